"""Claims about StarCraft II's interface: battles, clocks, crashes and what else looks like SMAC.

StarCraft II is not here. `Battle` keeps to the code of smac.env.StarCraft2Env, method by method:
what it returns, when it asserts, and what it does when the connection to the game breaks.
"""

from __future__ import annotations

import logging
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pevdn import worlds
from pevdn.errors import PevdnError, UsageError
from pevdn.worlds.base import AgentSpec, EntityGroup, ExternalWorld
from pevdn.worlds.external import problem_of
from pevdn.worlds.starcraft import MOST_CRASHES, StarCraftEnvironment

NOOP, STOP, SHOOT = range(3)


class ProtocolError(Exception):
    """As pysc2.lib.protocol names it."""


class Battle:
    """Two marines against one enemy with four health, which shoots the first that is alive."""

    def __init__(self, seed: int | None = None, continuing_episode: bool = False) -> None:
        self.n_agents, self.n_actions, self.episode_limit = 2, 3, 6
        self.continuing_episode, self._seed = continuing_episode, seed
        self.force_restarts = self.closed = self._total_steps = 0
        self.breaks: set[int] = set()  # steps of all episodes at which the game crashes

    def reset(self) -> Any:
        self.allies, self.enemy, self._episode_steps = [2, 2], 4, 0
        return self.get_obs(), self.get_state()

    def step(self, actions: Any) -> Any:
        actions_int = [int(a) for a in actions]
        for a_id, action in enumerate(actions_int):
            assert self.get_avail_agent_actions(a_id)[action] == 1, "cannot perform action"
        try:
            self._play(actions_int)
        except ProtocolError:
            self.full_restart()
            return 0, True, {}
        self._episode_steps += 1
        info = {"battle_won": False, "dead_allies": self.allies.count(0)}
        terminated, reward = False, float(actions_int.count(SHOOT))
        if self.enemy <= 0 or not any(self.allies):
            terminated = True
            if self.enemy <= 0:
                info["battle_won"] = True
                reward += 10
        elif self._episode_steps >= self.episode_limit:
            terminated = True
            if self.continuing_episode:
                info["episode_limit"] = True
        return reward, terminated, info

    def _play(self, actions: list[int]) -> None:
        self._total_steps += 1
        if self._total_steps in self.breaks:
            raise ProtocolError("Could not execute: websocket is closed")
        self.enemy -= actions.count(SHOOT)
        if self.enemy > 0 and SHOOT in actions:  # it shoots back
            first = next(i for i, health in enumerate(self.allies) if health)
            self.allies[first] -= 1

    def full_restart(self) -> None:
        self.force_restarts += 1

    def get_obs_agent(self, agent_id: int) -> np.ndarray:
        alive = self.allies[agent_id] > 0
        return np.array([self.allies[agent_id], self.enemy], np.float32) * alive

    def get_obs(self) -> list[np.ndarray]:
        return [self.get_obs_agent(i) for i in range(self.n_agents)]

    def get_state(self) -> np.ndarray:
        return np.array([*self.allies, self.enemy], np.float32)

    def get_avail_agent_actions(self, agent_id: int) -> list[int]:
        return [0, 1, 1] if self.allies[agent_id] > 0 else [1, 0, 0]

    def get_avail_actions(self) -> list[list[int]]:
        return [self.get_avail_agent_actions(i) for i in range(self.n_agents)]

    def get_env_info(self) -> dict[str, int]:
        return {
            "state_shape": 3,
            "obs_shape": 2,
            "n_actions": self.n_actions,
            "n_agents": self.n_agents,
            "episode_limit": self.episode_limit,
        }

    def seed(self) -> int | None:
        return self._seed

    def close(self) -> None:
        self.closed += 1


def fight(adapter: Any, *tactics: tuple[int, int]) -> list[Any]:
    """An episode; the last tactic goes on, and the dead do nothing."""
    steps = [adapter.reset(0)]
    while not steps[-1].done:
        assert problem_of(steps[-1], adapter.agents) is None and len(steps) < 1000
        wanted = tactics[min(len(steps) - 1, len(tactics) - 1)]
        alive = [not mask[NOOP] for mask in steps[-1].available]
        actions = (a if here else NOOP for a, here in zip(wanted, alive, strict=True))
        steps.append(adapter.step(tuple(actions)))
    assert problem_of(steps[-1], adapter.agents) is None
    return steps


def test_a_battle_is_told_as_smac_tells_it() -> None:
    world = worlds.adopt(Battle())
    assert isinstance(world, ExternalWorld)
    assert (world.name, world.max_steps, world.max_workers) == ("object:Battle", 6, 1)
    assert world.agents == (AgentSpec(2, 3), AgentSpec(2, 3))
    steps = fight(world.build(), (SHOOT, SHOOT))
    assert [o.tolist() for o in steps[0].observations] == [[2, 4], [2, 4]]
    assert [m.tolist() for m in steps[0].available] == [[False, True, True]] * 2
    assert [o.tolist() for o in steps[1].observations] == [[1, 2], [2, 2]]
    assert [float(s.reward) for s in steps] == [0, 2, 12]
    assert steps[-1].won and steps[-1].done and not steps[-1].truncated
    assert not steps[1].won and not steps[1].done


def test_the_dead_can_do_nothing_and_the_battle_goes_on() -> None:
    env = Battle()
    env.n_actions = 3
    steps = fight(StarCraftEnvironment(env, "b"), (SHOOT, STOP))
    dead = steps[2]
    assert dead.observations[0].tolist() == [0, 0]
    assert dead.available[0].tolist() == [True, False, False]
    assert not dead.done and not steps[-1].won


@pytest.mark.parametrize("continuing", [True, False])
def test_the_clock_truncates_if_the_environment_says_so(continuing: bool) -> None:
    """By default SMAC calls an episode finished that reached its limit; it is taken at its word."""
    env = Battle(continuing_episode=continuing)
    for _ in range(2):
        steps = fight(StarCraftEnvironment(env, "b"), (STOP, STOP))
        assert len(steps) - 1 == 6
        assert steps[-1].done and bool(steps[-1].truncated) == continuing and not steps[-1].won


def test_an_earlier_clock_of_ours_truncates() -> None:
    steps = fight(StarCraftEnvironment(Battle(), "b", max_steps=4), (STOP, STOP))
    assert len(steps) - 1 == 4 and steps[-1].truncated


def test_an_episode_in_which_the_game_crashed_is_truncated_with_what_was_last_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = Battle()
    env.breaks = {2}
    adapter = StarCraftEnvironment(env, "smac:3m")
    with caplog.at_level(logging.WARNING):
        steps = fight(adapter, (SHOOT, STOP), (STOP, SHOOT))
    assert len(steps) - 1 == 2 and env.force_restarts == 1
    assert steps[-1].done and steps[-1].truncated and not steps[-1].won
    assert steps[-1].reward == 0
    assert [o.tolist() for o in steps[-1].observations] == [[1, 3], [2, 3]]
    assert "smac:3m crashed and was restarted." in caplog.text
    assert fight(adapter, (SHOOT, SHOOT))[-1].won  # the next one is played as if nothing had been


def test_a_crash_that_smac_does_not_catch_is_caught_and_other_errors_are_not() -> None:
    class Fragile(Battle):
        fails: Exception | None = None

        def step(self, actions: Any) -> Any:
            if self.fails:
                raise self.fails
            return super().step(actions)

    env = Fragile()
    adapter = StarCraftEnvironment(env, "b")
    adapter.reset(0)
    env.fails = ConnectionResetError("gone")
    assert adapter.step((STOP, STOP)).truncated and env.force_restarts == 1
    env.fails = ValueError("a mistake")
    with pytest.raises(ValueError, match="a mistake"):
        adapter.step((STOP, STOP))


def test_a_crash_at_reset_starts_the_game_again() -> None:
    class Unlucky(Battle):
        def reset(self) -> Any:
            if not self.force_restarts:
                raise ProtocolError("websocket is closed")
            return super().reset()

    adapter = StarCraftEnvironment(Unlucky(), "b")
    assert fight(adapter, (SHOOT, SHOOT))[-1].won and adapter.env.force_restarts == 1


def test_a_game_that_only_crashes_is_given_up() -> None:
    env = Battle()
    env.breaks = set(range(1, 99))
    adapter = StarCraftEnvironment(env, "smac:3m")
    for _ in range(MOST_CRASHES - 1):
        assert fight(adapter, (STOP, STOP))[-1].truncated
    with pytest.raises(PevdnError, match=r"smac:3m crashed 5 times without completing an episode"):
        fight(adapter, (STOP, STOP))


def test_crashes_with_whole_episodes_in_between_are_put_up_with() -> None:
    env = Battle()
    env.breaks = set(range(1, 99, 3))  # a crash, and two steps of a battle
    adapter = StarCraftEnvironment(env, "smac:3m")
    for _ in range(2 * MOST_CRASHES):
        assert fight(adapter, (SHOOT, SHOOT))[-1].truncated
        assert fight(adapter, (SHOOT, SHOOT))[-1].won


def test_an_end_without_information_is_no_crash_where_no_game_can_be_restarted() -> None:
    class Silent(Battle):
        full_restart = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name == "full_restart":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def step(self, actions: Any) -> Any:
            reward, terminated, _ = super().step(actions)
            return reward, terminated, {}

    adapter = StarCraftEnvironment(Silent(), "b")
    for _ in range(2 * MOST_CRASHES):
        last = fight(adapter, (SHOOT, SHOOT))[-1]
        assert last.done and not last.truncated and last.reward == 12
    assert not adapter.reports_won


class Lite:
    """SMAClite's dialect: gymnasium's reset and step, sizes as attributes, no get_env_info."""

    def __init__(self) -> None:
        self.n_agents, self.n_actions, self.obs_size = 2, 3, 2
        self._battle = Battle()
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return tuple(self._battle.reset()[0]), {}

    def step(self, actions: list[int]) -> Any:
        assert all(type(action) is int for action in actions)
        reward, _, info = self._battle.step(actions)
        over = self._battle.enemy <= 0 or not any(self._battle.allies)
        return self.get_obs(), reward, over, False, info

    def get_obs(self) -> Any:
        return tuple(self._battle.get_obs())

    def get_avail_actions(self) -> Any:
        return [np.array(mask, float) for mask in self._battle.get_avail_actions()]


class Wrapped:
    """As gymnasium.make wraps it: nothing but `unwrapped` leads to what is not gymnasium's."""

    def __init__(self, env: Any, longest: int) -> None:
        self.unwrapped, self.longest = env, longest
        self.spec = type("Spec", (), {"max_episode_steps": longest})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.unwrapped.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        seen, reward, over, _, info = self.unwrapped.step(actions)
        self.steps += 1
        return seen, reward, over, self.steps >= self.longest, info


def test_smaclites_dialect_is_understood() -> None:
    world = worlds.adopt(Wrapped(Lite(), 4))
    assert isinstance(world, ExternalWorld)
    assert (world.name, world.max_steps, world.agents) == ("object:Lite", 4, (AgentSpec(2, 3),) * 2)
    adapter: Any = world.build()
    assert fight(adapter, (SHOOT, SHOOT))[-1].won
    late = fight(adapter, (STOP, STOP))
    assert len(late) - 1 == 4 and late[-1].truncated
    later: Any = worlds.adopt(Wrapped(Lite(), 4), max_steps=9).build()
    assert len(fight(later, (STOP, STOP))) - 1 == 4  # the environment's own clock
    adapter.reset(11)
    assert adapter.env.unwrapped.seeds == [0, 0, 11] and adapter.seeded


def test_who_does_not_say_how_long_a_battle_is_is_asked() -> None:
    with pytest.raises(UsageError, match=r"object:Lite states no episode limit.*max_steps=N"):
        worlds.adopt(Lite())
    assert worlds.adopt(Lite(), max_steps=7).max_steps == 7


def test_who_does_not_say_its_sizes_is_asked() -> None:
    env = Lite()
    del env.n_agents
    with pytest.raises(UsageError, match="does not state 'n_agents'; its get_env_info"):
        worlds.adopt(env, max_steps=5)


def test_agents_asked_one_by_one_are_enough() -> None:
    class OneByOne:
        def __init__(self) -> None:
            self._battle = Battle()
            for word in ("reset", "step", "get_env_info", "get_obs_agent"):
                setattr(self, word, getattr(self._battle, word))
            self.get_avail_agent_actions = self._battle.get_avail_agent_actions

    assert fight(worlds.adopt(OneByOne()).build(), (SHOOT, SHOOT))[-1].won


def test_who_makes_battles_can_make_many_and_closes_them() -> None:
    world = worlds.adopt(Battle)
    assert isinstance(world, ExternalWorld) and world.max_workers is None
    one, two = pickle.loads(pickle.dumps(world.build))(), world.build()
    assert one.env is not two.env
    one.close()
    assert one.env.closed == 1
    kept = worlds.adopt(two.env).build()
    kept.close()
    assert two.env.closed == 0


# --- smac:MAP --------------------------------------------------------------------------------


def test_without_smac_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smac", None)
    with pytest.raises(UsageError) as caught:
        worlds.make("smac:3m")
    said = str(caught.value)
    assert "world 'smac:3m' needs SMAC" in said and "StarCraft II" in said
    assert "pip install git+https://github.com/oxwhirl/smac" in said
    assert said.endswith("; or train on 'smax-sc2:3m'")


class StarCraft2Env(Battle):
    """With the arguments and sizes of SMAC's that its observations are read by."""

    map_type, n_actions_no_attack = "marines", 2

    def __init__(
        self,
        map_name: str = "8m",
        difficulty: str = "7",
        game_version: str | None = None,
        seed: int | None = None,
        continuing_episode: bool = False,
    ) -> None:
        super().__init__(seed, continuing_episode)
        self.map_name, self.difficulty = map_name, difficulty

    def get_obs_enemy_feats_size(self) -> tuple[int, int]:
        return 1, 1

    def get_obs_ally_feats_size(self) -> tuple[int, int]:
        return 0, 5

    def get_obs_move_feats_size(self) -> int:
        return 1


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SMAC's and pysc2's modules, as far as they are looked at; `found` is what is on the disk."""
    found: dict[str, Any] = {"game": True, "maps": {"3m.SC2Map"}}

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
        return made

    class Game:
        def map_data(self, path: str) -> bytes:
            if path not in found["maps"]:
                raise ValueError(f"Map {path} not found in ~/StarCraftII/Maps.")
            return b""

    def get(version: str | None) -> Game:
        if not found["game"]:
            raise FileNotFoundError("No such file or directory: '~/StarCraftII/Versions'")
        return Game()

    module("smac")
    module("smac.env", StarCraft2Env=StarCraft2Env)
    module("smac.env.starcraft2")
    module("smac.env.starcraft2.maps")
    registry = {"3m": {}, "2s3z": {}}
    module("smac.env.starcraft2.maps.smac_maps", get_smac_map_registry=lambda: registry)
    module("pysc2")
    module("pysc2.run_configs", get=get)
    module("pysc2.maps", get=lambda name: type("Map", (), {"path": f"{name}.SC2Map"}))
    worlds.make.cache_clear()
    return found


def test_smac_is_made_with_its_arguments_and_told_to_say_when_the_clock_ends_a_battle(
    installed: dict[str, Any],
) -> None:
    world = worlds.make("smac:3m?difficulty=3&seed=5")
    assert isinstance(world, ExternalWorld)
    assert (world.name, world.max_workers) == ("smac:3m?difficulty=3&seed=5", None)
    assert world.agents[0].entities == (EntityGroup(1, 1, 1, actions=2), EntityGroup(2, 0, 5))
    adapter: Any = world.build()
    assert (adapter.env.map_name, adapter.env.difficulty, adapter.env.seed()) == ("3m", "3", 5)
    assert fight(adapter, (STOP, STOP))[-1].truncated and not adapter.seeded
    own = worlds.make("smac:3m?continuing_episode=false").build()
    assert not fight(own, (STOP, STOP))[-1].truncated


@pytest.mark.parametrize(
    ("world_id", "change", "message"),
    [
        ("smac:3n", {}, "unknown map of SMAC '3n'; did you mean '3m'?"),
        ("smac:3m?dificulty=7", {}, "argument of StarCraft2Env 'dificulty'; did you mean 'diffic"),
        ("smac:3m", {"game": False}, "No such file or directory: '~/StarCraftII/Versions'"),
        ("smac:3m", {"game": False}, "set SC2PATH to the folder of the game; or train on 'smax-"),
        ("smac:2s3z", {}, "needs StarCraft II and SMAC's maps (Map 2s3z.SC2Map not found in"),
    ],
)
def test_what_is_missing_for_starcraft_is_named(
    installed: dict[str, Any], world_id: str, change: dict[str, Any], message: str
) -> None:
    installed.update(change)
    with pytest.raises(UsageError) as caught:
        worlds.make(world_id)
    assert message in str(caught.value)
