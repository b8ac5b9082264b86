"""`pevdn worlds`: list the worlds."""

from __future__ import annotations

from dataclasses import asdict

from pevdn.cli.output import Json, print_json, print_table


def main(as_json: Json = False) -> None:
    """List the worlds, with team sizes and episode limits."""
    from pevdn import worlds

    rows = [asdict(world) for world in worlds.available()] + [
        {
            "id": f"{family}:{name}",
            "agents": None,
            "episode_limit": None,
            "description": worlds.FAMILIES[family],
        }
        for family, name in worlds.OPEN_FAMILIES.items()
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["world", "agents", "steps", "description"],
        [["–" if cell is None else cell for cell in world.values()] for world in rows],
    )
