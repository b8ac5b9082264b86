"""`pevdn party`: run one agent of a team of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json
from pevdn.errors import PevdnError, UsageError

Team = Annotated[Path, typer.Option("--team", help="Roster made by `pevdn keys`.")]
Out = Annotated[
    Path | None, typer.Option(help="Data directory (default: NAME.data beside the roster).")
]
Key = Annotated[
    Path | None, typer.Option(help="Private key (default: NAME.key beside the roster).")
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Address to listen at (default: the one in the roster)."
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Serve Prometheus metrics at this port of 127.0.0.1.", min=1, max=65535),
]


def main(
    team: Team,
    me: Annotated[str, typer.Option("--me", help="Name of the party in the roster.")],
    out: Out = None,
    key: Key = None,
    listen: Listen = None,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Run one agent of a team; its data never leave this process."""

    if me == "world":
        raise UsageError("'world' is the world server, not a party; start it with `pevdn world`.")
    take_part(team, me, out, key, listen, metrics_port, as_json)


@contextmanager
def needs_network() -> Iterator[None]:
    """Turn a missing package of the extra into one sentence."""

    try:
        yield
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if package not in ("cryptography", "grpc", "google", "prometheus_client"):
            raise
        raise PevdnError(
            f"a team of processes needs the package {package}, which is missing; install "
            "pevdn[network]."
        ) from None


def take_part(
    team: Path,
    me: str,
    out: Path | None,
    key: Path | None,
    listen: str | None,
    metrics_port: int | None,
    as_json: bool,
    world_timeout: float | None = None,
) -> None:
    """Run one member until the team has finished."""
    from pevdn.config.runtime import RuntimeOptions

    options = RuntimeOptions().replace({"world_timeout": world_timeout})
    with needs_network():
        from pevdn.network import roster_file
        from pevdn.network.member import run_member
    if roster_file.read(team).rehearsal:
        typer.echo(
            f"{me}: a rehearsal: all random numbers derive from the seed; nothing is hidden.",
            err=True,
        )
    report = run_member(
        team,
        me,
        out=out,
        key=key,
        listen=listen,
        metrics_port=metrics_port,
        on_report=_show,
        world_timeout=options.world_timeout,
    )
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    typer.echo(line(report), err=True)


def line(report: dict[str, Any]) -> str:
    """`alice: training · step 120 · 4,000 env steps · win rate 0.40 · ε team 1.20`"""
    parts = [f"{report['name']}: {report['state']}"]
    if report.get("step"):
        parts.append(f"step {report['step']:,}")
    if report.get("env_steps") is not None:
        parts.append(f"{report['env_steps']:,} env steps")
    if report.get("win_rate") is not None:
        parts.append(f"win rate {report['win_rate']:.2f}")
    for observer in ("record", "team"):  # the strongest that there is
        if report.get(f"epsilon_{observer}") is not None:
            parts.append(f"ε {observer} {report[f'epsilon_{observer}']:.2f}")
            break
    return " · ".join(parts)
