"""PettingZoo parallel environments with discrete actions: `pettingzoo:MODULE[?argument=value]`.

| of the environment              | becomes, for the team                                          |
|---------------------------------|----------------------------------------------------------------|
| possible_agents                 | its agents, in this order                                      |
| rewards                         | their sum or, with `team-reward`, their mean or common value   |
| Box                             | flattened; uint8 is divided by its largest value               |
| Discrete and other spaces       | flattened as gymnasium does: each choice one-hot               |
| action_mask                     | the available actions, from the observation or the infos       |
| MultiDiscrete, MultiBinary      | one action per combination, at most 64                         |
| an agent that leaves            | observes zeros, and can only take action 0, which is not sent  |
| the last agents are truncated   | truncated; their last observations are kept                    |
| won, is_success, … in the infos | won, if true for any agent at the end                          |

pevdn's own options have a hyphen, which no Python argument has: `team-reward`, `max-steps`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import itertools
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.worlds import arguments
from pevdn.worlds.base import AgentSpec, ExternalWorld, Step, external_step
from pevdn.worlds.quiet import silence

TEAM_REWARDS = ("sum", "mean", "common")
LIMITS = ("max_cycles", "max_steps", "max_episode_steps", "_max_episode_steps", "episode_limit")
WON = ("won", "battle_won", "is_success", "success")
MOST_COMBINATIONS = 64
INSTALL = "install it with pip install 'pevdn[pettingzoo]'"
TURN_BASED = (
    "is turn-based (AEC), but agents must act at the same time; if nothing happens between turns, "
    "convert it with pettingzoo.utils.conversions.aec_to_parallel"
)


class ParallelEnvironment:
    """A parallel environment as an `ExternalEnv`; `rewards` are each agent's in the last step."""

    seeded = True

    def __init__(
        self,
        env: Any,
        name: str,
        *,
        team_reward: str = "sum",
        max_steps: int | None = None,
        owned: bool = True,
    ) -> None:
        _require_parallel(env, name)
        if team_reward not in TEAM_REWARDS:
            raise unknown("team-reward", team_reward, TEAM_REWARDS)
        self.env, self.name, self.team_reward, self._owned = env, name, team_reward, owned
        self.names: list[Any] = list(env.possible_agents)
        labels = [f"{name}: agent '{agent}'" for agent in self.names]
        pairs = list(zip(self.names, labels, strict=True))
        self._readers = [_reader(env.observation_space(agent), label) for agent, label in pairs]
        self._actions = [_actions(env.action_space(agent), label) for agent, label in pairs]
        self.agents = tuple(
            AgentSpec(reader.size, len(actions))
            for reader, actions in zip(self._readers, self._actions, strict=True)
        )
        self.max_steps = max_steps or _limit(env, name)
        self.rewards: dict[Any, float] = {}
        self.reports_won = False

    def reset(self, seed: int) -> Step:
        with contextlib.redirect_stdout(sys.stderr):
            observations, infos = self.env.reset(seed=seed)
        self._steps, self.rewards = 0, {}
        return self._result(observations, infos, self.env.agents, 0.0, done=False, truncated=False)

    def step(self, actions: tuple[int, ...]) -> Step:
        playing = set(self.env.agents)
        chosen = {
            agent: choices[action]
            for agent, choices, action in zip(self.names, self._actions, actions, strict=True)
            if agent in playing
        }
        with contextlib.redirect_stdout(sys.stderr):
            observations, rewards, terminated, truncated, infos = self.env.step(chosen)
        self._steps += 1
        self.rewards = {agent: float(rewards[agent]) for agent in self.names if agent in rewards}
        cut = {a for a in playing if truncated.get(a) and not terminated.get(a)}
        staying = {a for a in self.env.agents if not (terminated.get(a) or truncated.get(a))}
        if over := not staying:
            staying = cut
        late = not over and self._steps >= self.max_steps
        return self._result(
            observations,
            infos,
            staying,
            self._reward(),
            done=over or late,
            truncated=late or (over and bool(cut)),
        )

    def render(self) -> np.ndarray:
        """Return an image (height, width, 3) of uint8; build with `drawn=True` for it."""
        with contextlib.redirect_stdout(sys.stderr):
            image = self.env.render()
        if np.ndim(image) != 3:
            raise UsageError(
                f"{self.name} cannot be drawn: its render() returned {type(image).__name__}, not "
                "an image; it needs render_mode='rgb_array'"
            )
        return np.asarray(image, np.uint8)

    def close(self) -> None:
        if self._owned:
            self.env.close()

    def _result(
        self,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        present: Collection[Any],
        reward: float,
        *,
        done: bool,
        truncated: bool,
    ) -> Step:
        """Return the step; agents not in `present` observe zeros and can only take action 0."""
        filled = [info for info in infos.values() if info]
        self.reports_won |= any(word in info for info in filled for word in WON)
        vectors, masks = [], []
        for agent, spec, reader in zip(self.names, self.agents, self._readers, strict=True):
            if agent not in present:
                vectors.append(np.zeros(spec.observation_size, np.float32))
                masks.append(np.arange(spec.n_actions) == 0)
                continue
            if agent not in observations:
                raise PevdnError(
                    f"{self.name} returned no observation for '{agent}', which plays on"
                )
            observation, info = observations[agent], infos.get(agent) or {}
            mask = observation["action_mask"] if reader.masked else info.get("action_mask")
            vectors.append(reader.read(observation))
            masks.append(
                np.ones(spec.n_actions, bool) if mask is None else np.array(mask).astype(bool)
            )
        won = done and any(info.get(word) for info in filled for word in WON)
        return external_step(vectors, masks, reward, done, truncated, won)

    def _reward(self) -> float:
        rewards = list(self.rewards.values())
        if self.team_reward == "sum":
            return sum(rewards)
        if self.team_reward == "mean":
            return sum(rewards) / len(self.names)
        if len(set(rewards)) > 1:
            each = ", ".join(f"'{agent}' {reward:g}" for agent, reward in self.rewards.items())
            raise UsageError(
                f"team-reward=common, but {self.name} rewarded its agents differently in one step "
                f"({each}); use team-reward=sum or mean"
            )
        return rewards[0] if rewards else 0.0


# ---- observation and action spaces -----------------------------------------------------------

Read = Callable[[Any], np.ndarray]


class Reader(NamedTuple):
    """Turns the observations of one agent into vectors."""

    size: int
    read: Read
    masked: bool  # whether the observation holds the action mask


def _reader(space: Any, owner: str) -> Reader:
    from gymnasium import spaces

    masked = isinstance(space, spaces.Dict) and "action_mask" in space.spaces
    if masked:
        space = spaces.Dict({k: part for k, part in space.spaces.items() if k != "action_mask"})
    size, read = _flatten(space, owner)
    if not size:
        raise UsageError(f"{owner} observes nothing: its observation space is {space}")
    return Reader(size, read, masked)


def _flatten(space: Any, owner: str) -> tuple[int, Read]:
    """Return the flat size of a space, and a function to a new float32 vector."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        top = float(space.high.max(initial=0)) if space.dtype == np.uint8 else 0.0
        scale = np.float32(1 / top if top else 1)
        return int(np.prod(space.shape)), lambda x: np.asarray(x, np.float32).ravel() * scale
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inside: Any = space.spaces
        parts = inside.items() if isinstance(space, spaces.Dict) else enumerate(inside)
        readers = [(key, *_flatten(part, owner)) for key, part in parts]
        return (
            sum(size for _, size, _ in readers),
            lambda x: np.concatenate([np.zeros(0, np.float32), *(r(x[k]) for k, _, r in readers)]),
        )
    if not getattr(space, "is_np_flattenable", False):
        raise UsageError(
            f"{owner} has an observation space without a fixed size, {space}; use Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
        )
    return spaces.flatdim(space), lambda x: np.array(spaces.flatten(space, x), np.float32)


def _actions(space: Any, owner: str) -> list[Any]:
    """Return all actions of a space; their indices are the actions of the agent."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return list(range(first, first + int(space.n)))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        if isinstance(space, spaces.MultiBinary):
            shape, sizes, starts = space.shape, np.full(space.shape, 2), np.zeros(space.shape, int)
        else:
            shape, sizes, starts = space.shape, space.nvec, space.start
        combinations = int(np.prod(sizes.astype(float)))
        if combinations > MOST_COMBINATIONS:
            raise UsageError(
                f"{owner} has {combinations} combinations of actions, {space}; at most "
                f"{MOST_COMBINATIONS} are supported"
            )
        choices = (range(s, s + n) for s, n in zip(starts.flat, sizes.flat, strict=True))
        return [np.array(one, space.dtype).reshape(shape) for one in itertools.product(*choices)]
    kind = "continuous" if isinstance(space, spaces.Box) else "unsupported"
    raise UsageError(
        f"{owner} has {kind} actions, {space}; use a Discrete space (some environments have an "
        "argument for it, such as continuous_actions=false)"
    )


def _limit(env: Any, name: str) -> int:
    """Return the episode limit that the environment states."""
    inner = getattr(env, "unwrapped", env)
    for place in (env, inner, getattr(inner, "env", None)):
        for word in LIMITS:
            limit = getattr(place, word, None) or getattr(place, "metadata", {}).get(word)
            if isinstance(limit, int | np.integer) and limit > 0:
                return int(limit)
    raise UsageError(
        f"{name} states no episode limit; give it an attribute max_steps, or add max-steps=N to "
        "the id of the world (max_steps=N in worlds.adopt)"
    )


def _require_parallel(env: Any, name: str) -> None:
    if hasattr(env, "agent_iter"):
        raise UsageError(f"{name} {TURN_BASED}")
    members = ("possible_agents", "observation_space", "action_space", "reset", "step")
    for member in members:
        if not hasattr(env, member):
            raise UsageError(
                f"{name} has no {member}: it is not a PettingZoo parallel environment, which has "
                f"{', '.join(members)}"
            )
    if not env.possible_agents:
        raise UsageError(f"{name} has no agents: possible_agents is empty")


# ---- building a world ------------------------------------------------------------------------


def make(world_id: str) -> ExternalWorld:
    """Return the world with this id; build one environment to read its interface."""
    module, _, query = world_id.partition(":")[2].partition("?")
    texts = arguments.parse(query)
    options = {name: texts.pop(name) for name in list(texts) if "-" in name}
    team_reward = options.pop("team-reward", "sum")
    max_steps = _steps(options.pop("max-steps", None))
    if options:
        raise unknown(
            "option of a PettingZoo world", next(iter(options)), ["team-reward", "max-steps"]
        )
    values = arguments.checked(module, texts, _factories(_imported(world_id, module)))
    build = functools.partial(_build, world_id, module, values, team_reward, max_steps)
    env = build()
    env.close()
    return ExternalWorld(world_id, env.agents, env.max_steps, build)


def _build(
    world_id: str,
    module: str,
    values: dict[str, Any],
    team_reward: str,
    max_steps: int | None,
    drawn: bool = False,
) -> ParallelEnvironment:
    imported = _imported(world_id, module)
    known = arguments.signature_of(_factories(imported))
    if drawn and (known is None or "render_mode" in known):
        values = {"render_mode": "rgb_array", **values}
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            env = imported.parallel_env(**values)
        except Exception as problem:
            raise UsageError(
                f"world '{world_id}' cannot be built: {type(problem).__name__}: {problem}"
            ) from problem
        return ParallelEnvironment(env, world_id, team_reward=team_reward, max_steps=max_steps)


def _steps(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text)):
        raise UsageError(f"max-steps is '{text}', but must be a whole number above 0")
    return None if text is None else int(text)


def _imported(world_id: str, module: str) -> ModuleType:
    """Import an environment's module, installed or in this folder, without windows or banners."""
    if not module:
        raise UsageError(
            f"world '{world_id}' names no module; use an id such as "
            "'pettingzoo:mpe2.simple_spread_v3'"
        )
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        with silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise UsageError(f"world '{world_id}' {_missing(module, missing.name or '')}") from missing
    except Exception as problem:
        raise UsageError(
            f"world '{world_id}': importing {module} raised {type(problem).__name__}: {problem}"
        ) from problem
    if hasattr(imported, "parallel_env"):
        return imported
    if hasattr(imported, "env") or hasattr(imported, "raw_env"):
        raise UsageError(f"world '{world_id}' {TURN_BASED}")
    raise UsageError(
        f"world '{world_id}': the module {module} has no parallel_env, the function or class that "
        "builds the environment"
    )


def _missing(module: str, package: str) -> str:
    root, *rest = module.split(".")
    if package in ("pettingzoo", "mpe2"):
        return f"needs the Python package {package}; {INSTALL}"
    if module == package or module.startswith(f"{package}."):
        near = _nearest(package)
        guess = f"; did you mean '{near}'?" if near else f" nor in {Path.cwd()}"
        return f"needs the module {package}, which is not installed{guess}"
    hint = f", as pip install 'pettingzoo[{rest[0]}]' does" if root == "pettingzoo" and rest else ""
    return f"needs the Python package {package}; install it{hint}"


def _nearest(module: str) -> str | None:
    """Return the module of the same package with the nearest name, such as another version."""
    package, _, name = module.rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", [])
    near = difflib.get_close_matches(name, [other.name for other in pkgutil.iter_modules(places)])
    return f"{package}.{near[0]}" if near else None


def _factories(module: ModuleType) -> list[Callable[..., Any]]:
    """Return callables that may state the arguments: PettingZoo's `parallel_env` takes **kwargs."""
    raw = getattr(module, "raw_env", None)
    home = sys.modules.get(getattr(raw, "__module__", ""), None)
    factories = (getattr(module, "parallel_env", None), raw, getattr(home, "_env", None))
    return [factory for factory in factories if factory is not None]
