"""StarCraft II through SMAC, and other environments with the interface of its `StarCraft2Env`.

`smac:MAP[?argument=value]` builds `smac.env.StarCraft2Env(map_name=MAP, …)` with
`continuing_episode=True`, which makes SMAC report truncation. Objects with the same interface, such
as SMACv2's, are used unchanged; so are SMAClite's, whose `step` returns gymnasium's five values.

SMAC takes its seed at construction, not at reset: an episode cannot be repeated from its seed.

The game crashes occasionally. SMAC then restarts it and ends the episode without a result. Such an
episode is truncated at its last observation and counts as not won.
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
from pevdn.worlds.base import AgentSpec, EntityGroup, ExternalWorld, Step, external_step
from pevdn.worlds.maps import BATTLE_MAPS
from pevdn.worlds.quiet import silence

MOST_CRASHES = 5  # in a row
CRASHES = ("ConnectionError", "ProtocolError", "WebSocketException")  # of pysc2 and of Python
PAGE = "https://github.com/oxwhirl/smac"

_log = logging.getLogger(__name__)


class StarCraftEnvironment:
    """A `StarCraft2Env`, or an environment with its interface, as an `ExternalEnv`."""

    reports_won = False

    def __init__(
        self,
        env: Any,
        name: str,
        *,
        max_steps: int | None = None,
        entities: tuple[EntityGroup, ...] = (),
        owned: bool = True,
    ) -> None:
        self.env, self.name, self._owned = env, name, owned
        self._inner = getattr(env, "unwrapped", env)  # without gymnasium's wrappers
        size, actions, self._n = _sizes(self._inner, name)
        self.agents = (AgentSpec(size, actions, entities),) * self._n
        self.max_steps = max_steps or _limit(env, self._inner, name)
        self.seeded = "seed" in inspect.signature(env.reset).parameters
        self._crashes = 0

    def reset(self, seed: int) -> Step:
        """Start an episode; SMAClite takes the seed, SMAC ignores it."""
        with contextlib.redirect_stdout(sys.stderr):
            try:
                self.env.reset(**({"seed": seed} if self.seeded else {}))
            except Exception as problem:
                self._restart(problem)
                self.env.reset()
            self._steps = 0
            self._last = self._observe()
        return self._result(0.0)

    def step(self, actions: tuple[int, ...]) -> Step:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                result = self.env.step([int(action) for action in actions])
            except Exception as problem:
                self._restart(problem)
                return self._result(0.0, done=True, truncated=True)
            # SMAC returns reward, terminated, info; gymnasium adds observations and truncated.
            reward, terminated, *cut, info = result[-4:] if len(result) == 5 else result
            if terminated and not info and hasattr(self.env, "full_restart"):  # SMAC restarted it
                self._crashed()
                return self._result(0.0, done=True, truncated=True)
            self._steps += 1
            self._last = self._observe()
        late = bool(info.get("episode_limit")) or any(cut) or self._steps >= self.max_steps
        over = bool(terminated) and not info.get("episode_limit")
        if over or late:
            self._crashes = 0
        self.reports_won |= "battle_won" in info
        won = bool(info.get("battle_won", False))
        return self._result(reward, done=over or late, truncated=late and not over, won=won)

    def close(self) -> None:
        if self._owned:
            self.env.close()

    def _observe(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        return (
            tuple(np.array(o, np.float32) for o in self._by_agent("get_obs", "get_obs_agent")),
            tuple(
                np.array(a).astype(bool)
                for a in self._by_agent("get_avail_actions", "get_avail_agent_actions")
            ),
        )

    def _by_agent(self, of_all: str, of_one: str) -> Sequence[Any]:
        if hasattr(self._inner, of_all):
            return getattr(self._inner, of_all)()
        return [getattr(self._inner, of_one)(i) for i in range(self._n)]

    def _result(
        self, reward: float, done: bool = False, truncated: bool = False, won: bool = False
    ) -> Step:
        return external_step(*self._last, reward, done, truncated, done and won)

    def _restart(self, problem: Exception) -> None:
        """Restart a game that crashed; raise any other problem."""
        kinds = {kind.__name__ for kind in type(problem).__mro__}
        if not kinds & set(CRASHES) or not hasattr(self.env, "full_restart"):
            raise problem
        self._crashed()
        self.env.full_restart()

    def _crashed(self) -> None:
        self._crashes += 1
        if self._crashes >= MOST_CRASHES:
            raise PevdnError(
                f"{self.name} crashed {MOST_CRASHES} times without completing an episode; see the "
                "output of StarCraft II on standard error"
            )
        _log.warning("%s crashed and was restarted.", self.name)


def is_like(env: Any) -> bool:
    """Return whether an object has SMAC's methods for available actions."""
    inner = getattr(env, "unwrapped", env)
    words = ("get_avail_actions", "get_avail_agent_actions")
    return any(hasattr(inner, word) for word in words) and hasattr(env, "step")


def _sizes(env: Any, name: str) -> tuple[int, int, int]:
    """Return observation size, number of actions and number of agents."""
    info = env.get_env_info() if hasattr(env, "get_env_info") else vars(env)
    try:
        size = info["obs_shape"] if "obs_shape" in info else info["obs_size"]
        return int(np.prod(size)), int(info["n_actions"]), int(info["n_agents"])
    except KeyError as missing:
        raise UsageError(
            f"{name} does not state {missing}; its get_env_info() must return obs_shape, "
            "n_actions, n_agents and episode_limit, as in SMAC"
        ) from None


def _limit(env: Any, inner: Any, name: str) -> int:
    info = inner.get_env_info() if hasattr(inner, "get_env_info") else {}
    spec = getattr(env, "spec", None)
    for limit in (
        info.get("episode_limit"),
        getattr(inner, "episode_limit", None),
        getattr(spec, "max_episode_steps", None),
    ):
        if limit:
            return int(limit)
    raise UsageError(
        f"{name} states no episode limit; give it an attribute episode_limit, or use "
        "pevdn.worlds.adopt(env, max_steps=N)"
    )


# ---- smac:MAP --------------------------------------------------------------------------------


def make(world_id: str) -> ExternalWorld:
    """Return the SMAC world with this id; the game starts at an environment's first reset."""
    name, _, query = world_id.partition(":")[2].partition("?")
    smac = _imported(world_id, name)
    known = smac.env.starcraft2.maps.smac_maps.get_smac_map_registry()
    if name not in known:
        raise unknown("map of SMAC", name, known)
    texts = arguments.parse(query)
    values = arguments.checked("StarCraft2Env", texts, [smac.env.StarCraft2Env])
    _find_game(world_id, name, values.get("game_version"))
    build = functools.partial(_build, world_id, name, {"continuing_episode": True, **values})
    env = build()
    return ExternalWorld(world_id, env.agents, env.max_steps, build)


def _build(
    world_id: str, name: str, values: dict[str, Any], drawn: bool = False
) -> StarCraftEnvironment:
    smac = _imported(world_id, name)
    with silence():
        env = smac.env.StarCraft2Env(map_name=name, **values)
    return StarCraftEnvironment(env, world_id, entities=_entities(env))


def _imported(world_id: str, name: str) -> Any:
    try:
        with silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("smac.env.starcraft2.maps.smac_maps")
            importlib.import_module("smac.env")
    except ImportError as missing:
        raise UsageError(
            f"world '{world_id}' needs SMAC ({missing}) and StarCraft II: pip install git+{PAGE} "
            "(PyPI's smac is another program), and install the game and its maps as described "
            f"there{_alternative(name)}"
        ) from missing
    return sys.modules["smac"]


def _find_game(world_id: str, name: str, version: str | None) -> None:
    try:
        with silence():
            game = importlib.import_module("pysc2.run_configs").get(version=version)
            game.map_data(importlib.import_module("pysc2.maps").get(name).path)
    except Exception as problem:
        raise UsageError(
            f"world '{world_id}' needs StarCraft II and SMAC's maps ({problem}): install them as "
            f"described at {PAGE}, and set SC2PATH to the folder of the game{_alternative(name)}"
        ) from problem


def _alternative(name: str) -> str:
    return f"; or train on 'smax-sc2:{name}'" if name in BATTLE_MAPS else ""


def _entities(env: Any) -> tuple[EntityGroup, ...]:
    """Return the groups of SMAC's observation: enemies and allies, after the movement features.

    Each attack targets one enemy, except on MMM, where medivacs heal allies.
    """
    enemies, enemy_size = env.get_obs_enemy_feats_size()
    allies, ally_size = env.get_obs_ally_feats_size()
    start = env.get_obs_move_feats_size()
    targets = None if env.map_type == "MMM" else env.n_actions_no_attack
    return (
        EntityGroup(start, enemies, enemy_size, targets),
        EntityGroup(start + enemies * enemy_size, allies, ally_size),
    )
