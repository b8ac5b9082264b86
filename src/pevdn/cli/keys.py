"""`pevdn keys`: create the roster and the keys of a team of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.cli.party import needs_network
from pevdn.errors import UsageError

if TYPE_CHECKING:
    from pevdn.config.experiment import Config
    from pevdn.network.roster import Roster

# Options shared with `pevdn team up`.
Algorithm = Annotated[str, typer.Argument(help="iql, or pe-vdn-a to pe-vdn-d.")]
Env = Annotated[str, typer.Option(help="World id; `pevdn worlds` lists them.")]
Preset = Annotated[
    str | None, typer.Option(help="Preset to start from; `pevdn presets` lists them.")
]
Steps = Annotated[
    int | None, typer.Option(help="Environment steps (default: the preset's, or 400,000).")
]
Mode = Annotated[str, typer.Option(help="Secure sum: shares or pairwise-masks.")]
Patience = Annotated[float, typer.Option(help="Seconds to wait for a missing member.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting; `pevdn config` lists them."),
]

HAND_OUT = """\
Give team.toml and all NAME.pem files to every member; they contain no secret.
NAME.key authenticates NAME: give it to NAME only, and delete it here.
Training does not need authority.key: the roster lists every trusted certificate."""
REHEARSAL = "This is a rehearsal: all random numbers derive from the seed; nothing is hidden."


def main(
    algorithm: Algorithm,
    out: Annotated[Path, typer.Option(help="Directory for the roster, certificates and keys.")],
    parties: Annotated[
        list[str],
        typer.Option(
            "--party",
            metavar="NAME=HOST:PORT",
            help="Name and address of a party; repeat for each agent, in order.",
        ),
    ],
    world: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the world server; omit it if parties have worlds of their own.",
        ),
    ] = None,
    env: Env = "smax-sc2:3m",
    preset: Preset = None,
    steps: Steps = None,
    mode: Mode = "shares",
    patience: Patience = 3600.0,
    rehearsal: Annotated[
        bool,
        typer.Option("--rehearsal", help="Derive all random numbers from --seed; hides nothing."),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of a rehearsal (default: 0).")] = None,
    days: Annotated[int, typer.Option(help="Validity of the certificates, in days.")] = 365,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Create the roster, certificates and private keys of a team of processes."""
    from pevdn.config import presets
    from pevdn.config.settings import parse_assignments
    from pevdn.privacy import planner

    with needs_network():
        from pevdn.network import keys
    if seed is not None and not rehearsal:
        raise UsageError(
            f"--seed is {seed}, but only a rehearsal has a seed; add --rehearsal, or omit --seed."
        )
    settings = parse_assignments(assignments or [])
    configured = presets.configure(algorithm, env, steps, 1, seed or 0, settings, preset)
    planner.check_preset(preset, settings, configured)
    places = [_place(party) for party in parties]
    warn(configured, len(places), preset, settings)
    show(keys.create(out, configured, places, world, mode, patience, rehearsal, days), as_json)


def warn(config: Config, agents: int, preset: str | None, settings: Mapping[str, Any]) -> None:
    """Warn of a large δ, of settings without effect, and of a preset for another team size."""
    from pevdn.privacy import planner

    delta = planner.large_delta(planner.Plan.of(config, agents)) if config.private else None
    unused = planner.unused_openings(config)
    for note in filter(None, (delta, unused, planner.other_team(preset, settings, config, agents))):
        typer.echo(note, err=True)


def _place(text: str) -> tuple[str, str]:

    name, equals, address = text.partition("=")
    if not equals:
        raise UsageError(
            f"--party got '{text}', but takes NAME=HOST:PORT, as in alice=10.0.0.2:7700."
        )
    return name.strip(), address.strip()


def show(roster: Roster, as_json: bool) -> None:
    """Print the members, and which file goes to whom."""
    out = roster.path.parent
    rows: list[dict[str, Any]] = [
        {
            "name": member.name,
            "address": member.address,
            "certificate": str(out / f"{member.name}.pem"),
            "key": str(out / f"{member.name}.key"),
            "sha256": member.fingerprint,
            "expires": member.expires.isoformat(),
        }
        for member in roster.members
    ]
    if as_json:
        document = {"roster": str(roster.path), "run": roster.run.hex(), "members": rows}
        print_json({**document, "agreement": roster.agreement})
        return
    print_table(
        ["member", "address", "expires", "certificate (SHA-256)"],
        [[r["name"], r["address"], r["expires"][:10], r["sha256"][:16] + "…"] for r in rows],
    )
    typer.echo(HAND_OUT)
    if roster.rehearsal:
        typer.echo(REHEARSAL)
    typer.echo(f"\nroster   {roster.path}")
