"""Battles: the rules of SMAX and of StarCraft II, their rewards, and what they hide."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import slow

from pevdn import worlds
from pevdn.worlds.base import Step
from pevdn.worlds.maps import BATTLE_MAPS
from pevdn.worlds.smax import STARCRAFT_UNITS, SmaxWorld

SEEDS = 32
NORTH, EAST, SOUTH, WEST, STOP, FIRST_TARGET = range(6)
PLAYED = ["smax:3m", "smax-sc2:3m", "smax-sc2:2s3z", "smax-sc2:5m_vs_6m"]

# --- playing battles -------------------------------------------------------------------------


class Battles(NamedTuple):
    """Recorded battles; arrays start with (games, steps), and step t is what came of action t."""

    observations: np.ndarray  # (games, T, N, O)
    available: np.ndarray  # (games, T, N, A)
    reward: np.ndarray
    done: np.ndarray
    truncated: np.ndarray
    won: np.ndarray
    positions: np.ndarray  # (games, T, units, 2)
    health: np.ndarray  # (games, T, units)
    alive: np.ndarray

    def lengths(self) -> np.ndarray:
        return self.done.argmax(axis=1) + 1

    def at_end(self, field: np.ndarray) -> np.ndarray:
        return field[np.arange(len(field)), self.lengths() - 1]

    def returns(self) -> np.ndarray:
        during = np.arange(self.reward.shape[1]) < self.lengths()[:, None]
        return (self.reward * during).sum(axis=1)


FIGHT, RANDOM, FLEE_WEST, STAND, PUSH_WEST, SHOOT_FIRST = range(6)


def choose(tactic: jax.Array, key: jax.Array, available: jax.Array) -> jax.Array:
    """One action per ally under a tactic; `available` (N, A)."""
    n = len(available)
    target = FIRST_TARGET + jnp.argmax(available[:, FIRST_TARGET:], axis=1)  # all on the same
    fight = jnp.where(jnp.any(available[:, FIRST_TARGET:], axis=1), target, EAST)
    anything = jax.random.categorical(key, jnp.where(available, 0.0, -jnp.inf))
    west, stand, shoot = (jnp.full(n, action) for action in (WEST, STOP, FIRST_TARGET))
    plans = [fight, anything, west, stand, west.at[0].set(STOP), shoot]
    return jnp.stack(plans)[tactic]


@functools.cache
def compiled(world_id: str) -> tuple[Any, Any]:
    """`reset(keys)` and `play(keys, states, first steps, tactic)`, for many games at once."""
    world = worlds.make(world_id)

    def play(key: jax.Array, state: Any, first: Step, tactic: jax.Array) -> Any:
        def tick(carry: Any, key: jax.Array) -> Any:
            state, available = carry
            actions = tuple(choose(tactic, key, available))
            state, step = world.step(key, state, actions)
            units = state.state
            seen = (units.unit_positions, units.unit_health, units.unit_alive)
            available = jnp.stack(step.available)
            recorded = step._replace(observations=jnp.stack(step.observations), available=available)
            return (state, available), (*recorded, *seen)

        start = (state, jnp.stack(first.available))
        return jax.lax.scan(tick, start, jax.random.split(key, world.max_steps))[1]

    return jax.jit(jax.vmap(world.reset)), jax.jit(jax.vmap(play, in_axes=(0, 0, 0, None)))


def keys(seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), SEEDS)


@functools.cache
def fought(world_id: str, tactic: int, seed: int = 0) -> Battles:
    reset, play = compiled(world_id)
    states, first = reset(keys(seed))
    return Battles(*map(np.asarray, play(keys(seed), states, first, tactic)))


def staged(world_id: str, tactic: int, **units: np.ndarray) -> Battles:
    """Battles that start from given units instead, the same in every game."""
    reset, play = compiled(world_id)
    states, first = reset(keys())
    new = {
        name: jnp.broadcast_to(value, getattr(states.state, name).shape).astype(
            getattr(states.state, name).dtype
        )
        for name, value in units.items()
    }
    states = states.replace(state=states.state.replace(**new))
    return Battles(*map(np.asarray, play(keys(), states, first, tactic)))


# --- battles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_id", [*PLAYED[:-1], slow(PLAYED[-1])])
def test_a_dead_agent_sees_nothing_and_can_only_stop(world_id: str) -> None:
    n = len(worlds.make(world_id).agents)
    for tactic in (FIGHT, RANDOM):
        b = fought(world_id, tactic)
        dead = ~b.alive[:, :, :n]
        assert dead.any() and not dead.all()
        only_stop = np.arange(b.available.shape[-1]) == STOP
        assert (b.available[dead] == only_stop).all()
        assert (b.observations[dead] == 0).all()
        assert b.available[~dead][:, : STOP + 1].all()


@pytest.mark.parametrize(
    ("world_id", "reach", "sight"),
    [("smax-sc2:3m", [5] * 3, [9] * 3), ("smax-sc2:2s3z", [6, 6, 2, 2, 2], [10, 10, 9, 9, 9])],
)
def test_an_agent_sees_and_reaches_exactly_as_far_as_its_unit(
    world_id: str, reach: list[float], sight: list[float]
) -> None:
    b, n = fought(world_id, RANDOM), len(reach)
    gaps = np.linalg.norm(b.positions[:, :, :n, None] - b.positions[:, :, None, n:], axis=-1)
    both = b.alive[:, :, :n, None] & b.alive[:, :, None, n:]
    enemies = b.observations[..., 13 * (n - 1) : -10].reshape(*gaps.shape, 13)
    for limit, shown in ((reach, b.available[..., FIRST_TARGET:]), (sight, enemies[..., 0] > 0)):
        edge = np.array(limit)[:, None]
        clear = np.abs(gaps - edge) > 1e-3  # leave out the rounding of the device
        assert ((gaps < edge) & both)[clear].any()
        assert (shown == ((gaps < edge) & both))[clear].all()


@pytest.mark.parametrize("world_id", [w for w in PLAYED if "sc2" in w])
def test_a_won_battle_is_worth_twenty_and_no_other_more_than_ten(world_id: str) -> None:
    for b in (fought(world_id, FIGHT), fought(world_id, RANDOM)):
        won = b.at_end(b.won)
        np.testing.assert_allclose(b.returns()[won], 20.0, rtol=1e-5)
        assert (b.returns()[~won] <= 10.0 + 1e-4).all()
        assert (b.reward >= 0).all()


@pytest.mark.parametrize("world_id", ["smax-sc2:3m", "smax-sc2:2s3z"])
def test_fighting_wins_more_than_playing_at_random(world_id: str) -> None:
    fight, random = (fought(world_id, tactic) for tactic in (FIGHT, RANDOM))
    assert fight.at_end(fight.won).sum() > random.at_end(random.won).sum()
    assert fight.returns().mean() > 2 * random.returns().mean()


def test_stock_smax_pays_one_for_health_and_one_for_victory() -> None:
    b = fought("smax:3m", FIGHT)
    won = b.at_end(b.won)
    assert won.any()
    np.testing.assert_allclose(b.returns()[won], 2.0, rtol=1e-5)


@pytest.mark.parametrize("name", BATTLE_MAPS)
def test_on_every_map_the_reward_of_a_perfect_battle_is_twenty(name: str) -> None:
    """Pays for the whole battle at once, between teams of mixed units."""
    world = worlds.make(f"smax-sc2:{name}")
    assert isinstance(world, SmaxWorld)
    shapes = jax.eval_shape(world.reset, jax.random.key(0))[0].state
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    kinds = np.arange(len(blank.unit_types)) % len(STARCRAFT_UNITS)
    full = np.asarray(world._env.unit_type_health)[kinds]
    ally = np.arange(len(kinds)) < BATTLE_MAPS[name].allies
    left = np.where(ally, full, 0.0)
    over = blank.replace(unit_types=kinds, unit_health=left, unit_alive=ally)
    paid = world._env.compute_reward(over, full, left)
    for agent in world._env.agents:
        assert world._reward_scale * float(paid[agent]) == pytest.approx(20.0, rel=1e-6)


def test_the_end_is_told_apart_as_victory_defeat_or_clock() -> None:
    for world_id in PLAYED:
        n = len(worlds.make(world_id).agents)
        for tactic in (FIGHT, RANDOM, STAND):
            b = fought(world_id, tactic)
            assert b.done.any(axis=1).all()
            allies = b.at_end(b.alive)[:, :n].any(axis=1)
            enemies = b.at_end(b.alive)[:, n:].any(axis=1)
            assert (b.at_end(b.won) == (allies & ~enemies)).all()
            assert (b.at_end(b.truncated) == (allies & enemies)).all()
            assert not (b.truncated & ~b.done).any()


@pytest.mark.parametrize(("world_id", "limit"), [("smax:3m", 100), ("smax-sc2:3m", 60)])
def test_a_battle_without_deaths_is_truncated_at_the_limit(world_id: str, limit: int) -> None:
    b = staged(world_id, STAND, unit_health=np.float32(1e6))
    assert (b.lengths() == limit).all()
    assert b.at_end(b.truncated).all()
    assert not b.at_end(b.won).any()


def duel(ally_health: float, step: int) -> Battles:
    """An ally and an enemy with one health point, within reach of each other; the rest dead."""
    health = np.array([ally_health, 0, 0, 1, 0, 0])
    return staged(
        "smax-sc2:3m",
        SHOOT_FIRST,
        unit_health=health,
        unit_alive=health > 0,
        unit_positions=np.array([[15, 16], [1, 1], [1, 2], [17, 16], [31, 1], [31, 2]]),
        step=np.int32(step),
    )


def test_a_victory_on_the_last_step_is_no_truncation() -> None:
    b = duel(ally_health=45, step=59)
    assert b.won[:, 0].all() and b.done[:, 0].all() and not b.truncated[:, 0].any()
    np.testing.assert_allclose(b.reward[:, 0], 10 + 10 * (1 / 45) / 3, rtol=1e-5)


def test_dying_together_is_neither_victory_nor_truncation() -> None:
    b = duel(ally_health=1, step=0)
    assert b.done[:, 0].all() and not b.won[:, 0].any() and not b.truncated[:, 0].any()
    np.testing.assert_allclose(b.reward[:, 0], 10 * (1 / 45) / 3, rtol=1e-5)


def test_walls_block_under_starcraft_rules_and_kill_in_stock_smax() -> None:
    # Eight steps of 1.6 take everybody to the western wall; the enemy needs twelve to be in range.
    blocked, killed = fought("smax-sc2:3m", FLEE_WEST), fought("smax:3m", FLEE_WEST)
    assert (blocked.health[:, 8, :3] == 45).all()
    assert (blocked.positions[:, 8, :3, 0] < 1).all()
    assert (killed.health[:, 8, :3] == 0).all()
    assert (killed.lengths() <= 9).all() and not killed.at_end(killed.won).any()


def test_nobody_leaves_the_map_under_starcraft_rules() -> None:
    crowd = np.array([[0.0, 16], [0.5, 16.1], [1.0, 15.9], [31, 1], [31, 3], [31, 5]])
    for b in (
        fought("smax-sc2:3m", FLEE_WEST),
        fought("smax-sc2:5m_vs_6m", FLEE_WEST),
        staged("smax-sc2:3m", PUSH_WEST, unit_positions=crowd),
    ):
        assert (b.positions >= 0).all() and (b.positions <= 32).all()


def test_smacv2_places_everybody_on_the_map() -> None:
    world = worlds.make("smax-sc2:smacv2_5_units")
    starts = jax.jit(jax.vmap(lambda k: world.reset(k)[0].state.unit_positions))(keys())
    assert (starts >= 0).all() and (starts <= 32).all()


def test_enemy_actions_are_hidden_under_starcraft_rules_and_shown_in_stock_smax() -> None:
    for world_id, hidden in (("smax-sc2:3m", True), ("smax:3m", False)):
        b = fought(world_id, FIGHT)
        others = b.observations[..., :-10].reshape(*b.observations.shape[:-1], 5, 13)
        moves_and_targets = others[..., 3:6]
        assert (others[..., 2:, 0] > 0).any()  # enemies are in view
        assert (moves_and_targets[..., 2:, :] == 0).all() == hidden
        assert (moves_and_targets[..., :2, :] != 0).any()  # teammates' actions are


def test_a_marine_takes_six_health_a_shot() -> None:
    b = fought("smax-sc2:3m", FIGHT)
    assert set(np.unique(b.health)) == {float(h) for h in [0, *range(3, 46, 6)]}
    stock = fought("smax:3m", FIGHT)
    assert set(np.unique(stock.health)) == {0.0, 9.0, 18.0, 27.0, 36.0, 45.0}


FIGURES = [
    "velocities",
    "attacks",
    "attack_ranges",
    "sight_ranges",
    "radiuses",
    "health",
    "weapon_cooldowns",
]


def test_starcraft_figures_differ_from_stock_smax_where_that_is_off_and_nowhere_else() -> None:
    stock, starcraft = worlds.make("smax:3m")._env, worlds.make("smax-sc2:3m")._env  # type: ignore
    assert list(STARCRAFT_UNITS) == stock.unit_type_names
    differences = {
        (figure, unit): float(ours)
        for figure in FIGURES
        for unit, ours, theirs in zip(
            stock.unit_type_names,
            getattr(starcraft, f"unit_type_{figure}"),
            getattr(stock, f"unit_type_{figure}"),
            strict=True,
        )
        if ours != theirs
    }
    assert differences == pytest.approx(
        {
            ("attacks", "marine"): 6.0,
            ("attacks", "zealot"): 16.0,
            ("velocities", "marauder"): 3.15,
            ("health", "hydralisk"): 90.0,
            ("weapon_cooldowns", "stalker"): 1.34,
            ("weapon_cooldowns", "zergling"): 0.497,
        }
    )


def test_the_same_key_plays_the_same_battle_and_another_key_another() -> None:
    once, again, other = (fought.__wrapped__("smax-sc2:3m", RANDOM, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(once, again, strict=True))
    assert not (once.positions[:, 0] == other.positions[:, 0]).any()


def test_random_battles_never_break_a_number() -> None:
    for world_id in PLAYED:
        b = fought(world_id, RANDOM)
        assert np.isfinite(b.observations).all() and np.isfinite(b.reward).all()
