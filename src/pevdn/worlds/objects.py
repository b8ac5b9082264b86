"""Worlds from environment objects and factories: `pevdn.train(…, env=my_env)`."""

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
from pevdn.worlds.pettingzoo_worlds import ParallelEnvironment
from pevdn.worlds.starcraft import StarCraftEnvironment

Environment = ParallelEnvironment | StarCraftEnvironment

ACCEPTED = (
    "pass an id such as 'smax-sc2:3m', a pevdn World or ExternalWorld, a PettingZoo parallel "
    "environment, an object with the interface of SMAC's StarCraft2Env, or a function or class "
    "that makes one of the last two"
)


def adopt(env: Any, max_steps: int | None, team_reward: str) -> World | ExternalWorld:
    """Return the world of an object; see `pevdn.worlds.adopt`."""
    if isinstance(env, ExternalWorld):
        return env
    if (adapter := _adapter(env, max_steps, team_reward, owned=False)) is not None:
        name, agents, limit = adapter.name, adapter.agents, adapter.max_steps
        return ExternalWorld(name, agents, limit, _Constant(adapter), max_workers=1)
    if isinstance(env, World) and not isinstance(env, type):
        return env
    if callable(env):
        return _from_factory(env, max_steps, team_reward)
    raise UsageError(f"{env!r} is not a world: {ACCEPTED}")


class _Constant:
    """Builds the same environment every time."""

    def __init__(self, env: Environment) -> None:
        self.env = env

    def __call__(self, drawn: bool = False) -> Environment:
        return self.env


def _adapter(env: Any, max_steps: int | None, team_reward: str, owned: bool) -> Environment | None:
    """Wrap a PettingZoo or SMAC environment; return None if it is neither."""
    if isinstance(env, type):
        return None
    name = f"object:{type(getattr(env, 'unwrapped', env)).__name__}"
    if starcraft.is_like(env):
        return StarCraftEnvironment(env, name, max_steps=max_steps, owned=owned)
    if hasattr(env, "agent_iter") or hasattr(env, "possible_agents"):
        return ParallelEnvironment(
            env, name, team_reward=team_reward, max_steps=max_steps, owned=owned
        )
    return None


def _from_factory(
    factory: Callable[..., Any], max_steps: int | None, team_reward: str
) -> World | ExternalWorld:
    try:
        pickle.dumps(factory)
    except Exception as problem:
        raise UsageError(
            f"{_name(factory)} cannot be pickled for worker processes ({problem}); define it at "
            "the top of a module, not in a function or as a lambda"
        ) from problem
    build = functools.partial(_build, factory, max_steps, team_reward)
    env = build()
    env.close()
    return ExternalWorld(env.name, env.agents, env.max_steps, build)


def _build(
    factory: Callable[..., Any], max_steps: int | None, team_reward: str, drawn: bool = False
) -> Environment:
    render = drawn and "render_mode" in (arguments.signature_of([factory]) or ())
    with contextlib.redirect_stdout(sys.stderr):
        env = factory(render_mode="rgb_array") if render else factory()
    adapter = _adapter(env, max_steps, team_reward, owned=True)
    if adapter is None:
        raise UsageError(f"{_name(factory)} returned {env!r}, which is not a world: {ACCEPTED}")
    return adapter


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", repr(factory))
