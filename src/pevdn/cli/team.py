"""`pevdn team`: run a whole team on this machine, or show its status."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.keys import Algorithm, Assignments, Env, Mode, Patience, Preset, Steps, warn
from pevdn.cli.options import WorldTimeout
from pevdn.cli.output import Json, print_json, print_table
from pevdn.cli.party import line
from pevdn.errors import PevdnError

app = typer.Typer(
    help="Run a team with one process per agent on this machine, or show its status.",
    no_args_is_help=True,
)


@app.command()
def up(
    algorithm: Algorithm,
    env: Env = "smax-sc2:3m",
    steps: Steps = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of keys and data; an existing team continues.")
    ] = None,
    mode: Mode = "shares",
    seed: Annotated[
        int | None,
        typer.Option(help="Rehearse: derive all random numbers from this seed; hides nothing."),
    ] = None,
    preset: Preset = None,
    patience: Patience = 3600.0,
    world_timeout: WorldTimeout = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Start the world server and one party per agent, and show their progress."""
    from pevdn.config import presets
    from pevdn.config.runtime import RuntimeOptions
    from pevdn.config.settings import parse_assignments
    from pevdn.privacy import planner

    local = _local()
    options = RuntimeOptions().replace({"world_timeout": world_timeout})
    settings = parse_assignments(assignments or [])
    configured = presets.configure(algorithm, env, steps, 1, seed or 0, settings, preset)
    planner.check_preset(preset, settings, configured)
    folder = out or Path("runs") / f"team-{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    roster = local.make(folder, configured, mode, patience, seed is not None)
    warn(configured, len(roster.parties), preset, settings)
    typer.echo(f"{len(roster.parties)} parties and a world in {folder}", err=True)
    reports = local.up(roster, _Screen(), world_timeout=options.world_timeout)
    show(reports, as_json)


@app.command()
def status(
    team: Annotated[Path, typer.Argument(help="Roster, or its directory.")],
    as_json: Json = False,
) -> None:
    """Show the last status of the members on this machine."""

    local = _local()
    from pevdn.network import roster_file

    roster = roster_file.read(team / "team.toml" if team.is_dir() else team)
    reports = local.reports(roster)
    if not reports:
        raise PevdnError(
            f"no member of {roster.path} has run here; start one with `pevdn party` or `pevdn "
            "world`."
        )
    show(reports, as_json)


def show(reports: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(reports)
        return
    noised = any("epsilon_record" in report for report in reports.values())
    observer = "record" if noised else "team"
    counters = ("step", "/s", "env steps", "win", f"ε {observer}", "MB out, in", "seconds")
    print_table(
        ["member", "state", *counters],
        [_row(report, f"epsilon_{observer}") for report in reports.values()],
    )
    typer.echo("Seconds: computing, talking, waiting for shares, playing.")


def _row(report: dict[str, Any], spent_epsilon: str) -> list[str]:
    spent, peers = report["seconds"], report["peers"].values()
    win_rate, epsilon = report.get("win_rate"), report.get(spent_epsilon)
    return [
        report["name"],
        report["state"],
        f"{report.get('step', 0):,}",
        f"{report['steps_per_second']:.1f}",
        f"{report['env_steps']:,}" if "env_steps" in report else "–",
        f"{win_rate:.2f}" if win_rate is not None else "–",
        f"{epsilon:.2f}" if epsilon is not None else "–",
        ", ".join(f"{sum(p[f'bytes_{w}'] for p in peers) / 1e6:.1f}" for w in ("sent", "received")),
        ", ".join(f"{spent.get(n, 0):.0f}" for n in ("computing", "talking", "waiting", "playing")),
    ]


class _Screen:
    """The status of a team: redrawn every second on a terminal, else printed every ten."""

    def __init__(self) -> None:
        self._at = 0.0
        self._drawn = 0

    def __call__(self, reports: dict[str, dict[str, Any]]) -> None:
        lines = [line(report) for report in reports.values()]
        if sys.stderr.isatty():
            up = f"\x1b[{self._drawn}F" if self._drawn else ""
            sys.stderr.write(up + "".join(f"\x1b[2K{text}\n" for text in lines))
            self._drawn = len(lines)
        elif time.monotonic() - self._at > 10:
            self._at = time.monotonic()
            sys.stderr.write("".join(f"{text}\n" for text in lines))
        sys.stderr.flush()


def _local() -> Any:
    from pevdn.cli.party import needs_network

    with needs_network():
        from pevdn.network import local
    return local
