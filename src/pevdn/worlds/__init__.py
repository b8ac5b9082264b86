"""Environments behind one interface; `make` builds one from its id, `available` lists them.

Importing this package imports neither JAX nor any simulator: `pevdn worlds` answers at once.
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
    "jaxmarl": "a cooperative world of JaxMARL",
    "pettingzoo": "any parallel environment of PettingZoo with discrete actions",
    "smac": "StarCraft II itself, through SMAC",
    "smax": "stock SMAX",
    "smax-sc2": "SMAX with StarCraft II's rules",
    "toy": "a toy with a known answer",
}
OPEN_FAMILIES = {"pettingzoo": "MODULE[?argument=value]", "smac": "MAP"}  # not listed one by one


@dataclass(frozen=True)
class WorldInfo:
    """What `pevdn worlds` says of one world."""

    id: str
    agents: int
    episode_limit: int  # steps
    description: str


def available() -> list[WorldInfo]:
    """Every world that `make` can build; of the open families there are any number besides."""
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
    """How many agents a world has; those that are listed are not made for it."""
    listed = {world.id: world.agents for world in available()}
    return listed[world_id] if world_id in listed else len(make(world_id).agents)


@functools.cache  # a world never changes, and compiled programs are kept per world object
def make(world_id: str) -> Any:
    """The world called `world_id`, such as `smax-sc2:3m`; the same object for the same id.

    It is a `World` or, for StarCraft II and PettingZoo, a `ExternalWorld`.
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
    """The world of an object, or of a function or class that makes one.

    An object is played as the one copy there is, and is not closed. Who makes it can have copies
    side by side. `max_steps` is for an environment that does not say how long its episodes are;
    `team_reward`, for PettingZoo: the "sum" of what the agents are paid, their "mean", or "common".
    """
    if isinstance(env, str):
        return make(env)
    from pevdn.worlds import objects

    return objects.adopt(env, max_steps, team_reward)


def _unknown_world(world_id: str) -> UsageError:
    """Names the nearest id: within the family if that is right, else by what follows the colon."""
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
