"""Claims about JaxMARL's worlds behind our interface: pay, ends, victories, masks, and refusals."""

from __future__ import annotations

import functools
import importlib
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import slow, small

import pevdn
from pevdn import worlds
from pevdn.agent import minibatch
from pevdn.errors import UsageError
from pevdn.worlds.base import Step
from pevdn.worlds.jaxmarl_worlds import JaxmarlWorld, State
from pevdn.worlds.maps import JAXMARL_GAMES

GAMES = 8
SPREAD, REFERENCE, SPEAKER, RIDDLE, KITCHEN, KITCHEN_V2, HANABI = (
    f"jaxmarl:{name}" for name in JAXMARL_GAMES
)
PARTICLES = [SPREAD, REFERENCE, SPEAKER]
CLOCKED = [*PARTICLES, KITCHEN, KITCHEN_V2]
AFTER_THE_END = 3  # steps that are played although the episode is over

# --- playing ---------------------------------------------------------------------------------


def make(world_id: str) -> JaxmarlWorld:
    world = worlds.make(world_id)
    assert isinstance(world, JaxmarlWorld)
    return world


Tactic = tuple[float, ...]  # how much the first, second, … action is preferred; none: random


@functools.cache
def compiled(world_id: str) -> Any:
    """`play(keys, preferences, noise)` for many games: what came of every step."""
    world = make(world_id)

    def play(key: jax.Array, preferences: Any, noise: jax.Array) -> tuple[Step, Step]:
        def choose(key: jax.Array, available: jax.Array, preference: jax.Array) -> jax.Array:
            wish = preference + noise * jax.random.gumbel(key, available.shape)
            return jnp.argmax(jnp.where(available, wish, -jnp.inf))

        def tick(carry: Any, key: jax.Array) -> Any:
            state, available = carry
            own, *keys = jax.random.split(key, 1 + len(available))
            state, step = world.step(own, state, tuple(map(choose, keys, available, preferences)))
            return (state, step.available), step

        start, steps = jax.random.split(key)
        state, first = world.reset(start)
        steps = jax.random.split(steps, world.max_steps + AFTER_THE_END)
        return first, jax.lax.scan(tick, (state, first.available), steps)[1]

    return jax.jit(jax.vmap(play, in_axes=(0, None, None)))


@functools.cache
def played(world_id: str, tactic: Tactic = (), seed: int = 0) -> tuple[Step, Step]:
    """The first step, (games, …), and the others, (games, steps, …)."""
    preferences = [np.array(tactic or [0.0] * a.n_actions) for a in make(world_id).agents]
    keys = jax.random.split(jax.random.key(seed), GAMES)
    return jax.device_get(compiled(world_id)(keys, preferences, float(not tactic)))


def lengths(steps: Step) -> np.ndarray:
    assert np.any(steps.done, axis=1).all()
    return np.argmax(steps.done, axis=1) + 1


def at_end(steps: Step, field: Any) -> np.ndarray:
    return np.asarray(field)[np.arange(GAMES), lengths(steps) - 1]


@functools.cache
def functions(world: JaxmarlWorld) -> tuple[Any, Any]:
    return jax.jit(world.reset), jax.jit(world.step)


def staged(world_id: str, **game: Any) -> tuple[JaxmarlWorld, State]:
    """A world at the start of an episode, with some of JaxMARL's own state replaced."""
    world = make(world_id)
    state, _ = functions(world)[0](jax.random.key(0))
    new = {k: jnp.asarray(v, getattr(state.game, k).dtype) for k, v in game.items()}
    return world, state._replace(game=state.game.replace(**new))


def after(world: JaxmarlWorld, state: State, *joint: Sequence[int]) -> Step:
    """What comes of the last of some joint actions."""
    for actions in joint:
        state, step = functions(world)[1](jax.random.key(1), state, tuple(map(np.int32, actions)))
    return step


# --- episodes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JAXMARL_GAMES)
def test_a_random_episode_gives_every_agent_what_was_promised(name: str) -> None:
    world, (first, steps) = make(f"jaxmarl:{name}"), played(f"jaxmarl:{name}")
    assert not first.done.any() and (first.reward == 0).all()
    for i, agent in enumerate(world.agents):
        seen, mask = steps.observations[i], steps.available[i]
        assert seen.shape[2:] == (agent.observation_size,) and seen.dtype == np.float32
        assert mask.shape[2:] == (agent.n_actions,)
        assert np.isfinite(seen).all() and mask.any(axis=-1).all()  # also after the end
    assert np.isfinite(steps.reward).all()
    assert (lengths(steps) <= world.max_steps).all()


@pytest.mark.parametrize("world_id", CLOCKED)
def test_a_clock_ends_an_episode_at_the_limit_and_only_truncates_it(world_id: str) -> None:
    _, steps = played(world_id)
    assert (lengths(steps) == make(world_id).max_steps).all()
    assert at_end(steps, steps.truncated).all()


@pytest.mark.parametrize("world_id", [RIDDLE, HANABI])
def test_a_game_that_ends_itself_is_never_truncated(world_id: str) -> None:
    _, steps = played(world_id)
    assert not steps.truncated.any()
    assert len(set(lengths(steps))) > 1


def test_a_riddle_that_nobody_answers_is_over_and_lost() -> None:
    _, steps = played(RIDDLE, (2.0, 1.0, 0.0))
    assert (lengths(steps) == 6).all()
    assert not steps.truncated.any() and not steps.won.any() and not steps.reward.any()


def test_hanabi_with_every_token_spent_lasts_as_long_as_it_can() -> None:
    discard, play, hint, wait = [1.0] * 5, [0.0] * 5, [2.0] * 10, [0.0]
    _, steps = played(HANABI, (*discard, *play, *hint, *wait))
    assert make(HANABI).max_steps == 40 + 47 + 2
    assert (lengths(steps) == 40 + 47 + 2).all()


def test_in_hanabi_one_player_moves_and_the_others_pass() -> None:
    first, steps = played(HANABI)
    assert first.available[0][:, 5:10].all() and not first.available[0][:, -1].any()
    passes = np.stack([mask[..., -1] for mask in steps.available])
    others = np.stack([mask[..., :-1].any(axis=-1) for mask in steps.available])
    assert (passes.sum(axis=0) == 1).all() and (passes != others).all()


def test_what_the_observations_of_particles_are_made_of() -> None:
    """Own speed and place, the landmarks and the others as seen from here, what was heard."""
    state, first = functions(make(SPREAD))[0](jax.random.key(0))
    places = np.array(state.game.p_pos)
    for i, seen in enumerate(first.observations):
        others = np.delete(places[:3], i, axis=0) - places[i]
        parts = (np.zeros(2), places[i], places[3:] - places[i], others, np.zeros(4))
        np.testing.assert_allclose(seen, np.concatenate([np.ravel(p) for p in parts]), rtol=1e-5)
        things = make(SPREAD).agents[i].entities
        for group, known in zip(things, (places[3:] - places[i], others), strict=True):
            cut = seen[group.start : group.start + group.count * group.size]
            np.testing.assert_allclose(cut.reshape(group.count, group.size), known, rtol=1e-5)

    world, state = staged(REFERENCE, goal=[2, 0])
    told = after(world, state, [5 * 7, 5 * 4]).observations  # agents say 7 and 4, and stand
    places = np.array(state.game.p_pos)
    for i, (goal, heard) in enumerate([(0, 4), (2, 7)]):
        colours = np.where(np.arange(3) == goal, 0.75, 0.25)
        parts = (np.zeros(2), places[2:] - places[i], colours, np.arange(10) == heard)
        np.testing.assert_allclose(told[i], np.concatenate([np.ravel(p) for p in parts]), rtol=1e-5)

    world, state = staged(SPEAKER, goal=1)
    speaker, listener = after(world, state, [2, 0]).observations
    places = np.array(state.game.p_pos)
    np.testing.assert_allclose(speaker, [0.15, 0.65, 0.15])
    parts = (np.zeros(2), places[2:] - places[1], [0, 0, 1])
    np.testing.assert_allclose(listener, np.concatenate([np.ravel(p) for p in parts]), rtol=1e-5)


def test_in_hanabi_nobody_sees_the_own_cards() -> None:
    world, one = staged(HANABI)
    hands = np.array(one.game.player_hands)
    hint = 10 + int(hands[1, 0].sum(axis=1).argmax())  # the colour of the other's first card
    hands[0] = hands[0, ::-1]
    _, two = staged(HANABI, player_hands=hands)
    seen = [after(world, state, [hint, 20]).observations for state in (one, two)]
    assert (seen[0][0] == seen[1][0]).all() and (seen[0][1] != seen[1][1]).any()


def test_the_same_key_plays_the_same_episode_and_another_key_another() -> None:
    for world_id in (SPREAD, RIDDLE, HANABI):
        once, again, other = (played.__wrapped__(world_id, (), seed) for seed in (1, 1, 2))
        assert jax.tree.all(jax.tree.map(np.array_equal, once, again))
        assert not jax.tree.all(jax.tree.map(np.array_equal, once, other))


# --- pay and victories -----------------------------------------------------------------------


@pytest.mark.parametrize("world_id", [SPREAD, REFERENCE])
def test_the_team_is_paid_the_mean_of_its_agents(world_id: str) -> None:
    world, state = staged(world_id)
    env, key = world._env, jax.random.key(1)
    actions = dict.fromkeys(env.agents, jnp.int32(2))
    paid = jax.jit(env.step_env)(key, state.game, actions)[2]
    reward = after(world, state, [2] * len(world.agents)).reward
    assert reward == pytest.approx(np.mean([float(paid[a]) for a in env.agents]), rel=1e-5)
    assert reward < 0


LANDMARKS = [[0.8, 0.8], [-0.8, 0.8], [0.0, -0.8]]
AWAY = [0.0, 0.2]


@pytest.mark.parametrize(
    ("world_id", "goal", "agents", "won"),
    [
        (SPREAD, None, [LANDMARKS[2], LANDMARKS[0], LANDMARKS[1]], True),
        (SPREAD, None, [LANDMARKS[2], LANDMARKS[0], [-0.8, 0.61]], True),
        (SPREAD, None, [LANDMARKS[2], LANDMARKS[0], [-0.8, 0.59]], False),
        (SPREAD, None, [LANDMARKS[2], LANDMARKS[0], AWAY], False),
        (REFERENCE, [2, 0], [LANDMARKS[2], LANDMARKS[0]], True),
        (REFERENCE, [2, 0], [LANDMARKS[0], LANDMARKS[2]], False),
        (REFERENCE, [2, 0], [LANDMARKS[2], AWAY], False),
        (SPEAKER, 1, [AWAY, LANDMARKS[1]], True),
        (SPEAKER, 1, [LANDMARKS[1], AWAY], False),
        (SPEAKER, 1, [AWAY, LANDMARKS[0]], False),
    ],
)
def test_a_particle_world_is_won_when_the_right_landmarks_are_touched(
    world_id: str, goal: Any, agents: list[list[float]], won: bool
) -> None:
    game = {"p_pos": agents + LANDMARKS} | ({} if goal is None else {"goal": goal})
    world, state = staged(world_id, **game)
    assert bool(after(world, state, [0] * len(world.agents)).won) == won


@pytest.mark.parametrize(("n", "earned", "wins"), [(2, -6.3, 0.97), (3, -9.0, 0.9)])
def test_spread_is_won_by_walking_to_landmarks_of_ones_own_and_not_at_random(
    n: int, earned: float, wins: float
) -> None:
    world_id = f"{SPREAD}?num_agents={n}"
    world = make(world_id)
    shares = jnp.array(list(itertools.permutations(range(n))))
    push = 0.5 * jnp.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])

    def play(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, _ = world.reset(key)
        agents, landmarks = state.game.p_pos[:n], state.game.p_pos[n:]
        ways = jnp.linalg.norm(agents - landmarks[shares], axis=-1).sum(axis=1)
        goals = landmarks[shares[jnp.argmin(ways)]]

        def tick(state: State, key: jax.Array) -> Any:
            place, speed = state.game.p_pos[:n], state.game.p_vel[:n]
            next_speed = 0.75 * speed[:, None] + push  # (agents, actions, 2)
            ahead = (place + 0.1 * speed)[:, None] + 0.23 * next_speed
            gaps = jnp.linalg.norm(ahead - goals[:, None], axis=-1)
            state, step = world.step(key, state, tuple(jnp.argmin(gaps, axis=1)))
            return state, (step.reward, step.won)

        rewards, won = jax.lax.scan(tick, state, jax.random.split(key, world.max_steps))[1]
        return rewards.sum(), won[-1]

    returns, won = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 1024))
    assert returns.mean() > earned and won.mean() > wins
    _, steps = played(world_id)
    assert steps.reward[:, :25].sum(axis=1).mean() < 2 * earned
    assert not at_end(steps, steps.won).any()


@pytest.mark.parametrize(("visited", "reward"), [([1, 1, 1], 1), ([1, 0, 0], -1)])
def test_the_riddle_is_won_by_telling_when_all_have_been_there(
    visited: list[int], reward: int
) -> None:
    world, state = staged(RIDDLE, has_been=visited, agent_in_room=0)
    step = after(world, state, [2, 0, 0])
    assert step.done and not step.truncated
    assert step.reward == reward and bool(step.won) == (reward > 0)


@pytest.mark.parametrize("carried", ["dish", "plate"])
def test_overcooked_is_won_by_a_delivery(carried: str) -> None:
    down, stay, interact = 1, 4, 5
    objects = importlib.import_module("jaxmarl.environments.overcooked.common").OBJECT_TO_INDEX
    inventory = [objects[carried], objects["empty"]]
    world, state = staged(KITCHEN, agent_pos=[[3, 2], [1, 1]], agent_inv=inventory)
    serve = ([down, stay], [interact, stay])
    assert after(world, state, *serve).reward == (20 if carried == "dish" else 0)
    assert bool(after(world, state, *serve, [stay, stay]).won) == (carried == "dish")


def test_hanabi_is_won_by_the_last_of_all_points() -> None:
    world, state = staged(HANABI)
    nearly = np.ones((5, 5))
    nearly[0, 4] = 0
    hands = np.array(state.game.player_hands)
    hands[0, 0] = 1 - nearly
    for score, won in ((24, True), (23, False)):
        _, state = staged(HANABI, fireworks=nearly, player_hands=hands, score=score)
        step = after(world, state, [5, 20])  # play the first card; pass
        assert step.reward == 1 and step.done and not step.truncated
        assert bool(step.won) == won


# --- names and options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_id", "agents", "observation", "limit"),
    [
        (f"{SPREAD}?num_agents=5", 5, 4 + 5 * 2 + 4 * 4, 25),
        (f"{RIDDLE}?num_agents=4", 4, 2, 10),
        (f"{KITCHEN}?layout=cramped_room", 2, 4 * 5 * 26, 400),
        (f"{KITCHEN}?layout=counter_circuit", 2, 5 * 8 * 26, 400),
        (f"{KITCHEN_V2}?layout=coord_ring", 2, 5 * 5 * 30, 400),
        (f"{HANABI}?num_agents=3", 3, 253 + 71 + 50 + 57 + 525, 2 * 35 + 7 + 3),
    ],
)
def test_an_option_changes_the_world(
    world_id: str, agents: int, observation: int, limit: int
) -> None:
    world = make(world_id)
    assert world.name == world_id and world.max_steps == limit
    assert [agent.observation_size for agent in world.agents] == [observation] * agents


@pytest.mark.parametrize(
    ("world_id", "message"),
    [
        ("jaxmarl:switch_ridle", "did you mean 'jaxmarl:switch_riddle'?"),
        ("switch_riddle", "did you mean 'jaxmarl:switch_riddle'?"),
        (f"{KITCHEN}?layout=cramped_rom", "unknown layout 'cramped_rom'; did you mean 'cramped"),
        (f"{KITCHEN}?lay=x", "unknown option of jaxmarl:overcooked 'lay'; did you mean 'layout'?"),
        (f"{RIDDLE}?num_agents=2", "unknown num_agents '2'; choose one of: 3, 4, 5, 6."),
        (f"{SPEAKER}?num_agents=3", "jaxmarl:MPE_simple_speaker_listener_v4 has no options"),
        ("jaxmarl:MPE_simple_tag_v3", "'jaxmarl:MPE_simple_tag_v3' is not cooperative: one"),
        ("jaxmarl:coin_game", "'jaxmarl:coin_game' is not cooperative"),
        ("jaxmarl:MPE_simple_facmac_6a_v1", "has continuous actions"),
        ("jaxmarl:MPE_simple_v3", "has only one agent, but a team needs two"),
        ("jaxmarl:SMAX", "such as 'smax:3m'"),
        ("jaxmarl:JaxRobotarium_rware", "jaxrobotarium"),
    ],
)
def test_a_world_that_is_not_there_says_why(world_id: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        worlds.make(world_id)
    assert message in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="chex")

    monkeypatch.setattr("pevdn.worlds.jaxmarl_worlds.importlib.import_module", missing)
    with pytest.raises(UsageError, match="needs the Python package 'chex', which is not installed"):
        JaxmarlWorld("switch_riddle")


def test_a_world_comes_alone_and_in_silence_and_every_one_of_jaxmarls_is_known() -> None:
    program = (
        "import sys; from pevdn import worlds; from pevdn.worlds.maps import *; "
        "world = worlds.make('jaxmarl:MPE_simple_spread_v3'); "
        "print([n for n in sys.modules if 'storm' in n or 'jaxnav' in n or 'visual' in n]); "
        "import jaxmarl; from jaxmarl.environments import SimpleSpreadMPE, mpe; "
        "from jaxmarl.environments import overcooked_layouts, overcooked_v2_layouts; "
        "print(type(world._env) is SimpleSpreadMPE is mpe.SimpleSpreadMPE, "
        "{*JAXMARL_GAMES, *JAXMARL_REFUSED} == set(jaxmarl.registered_envs), "
        "set(KITCHENS) == set(overcooked_layouts), "
        "{*KITCHENS_V2, 'long_room'} == set(overcooked_v2_layouts))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[]"
    assert lines[-1] == "True True True True"


# --- learning --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["pe-vdn-b", slow("pe-vdn-c")])
def test_a_team_trains_on_simple_spread(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minibatch, "_wide", lambda: True)  # one length of episodes to compile for
    settings = {**small(algorithm), "eval_every": 200}
    run = pevdn.train(algorithm, env=SPREAD, steps=400, out=tmp_path / "run", **settings)
    last = run.metrics[-1]
    assert last["env_steps"] >= 400 and last["updates"] > 0
    assert -100 < last["return"] < 0


@pytest.mark.slow
def test_two_agents_learn_to_cover_two_landmarks(tmp_path: Path) -> None:
    """The first 400,000 steps of docs/results.md; its eight seeds had 0.80 to 0.92 there."""
    settings = dict(gamma=0.8, return_lambda=0.8, learning_rate=0.002, learning_rate_end=0.1)
    settings |= dict(learning_rate_steps=1_500_000, target_rate=0.02, average_decay=0.999)
    settings |= dict(update_every=4, parallel_episodes=32, exploration_steps=100_000)
    run = pevdn.train(
        "pe-vdn-b",
        env=f"{SPREAD}?num_agents=2",
        steps=400_000,
        out=tmp_path / "run",
        eval_every=100_000,
        eval_episodes=256,
        **settings,
    )
    assert run.metrics[-1]["win_rate_average"] > 0.7
