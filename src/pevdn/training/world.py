"""The world of a run: made from its id or given as an object, and what is kept of it.

A run in a world outside of JAX, or in an object, keeps what its agents see and do in world.json:
what was learnt can be loaded where the world is not.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pevdn.errors import UsageError
from pevdn.storage.files import write_atomically
from pevdn.training.directory import Run

if TYPE_CHECKING:
    from pevdn.worlds.base import ExternalWorld, World

FILE = "world.json"


def find(env: Any) -> World | ExternalWorld:
    """The world with this id, or of this object."""
    from pevdn import worlds

    return worlds.adopt(env)


def keep(path: Path, world: World | ExternalWorld, given: bool) -> None:
    """Write world.json, if it will be needed; `given` says that the world was an object."""
    from pevdn.worlds.base import ExternalWorld

    if given or isinstance(world, ExternalWorld):
        agents = [dataclasses.asdict(spec) for spec in world.agents]
        document = {"given": given, "max_steps": world.max_steps, "agents": agents}
        write_atomically(path / FILE, json.dumps(document, indent=2) + "\n")


def again(run: Run, env: Any = None) -> World | ExternalWorld:
    """The world to play in; a run in an object needs the object again."""
    kept, name = _kept(run), run.config.env
    if kept is not None and kept[1] and env is None:
        raise UsageError(
            f"{run.path} was trained in an object ({name}), which no directory can hold; give it "
            "again in Python, as env=…"
        )
    world = find(name if env is None else env)
    same = kept is None or (world.agents, world.max_steps) == (kept[0].agents, kept[0].max_steps)
    if world.name != name or not same:
        found = "another one of that name" if world.name == name else f"'{world.name}'"
        raise UsageError(f"{run.path} was trained in world '{name}', and this is {found}.")
    return world


def outline(run: Run) -> World | ExternalWorld:
    """As much of a world as it takes to load what was learnt; where possible without the world."""
    kept = _kept(run)
    return find(run.config.env) if kept is None else kept[0]


def _kept(run: Run) -> tuple[ExternalWorld, bool] | None:
    """What world.json says, and whether the world was an object."""
    from pevdn.worlds.base import AgentSpec, EntityGroup, ExternalWorld

    path = run.path / FILE
    if not path.exists():
        return None

    def absent() -> NoReturn:
        raise UsageError(f"{path} is no world to play in.")

    try:
        found = json.loads(path.read_text())
        agents = tuple(
            AgentSpec(**{**spec, "entities": tuple(EntityGroup(**x) for x in spec["entities"])})
            for spec in found["agents"]
        )
        world = ExternalWorld(run.config.env, agents, int(found["max_steps"]), absent)
        return world, bool(found["given"])
    except (ValueError, KeyError, TypeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(f"{path} is damaged ({type(problem).__name__}: {reason}).") from None
