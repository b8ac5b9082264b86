"""The world of a run, and world.json.

A run in an external world or in an object stores the agents' interfaces in world.json, so that its
policies can be loaded without the world.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.storage.files import write_atomically
from pevdn.training.directory import Run
from pevdn.worlds.base import AgentSpec, EntityGroup, ExternalWorld, World

FILE = "world.json"


def find(env: Any) -> World | ExternalWorld:
    """Return the world with this id, or of this object."""
    return worlds.adopt(env)


def keep(path: Path, world: World | ExternalWorld, is_object: bool) -> None:
    """Write world.json where `outline` will need it."""
    if is_object or isinstance(world, ExternalWorld):
        agents = [dataclasses.asdict(spec) for spec in world.agents]
        document = {"given": is_object, "max_steps": world.max_steps, "agents": agents}
        write_atomically(path / FILE, json.dumps(document, indent=2) + "\n")


def again(run: Run, env: Any = None) -> World | ExternalWorld:
    """Return the world to play in; a run in an object needs the object again."""
    kept, name = _kept(run), run.config.env
    if kept is not None and kept[1] and env is None:
        raise UsageError(
            f"{run.path} was trained in an object ({name}), which a directory cannot store; pass "
            "it again in Python, as env=…"
        )
    world = find(name if env is None else env)
    same = kept is None or (world.agents, world.max_steps) == (kept[0].agents, kept[0].max_steps)
    if world.name != name or not same:
        other = "another one of that name" if world.name == name else f"'{world.name}'"
        raise UsageError(f"{run.path} was trained in world '{name}', and this is {other}.")
    return world


def outline(run: Run) -> World | ExternalWorld:
    """Return enough of the world to load policies, from world.json where there is one."""
    kept = _kept(run)
    return find(run.config.env) if kept is None else kept[0]


def _kept(run: Run) -> tuple[ExternalWorld, bool] | None:
    """Read world.json: the interfaces, and whether the world was an object."""
    path = run.path / FILE
    if not path.exists():
        return None

    def absent() -> NoReturn:
        raise UsageError(f"{path} only describes a world; it cannot be played.")

    try:
        document = json.loads(path.read_text())
        agents = tuple(
            AgentSpec(
                spec["observation_size"],
                spec["n_actions"],
                # Earlier versions wrote `things`.
                tuple(EntityGroup(**x) for x in spec.get("entities", spec.get("things", ()))),
            )
            for spec in document["agents"]
        )
        world = ExternalWorld(run.config.env, agents, int(document["max_steps"]), absent)
        return world, bool(document["given"])
    except (ValueError, KeyError, TypeError) as problem:
        reason = " ".join(str(problem).split())
        raise UsageError(f"{path} is damaged ({type(problem).__name__}: {reason}).") from None
