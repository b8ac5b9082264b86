"""The team in one program: the algorithms, their equivalences, and what each counts."""

from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support import PRODUCTION, slow, split_keys

from pevdn import worlds
from pevdn.agent import learning
from pevdn.config import experiment as config
from pevdn.privacy.planner import Plan
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import where_lane
from pevdn.simulation.team import TeamLayout
from pevdn.worlds.base import AgentSpec, EntityGroup

SMALL = {
    "hidden_size": 8,
    "buffer_size": 16,
    "expected_batch_size": 6,
    "parallel_episodes": 2,
    "update_every": 1,
    "network": "recurrent",
    "return_lambda": 0.0,
    "eval_episodes": 4,
}
T = 5


def team_of(n: int) -> tuple[AgentSpec, ...]:
    """n agents of up to three shapes, mixed so that equal ones are not neighbours."""
    shapes = [AgentSpec(4, 3), AgentSpec(6, 2, (EntityGroup(1, 2, 2, actions=0),)), AgentSpec(3, 5)]
    return tuple(shapes[i % min(3, n)] for i in range(n))


@cache
def simulation(algorithm: str, agents: tuple[AgentSpec, ...], **settings) -> Simulation:
    world = SimpleNamespace(name="made-up", agents=agents, max_steps=T)
    return Simulation(world, config.make(algorithm, settings={**SMALL, **settings}))


@cache
def compiled(sim: Simulation, name: str):
    """One compilation for each program of a simulation."""
    return jax.jit(getattr(sim, name))


def random_state(sim: Simulation, seed: int, lanes: int = 1):
    """Random parameters, targets and episodes that agree on reward and length across the team."""
    rng = np.random.default_rng(seed)
    state = compiled(sim, "start")(jnp.arange(lanes))
    jitter = lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)  # noqa: E731
    rows = sim.settings.buffer_size + 1
    steps = sim.world.max_steps
    length = rng.integers(1, steps + 1, (lanes, 1, rows))
    rewards = rng.normal(size=(lanes, 1, rows, steps)) * 3
    ended = (np.arange(steps) == length[..., None] - 1) & (rng.random((lanes, 1, rows, 1)) < 0.7)
    learners, replays = [], []
    for learner, replay in zip(state.learners, state.replays, strict=True):
        learners.append(
            learner._replace(
                params=jax.tree.map(jitter, learner.params),
                target=jax.tree.map(jitter, learner.target),
            )
        )
        available = rng.random(replay.available.shape) < 0.7
        available[..., 0] = True
        shape = replay.rewards.shape
        actions = rng.integers(0, available.shape[-1], replay.actions.shape)
        replays.append(
            replay._replace(
                observations=jnp.asarray(rng.normal(size=replay.observations.shape), jnp.float32),
                available=jnp.asarray(available),
                actions=jnp.asarray(actions, replay.actions.dtype),
                rewards=jnp.asarray(np.broadcast_to(rewards, shape), jnp.float32),
                terminal=jnp.asarray(np.broadcast_to(ended, shape)),
                length=jnp.asarray(np.broadcast_to(length, shape[:-1]), jnp.int32),
            )
        )
    return state._replace(
        learners=tuple(learners),
        replays=tuple(replays),
        episodes=state.episodes + sim.settings.buffer_size,
    )


def gradients(sim: Simulation, state, chosen):
    lanes = state.key.shape[0]
    keys = split_keys(state.key, 4)
    return sums(sim, state, jnp.tile(chosen, (lanes, 1)), keys)


def sums(sim: Simulation, state, chosen, keys):
    """The gradients of a minibatch, summed; of private programs, what the whole units stand for."""
    found, refused = compiled(sim, "sum_minibatch")(state, chosen, keys)
    assert not np.any(refused)
    return sim.release.as_floats(found) if sim.config.private else found


def relative_error(ours, theirs) -> float:
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def flat(by_kind):
    """Parameters (S, N, ...) by kind as vectors (S, N, P)."""
    vector = jax.vmap(jax.vmap(lambda tree: ravel_pytree(tree)[0]))
    return [vector(tree) for tree in by_kind]


def flat_norm(found) -> float:
    """The size of the first agent's gradient."""
    return float(jnp.linalg.norm(flat(found)[0][0, 0]))


# ---- equivalence --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, *map(slow, (3, 4)), 5, *map(slow, (6, 7)), 8])
def test_the_decentralised_gradient_is_that_of_vanilla_vdn(n):
    """Joint loss differentiated through the sum, against −2 · A · ∂Q_i/∂θ_i of each agent."""
    agents, how = team_of(n), {"double_q": n % 2 == 0, "return_lambda": 0.3 * (n % 3)}
    how["network"] = "entities" if n > 5 else "recurrent"
    central = simulation("vdn", agents, **how)
    broadcast = simulation("pe-vdn-a", agents, **how)
    for seed in range(3):
        state = random_state(central, 10 * n + seed)
        chosen = jnp.asarray(np.random.default_rng(seed).permutation(16)[:6])
        ours, theirs = gradients(broadcast, state, chosen), gradients(central, state, chosen)
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("modulus", [2**32, slow(2**31 - 1)])
def test_secret_sharing_changes_the_gradient_by_its_rounding_alone(modulus):
    """At PRECISION 5 the gradients agree to five places; at PRECISION 0 they visibly do not."""
    agents = team_of(4)
    state = random_state(simulation("pe-vdn-a", agents), 1)
    exact = gradients(simulation("pe-vdn-a", agents), state, jnp.arange(6))
    fine = gradients(simulation("pe-vdn-b", agents, modulus=modulus), state, jnp.arange(6))
    coarse = gradients(
        simulation("pe-vdn-b", agents, modulus=modulus, precision=0), state, jnp.arange(6)
    )
    assert relative_error(fine, exact) < 1e-4
    assert relative_error(coarse, exact) > 1e-2


def test_alone_an_agent_learns_nothing_from_the_others():
    agents = team_of(3)
    sim = simulation("iql", agents)
    state = random_state(sim, 2)
    before = gradients(sim, state, jnp.arange(6))
    other = state.learners[1]
    changed = other._replace(params=jax.tree.map(lambda x: x + 1.0, other.params))
    after = gradients(
        sim, state._replace(learners=(state.learners[0], changed, state.learners[2])), jnp.arange(6)
    )
    assert relative_error(after[0], before[0]) == 0
    assert relative_error(after[1], before[1]) > 0.01


def test_private_gradients_without_a_bound_and_without_noise_are_the_plain_ones():
    agents = team_of(3)
    plain = simulation("pe-vdn-a", agents)
    private = simulation("pe-vdn-c", agents, clip_norm=1e3, noise_multiplier=0)
    state = random_state(plain, 3)
    ours, theirs = gradients(private, state, jnp.arange(6)), gradients(plain, state, jnp.arange(6))
    assert relative_error(ours, theirs) < 1e-4


def test_steps_that_no_episode_reached_are_left_out_of_the_sum_and_nothing_else():
    """A world of 25 steps: the same short episodes, with and without a longer one beside them."""
    world = SimpleNamespace(name="long", agents=team_of(2), max_steps=25)
    wanted = config.make("pe-vdn-a", settings=SMALL)
    cut, whole = Simulation(world, wanted), Simulation(world, wanted)
    whole.horizons = [world.max_steps]
    state = random_state(cut, 11)
    assert cut.horizons == [9, 11, 17, 25]
    for longest in (25, 18, 17, 12, 11, 10, 9, 3):
        lengths = [
            replay._replace(length=jnp.minimum(replay.length, longest).at[..., 0].set(longest))
            for replay in state.replays
        ]
        state = state._replace(replays=tuple(lengths))
        ours, theirs = gradients(cut, state, jnp.arange(6)), gradients(whole, state, jnp.arange(6))
        assert relative_error(ours, theirs) < 1e-5


# ---- privacy mechanism in the program ------------------------------------------------------


def test_an_episode_moves_an_agents_summed_gradient_by_at_most_the_clip_norm():
    """Neighbours: the same minibatch with and without one episode, in every place."""
    agents = team_of(3)
    sim = simulation("pe-vdn-c", agents, clip_norm=0.05)
    state = random_state(sim, 4)
    run, keys = compiled(sim, "sum_minibatch"), split_keys(state.key, 4)
    with_it, _ = run(state, jnp.arange(6)[None], keys)
    moved = []
    for gone in range(6):
        chosen = jnp.arange(6).at[gone].set(16)  # 16 is the scratch slot
        without, _ = run(state, chosen[None], keys)
        for a, b in zip(flat(with_it), flat(without), strict=True):  # (S, N, P) whole units
            squares = (np.asarray(a, np.int64) - np.asarray(b)) ** 2
            moved += np.ravel(squares.sum(-1)).tolist()
    largest = max(moved) ** 0.5 * sim.release.unit
    assert largest <= 0.05
    assert largest > 0.049  # the bound is reached, so clipping really is what holds it


def test_a_minibatch_is_learnt_from_in_full_whatever_the_size_of_its_parts():
    """16 episodes, all sampled, in parts of 3 and in one: the parts add up to the whole."""
    agents = team_of(2)
    sim = simulation("pe-vdn-c", agents, clip_norm=0.1, noise_multiplier=0, expected_batch_size=16)
    state = random_state(sim, 5)
    keys = split_keys(state.key, 4)
    with patch.object(sim, "part", 16):
        whole, _ = jax.jit(sim.sum_minibatch)(state, jnp.arange(16)[None], keys)
    with patch.object(sim, "part", 3):
        in_parts, _ = jax.jit(sim.gradients)(state, keys)
    whole = sim.release.as_floats(whole)
    assert relative_error(in_parts, jax.tree.map(lambda x: x / 16, whole)) < 1e-4


@pytest.mark.parametrize(
    ("algorithm", "network"),
    [("pe-vdn-c", "recurrent"), ("pe-vdn-c", "entities"), ("pe-vdn-d", "entities")],
)
def test_what_an_episode_adds_does_not_depend_on_which_others_were_sampled(algorithm, network):
    """Bit for bit: sum(S ∪ {k}) = sum(S) + sum({k}), whatever parts and horizons that makes.

    With pe-vdn-d, the first agent samples k, and the samples of the others stay. Rewards that
    cancel make the gradient depend on the last bits of long sums. Compiled as in production, where
    rounding differs from horizon to horizon.
    """
    agents = (AgentSpec(20, 6, (EntityGroup(0, 3, 4, actions=3),)),) * 3
    world = SimpleNamespace(name="long", agents=agents, max_steps=60)
    how = {"network": network, "buffer_size": 32, "expected_batch_size": 16, "return_lambda": 0.3}
    how |= {"hidden_size": 32, "clip_norm": 0.2, "noise_multiplier": 1.7}
    sim = Simulation(world, config.make(algorithm, settings={**SMALL, **how}))
    assert len(sim.horizons) == 4 and sim.part < 16
    state = random_state(sim, 1)
    lengths = np.array([13] * 8 + [21] * 8 + [33] * 8 + [60] * 8 + [0])
    replays = []
    for rows in state.replays:
        seen, rewards = np.array(rows.observations), np.array(rows.rewards)
        seen[:, :, 8:16], rewards[:, :, 8:16] = 0.1, 0.0
        rewards[:, :, 8:16, 16:20] = np.array([1, -3, 3, -1]) * 1e4
        replays.append(
            rows._replace(
                length=jnp.asarray(np.broadcast_to(lengths, rows.length.shape), jnp.int32),
                observations=jnp.asarray(seen),
                rewards=jnp.asarray(rewards),
                terminal=jnp.zeros_like(rows.terminal),
                available=jnp.ones_like(rows.available),
                opened=jnp.asarray(rewards) if sim.config.noised else None,
            )
        )
    state = state._replace(replays=tuple(replays))
    run = jax.jit(sim.sum_minibatch, compiler_options=PRODUCTION)

    others = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 24, 25]

    def total(*slots):
        chosen = [[*own, *[32] * (32 - len(own))] for own in (slots, others, others[5:])]
        chosen = jnp.array([chosen if sim.config.noised else chosen[0]])
        found, _ = run(state, chosen, split_keys(state.key, 4))
        by_agent = [np.reshape(x, (3, -1)) for x in jax.tree.leaves(found)]
        return np.concatenate(by_agent, axis=1).astype(np.int64)

    alike = 1 if sim.config.noised else 3  # agents that sample k
    for k in (5, 12, 20, 31):
        with_k, without, alone = total(*others, k), total(*others), total(k)
        assert np.any(alone[0]) and np.array_equal(with_k[:alike], (without + alone)[:alike])
        assert np.array_equal(with_k[alike:], without[alike:])


def test_the_program_samples_at_the_rate_that_is_accounted_for():
    """Half of the noise-free gradients of a buffer of equal episodes, at q = 1/2, on average.

    240 updates on 16 equal episodes: the mean sample is 8, its standard error 0.13; five of them.
    """
    sim = simulation("pe-vdn-c", team_of(2), noise_multiplier=0, expected_batch_size=8)
    state = random_state(sim, 12)
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :, :1], x.shape), state.replays)
    state = state._replace(replays=same)
    alone = jnp.full((1, 6), 16).at[0, 0].set(0)
    one = flat_norm(sums(sim, state, alone, split_keys(state.key, 4)))
    keys = jax.random.split(jax.random.key(13), (240, 1, 4))
    sizes = [8 * flat_norm(compiled(sim, "gradients")(state, k)[0]) / one for k in keys]
    assert sim.config.sampling_rate == 0.5
    assert np.allclose(sizes, np.rint(sizes), atol=1e-2)  # whole episodes, each counted once
    assert abs(np.mean(sizes) - 8) < 5 * np.sqrt(16 * 0.25 / 240)


def test_the_divisor_is_the_expected_batch_size_whatever_was_sampled():
    """Half of the buffer is empty: half as many episodes are sampled, the divisor stays."""
    agents = team_of(2)
    sim = simulation("pe-vdn-c", agents, clip_norm=0.1, noise_multiplier=0, expected_batch_size=16)
    state = random_state(sim, 6)._replace(episodes=jnp.full(1, 8))
    keys = split_keys(state.key, 4)
    found, _ = compiled(sim, "gradients")(state, keys)
    chosen = jnp.where(jnp.arange(16) < 8, jnp.arange(16), 16)
    total = sums(sim, state, chosen[None], keys)
    assert relative_error(found, jax.tree.map(lambda x: x / 16, total)) < 1e-4


def test_noise_has_the_promised_size_and_is_fresh_for_every_agent_and_update():
    agents = (AgentSpec(6, 4),) * 3
    sim = simulation("pe-vdn-c", agents, clip_norm=0.5, noise_multiplier=2.0, hidden_size=32)
    state = random_state(sim, 7)._replace(episodes=jnp.zeros(1, jnp.int32))  # nothing to sample
    draw = compiled(sim, "gradients")
    noise = [
        flat(draw(state, split_keys(key, 4))[0])[0][0]
        for key in (state.key, split_keys(state.key, 1)[:, 0])
    ]
    everything = np.concatenate(noise)  # (6, parameters), independent draws
    size = everything.size
    expected = 2.0 * 0.5 / 6  # noise_multiplier · C / expected batch size
    # The standard error of a standard deviation is σ/√(2n): five of them, error rate 1e-6.
    assert abs(everything.std() - expected) < 5 * expected / np.sqrt(2 * size)
    correlations = np.corrcoef(everything) - np.eye(6)
    assert np.abs(correlations).max() * np.sqrt(everything.shape[1]) < 5


# ---- the loop -----------------------------------------------------------------------------


def trace(algorithm: str, iterations: int, seeds: int = 1, **settings):
    """State counters after every iteration on the coordination game."""
    world = worlds.make("toy:coordination")
    wanted = config.make(algorithm, world.name, settings={**SMALL, **settings})
    sim = Simulation(world, wanted)
    advance = compiled(sim, "advance")
    state, seen = compiled(sim, "start")(jnp.arange(seeds)), []
    for _ in range(iterations):
        state = advance(state, jnp.int32(10**6), jnp.int32(1))
        seen.append((int(state.episodes[0]), int(state.updates[0]), int(state.exposure[0])))
    return state, seen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        slow({"update_every": 4}),
        {"buffer_throughput": 2.0, "parallel_episodes": 3},
        {"learning_starts": 5, "parallel_episodes": 1, "update_every": 3},
        slow({"buffer_size": 15, "parallel_episodes": 4}),
    ],
)
def test_exposure_is_the_most_updates_any_episode_was_in_the_buffer_for(settings):
    """Against a first-in first-out queue replayed by hand from what happened; and as planned."""
    _, seen = trace("pe-vdn-c", 60, **settings)
    queue, most, before = [], 0, (0, 0)
    size = settings.get("buffer_size", 16)
    for episodes, updates, exposure in seen:
        queue = (queue + [0] * (episodes - before[0]))[-size:]
        queue = [n + updates - before[1] for n in queue]
        most = max([most, *queue])
        before = (episodes, updates)
        assert exposure == most
    plan = Plan.of(config.make("pe-vdn-c", settings={**SMALL, **settings}), 2)
    assert 0 < most <= plan.exposure
    if "buffer_throughput" not in settings:
        assert most == plan.exposure  # without coins a plan is exact


def test_with_dp_learning_starts_when_a_quarter_of_the_buffer_is_full():
    _, seen = trace("pe-vdn-c", 12, learning_starts=0)
    assert next(e for e, u, _ in seen if u) == 4
    assert all(u == 0 for e, u, _ in seen if e < 4)


def test_updates_come_exactly_every_kth_episode():
    _, seen = trace("pe-vdn-b", 10, update_every=4, learning_starts=4)
    assert [u for _, u, _ in seen] == [e // 4 for e, _, _ in seen]


def test_throughput_k_makes_an_update_one_time_in_k():
    """A binomial count of 600 coins within five standard deviations."""
    coins = {"buffer_throughput": 3.0, "parallel_episodes": 6, "learning_starts": 6}
    _, seen = trace("pe-vdn-b", 100, **coins)
    tossed, heads, _ = seen[-1]
    z = (heads - tossed / 3) / np.sqrt(tossed * 2 / 9)
    assert abs(z) < 5


def test_a_refused_message_stops_the_lane_and_is_never_learnt_from():
    """Modulus 64 at PRECISION 2 leaves ±0.16 to two agents: the first rewards do not fit."""
    state, _ = trace("pe-vdn-b", 10, modulus=64, precision=2)
    assert float(state.refused[0]) > 0.16
    assert int(state.updates[0]) == 0
    fresh = trace("pe-vdn-b", 0, modulus=64, precision=2)[0]
    assert relative_error(state.learners[0].params, fresh.learners[0].params) == 0


def test_with_dp_no_message_stops_training():
    """The same range, and NaN: messages saturate, and nothing tells that they did."""
    state, seen = trace("pe-vdn-c", 30, modulus=64, precision=2)
    assert int(state.updates[0]) > 0
    assert float(state.refused[0]) == 0
    real = learning.message

    def broken(*given, **more):
        m, memo = real(*given, **more)
        return jnp.where(m > 0, jnp.nan, jnp.inf), memo

    with patch.object(learning, "message", broken):
        compiled.cache_clear()
        state, after = trace("pe-vdn-c", 30, gamma=0.98)
    compiled.cache_clear()
    assert after == seen
    assert float(state.refused[0]) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.learners))


def test_a_lane_that_waits_is_unchanged_and_lanes_do_not_touch_each_other():
    old = {"a": jnp.arange(6.0).reshape(3, 2)}
    new = {"a": -jnp.ones((3, 2))}
    kept = where_lane(jnp.array([True, False, True]), new, old)["a"]
    assert kept.tolist() == [[-1, -1], [2, 3], [-1, -1]]


def test_seeds_trained_together_are_the_seeds_trained_alone():
    """Three lanes of one program against the second of them by itself, up to float rounding."""
    world = worlds.make("toy:coordination")
    settings = {**SMALL, "learning_starts": 6}
    sim = Simulation(world, config.make("pe-vdn-c", "toy:coordination", settings=settings))
    advance = compiled(sim, "advance")
    until, most = jnp.int32(151), jnp.int32(10**6)
    together = advance(compiled(sim, "start")(jnp.arange(3)), until, most)
    alone = advance(compiled(sim, "start")(jnp.arange(1, 2)), until, most)
    for name in ("env_steps", "episodes", "updates", "exposure"):
        assert int(getattr(together, name)[1]) == int(getattr(alone, name)[0])
    pick = lambda tree: jax.tree.map(lambda x: x[1:2], tree)  # noqa: E731
    params = [x.params for x in together.learners], [x.params for x in alone.learners]
    assert relative_error(pick(params[0]), params[1]) < 1e-3


def test_many_short_calls_are_one_long_call():
    world = worlds.make("toy:coordination")
    sim = Simulation(world, config.make("pe-vdn-b", "toy:coordination", settings=SMALL))
    advance = compiled(sim, "advance")
    at_once = advance(compiled(sim, "start")(jnp.arange(1)), jnp.int32(120), jnp.int32(10**6))
    bit_by_bit = compiled(sim, "start")(jnp.arange(1))
    while int(bit_by_bit.env_steps[0]) < 120:
        bit_by_bit = advance(bit_by_bit, jnp.int32(120), jnp.int32(1))
    same = jax.tree.map(
        lambda a, b: jnp.array_equal(a, b),
        at_once._replace(key=jax.random.key_data(at_once.key)),
        bit_by_bit._replace(key=jax.random.key_data(bit_by_bit.key)),
    )
    assert all(jax.tree.leaves(same))


def test_a_capped_reward_is_kept_capped_and_reported_whole():
    """The two-step game pays 7 or up to 8: an agent writes down 2, the score is the truth."""
    world = worlds.make("toy:two-step")
    for cap in (0.0, 2.0):
        settings = {**SMALL, "reward_cap": cap}
        sim = Simulation(world, config.make("pe-vdn-b", "toy:two-step", settings=settings))
        state = compiled(sim, "start")(jnp.arange(1))
        params = tuple(learner.params for learner in state.learners)
        keys = split_keys(state.key, 20)
        played = jax.jit(lambda p, k: sim.player.play(p, k, jnp.ones(1), record=True))(params, keys)  # noqa: B023
        kept = np.asarray(played.episodes[0].rewards[0, 0])  # (E, T)
        paid = np.asarray(played.total_reward[0])
        assert paid.max() >= 7
        assert np.allclose(kept.sum(-1), np.minimum(paid, cap or np.inf))  # paid once, at the end


def test_recorded_episodes_are_what_happened():
    """Play with known choices: rewards, masks and ends in the replay are those of the game."""
    world = worlds.make("toy:coordination")
    sim = Simulation(world, config.make("pe-vdn-b", "toy:coordination", settings=SMALL))
    state = compiled(sim, "start")(jnp.arange(2))
    params = tuple(learner.params for learner in state.learners)
    keys = split_keys(state.key, 5)
    played = jax.jit(lambda p, k: sim.player.play(p, k, jnp.ones(2), record=True))(params, keys)
    assert np.all(played.length == 3)
    right = np.zeros((2, 5), int)
    for kind, episodes in zip(sim.team.kinds, played.episodes, strict=True):
        assert episodes.observations.shape == (2, 1, 5, 4, kind.spec.observation_size)
        cue_size = kind.spec.observation_size - 3
        cue = np.argmax(episodes.observations[:, 0, :, 0, :cue_size], axis=-1)
        assert np.all(episodes.observations[:, 0, :, 1:, :cue_size] == 0)  # the cue is shown once
        named = np.asarray(episodes.actions[:, 0, :, 2]) - 1
        assert np.all(named >= 0)  # only naming is available at the last step
        right += named == cue
        assert np.array_equal(episodes.terminal[:, 0, :], np.tile([False, False, True], (2, 5, 1)))
    assert np.array_equal(played.episodes[0].rewards[:, 0, :, 2], right)
    assert np.array_equal(played.total_reward, right)
    assert np.array_equal(played.won, right == 2)


def test_kinds_gather_and_scatter_in_the_order_of_the_team():
    team = TeamLayout.of(team_of(7))
    arrays = [jnp.full((2, 3), float(i)) for i in range(7)]
    back = team.by_agent(team.by_kind(arrays, axis=1), axis=1)
    assert len(team) == 7
    assert [float(x[0, 0]) for x in back] == list(range(7))


def test_an_evaluation_that_beats_the_threshold_becomes_the_anchor():
    sim = simulation("pe-vdn-c", team_of(2), anchor=True, anchor_threshold=0.5)
    state = random_state(sim, 8, lanes=2)
    halves = [jax.tree.map(lambda x: x / 2, learner.params) for learner in state.learners]
    moved = [x._replace(average=half) for x, half in zip(state.learners, halves, strict=True)]
    state = state._replace(learners=tuple(moved))
    kept = sim.keep_anchor(state, jnp.array([0.75, 0.5]))
    assert kept.anchored.tolist() == [True, False]
    assert kept.threshold.tolist() == [0.75, 0.5]
    anchor, average = kept.learners[0].anchor, state.learners[0].average
    assert np.array_equal(anchor.input_weight[0], average.input_weight[0])
    assert not np.array_equal(anchor.input_weight[1], average.input_weight[1])
    again = sim.keep_anchor(kept, jnp.array([0.75, 0.6]))
    assert again.threshold.tolist() == pytest.approx([0.75, 0.6])


def test_the_average_weighs_the_past_and_the_step_size_falls_along_a_line():
    """Two updates of plain SGD, at the start and after half of the steps."""
    settings = {"average_decay": 0.9, "learning_rate_end": 0.2, "learning_rate_steps": 1000}
    sim = simulation("pe-vdn-a", team_of(2), optimizer="sgd", learning_rate=0.1, **settings)
    state = random_state(sim, 10)
    learner = state.learners[0]
    state = state._replace(learners=(learner._replace(average=learner.params), *state.learners[1:]))
    update, ready = compiled(sim, "update"), jnp.ones(1, bool)
    keys = split_keys(state.key, 4)

    def moved(steps: int, made: int):
        before = state._replace(env_steps=jnp.array([steps]), updates=jnp.array([made]))
        after = update(before, keys, ready).learners[0]
        away = jax.tree.map(jnp.subtract, after.params, learner.params)
        kept = jax.tree.map(jnp.subtract, after.average, learner.params)
        return flat([away])[0][0], flat([kept])[0][0]

    full, average = moved(0, 1000)
    assert np.allclose(average, 0.1 * full, atol=1e-6)
    assert np.allclose(moved(500, 1000)[0], 0.6 * full, atol=1e-5)
    assert np.allclose(moved(5000, 1000)[0], 0.2 * full, atol=1e-5)
    assert np.allclose(moved(0, 0)[1], (1 - 2 / 11) * full, atol=1e-6)  # a young average follows


def test_the_anchor_holds_the_parameters_back():
    """The same private update with a strong penalty ends closer to the anchor."""

    def distance(penalty: float) -> float:
        settings = {"anchor": True, "anchor_penalty": penalty, "optimizer": "sgd"}
        sim = simulation("pe-vdn-c", team_of(2), learning_rate=0.1, **settings)
        state = random_state(sim, 9)._replace(anchored=jnp.ones(1, bool))
        after = compiled(sim, "update")(state, split_keys(state.key, 4), jnp.ones(1, bool))
        anchors = [x.anchor for x in after.learners]
        return relative_error([x.params for x in after.learners], anchors)

    assert distance(1.0) < distance(0.0)


def test_target_networks_follow_at_the_target_rate():
    sim = simulation("pe-vdn-a", team_of(2), target_rate=0.5)
    state = random_state(sim, 10)
    update = compiled(sim, "update")
    for _ in range(3):
        before = state.learners[0].target.input_weight
        state = update(state, split_keys(state.key, 4), jnp.ones(1, bool))
        after, params = state.learners[0].target.input_weight, state.learners[0].params.input_weight
        assert np.allclose(after, before + 0.5 * (params - before), atol=1e-6)


def test_fresh_agents_differ_from_each_other_and_between_seeds():
    sim = simulation("iql", (AgentSpec(4, 3),) * 3)
    learner = compiled(sim, "start")(jnp.arange(2)).learners[0]
    weights = np.asarray(learner.params.input_weight).reshape(6, -1)
    assert len(np.unique(weights, axis=0)) == 6
