"""pe-vdn-d in the simulation: what is opened, when, and that each agent then learns alone.

Statistical tests fail by chance once in a million times (five standard errors, or χ²).
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2
from support import slow, split_keys

from pevdn.agent import keys as derive
from pevdn.agent import learning, minibatch, schedule
from pevdn.agent.program import AgentProgram
from pevdn.config import experiment as config
from pevdn.config.runtime import RuntimeOptions
from pevdn.privacy import mechanism
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation
from pevdn.simulation.replays import HostReplay
from pevdn.simulation.state import State, each_agent
from pevdn.training.checkpoint import Checkpoints, Progress
from pevdn.worlds.base import AgentSpec, EntityGroup
from pevdn.worlds.toy import Coordination

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "buffer_size": 16,
    "expected_batch_size": 6,
    "parallel_episodes": 2,
    "update_every": 1,
    "network": "recurrent",
    "return_lambda": 0.0,
    "eval_episodes": 4,
    "message_norm": 0.5,
    "opening_noise": 1.0,
}
T, SLOTS, LANES = 5, 16, 40
RARE = 1e-6


def team_of(n: int) -> tuple[AgentSpec, ...]:
    """n agents of up to three shapes, mixed so that equal ones are not neighbours."""
    shapes = [AgentSpec(4, 3), AgentSpec(6, 2, (EntityGroup(1, 2, 2, actions=0),)), AgentSpec(3, 5)]
    return tuple(shapes[i % min(3, n)] for i in range(n))


@cache
def simulation(n: int, algorithm: str = "pe-vdn-d", **settings: Any) -> Simulation:
    world: Any = SimpleNamespace(name="made-up", agents=team_of(n), max_steps=T)
    return Simulation(world, config.make(algorithm, settings={**SMALL, **settings}))


@cache
def compiled(sim: Simulation, name: str) -> Any:
    return jax.jit(getattr(sim, name))


def random_state(sim: Simulation, seed: int, lanes: int = 1) -> State:
    """Random parameters, targets and episodes that agree on reward and length across the team."""
    rng = np.random.default_rng(seed)
    state: State = compiled(sim, "start")(jnp.arange(lanes))
    rows, steps = sim.settings.buffer_size + 1, sim.world.max_steps
    length = rng.integers(1, steps + 1, (lanes, 1, rows))
    rewards = rng.normal(size=(lanes, 1, rows, steps)) * 3
    ended = (np.arange(steps) == length[..., None] - 1) & (rng.random((lanes, 1, rows, 1)) < 0.7)

    def jitter(x: Any) -> Any:
        return x + jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)

    def played(rows: Any) -> Any:
        available = rng.random(rows.available.shape) < 0.7
        available[..., 0] = True
        actions = rng.integers(0, available.shape[-1], rows.actions.shape)
        return rows._replace(
            observations=jnp.asarray(rng.normal(size=rows.observations.shape), jnp.float32),
            available=jnp.asarray(available),
            actions=jnp.asarray(actions, rows.actions.dtype),
            rewards=jnp.asarray(np.broadcast_to(rewards, rows.rewards.shape), jnp.float32),
            terminal=jnp.asarray(np.broadcast_to(ended, rows.rewards.shape)),
            length=jnp.asarray(np.broadcast_to(length, rows.length.shape), jnp.int32),
        )

    return state._replace(
        learners=tuple(
            x._replace(params=jax.tree.map(jitter, x.params), target=jax.tree.map(jitter, x.target))
            for x in state.learners
        ),
        replays=tuple(played(rows) for rows in state.replays),
        episodes=state.episodes + sim.settings.buffer_size,
    )


def every_slot(lanes: int) -> Any:
    return jnp.tile(jnp.arange(SLOTS), (lanes, 1))


class Telling(AgentProgram):
    """Tells the opened sum and what an agent subtracts from it, in place of what it stores."""

    def opened(self, total: Any, own: Any, batch: Any) -> Any:
        return total, own


@cache
def programs(sim: Simulation) -> SimpleNamespace:
    """What `Opened` computes, compiled once for each simulation."""
    telling, program = copy.copy(sim), sim.program
    telling.program = Telling(program.settings, program.release, program.opening)

    def fetch(state: State) -> Any:
        return sim.replay.fetch(state, every_slot(len(state.key)), T)

    def clipped(learner: Any, batch: Any) -> Any:
        shares = program.share_of_error(learner.params, learner.target, batch)
        return jax.vmap(sim.opening.clip, 1, 1)(shares)

    def message(learner: Any, batch: Any) -> Any:
        return program.message(learner.params, learner.target, batch)[0]

    def noise(keys: Any) -> Any:
        own = jax.vmap(lambda key: derive.of_agents(key, len(sim.team)))(keys)
        draw = jax.vmap(jax.vmap(lambda key: mechanism.words(key, T, SLOTS)))
        return sim.opening.noise(draw(own))

    return SimpleNamespace(
        fetch=jax.jit(fetch),
        tell=jax.jit(telling.opened),
        store=jax.jit(sim.opened),
        clipped=jax.jit(each_agent(clipped)),
        message=jax.jit(each_agent(message)),
        noise=jax.jit(noise),
    )


class Opened:
    """One opening of all episodes of a state, by agent: arrays (N, S, T, E) of whole units."""

    def __init__(self, sim: Simulation, state: State, number: int = 0) -> None:
        run, keys = programs(sim), sim.opening_keys(state.key, number)
        self.batches = run.fetch(state)
        given = (state.learners, self.batches, *keys)
        told = run.tell(*given)
        self.totals = by_agent(sim, [total for total, _ in told])  # each agent's, modulo p
        self.subtracted = by_agent(sim, [own for _, own in told])
        self.stored = by_agent(sim, run.store(*given))  # real numbers
        pairs = zip(state.learners, self.batches, strict=True)
        self.clipped = by_agent(sim, [run.clipped(*pair) for pair in pairs])
        self.noise = np.moveaxis(np.asarray(run.noise(keys[1]), np.int64), 1, 0)


def by_agent(sim: Simulation, by_kind: Any) -> Any:
    found = np.stack([np.asarray(x) for x in sim.team.by_agent(list(by_kind), axis=1)])
    return found.astype(np.float64 if found.dtype == np.float32 else np.int64)


def signed(words: Any, modulus: int) -> Any:
    return np.where(words > modulus // 2, words - modulus, words)


# ---- what is opened ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "t"), [(2, 1), (3, 1), (3, 2), slow(5, 1), (5, 3), slow(5, 4)])
def test_what_is_opened_is_the_sum_of_clipped_shares_and_noise_of_the_stated_variance(n, t):
    """Exactly, in integers; and the noise of any N − t agents has variance s² (χ², 1e-6)."""
    sim = simulation(n, colluders=t)
    opened = Opened(sim, random_state(sim, n + t, LANES))
    modulus, unit = sim.opening.modulus, sim.opening.unit
    exact = opened.clipped.sum(0) + opened.noise.sum(0)
    assert np.any(opened.clipped) and len(opened.clipped) == n
    for total in opened.totals:
        assert np.array_equal(signed(total, modulus), exact)
    for i in range(n):  # any N − t agents: neighbours in a circle
        honest = sum(opened.noise[(i + j) % n] for j in range(n - t)) * unit
        ratio = np.sum(honest**2) / 0.5**2  # s = M · opening_noise = 0.5 · 1
        low, high = chi2.ppf([RARE / 2, 1 - RARE / 2], honest.size)
        assert low < ratio < high
    far = opened.noise.reshape(n, -1)
    if n > 1:
        correlations = np.corrcoef(far) - np.eye(n)
        assert np.abs(correlations).max() * np.sqrt(far.shape[1]) < 5


@pytest.mark.parametrize(("n", "t"), [(2, 1), (3, 1), (3, 2)])
def test_an_agent_takes_off_its_own_noise_only_if_all_others_may_collude(n, t):
    sim = simulation(n, colluders=t)
    opened = Opened(sim, random_state(sim, 3, LANES))
    own = opened.clipped + (opened.noise if t == n - 1 else 0)
    assert np.array_equal(opened.subtracted, own)
    everything = opened.clipped.sum(0) + opened.noise.sum(0)
    lengths = np.asarray(opened.batches[0].length[:, 0])[:, None]  # (S, 1, E)
    rewards = np.asarray(opened.batches[0].rewards[:, 0]) / n
    played = np.arange(T)[:, None] < lengths
    for i in range(n):
        expected = ((everything - own[i]) * sim.opening.unit + rewards) * played
        assert np.allclose(opened.stored[i], expected, rtol=1e-5, atol=1e-6)


def test_noise_covers_every_step_of_every_episode_also_those_never_played():
    sim = simulation(3, colluders=2)
    opened = Opened(sim, random_state(sim, 4, LANES))
    assert np.all(np.count_nonzero(opened.noise, axis=(1, 2, 3)) > 0.999 * LANES * T * SLOTS)
    assert np.any(np.asarray(opened.batches[0].length) < T)


def test_every_opening_of_an_episode_has_noise_of_its_own():
    sim = simulation(3, colluders=2)
    state = random_state(sim, 5, LANES)
    first, second = (Opened(sim, state, number).noise.ravel() for number in (0, 1))
    later = state._replace(key=jax.vmap(lambda key: derive.of_block(key, 2, 1)[0])(state.key))
    third = Opened(sim, later).noise.ravel()
    pairs = np.abs(np.corrcoef([first, second, third]) - np.eye(3))
    assert pairs.max() * np.sqrt(first.size) < 5


# ---- the record -------------------------------------------------------------------------------


def without_record(state: State, sim: Simulation, agent: int, slot: int) -> State:
    """Return the neighbour: the agent's record of one episode is empty, all else is unchanged.

    The rewards stay, which are public: an empty record must not offer a share of them.
    """
    k = next(k for k, kind in enumerate(sim.team.kinds) if agent in kind.members)
    at = sim.team.kinds[k].members.index(agent)
    rows = state.replays[k].map(lambda x: x.at[:, at, slot].set(jnp.zeros((), x.dtype)))
    rows = rows._replace(rewards=state.replays[k].rewards)
    return state._replace(replays=(*state.replays[:k], rows, *state.replays[k + 1 :]))


def with_extremes(state: State, slot: int) -> State:
    """Make one episode as bad as numbers can be, for every agent."""
    worst = jnp.array([jnp.nan, 1e38, -jnp.inf, 3e38, -1e38])

    def bad(rows: Any) -> Any:
        return rows._replace(
            observations=rows.observations.at[:, :, slot, 0].set(1e38),
            rewards=rows.rewards.at[:, :, slot].set(worst),
            length=rows.length.at[:, :, slot].set(T),
        )

    return state._replace(replays=tuple(bad(rows) for rows in state.replays))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize(("n", "t"), [(2, 1), (3, 1)])
def test_emptying_a_record_moves_the_opened_sum_by_at_most_the_message_norm(n, t, extreme):
    """In unbounded integers, through the whole program: ‖y − y′‖ ≤ M/unit for the same noise."""
    sim = simulation(n, colluders=t)
    state, slot = random_state(sim, 6, LANES), 3
    if extreme:
        state = with_extremes(state, slot)
    before = Opened(sim, state)
    most = sim.opening.message_norm / sim.opening.unit
    for agent in range(n):
        after = Opened(sim, without_record(state, sim, agent, slot))
        moved = signed(before.totals[0], 2**32) - signed(after.totals[0], 2**32)  # (S, T, E)
        norms = np.sqrt((moved.astype(object) ** 2).sum(1).astype(float))
        assert not np.any(np.delete(norms, slot, 1)) and norms.max() <= most
        assert norms.max() > 0.99 * most  # the bound is reached
        assert not np.any(after.clipped[agent][..., slot])  # it offers noise alone,
        assert not np.any(after.stored[agent][..., slot])  # and stores nothing
        others = [j for j in range(n) if j != agent]
        assert np.array_equal(after.clipped[others], before.clipped[others])


def test_an_empty_record_adds_nothing_to_its_agents_gradient():
    """The sum over a sample with the emptied record is that without it; others' are unaffected."""
    sim = simulation(3)
    state = opened_state(sim, without_record(random_state(sim, 7), sim, 2, 3))
    keys = split_keys(state.key, 4)
    sample = jnp.tile(jnp.array([1, 3, 5, 8, SLOTS, SLOTS]), (1, 3, 1))
    run = compiled(sim, "sum_minibatch")
    with_it = agent_vectors(sim, run(state, sample, keys)[0])
    skipped = agent_vectors(sim, run(state, sample.at[:, :, 1].set(SLOTS), keys)[0])
    assert np.array_equal(with_it[2], skipped[2])
    assert not any(np.array_equal(with_it[i], skipped[i]) for i in (0, 1))


# ---- learning alone ---------------------------------------------------------------------------


def opened_state(sim: Simulation, state: State) -> State:
    """Open all episodes of a state."""
    keys = sim.opening_keys(state.key, 0)
    done: State = compiled(sim, "open")(state, every_slot(len(state.key)), keys)
    return done


def agent_vectors(sim: Simulation, by_kind: Any) -> list[Any]:
    """Gradients (S, N, ...) by kind as one vector per agent, (S, P)."""

    def flat(tree: Any) -> Any:
        leaves = [np.asarray(x).reshape(*x.shape[:2], -1) for x in jax.tree.leaves(tree)]
        return np.concatenate(leaves, axis=-1)

    found: list[Any] = [None] * len(sim.team)
    for kind, tree in zip(sim.team.kinds, by_kind, strict=True):
        for at, agent in enumerate(kind.members):
            found[agent] = flat(tree)[:, at]
    return found


LOUD = {"message_norm": 100.0, "opening_noise": 0.0}  # nothing is clipped, no noise is added


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        slow(2, {}),
        (3, {}),
        (3, {"return_lambda": 0.5, "network": "entities"}),
        slow(5, {"return_lambda": 0.9, "network": "entities"}),
        (2, {"bootstrap_timeouts": False, "modulus": 2**31 - 1}),
    ],
)
def test_without_clip_and_noise_an_agent_learns_from_the_team_error_of_pe_vdn_b(n, settings):
    """A = r + Σ m of the same batch; also for unlike agents and with λ-returns."""
    sim = simulation(n, **LOUD, **settings)
    state = opened_state(sim, random_state(sim, 8))
    batches = programs(sim).fetch(state)
    pairs = zip(state.learners, batches, strict=True)
    messages = sim.team.by_agent([programs(sim).message(*x) for x in pairs], axis=1)
    rate = sim.settings.gamma * sim.settings.return_lambda
    first = jax.tree.map(lambda x: x[0, 0], batches[0])
    team_error = np.asarray(learning.team_error(sum(m[0] for m in messages), first, rate))
    assert np.abs(team_error).max() > 1
    stored = sim.team.by_agent([batch.opened for batch in batches], axis=1)
    for own, opened in zip(messages, stored, strict=True):
        error = np.asarray((opened[0] + own[0]) * learning.valid(first))
        assert np.allclose(error, team_error, atol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"return_lambda": 0.5, "network": "entities"}])
def test_without_clip_and_noise_gradients_are_those_of_pe_vdn_c(settings):
    """Right after the opening, for the same sample."""
    ours = simulation(3, **LOUD, **settings)
    theirs = simulation(3, "pe-vdn-c", **dataclasses.asdict(ours.settings))
    state = opened_state(ours, random_state(ours, 9))
    common = jnp.array([[0, 2, 4, 9, 11, 15]])
    keys = split_keys(state.key, 4)
    plain = state._replace(replays=tuple(x._replace(opened=None) for x in state.replays))
    found = compiled(ours, "sum_minibatch")(state, jnp.tile(common, (1, 3, 1)), keys)[0]
    expected = compiled(theirs, "sum_minibatch")(plain, common, keys)[0]
    pairs = zip(agent_vectors(ours, found), agent_vectors(theirs, expected), strict=True)
    for mine, other in pairs:
        assert np.linalg.norm(mine - other) < 1e-4 * np.linalg.norm(other)


def test_an_update_learns_nothing_from_another_agents_replay_or_parameters():
    """Change all that agent 1 has after the opening: the others' gradients stay, bit for bit."""
    sim = simulation(3)
    state = opened_state(sim, random_state(sim, 10))
    other = opened_state(sim, random_state(sim, 11))
    k = next(k for k, kind in enumerate(sim.team.kinds) if kind.members == (1,))
    mixed = other.replays[k]._replace(
        **{name: getattr(state.replays[k], name) for name in ("rewards", "terminal", "length")}
    )
    changed = state._replace(
        replays=(*state.replays[:k], mixed, *state.replays[k + 1 :]),
        learners=(*state.learners[:k], other.learners[k], *state.learners[k + 1 :]),
    )
    keys = split_keys(state.key, 4)
    run = compiled(sim, "gradients")
    before, after = (agent_vectors(sim, run(s, keys)[0]) for s in (state, changed))
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_each_agents_sample_is_its_own_and_at_the_accounted_rate():
    """2,000 samples of 16 episodes by 3 agents: rate q, and no two agents agree more than chance.

    Frequencies and correlations are within five standard errors.
    """
    sim = simulation(3)
    full: Any = SimpleNamespace(episodes=jnp.full(2000, SLOTS))
    keys = jax.random.split(jax.random.key(1), (2000, 4))
    slots = np.asarray(jax.jit(lambda keys: sim.sample(full, keys))(keys))  # (S, N, B)
    taken = (slots[..., None] == np.arange(SLOTS)).any(2)  # (S, N, 16)
    assert (slots[..., None] == np.arange(SLOTS)).sum(2).max() == 1
    q = sim.config.sampling_rate
    each = taken.mean(0)
    assert np.abs(each - q).max() < 5 * np.sqrt(q * (1 - q) / 2000)
    flat = np.moveaxis(taken, 1, 0).reshape(3, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(3)).max() * np.sqrt(flat.shape[1]) < 5


# ---- when -------------------------------------------------------------------------------------


class Timed(Simulation):
    """Stores when an episode was opened in place of what was opened: one entry for each time."""

    def open(self, state: State, slots: Any, keys: Any) -> State:
        batches = self.replay.fetch(state, slots, self.horizons[-1])

        def noted(batch: Any, now: Any) -> Any:
            times = (batch.opened > 0).sum(0)  # (E,) openings so far
            return jnp.where(jnp.arange(len(batch.opened))[:, None] == times, now, batch.opened)

        found = tuple(each_agent(noted, 1)(batch, 1.0 * state.episodes) for batch in batches)
        return self.replay.store_opened(state, slots, found)


@pytest.mark.parametrize("openings", [1, 2])
def test_every_episode_is_opened_n_times_at_the_ages_of_the_schedule(openings: int) -> None:
    """Blocks of two episodes in a buffer of 8, looked at after every block."""
    settings = {**SMALL, "buffer_size": 8, "openings": openings, "learning_starts": 8}
    sim = Timed(Coordination(2), config.make("pe-vdn-d", settings=settings))
    ages = schedule.opening_ages(sim.config)
    assert ages == {1: [0], 2: [0, 4]}[openings]
    state, advance = jax.jit(sim.start)(jnp.array([3])), jax.jit(sim.advance)
    for block in range(1, 13):
        state = advance(state, jnp.int32(10**6), jnp.int32(1), jnp.full(1, 10**6, jnp.int32))
        assert int(state.episodes[0]) == 2 * block
        for rows in state.replays:
            for episode in range(max(0, 2 * block - 8), 2 * block):
                stored_at = 2 * (episode // 2 + 1)  # episodes, with its own block
                due = [stored_at + age for age in ages if stored_at + age <= 2 * block]
                times = np.asarray(rows.opened)[0, 0, episode % 8]
                assert times[times > 0].tolist() == due
    assert int(state.updates[0]) > 0


# ---- where ------------------------------------------------------------------------------------


class Kept:
    """A simulation that keeps its episodes here or there, compiled once for all tests."""

    def __init__(self, buffer: str) -> None:
        settings = {**SMALL, "openings": 2, "learning_starts": 8}
        self.config = config.make("pe-vdn-d", seeds=2, settings=settings)
        self.sim = Simulation(Coordination(3), self.config, RuntimeOptions(buffer=buffer))
        self._advance = self.sim.compile(Lanes(1, 2, print).jit)
        self._start = jax.jit(self.sim.start)

    def start(self) -> State:
        if isinstance(self.sim.replay, HostReplay):
            for name in self.sim.replay.rows:
                self.sim.replay.rows[name].__init__(self.sim.replay.size)  # type: ignore[misc]
        state: State = self._start(jnp.arange(2))
        return state

    def advance(self, state: Any, blocks: int) -> State:
        limits = jnp.int32(10**6), jnp.int32(blocks), jnp.full(2, 10**6, jnp.int32)
        after: State = self._advance(state, *limits)
        return after

    def opened(self, state: State) -> list[Any]:
        """What was opened of every stored episode, by kind (S, N, T, E)."""
        slots = np.tile(np.arange(SLOTS), (2, 1))
        if isinstance(self.sim.replay, HostReplay):
            empty = partial(minibatch.empty_part, steps=3, part=SLOTS, opened=True)
            found = self.sim.replay._unpack(slots, self.sim.team.shapes(empty, 2))
        else:
            found = self.sim.replay.fetch(state, jnp.asarray(slots), 3)
        return [np.array(batch.opened) for batch in found]


kept = cache(Kept)


def learnt(state: State) -> list[Any]:
    return [np.array(x) for x in jax.tree.leaves(state.learners)]


def counters(state: State) -> list[Any]:
    rest = state._replace(learners=(), replays=(), key=jax.random.key_data(state.key))
    return [np.array(x) for x in jax.tree.leaves(rest)]


def same(ours: list[Any], theirs: list[Any], atol: float = 0.0) -> bool:
    return all(np.allclose(a, b, rtol=0, atol=atol) for a, b in zip(ours, theirs, strict=True))


def test_a_host_buffer_opens_and_learns_as_a_device_buffer_does() -> None:
    """Bit for bit up to the first update; then as far as programs compiled apart agree."""
    ends: dict[int, list[Any]] = {3: [], 14: []}
    for buffer in ("device", "host"):
        run = kept(buffer)
        for blocks, found in ends.items():
            state = run.advance(run.start(), blocks)
            found.append((run.opened(state), learnt(state), counters(state)))
    (opened, params, counted), (theirs, their_params, their_count) = ends[3]
    assert same(opened, theirs) and same(params, their_params) and same(counted, their_count)
    assert np.any(opened[0])
    (opened, params, counted), (theirs, their_params, their_count) = ends[14]
    assert same(counted, their_count)
    assert same(opened, theirs, 1e-4) and same(params, their_params, 1e-5)


@pytest.mark.parametrize("buffer", ["device", "host"])
def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, buffer: str
) -> None:
    run = kept(buffer)
    whole = run.advance(run.start(), 12)
    opened, params, counted = run.opened(whole), learnt(whole), counters(whole)
    half = run.advance(run.start(), 7)
    checkpoints = Checkpoints(tmp_path, run.config)
    checkpoints.save(half, Progress(), run.sim)
    run.start()  # an empty buffer, for the checkpoint to fill
    restored, _ = checkpoints.restore(run.sim)
    checkpoints.close()
    ended = run.advance(jax.tree.map(jnp.asarray, restored), 5)
    assert same(learnt(ended), params) and same(counters(ended), counted)
    assert same(run.opened(ended), opened) and all(np.any(x) for x in opened)
