"""Worlds behind one interface: `make` builds one from its id, `available` lists them.

Importing this package imports neither JAX nor a simulator: `pevdn worlds` stays quick.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pevdn.errors import UsageError, unknown
from pevdn.worlds.maps import BATTLE_MAPS, JAXMARL_GAMES, JAXMARL_REFUSED, STOCK_LIMIT, TOY_GAMES

if TYPE_CHECKING:
    from pevdn.worlds.base import ExternalWorld, World

FAMILIES = {
    "jaxmarl": "a cooperative JaxMARL world",
    "pettingzoo": "any PettingZoo parallel environment with discrete actions",
    "smac": "StarCraft II through SMAC",
    "smax": "stock SMAX",
    "smax-sc2": "SMAX with StarCraft II's rules",
    "toy": "a toy game with a known optimum",
}
OPEN_FAMILIES = {"pettingzoo": "MODULE[?argument=value]", "smac": "MAP"}  # not enumerable


@dataclass(frozen=True)
class WorldInfo:
    """One row of `pevdn worlds`."""

    id: str
    agents: int
    episode_limit: int  # steps
    description: str


def available() -> list[WorldInfo]:
    """Return all worlds that `make` can build, except those of `OPEN_FAMILIES`."""
    stock = [
        WorldInfo(f"smax:{name}", m.allies, STOCK_LIMIT, f"{m.units}; {FAMILIES['smax']}")
        for name, m in BATTLE_MAPS.items()
    ]
    starcraft = [
        WorldInfo(f"smax-sc2:{name}", m.allies, m.limit, f"{m.units}; {FAMILIES['smax-sc2']}")
        for name, m in BATTLE_MAPS.items()
    ]
    toys = [WorldInfo(f"toy:{name}", g.agents, g.limit, g.about) for name, g in TOY_GAMES.items()]
    jaxmarl = [
        WorldInfo(f"jaxmarl:{name}", g.agents, g.limit, "; ".join((g.about, *g.choices)))
        for name, g in JAXMARL_GAMES.items()
    ]
    return starcraft + stock + jaxmarl + toys


def team_size(world_id: str) -> int:
    """Return the number of agents; only a world that is not listed is built for it."""
    listed = {world.id: world.agents for world in available()}
    return listed[world_id] if world_id in listed else len(make(world_id).agents)


@functools.cache  # worlds are immutable, and compiled programs are cached per world object
def make(world_id: str) -> Any:
    """Return the world with this id, such as `smax-sc2:3m`; equal ids give the same object.

    It is a `World` or, for StarCraft II and PettingZoo, an `ExternalWorld`.
    """
    family, _, name = world_id.partition(":")
    if family == "pettingzoo":
        from pevdn.worlds import pettingzoo_worlds

        return pettingzoo_worlds.make(world_id)
    if family == "smac":
        from pevdn.worlds import starcraft

        return starcraft.make(world_id)
    if family == "jaxmarl" and name in JAXMARL_REFUSED:
        raise UsageError(f"world '{world_id}' {JAXMARL_REFUSED[name]}")
    listed = world_id.partition("?")[0] if family == "jaxmarl" else world_id
    if listed not in {info.id for info in available()}:
        raise _unknown_world(listed)
    if family == "toy":
        from pevdn.worlds import toy

        games: dict[str, type[World]] = {"coordination": toy.Coordination, "two-step": toy.TwoStep}
        return games[name]()
    if family == "jaxmarl":
        from pevdn.worlds.jaxmarl_worlds import JaxmarlWorld

        return JaxmarlWorld(name)
    from pevdn.worlds.smax import SmaxWorld

    return SmaxWorld(name, starcraft=family == "smax-sc2")


def adopt(
    env: Any, *, max_steps: int | None = None, team_reward: str = "sum"
) -> World | ExternalWorld:
    """Return the world of an environment object, or of a function or class that makes one.

    An object runs in this process as the only worker, and is not closed. A factory can serve
    several workers. `max_steps` is needed if the environment does not state its episode limit.
    `team_reward` combines the rewards of a PettingZoo environment: "sum", "mean" or "common".
    """
    if isinstance(env, str):
        return make(env)
    from pevdn.worlds import objects

    return objects.adopt(env, max_steps, team_reward)


def _unknown_world(world_id: str) -> UsageError:
    """Return an error that names the nearest id, within the family if that is known."""
    ids = [info.id for info in available()]
    family, colon, _ = world_id.partition(":")
    if colon and family in FAMILIES:
        return unknown("world", world_id, [i for i in ids if i.startswith(f"{family}:")])
    if colon and difflib.get_close_matches(world_id, ids, n=1):
        return unknown("world", world_id, ids)
    if not colon:
        names = [*BATTLE_MAPS, *JAXMARL_GAMES, *TOY_GAMES]
        near = difflib.get_close_matches(world_id, names, n=1)
        if near:
            return unknown("world", world_id, [i for i in ids if i.endswith(f":{near[0]}")])
    return unknown("world family", family, FAMILIES, "A world is FAMILY:NAME, as in 'smax-sc2:3m'.")
