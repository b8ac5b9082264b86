"""StarCraft II through SMAC, and everything with the interface of its `StarCraft2Env`.

`smac:MAP[?argument=value]` makes `smac.env.StarCraft2Env(map_name=MAP, …)`, told to say when only
the clock has ended a battle (`continuing_episode`). An object with the same interface, such as
SMACv2's, is taken as it is; so is SMAClite's, which answers a step as gymnasium does.

SMAC is seeded when it is made, not when it is reset: an episode cannot be repeated from its seed.

The game crashes now and then. SMAC then starts it again and ends the episode without saying who
won. Such an episode is truncated here, with the last thing that was seen; what it would have come
to is not known, and it counts as not won.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.worlds import arguments
from pevdn.worlds.base import AgentSpec, EntityGroup, ExternalWorld, Step, host_step
from pevdn.worlds.maps import BATTLE_MAPS
from pevdn.worlds.quiet import silence

MOST_CRASHES = 5  # in a row, before it is no accident any more
CRASHES = ("ConnectionError", "ProtocolError", "WebSocketException")  # pysc2's, or Python's own
PAGE = "https://github.com/oxwhirl/smac"

_log = logging.getLogger(__name__)


class StarCraftTeam:
    """One copy of a `StarCraft2Env`, or of anything like it."""

    tells_won = False

    def __init__(
        self,
        env: Any,
        name: str,
        *,
        max_steps: int | None = None,
        entities: tuple[EntityGroup, ...] = (),
        ours: bool = True,
    ) -> None:
        self.env, self.name, self._ours = env, name, ours
        self._inner = getattr(env, "unwrapped", env)  # past what gymnasium has wrapped around it
        size, actions, self._n = _sizes(self._inner, name)
        self.agents = (AgentSpec(size, actions, entities),) * self._n
        self.max_steps = max_steps or _clock(env, self._inner, name)
        self.seeded = "seed" in inspect.signature(env.reset).parameters
        self._crashes = 0

    def reset(self, seed: int) -> Step:
        """Start an episode. SMAC cannot be told the seed, and draws on; SMAClite can."""
        with contextlib.redirect_stdout(sys.stderr):
            try:
                self.env.reset(**({"seed": seed} if self.seeded else {}))
            except Exception as problem:
                self._restart(problem)
                self.env.reset()
            self._steps = 0
            self._last = self._views()
        return self._seen(0.0)

    def step(self, actions: tuple[int, ...]) -> Step:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = self.env.step([int(action) for action in actions])
            except Exception as problem:
                self._restart(problem)
                return self._seen(0.0, done=True, truncated=True)
            # SMAC: reward, terminated, info. Gymnasium: with observations and truncated besides.
            reward, terminated, *cut, info = answer[-4:] if len(answer) == 5 else answer
            if terminated and not info and hasattr(self.env, "full_restart"):  # SMAC did it
                self._crashed()
                return self._seen(0.0, done=True, truncated=True)
            self._steps += 1
            self._last = self._views()
        timed = bool(info.get("episode_limit")) or any(cut) or self._steps >= self.max_steps
        over = bool(terminated) and not info.get("episode_limit")
        if over or timed:
            self._crashes = 0
        self.tells_won |= "battle_won" in info
        won = bool(info.get("battle_won", False))
        return self._seen(reward, done=over or timed, truncated=timed and not over, won=won)

    def close(self) -> None:
        if self._ours:
            self.env.close()

    def _views(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        return (
            tuple(np.array(o, np.float32) for o in self._each("get_obs", "get_obs_agent")),
            tuple(
                np.array(a).astype(bool)
                for a in self._each("get_avail_actions", "get_avail_agent_actions")
            ),
        )

    def _each(self, every: str, one: str) -> Sequence[Any]:
        if hasattr(self._inner, every):
            return getattr(self._inner, every)()
        return [getattr(self._inner, one)(i) for i in range(self._n)]

    def _seen(
        self, reward: float, done: bool = False, truncated: bool = False, won: bool = False
    ) -> Step:
        return host_step(*self._last, reward, done, truncated, done and won)

    def _restart(self, problem: Exception) -> None:
        """Start a game that broke off again; any other problem is not the game's."""
        kinds = {kind.__name__ for kind in type(problem).__mro__}
        if not kinds & set(CRASHES) or not hasattr(self.env, "full_restart"):
            raise problem
        self._crashed()
        self.env.full_restart()

    def _crashed(self) -> None:
        self._crashes += 1
        if self._crashes >= MOST_CRASHES:
            raise PevdnError(
                f"{self.name} crashed {MOST_CRASHES} times without ending an episode in between; "
                "see what StarCraft II wrote to standard error"
            )
        _log.warning("%s crashed and was started again.", self.name)


def is_like(env: Any) -> bool:
    """Whether an object has SMAC's way of telling what is available."""
    inner = getattr(env, "unwrapped", env)
    words = ("get_avail_actions", "get_avail_agent_actions")
    return any(hasattr(inner, word) for word in words) and hasattr(env, "step")


def _sizes(env: Any, name: str) -> tuple[int, int, int]:
    """Observation size, number of actions and number of agents."""
    info = env.get_env_info() if hasattr(env, "get_env_info") else vars(env)
    try:
        size = info["obs_shape"] if "obs_shape" in info else info["obs_size"]
        return int(np.prod(size)), int(info["n_actions"]), int(info["n_agents"])
    except KeyError as missing:
        raise UsageError(
            f"{name} does not say {missing}; get_env_info() gives obs_shape, n_actions, n_agents "
            "and episode_limit in SMAC"
        ) from None


def _clock(env: Any, inner: Any, name: str) -> int:
    info = inner.get_env_info() if hasattr(inner, "get_env_info") else {}
    spec = getattr(env, "spec", None)
    for found in (
        info.get("episode_limit"),
        getattr(inner, "episode_limit", None),
        getattr(spec, "max_episode_steps", None),
    ):
        if found:
            return int(found)
    raise UsageError(
        f"{name} does not say how long an episode can be; give it an attribute episode_limit, or "
        "pass it as pevdn.worlds.adopt(env, max_steps=N)"
    )


# ---- smac:MAP --------------------------------------------------------------------------------


def make(world_id: str) -> ExternalWorld:
    """SMAC's world of an id; the game is started when a copy is first reset."""
    name, _, query = world_id.partition(":")[2].partition("?")
    smac = _imported(world_id, name)
    known = smac.env.starcraft2.maps.smac_maps.get_smac_map_registry()
    if name not in known:
        raise unknown("map of SMAC", name, known)
    given = arguments.parse(query)
    values = arguments.checked("StarCraft2Env", given, [smac.env.StarCraft2Env])
    _find_game(world_id, name, values.get("game_version"))
    build = functools.partial(_build, world_id, name, {"continuing_episode": True, **values})
    team = build()
    return ExternalWorld(world_id, team.agents, team.max_steps, build)


def _build(world_id: str, name: str, values: dict[str, Any], drawn: bool = False) -> StarCraftTeam:
    smac = _imported(world_id, name)
    with silence():
        env = smac.env.StarCraft2Env(map_name=name, **values)
    return StarCraftTeam(env, world_id, entities=_entities(env))


def _imported(world_id: str, name: str) -> Any:
    try:
        with silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("smac.env.starcraft2.maps.smac_maps")
            importlib.import_module("smac.env")
    except ImportError as missing:
        raise UsageError(
            f"world '{world_id}' needs SMAC ({missing}) and StarCraft II: pip install git+{PAGE} "
            "(the smac of PyPI is another program), and get the game and its maps as that page "
            f"says{_instead(name)}"
        ) from missing
    return sys.modules["smac"]


def _find_game(world_id: str, name: str, version: str | None) -> None:
    try:
        with silence():
            game = importlib.import_module("pysc2.run_configs").get(version=version)
            game.map_data(importlib.import_module("pysc2.maps").get(name).path)
    except Exception as problem:
        raise UsageError(
            f"world '{world_id}' needs StarCraft II and SMAC's maps ({problem}): get them as "
            f"{PAGE} says, and set SC2PATH to the folder of the game{_instead(name)}"
        ) from problem


def _instead(name: str) -> str:
    return f"; or train on 'smax-sc2:{name}'" if name in BATTLE_MAPS else ""


def _entities(env: Any) -> tuple[EntityGroup, ...]:
    """Enemies and allies in SMAC's observation, after what the unit knows of where it can move.

    An action is about one enemy each, but for the medivacs of MMM, which heal allies instead.
    """
    enemies, enemy_size = env.get_obs_enemy_feats_size()
    allies, ally_size = env.get_obs_ally_feats_size()
    start = env.get_obs_move_feats_size()
    targets = None if env.map_type == "MMM" else env.n_actions_no_attack
    return (
        EntityGroup(start, enemies, enemy_size, targets),
        EntityGroup(start + enemies * enemy_size, allies, ally_size),
    )
