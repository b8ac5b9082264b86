"""Worlds that are given as objects: `pevdn.train(…, env=my_env)`."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

from pevdn.errors import UsageError
from pevdn.worlds import arguments, starcraft
from pevdn.worlds.base import ExternalWorld, World
from pevdn.worlds.pettingzoo_worlds import TURN_BY_TURN, ParallelTeam
from pevdn.worlds.starcraft import StarCraftTeam

Team = ParallelTeam | StarCraftTeam

ACCEPTED = (
    "a world is an id such as 'smax-sc2:3m', a pevdn World or ExternalWorld, a PettingZoo parallel "
    "environment, an object with the interface of SMAC's StarCraft2Env, or a function or class "
    "that makes one of the last two"
)


def adopt(env: Any, max_steps: int | None, team_reward: str) -> World | ExternalWorld:
    """The world of an object; see `pevdn.worlds.adopt`."""
    if isinstance(env, ExternalWorld):
        return env
    if (team := _wrapped(env, max_steps, team_reward, ours=False)) is not None:
        return ExternalWorld(team.name, team.agents, team.max_steps, _Kept(team), copies=1)
    if isinstance(env, World) and not isinstance(env, type):
        return env
    if callable(env):
        return _made_by(env, max_steps, team_reward)
    raise UsageError(f"{env!r} is no world: {ACCEPTED}")


class _Kept:
    """Hands out the one copy there is."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def __call__(self, drawn: bool = False) -> Team:
        return self.team


def _wrapped(env: Any, max_steps: int | None, team_reward: str, ours: bool) -> Team | None:
    """A PettingZoo or SMAC environment as one copy of a world; None if it is neither."""
    if isinstance(env, type):
        return None
    name = f"object:{type(getattr(env, 'unwrapped', env)).__name__}"
    if starcraft.is_like(env):
        return StarCraftTeam(env, name, max_steps=max_steps, ours=ours)
    if hasattr(env, "agent_iter"):
        raise UsageError(f"{name} {TURN_BY_TURN}")
    if hasattr(env, "possible_agents"):
        return ParallelTeam(env, name, team_reward=team_reward, max_steps=max_steps, ours=ours)
    return None


def _made_by(
    factory: Callable[..., Any], max_steps: int | None, team_reward: str
) -> World | ExternalWorld:
    named = getattr(factory, "__qualname__", repr(factory))
    try:
        pickle.dumps(factory)
    except Exception as problem:
        raise UsageError(
            f"{named} cannot be sent to the processes that copies of its world run in "
            f"({problem}); define it at the top of a module, not in a function or as a lambda"
        ) from problem
    build = functools.partial(_build, factory, max_steps, team_reward)
    team = build()
    team.close()
    return ExternalWorld(team.name, team.agents, team.max_steps, build)


def _build(
    factory: Callable[..., Any], max_steps: int | None, team_reward: str, drawn: bool = False
) -> Team:
    wanted = drawn and "render_mode" in (arguments.signature_of([factory]) or ())
    with contextlib.redirect_stdout(sys.stderr):
        env = factory(render_mode="rgb_array") if wanted else factory()
    team = _wrapped(env, max_steps, team_reward, ours=True)
    if team is None:
        named = getattr(factory, "__qualname__", repr(factory))
        raise UsageError(f"{named} made {env!r}, which is no world: {ACCEPTED}")
    return team
