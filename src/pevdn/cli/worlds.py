"""`pevdn worlds`: where teams can train."""

from __future__ import annotations

from dataclasses import asdict

from pevdn.cli.output import Json, print_json, print_table


def main(as_json: Json = False) -> None:
    """List the worlds, with team size and episode limit."""
    from pevdn import worlds

    found = worlds.available()
    if as_json:
        print_json([asdict(world) for world in found])
        return
    print_table(
        ["world", "agents", "steps", "what it is"],
        [[w.id, w.agents, w.episode_limit, w.description] for w in found],
    )
