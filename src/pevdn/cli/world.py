"""`pevdn world`: run the world server of a team of processes."""

from __future__ import annotations

from pevdn.cli.output import Json
from pevdn.cli.party import Key, Listen, MetricsPort, Out, Team, WorldTimeout, take_part


def main(
    team: Team,
    out: Out = None,
    key: Key = None,
    listen: Listen = None,
    metrics_port: MetricsPort = None,
    world_timeout: WorldTimeout = 120.0,
    as_json: Json = False,
) -> None:
    """Run the world server: it sends each party its own observation and the team's reward."""
    take_part(team, "world", out, key, listen, metrics_port, as_json, world_timeout=world_timeout)
