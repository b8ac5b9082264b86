"""`pevdn keys`: a team of processes, from names and addresses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.cli.party import needs_network

if TYPE_CHECKING:
    from pevdn.config.experiment import Config
    from pevdn.network.roster import Roster

# What a team is asked for, also by `pevdn team up`.
Algorithm = Annotated[str, typer.Argument(help="iql, pe-vdn-a, pe-vdn-b or pe-vdn-c.")]
Env = Annotated[str, typer.Option(help="World; `pevdn worlds` lists them.")]
Preset = Annotated[
    str | None, typer.Option(help="A recipe to start from; `pevdn presets` lists them.")
]
Steps = Annotated[
    int | None, typer.Option(help="Environment steps (default: the preset's, or 400,000).")
]
Mode = Annotated[
    str, typer.Option(help="How the sum of messages is formed: shares or pairwise-masks.")
]
Patience = Annotated[float, typer.Option(help="Seconds that a missing member is waited for.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting; `pevdn config` lists them."),
]

HAND_OUT = """\
Every member gets team.toml and all files NAME.pem; these hold no secret.
Who holds NAME.key can speak as NAME: hand it to NAME alone, and delete it here.
Nobody needs authority.key to train: the roster names every certificate that is trusted."""
REHEARSAL = "This is a rehearsal: everything is drawn from the seed, and nothing is hidden."


def main(
    algorithm: Algorithm,
    out: Annotated[Path, typer.Option(help="Directory for the roster, certificates and keys.")],
    parties: Annotated[
        list[str],
        typer.Option(
            "--party",
            metavar="NAME=HOST:PORT",
            help="A party and where it listens; one for each agent, in their order.",
        ),
    ],
    world: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the simulated world listens; left out if every party has a body.",
        ),
    ] = None,
    env: Env = "smax-sc2:3m",
    preset: Preset = None,
    steps: Steps = None,
    mode: Mode = "shares",
    patience: Patience = 3600.0,
    rehearsal: Annotated[
        bool, typer.Option("--rehearsal", help="Draw everything from --seed; hides nothing.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of a rehearsal (default 0).")] = None,
    days: Annotated[int, typer.Option(help="Days that the certificates are valid.")] = 365,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Make the roster, certificates and private keys of a team of processes."""
    from pevdn.config import presets
    from pevdn.config.settings import parse_assignments
    from pevdn.errors import UsageError

    with needs_network():
        from pevdn.network import keys
    if seed is not None and not rehearsal:
        raise UsageError(
            f"--seed is {seed}, but only a rehearsal is drawn from a seed; add --rehearsal, or "
            "leave --seed out."
        )
    settings = parse_assignments(assignments or [])
    wanted = presets.configure(algorithm, env, steps, 1, seed or 0, settings, preset)
    presets.check_team(preset, settings, wanted)
    places = [_place(party) for party in parties]
    warn_of_delta(wanted, len(places))
    show(keys.create(out, wanted, places, world, mode, patience, rehearsal, days), as_json)


def warn_of_delta(wanted: Config, agents: int) -> None:
    """Say on standard error that δ is too large for as many episodes, if it is."""
    from pevdn.privacy import planner

    note = planner.large_delta(planner.Plan.of(wanted, agents)) if wanted.private else None
    if note is not None:
        typer.echo(note, err=True)


def _place(text: str) -> tuple[str, str]:
    from pevdn.errors import UsageError

    name, equals, address = text.partition("=")
    if not equals:
        raise UsageError(
            f"--party got '{text}', but takes NAME=HOST:PORT, as in alice=10.0.0.2:7700."
        )
    return name.strip(), address.strip()


def show(roster: Roster, as_json: bool) -> None:
    """Who is in the team, and what to hand to whom."""
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
