"""PettingZoo's parallel environments with discrete actions: `pettingzoo:MODULE[?argument=value]`.

| of the environment             | becomes, for the team                                           |
|--------------------------------|-----------------------------------------------------------------|
| possible_agents                | its agents, in this order                                       |
| rewards                        | their sum; or, by `team-reward`, the mean or the common one     |
| Box                            | flattened; one of uint8 is divided by its largest value         |
| Discrete and other spaces      | what gymnasium flattens them to: one-hot for each choice        |
| action_mask                    | the available actions, in the observation or in the infos       |
| MultiDiscrete, MultiBinary     | one action for each combination, if these are 64 at most        |
| an agent that leaves           | sees zeros from then on, and can only play 0, which is not sent |
| the last agents are truncated  | truncated; their last observations are kept                     |
| won, is_success, … in the infos | won, if true for anybody at the end                            |

The options of ours have a hyphen, which no Python argument has: `team-reward`, `max-steps`.
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
from typing import Any

import numpy as np

from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.worlds import arguments
from pevdn.worlds.base import AgentSpec, ExternalWorld, Step, host_step
from pevdn.worlds.quiet import silence

TEAM_REWARDS = ("sum", "mean", "common")
CLOCKS = ("max_cycles", "max_steps", "max_episode_steps", "_max_episode_steps", "episode_limit")
WON = ("won", "battle_won", "is_success", "success")
MOST_COMBINATIONS = 64
INSTALL = "install it with pip install 'pevdn[pettingzoo]'"
TURN_BY_TURN = (
    "plays turn by turn (AEC), and agents here act at the same time; if nothing happens between "
    "the turns, make it parallel with pettingzoo.utils.conversions.aec_to_parallel"
)


class ParallelTeam:
    """One copy of a parallel environment; `paid` is what each agent was paid in the last step."""

    seeded = True

    def __init__(
        self,
        env: Any,
        name: str,
        *,
        team_reward: str = "sum",
        max_steps: int | None = None,
        ours: bool = True,
    ) -> None:
        _refuse_unfit(env, name)
        if team_reward not in TEAM_REWARDS:
            raise unknown("team-reward", team_reward, TEAM_REWARDS)
        self.env, self.name, self.team_reward, self._ours = env, name, team_reward, ours
        self.names: list[Any] = list(env.possible_agents)
        self._views = [_view(env.observation_space(a), f"{name}: agent '{a}'") for a in self.names]
        self._actions = [_actions(env.action_space(a), f"{name}: agent '{a}'") for a in self.names]
        self.agents = tuple(
            AgentSpec(size, len(actions))
            for (size, _, _), actions in zip(self._views, self._actions, strict=True)
        )
        self.max_steps = max_steps or _clock(env, name)
        self.paid: dict[Any, float] = {}
        self.tells_won = False

    def reset(self, seed: int) -> Step:
        with contextlib.redirect_stdout(sys.stderr):
            observations, infos = self.env.reset(seed=seed)
        self._steps, self.paid = 0, {}
        return self._seen(observations, infos, self.env.agents, 0.0, done=False, truncated=False)

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
        self.paid = {agent: float(rewards[agent]) for agent in self.names if agent in rewards}
        timed = {a for a in playing if truncated.get(a) and not terminated.get(a)}
        staying = {a for a in self.env.agents if not (terminated.get(a) or truncated.get(a))}
        if over := not staying:
            staying = timed
        late = not over and self._steps >= self.max_steps
        return self._seen(
            observations,
            infos,
            staying,
            self._reward(),
            done=over or late,
            truncated=late or (over and bool(timed)),
        )

    def render(self) -> np.ndarray:
        """A picture (height, width, 3) of uint8; only of a copy that was built for drawing."""
        with contextlib.redirect_stdout(sys.stderr):
            picture = self.env.render()
        if np.ndim(picture) != 3:
            raise UsageError(
                f"{self.name} cannot be drawn: its render() gave {type(picture).__name__}, not a "
                "picture; it needs render_mode='rgb_array'"
            )
        return np.asarray(picture, np.uint8)

    def close(self) -> None:
        if self._ours:
            self.env.close()

    def _seen(
        self,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        present: Collection[Any],
        reward: float,
        *,
        done: bool,
        truncated: bool,
    ) -> Step:
        """What the agents see; who is not `present` sees nothing and can only play 0."""
        said = [info for info in infos.values() if info]
        self.tells_won |= any(word in info for info in said for word in WON)
        seen, open_ = [], []
        for agent, spec, (_, read, masked) in zip(
            self.names, self.agents, self._views, strict=True
        ):
            if agent not in present:
                seen.append(np.zeros(spec.observation_size, np.float32))
                open_.append(np.arange(spec.n_actions) == 0)
                continue
            if agent not in observations:
                raise PevdnError(f"{self.name} gave no observation to '{agent}', who plays on")
            view = observations[agent]
            mask = view["action_mask"] if masked else (infos.get(agent) or {}).get("action_mask")
            seen.append(read(view))
            open_.append(
                np.ones(spec.n_actions, bool) if mask is None else np.array(mask).astype(bool)
            )
        won = done and any(info.get(word) for info in said for word in WON)
        return host_step(seen, open_, reward, done, truncated, won)

    def _reward(self) -> float:
        paid = list(self.paid.values())
        if self.team_reward == "sum":
            return sum(paid)
        if self.team_reward == "mean":
            return sum(paid) / len(self.names)
        if len(set(paid)) > 1:
            pay = ", ".join(f"'{agent}' {reward:g}" for agent, reward in self.paid.items())
            raise UsageError(
                f"team-reward=common, but {self.name} paid its agents differently in one step "
                f"({pay}); use team-reward=sum or mean"
            )
        return paid[0] if paid else 0.0


# ---- what an agent sees and does -------------------------------------------------------------

Read = Callable[[Any], np.ndarray]


def _view(space: Any, who: str) -> tuple[int, Read, bool]:
    """The size of an observation, how it is read, and whether the mask of actions is in it."""
    from gymnasium import spaces

    masked = isinstance(space, spaces.Dict) and "action_mask" in space.spaces
    if masked:
        space = spaces.Dict({k: part for k, part in space.spaces.items() if k != "action_mask"})
    size, read = _reader(space, who)
    if not size:
        raise UsageError(f"{who} observes nothing: its observation space is {space}")
    return size, read, masked


def _reader(space: Any, who: str) -> tuple[int, Read]:
    """A fresh vector of float32 for every observation."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        top = float(space.high.max(initial=0)) if space.dtype == np.uint8 else 0.0
        scale = np.float32(1 / top if top else 1)
        return int(np.prod(space.shape)), lambda x: np.asarray(x, np.float32).ravel() * scale
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inside: Any = space.spaces
        parts = inside.items() if isinstance(space, spaces.Dict) else enumerate(inside)
        readers = [(key, *_reader(part, who)) for key, part in parts]
        return (
            sum(size for _, size, _ in readers),
            lambda x: np.concatenate([np.zeros(0, np.float32), *(r(x[k]) for k, _, r in readers)]),
        )
    if not getattr(space, "is_np_flattenable", False):
        raise UsageError(
            f"{who} has an observation space without a fixed size, {space}; use Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
        )
    return spaces.flatdim(space), lambda x: np.array(spaces.flatten(space, x), np.float32)


def _actions(space: Any, who: str) -> list[Any]:
    """Every action of an agent, in the order of our numbers."""
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
                f"{who} chooses among {combinations} combinations of actions, {space}; "
                f"{MOST_COMBINATIONS} at most are taken as one choice"
            )
        choices = (range(s, s + n) for s, n in zip(starts.flat, sizes.flat, strict=True))
        return [np.array(one, space.dtype).reshape(shape) for one in itertools.product(*choices)]
    kind = "continuous actions" if isinstance(space, spaces.Box) else "actions of another kind"
    raise UsageError(
        f"{who} has {kind}, {space}; agents here choose among finitely many, a Discrete space "
        "(some environments have an argument for it, such as continuous_actions=false)"
    )


def _clock(env: Any, name: str) -> int:
    """The longest episode, by what the environment says of itself."""
    inner = getattr(env, "unwrapped", env)
    for place in (env, inner, getattr(inner, "env", None)):
        for word in CLOCKS:
            found = getattr(place, word, None) or getattr(place, "metadata", {}).get(word)
            if isinstance(found, int | np.integer) and found > 0:
                return int(found)
    raise UsageError(
        f"{name} does not say how long an episode can be; give it an attribute max_steps, or "
        "say it with max-steps=N in the id of the world (max_steps=N in worlds.adopt)"
    )


def _refuse_unfit(env: Any, name: str) -> None:
    if hasattr(env, "agent_iter"):
        raise UsageError(f"{name} {TURN_BY_TURN}")
    wanted = ("possible_agents", "observation_space", "action_space", "reset", "step")
    for word in wanted:
        if not hasattr(env, word):
            raise UsageError(
                f"{name} has no {word}, so it is no parallel environment of PettingZoo, which "
                f"has {', '.join(wanted)}"
            )
    if not env.possible_agents:
        raise UsageError(f"{name} has no agents: possible_agents is empty")


# ---- making one ------------------------------------------------------------------------------


def make(world_id: str) -> ExternalWorld:
    """The world of an id, of which one copy is made to see what it is like."""
    module, _, query = world_id.partition(":")[2].partition("?")
    given = arguments.parse(query)
    ours = {name: given.pop(name) for name in list(given) if "-" in name}
    team_reward = ours.pop("team-reward", "sum")
    max_steps = _steps(ours.pop("max-steps", None))
    if ours:
        raise unknown(
            "option of a PettingZoo world", next(iter(ours)), ["team-reward", "max-steps"]
        )
    found = _imported(world_id, module)
    values = arguments.checked(module, given, _makers(found))
    build = functools.partial(_build, world_id, module, values, team_reward, max_steps)
    team = build()
    team.close()
    return ExternalWorld(world_id, team.agents, team.max_steps, build)


def _build(
    world_id: str,
    module: str,
    values: dict[str, Any],
    team_reward: str,
    max_steps: int | None,
    drawn: bool = False,
) -> ParallelTeam:
    found = _imported(world_id, module)
    known = arguments.signature_of(_makers(found))
    if drawn and (known is None or "render_mode" in known):
        values = {"render_mode": "rgb_array", **values}
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            env = found.parallel_env(**values)
        except Exception as problem:
            raise UsageError(
                f"world '{world_id}' cannot be made: {type(problem).__name__}: {problem}"
            ) from problem
        return ParallelTeam(env, world_id, team_reward=team_reward, max_steps=max_steps)


def _steps(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text)):
        raise UsageError(f"max-steps is '{text}', but must be a whole number above 0")
    return None if text is None else int(text)


def _imported(world_id: str, module: str) -> ModuleType:
    """The module of an environment, installed or in this folder; windows and banners stay shut."""
    if not module:
        raise UsageError(
            f"world '{world_id}' names no module, as in 'pettingzoo:mpe2.simple_spread_v3'"
        )
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        with silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise UsageError(f"world '{world_id}' {_missing(module, missing.name or '')}") from missing
    except Exception as problem:
        raise UsageError(
            f"world '{world_id}': importing {module} gave {type(problem).__name__}: {problem}"
        ) from problem
    if hasattr(found, "parallel_env"):
        return found
    if hasattr(found, "env") or hasattr(found, "raw_env"):
        raise UsageError(f"world '{world_id}' {TURN_BY_TURN}")
    raise UsageError(
        f"world '{world_id}': the module {module} has no parallel_env, a function or class that "
        "makes the environment"
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
    """The module of the same package with the nearest name, such as one of another version."""
    package, _, name = module.rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", [])
    near = difflib.get_close_matches(name, [found.name for found in pkgutil.iter_modules(places)])
    return f"{package}.{near[0]}" if near else None


def _makers(module: ModuleType) -> list[Callable[..., Any]]:
    """What may say which arguments `parallel_env` takes: PettingZoo's own takes just anything."""
    raw = getattr(module, "raw_env", None)
    home = sys.modules.get(getattr(raw, "__module__", ""), None)
    found = (getattr(module, "parallel_env", None), raw, getattr(home, "_env", None))
    return [maker for maker in found if maker is not None]
