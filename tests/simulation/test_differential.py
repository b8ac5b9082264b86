"""One whole private update, compiled as in production, against NumPy in float64.

The reference below follows the paper's equations and shares no code with the program: networks,
next values, λ-returns, messages, their encoding and sum, the team error, each episode's gradient,
clipping, noise, optimiser, target network, average and the pull to the anchor. Derivatives are
complex steps, Im f(θ + ih)/h with h = 10⁻³⁰, which are exact to float64. Three things are the
program's own, because they have tests of their own: which episodes were sampled (`_choose`), how
fine the noise's unit is (`Release.spread`), and the integers that its sampler makes of a key's
random words (`released`).

TOLERANCE is relative to the largest change that an update makes to a quantity of one agent. The
program computes in float32, u = 2⁻²⁴ = 6·10⁻⁸. Q-values of size 1 after up to 13 recurrent steps
carry an error of some 10 u, so a message may round to the other neighbour: that moves the team
error by 10^−PRECISION = 10⁻⁵, where it is of size 1 to 5. A gradient is a sum over the episode of
such products, so its relative error is about 10⁻⁵, and so is that of truncation to the other whole
unit, σ · C/S < 10⁻⁵ · C. Storing a value in float32 comes on top, and is allowed for apart
(`disagreement`). Where PRECISION is 1, no message is so close to the middle between two integers
that float32 could round it differently (`rounds_alike`). Found are errors below 4·10⁻⁶.

Shapes: S lanes, N agents, B sampled episodes, T steps, A actions, K parameters of one agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import clipping
from optax.tree_utils import tree_get, tree_set
from support import PRODUCTION, slow

from pevdn import worlds
from pevdn.agent import learning
from pevdn.agent import recurrent as network
from pevdn.agent.entities import Parameters as EntityParameters
from pevdn.config import experiment as config
from pevdn.exchange import secret_shared
from pevdn.privacy import gaussian, mechanism
from pevdn.privacy.mechanism import Release
from pevdn.simulation import program as simulations
from pevdn.simulation.program import Simulation, split_keys
from pevdn.worlds.base import AgentSpec, EntityGroup

UNIT = 2.0**-24  # u, the unit roundoff of float32
TOLERANCE = 2e-5
STEP = 1e-30  # h of the complex step

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a GPU may multiply in less than float32"
)


# ---- the networks -------------------------------------------------------------------------
# Parameters have one more axis in front, (K, ...): one copy for each parameter that is moved.


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x.real > 0, x, 0.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def dense(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x (K, rows, in) to (K, rows, out)."""
    return x @ weight + bias[:, None, :]


def recurrent_values(p: Any, seen: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Linear, ReLU, GRU, linear: Q (K, B, T, A) from observations and last actions (B, T, ...)."""
    B, T, _ = seen.shape
    K, H, _ = p.recurrent_weight.shape
    x = np.concatenate([seen, done], axis=-1)
    features = relu(dense(x.reshape(1, B * T, x.shape[-1]), p.input_weight, p.input_bias))
    gates = dense(features, p.gates_weight, p.gates_bias).reshape(K, B, T, 3, H)
    h, memories = np.zeros((K, B, H)), []
    for t in range(T):
        from_h = (h @ p.recurrent_weight).reshape(K, B, 3, H)
        r = sigmoid(gates[:, :, t, 0] + from_h[:, :, 0])
        z = sigmoid(gates[:, :, t, 1] + from_h[:, :, 1])
        n = np.tanh(gates[:, :, t, 2] + r * (from_h[:, :, 2] + p.candidate_bias[:, None]))
        h = (1 - z) * n + z * h
        memories.append(h)
    rows = np.stack(memories, axis=2).reshape(K, B * T, H)
    return dense(rows, p.output_weight, p.output_bias).reshape(K, B, T, p.output_bias.shape[-1])


def entity_values(p: EntityParameters, seen: np.ndarray, done: np.ndarray) -> np.ndarray:
    """One encoder for all things of a group, a core, a score for each thing; (K, B, T, A)."""
    B, T, O = seen.shape
    rows, spec = seen.reshape(1, B * T, O), p.spec
    in_a_group = set()
    groups: list[list[np.ndarray]] = []  # embeddings (K, rows, H)
    for group, layer in zip(spec.entities, p.encoders, strict=True):
        embedded = []
        for j in range(group.count):
            columns = range(group.start + j * group.size, group.start + (j + 1) * group.size)
            in_a_group.update(columns)
            thing = rows[..., list(columns)]
            there = (thing != 0).any(-1, keepdims=True)
            embedded.append(there * relu(dense(thing, layer.weight, layer.bias)))
        groups.append(embedded)
    rest = [column for column in range(O) if column not in in_a_group]
    own = relu(dense(rows[..., rest], p.own.weight, p.own.bias))
    joined = np.concatenate([own, *(sum(group) for group in groups)], axis=-1)
    core = relu(dense(joined, p.core.weight, p.core.bias))

    about_things: dict[int, np.ndarray] = {}
    scorers = iter(p.scorers)
    for group, embedded in zip(spec.entities, groups, strict=True):
        if group.actions is None:
            continue
        scorer = next(scorers)
        for j, thing in enumerate(embedded):
            hidden = relu(
                dense(core, scorer.core_weight, scorer.bias) + thing @ scorer.thing_weight
            )
            scored = dense(hidden, scorer.output.weight, scorer.output.bias)
            about_things[group.actions + j] = scored[..., 0]
    plain = iter(np.moveaxis(dense(core, p.plain.weight, p.plain.bias), -1, 0))
    by_action = [
        about_things[a] if a in about_things else next(plain) for a in range(spec.n_actions)
    ]
    return np.stack(by_action, axis=-1).reshape(len(core), B, T, spec.n_actions)


def values(params: Any, episodes: Any) -> np.ndarray:
    """Q (K, B, T + 1, A) along the episodes, for K copies of the parameters."""
    A = episodes.available.shape[-1]
    last = np.concatenate([np.full_like(episodes.actions[:, :1], -1), episodes.actions], axis=1)
    done = (last[..., None] == np.arange(A)).astype(float)
    of = entity_values if isinstance(params, EntityParameters) else recurrent_values
    return of(params, episodes.observations, done)


def vector(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def each_moved(params: Any) -> Any:
    """K copies of K parameters, of which the k-th has the k-th parameter moved by ih."""
    leaves, structure = jax.tree.flatten(params)
    K, start, moved = sum(leaf.size for leaf in leaves), 0, []
    for leaf in leaves:
        copies = np.zeros((K, leaf.size), complex) + leaf.ravel()
        copies[start + np.arange(leaf.size), np.arange(leaf.size)] += 1j * STEP
        moved.append(copies.reshape(K, *leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(structure, moved)


# ---- Algorithm 1, from the messages to the sum of clipped gradients ------------------------


class Member(NamedTuple):
    """One agent's own arrays in one lane, float64."""

    learner: learning.Learner
    episodes: Any  # the sampled ones, (B, T, ...)


def played(episodes: Any) -> np.ndarray:
    """(B, T) bool."""
    return np.arange(episodes.rewards.shape[1]) < episodes.length[:, None]


def of_taken(per_action: np.ndarray, episodes: Any) -> np.ndarray:
    """(..., B, T, A) to (..., B, T)."""
    taken = np.broadcast_to(episodes.actions[..., None], (*per_action.shape[:-1], 1))
    return np.take_along_axis(per_action, taken, axis=-1)[..., 0]


def backwards(episodes: Any, last: np.ndarray, earlier: Callable[[int, Any], Any]) -> np.ndarray:
    """x (B, T): `last` at an episode's last step, and before it x_t = earlier(t, x_{t+1})."""
    B, T = episodes.rewards.shape
    x, after = np.zeros((B, T)), np.zeros(B)
    for t in reversed(range(T)):
        x[:, t] = np.where(t == episodes.length - 1, last[:, t], earlier(t, after))
        after = x[:, t]
    return np.where(played(episodes), x, 0.0)


def message(member: Member, s: Any) -> np.ndarray:
    """eq. (8): m_i (B, T), the agent's share of the λ-return, less Q_i(τ, a)."""
    one = jax.tree.map(lambda x: x[None], (member.learner.params, member.learner.target))
    episodes = member.episodes
    q, q_target = (values(params, episodes)[0] for params in one)
    open_ = lambda q: np.where(episodes.available, q, -np.inf)  # noqa: E731
    best = np.argmax(open_(q if s.double_q else q_target), axis=-1)
    next_value = np.take_along_axis(q_target, best[..., None], axis=-1)[:, 1:, 0]
    next_value = np.where(episodes.terminal, 0.0, next_value)
    g, lam = s.gamma, s.return_lambda
    share = backwards(
        episodes,
        g * next_value,
        lambda t, after: g * ((1 - lam) * next_value[:, t] + lam * after),
    )
    return np.where(played(episodes), share - of_taken(q[:, :-1], episodes), 0.0)


def opened_sum(messages: list[np.ndarray], s: Any) -> np.ndarray:
    """eq. (10) and (11): integers at PRECISION, their sum modulo p, and back; (B, T)."""
    scaled = [m * 10.0**s.precision for m in messages]
    if s.precision < 5:
        assert all(rounds_alike(x) for x in scaled)
    total = sum(np.rint(x).astype(np.int64) % s.modulus for x in scaled) % s.modulus
    return np.where(total > s.modulus // 2, total - s.modulus, total) / 10.0**s.precision


def rounds_alike(scaled: np.ndarray) -> bool:
    """Whether float32's error cannot change which integer is the nearest."""
    return bool(np.min(np.abs(np.abs(scaled) % 1 - 0.5), initial=1.0) > 1e-4)


def gradients(member: Member, total: np.ndarray, s: Any) -> np.ndarray:
    """eq. (7): −2 · A · ∂Q_i/∂θ_i, averaged along each episode; (B, K)."""
    episodes, rate = member.episodes, s.gamma * s.return_lambda
    rewards = episodes.rewards
    team_return = backwards(episodes, rewards, lambda t, after: rewards[:, t] + rate * after)
    error = np.where(played(episodes), team_return + total, 0.0)  # A
    q = values(each_moved(member.learner.params), episodes)[:, :, :-1]
    slope = of_taken(q, episodes).imag / STEP  # ∂Q/∂θ, (K, B, T)
    return np.einsum("bt,kbt->bk", -2.0 * error / episodes.length[:, None], slope)


def clipped(found: np.ndarray, params: Any, s: Any) -> np.ndarray:
    """Each episode's gradient (B, K) within C.

    C is less by what float32 may let pass: 2⁻¹² + K · 2⁻²⁴ of it.
    """
    C = s.clip_norm * (1 - 2.0**-12 - found.shape[1] * 2.0**-24)
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    return found * np.minimum(1.0, C / np.maximum(norms, 1e-300))


# ---- the release ---------------------------------------------------------------------------


def released(key: Any, each: np.ndarray, sim: Simulation) -> np.ndarray:
    """The noised mean (K,) of clipped gradients (B, K), for the key of one agent and update.

    Each is truncated to whole units of σ · C/S, in which the noise is an integer of deviation S.
    """
    s, k = sim.settings, sim.release.spread  # type: ignore[union-attr]
    S = 64 * math.sqrt(16**2 + 1) * math.sqrt(k**2 + 1)
    words = np.asarray(jax.random.bits(key, (each.shape[1], 4, 4), jnp.uint32))
    unit = s.noise_multiplier * s.clip_norm / S
    total = np.trunc(each / unit).sum(0) + gaussian.discrete_gaussian(words, k)
    return total * unit / s.expected_batch_size


# ---- the optimiser -------------------------------------------------------------------------

Quantities = dict[str, np.ndarray]  # of one agent in one lane, each (K,)


def quantities(learner: learning.Learner) -> Quantities:
    found = {name: getattr(learner, name) for name in ("params", "target", "average", "anchor")}
    found |= {name: tree_get(learner.optimiser, name) for name in ("mu", "nu", "trace")}
    return {name: vector(tree) for name, tree in found.items() if tree is not None}


def improved(learner: learning.Learner, gradient: np.ndarray, s: Any, now: Any) -> Quantities:
    """What the update with this gradient (K,) makes of a learner."""
    x = quantities(learner)
    theta = x["params"]
    if s.anchor and now.anchored:
        gradient = gradient + 2 * s.anchor_penalty * (theta - x["anchor"])
    if s.optimizer == "adam":
        b1, b2 = s.momentum, 0.999
        n = int(tree_get(learner.optimiser, "count")) + 1
        x["mu"] = b1 * x["mu"] + (1 - b1) * gradient
        x["nu"] = b2 * x["nu"] + (1 - b2) * gradient**2
        direction = x["mu"] / (1 - b1**n) / (np.sqrt(x["nu"] / (1 - b2**n)) + 1e-8)
        direction = direction + s.weight_decay * theta
    else:
        x["trace"] = s.momentum * x["trace"] + gradient + s.weight_decay * theta
        direction = x["trace"]
    fallen = min(now.env_steps / s.learning_rate_steps, 1.0)
    rate = s.learning_rate * (1 - (1 - s.learning_rate_end) * fallen)
    x["params"] = theta - rate * direction
    made = now.updates + 1
    tau = s.target_rate
    decay = min(s.average_decay, (1 + made) / (10 + made))
    x["target"] = (1 - tau) * x["target"] + tau * x["params"]
    x["average"] = decay * x["average"] + (1 - decay) * x["params"]
    return x


# ---- the whole update ----------------------------------------------------------------------


def numbers(tree: Any, *index: Any) -> Any:
    """Entries of arrays in front as NumPy's, real numbers as float64."""

    def plain(x: Any) -> np.ndarray:
        x = np.asarray(x)[index]
        return x.astype(float) if x.dtype.kind == "f" else x

    return jax.tree.map(plain, tree)


def places(sim: Simulation) -> list[tuple[int, int]]:
    """Kind and place within it, for each agent of the team."""
    found = {
        agent: (k, place)
        for k, kind in enumerate(sim.team.kinds)
        for place, agent in enumerate(kind.members)
    }
    return [found[agent] for agent in range(len(found))]


def reference(sim: Simulation, state: Any, keys: Any) -> list[list[Quantities]]:
    """What an update makes of every lane's agents."""
    s, lanes = sim.settings, []
    chosen = np.asarray(sim._choose(state, keys[:, 1]))
    for lane in range(len(chosen)):
        slots = chosen[lane][chosen[lane] < s.buffer_size]
        team = [
            Member(
                numbers(state.learners[k], lane, place),
                numbers(state.replays[k], lane, place, slots),
            )
            for k, place in places(sim)
        ]
        total = opened_sum([message(member, s) for member in team], s)
        noise_keys = jax.random.split(keys[lane, 3], len(team))
        now = SimpleNamespace(
            env_steps=int(state.env_steps[lane]),
            updates=int(state.updates[lane]),
            anchored=bool(state.anchored[lane]),
        )
        after = []
        for member, key in zip(team, noise_keys, strict=True):
            each = clipped(gradients(member, total, s), member.learner.params, s)
            after.append(improved(member.learner, released(key, each, sim), s, now))
        lanes.append(after)
    return lanes


def disagreement(
    sim: Simulation, before: Any, after: Any, wanted: list[list[Quantities]]
) -> dict[str, float]:
    """The largest error of each quantity, relative to the largest change of it.

    An error within 4 u of the value itself does not count: values are stored in float32.
    """
    worst: dict[str, float] = {}
    for lane, agents in enumerate(wanted):
        for (k, place), right in zip(places(sim), agents, strict=True):
            old, new = (quantities(numbers(x.learners[k], lane, place)) for x in (before, after))
            assert new.keys() == right.keys()
            for name in new:
                stored = 4 * UNIT * np.abs(right[name])
                error = np.max(np.maximum(np.abs(new[name] - right[name]) - stored, 0.0))
                change = np.max(np.abs(right[name] - old[name]))
                relative = error / change if change else error
                assert np.isfinite(relative), name
                worst[name] = max(worst.get(name, 0.0), float(relative))
    return worst


# ---- cases ---------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "hidden_size": 4,
    "buffer_size": 16,
    "expected_batch_size": 9,
    "parallel_episodes": 2,
    "update_every": 1,
    "gamma": 0.95,
    "learning_rate": 0.02,
    "learning_rate_end": 0.1,
    "learning_rate_steps": 1000,
    "momentum": 0.8,
    "weight_decay": 0.05,
    "target_rate": 0.1,
    "average_decay": 0.7,
    "noise_multiplier": 0.3,
    "clip_norm": 2.0,  # some gradients are longer, some are not, as the mutations show
    "anchor": True,
    "anchor_penalty": 0.05,
    "reward_cap": 0.0,
}
BATTLE = AgentSpec(
    75, 8, (EntityGroup(0, 2, 13), EntityGroup(26, 3, 13, actions=5))
)  # of smax-sc2:3m
SHUFFLED = AgentSpec(7, 4, (EntityGroup(1, 2, 2, actions=1),))  # plain actions before and after
PLAIN = AgentSpec(4, 3)


@dataclass(frozen=True)
class Case:
    network: str
    agents: tuple[AgentSpec, ...]
    T: int
    lanes: int
    settings: tuple[tuple[str, Any], ...]

    @property
    def simulation(self) -> Simulation:
        world = SimpleNamespace(name="made-up", agents=self.agents, max_steps=self.T)
        settings = {**BASE, "network": self.network, **dict(self.settings)}
        return Simulation(world, config.make("pe-vdn-c", settings=settings))  # type: ignore[arg-type]


def case(net: str, agents: tuple[AgentSpec, ...], T: int, lanes: int, **settings: Any) -> Case:
    return Case(net, agents, T, lanes, tuple(settings.items()))


CASES = {
    "recurrent, 3 agents, 2 lanes, adam": case("recurrent", (PLAIN,) * 3, 5, 2, return_lambda=0.6),
    "recurrent, 12 steps, sgd": case(
        "recurrent",
        (PLAIN, PLAIN),
        12,
        1,
        optimizer="sgd",
        return_lambda=0.0,
        modulus=2**31 - 1,
    ),
    # Large enough for jaxlib 0.10.2 to fuse encoders with the sum over what they encode.
    "entities, 3 agents in battle, adam": case(
        "entities",
        (BATTLE,) * 3,
        19,
        1,
        hidden_size=8,
        return_lambda=0.3,
        expected_batch_size=8,
    ),
    "entities, 4 horizons, 2 lanes, sgd, coarse messages": case(
        "entities",
        (SHUFFLED, SHUFFLED),
        20,
        2,
        optimizer="sgd",
        return_lambda=0.0,
        buffer_size=8,
        expected_batch_size=3,
        double_q=False,
        precision=1,
        average_decay=0.0,
    ),
}


@cache
def fresh(sim: Simulation, lanes: int) -> Any:
    return jax.jit(sim.start)(jnp.arange(lanes))


def random_state(sim: Simulation, seed: int, lanes: int, longest: int) -> Any:
    """A team amid its training: parameters, moments and episodes of 1 to `longest` steps."""
    rng, steps = np.random.default_rng(seed), sim.world.max_steps
    state = fresh(sim, lanes)
    like = lambda x, scale: jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype)  # noqa: E731
    near = lambda tree: jax.tree.map(lambda x: x + like(x, 0.3), tree)  # noqa: E731
    rows = (lanes, 1, sim.settings.buffer_size + 1)
    length = rng.integers(1, longest + 1, rows)
    length[..., :-1].flat[rng.integers(0, sim.settings.buffer_size)] = longest
    ended = (np.arange(steps) == length[..., None] - 1) & (rng.random((*rows, 1)) < 0.6)
    rewards = rng.normal(size=(*rows, steps)) * 2
    learners, replays = [], []
    for learner, replay in zip(state.learners, state.replays, strict=True):
        optimiser = learner.optimiser
        if tree_get(optimiser, "mu") is not None:
            mu = jax.tree.map(lambda x: like(x, 0.1), learner.params)
            nu = jax.tree.map(lambda x: like(x, 0.1) ** 2 + 1e-3, learner.params)
            count = tree_get(optimiser, "count") + 5
            optimiser = tree_set(optimiser, mu=mu, nu=nu, count=count)
        else:
            trace = jax.tree.map(lambda x: like(x, 0.1), learner.params)
            optimiser = tree_set(optimiser, trace=trace)
        others = {name: near(learner.params) for name in ("target", "anchor", "average")}
        learners.append(
            learner._replace(params=near(learner.params), optimiser=optimiser, **others)
        )
        observations = rng.normal(size=replay.observations.shape)
        for group in next(
            kind.spec.entities
            for kind in sim.team.kinds
            if kind.spec.observation_size == observations.shape[-1]
        ):
            for j in range(group.count):  # which is sometimes not seen
                start = group.start + j * group.size
                hidden = rng.random(observations.shape[:-1]) < 0.3
                observations[hidden, start : start + group.size] = 0.0
        available = rng.random(replay.available.shape) < 0.7
        open_ = rng.integers(0, available.shape[-1], available.shape[:-1])
        np.put_along_axis(available, open_[..., None], True, axis=-1)
        actions = rng.integers(0, available.shape[-1], replay.actions.shape)
        shape = replay.rewards.shape
        replays.append(
            replay._replace(
                observations=jnp.asarray(observations, jnp.float32),
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
        env_steps=jnp.arange(lanes) * 900 + 300,
        updates=jnp.arange(lanes) * 2 + 3,
        anchored=jnp.arange(lanes) % 2 == 0,
    )


def update_keys(seed: int, lanes: int) -> Any:
    return split_keys(jax.random.split(jax.random.key(seed), lanes), 4)


@cache
def compiled(name: str) -> tuple[Simulation, Any]:
    sim = CASES[name].simulation
    return sim, jax.jit(sim._update, compiler_options=PRODUCTION)


def samples(sim: Simulation, state: Any, keys: Any) -> list[int]:
    """How many episodes are sampled in each lane."""
    chosen = np.asarray(sim._choose(state, keys[:, 1]))
    return (chosen < sim.settings.buffer_size).sum(1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_update_is_what_the_equations_say(name: str) -> None:
    """For samples of several sizes, none at all included, and episodes for every horizon."""
    (sim, update), lanes = compiled(name), CASES[name].lanes
    sizes = []
    for seed, longest in enumerate([*sim.horizons, sim.world.max_steps]):
        state, keys = random_state(sim, seed, lanes, longest), update_keys(seed, lanes)
        if seed == len(sim.horizons):
            state = state._replace(episodes=state.episodes * 0)  # noise alone
        after = update(state, keys, jnp.ones(lanes, bool))
        errors = disagreement(sim, state, after, reference(sim, state, keys))
        assert max(errors.values()) < TOLERANCE, errors
        assert np.array_equal(after.updates, state.updates + 1)
        sizes += samples(sim, state, keys)
    assert max(sizes) > sim.part and min(sizes) == 0  # more than one part, and none


def test_a_lane_that_is_not_ready_keeps_everything_and_changes_nothing_elsewhere() -> None:
    sim, update = compiled("recurrent, 3 agents, 2 lanes, adam")
    state, keys = random_state(sim, 0, 2, sim.world.max_steps), update_keys(0, 2)
    both = update(state, keys, jnp.array([True, True]))
    one = update(state, keys, jnp.array([False, True]))
    for lane, same in enumerate((state, both)):
        found, wanted = (jax.tree.leaves(numbers(x.learners, lane)) for x in (one, same))
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert one.updates.tolist() == [int(state.updates[0]), int(state.updates[1]) + 1]


def test_training_makes_the_updates_of_the_equations_from_the_episodes_that_it_plays() -> None:
    """The program that `pevdn train` runs, `advance`: the fourth update of two unlike agents."""
    world = worlds.make("toy:coordination")
    settings = {**BASE, "network": "recurrent", "parallel_episodes": 6, "update_every": 6}
    wanted = config.make("pe-vdn-c", world.name, settings={**settings, "learning_starts": 6})
    sim, start = Simulation(world, wanted), jnp.arange(2)
    advance = jax.jit(sim.advance, compiler_options=PRODUCTION)
    before = advance(jax.jit(sim.start)(start), jnp.int32(10**6), jnp.int32(3))
    after = advance(before, jnp.int32(10**6), jnp.int32(1))
    assert before.updates.tolist() == [3, 3] and after.updates.tolist() == [4, 4]
    keys = sim._draw(before.key, before.env_steps)[2][0]
    stored = after._replace(learners=before.learners, updates=before.updates)
    errors = disagreement(sim, stored, after, reference(sim, stored, keys))
    assert max(errors.values()) < TOLERANCE, errors


# ---- what the comparison notices -----------------------------------------------------------

SMALL = case(
    "recurrent",
    (PLAIN, PLAIN),
    4,
    1,
    hidden_size=3,
    return_lambda=0.5,
    precision=1,
)
Patch = Callable[[pytest.MonkeyPatch], Any]


def instead(owner: Any, name: str, made: Callable[..., Any]) -> Patch:
    """Replace a function: `made` is given the right one and what that one is given."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **how: made(right, *args, **how))

    return patch


def swapped_betas(right: Any, wanted: Any) -> Any:
    s = wanted.settings
    return optax.adamw(s.learning_rate, b1=0.999, b2=s.momentum, weight_decay=s.weight_decay)


def coupled_decay(right: Any, wanted: Any) -> Any:
    s = wanted.settings
    adam = optax.adamw(s.learning_rate, b1=s.momentum, weight_decay=0.0)

    def update(gradient: Any, state: Any, params: Any) -> Any:
        decayed = jax.tree.map(lambda g, p: g + s.weight_decay * p, gradient, params)
        return adam.update(decayed, state, params)

    return optax.GradientTransformation(adam.init, update)


def longer(right: Any, *args: Any, by_episode: bool) -> Any:
    """Divided by one step more than were played."""
    length = args[3].length
    return jax.tree.map(
        lambda x: (x.T * (length / (length + 1))).T, right(*args, by_episode=by_episode)
    )


def wider_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Release.unit.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Release, "unit", property(lambda self: 1.01 * right(self)))


MUTATIONS: dict[str, Patch] = {
    "γ is 1 % less": instead(
        learning, "returns_of_values", lambda f, x, b, gamma, lam: f(x, b, 0.99 * gamma, lam)
    ),
    "λ is forgotten": instead(
        learning, "returns_of_values", lambda f, x, b, gamma, lam: f(x, b, gamma, 0.0)
    ),
    "unavailable actions are not masked": instead(
        learning,
        "next_values",
        lambda f, q, t, b, d: f(q, t, b._replace(available=b.available | True), d),
    ),
    "values after the end of a game count": instead(
        learning,
        "next_values",
        lambda f, q, t, b, d: f(q, t, b._replace(terminal=b.terminal & False), d),
    ),
    "the target network chooses, the online one values": instead(
        learning, "next_values", lambda f, q, t, b, d: f(t, q, b, d)
    ),
    "a step after the last counts": instead(
        learning, "valid", lambda f, b: f(b._replace(length=b.length + 1))
    ),
    "the mean is over one step more": instead(learning, "local_gradient", longer),
    "the last action comes a step late": instead(
        learning, "network_inputs", lambda f, b: f(b._replace(actions=jnp.roll(b.actions, 1, 0)))
    ),
    "messages are rounded down": instead(
        secret_shared, "encode", lambda f, x, code: f(x - 0.5 * 10**-code.precision, code)
    ),
    "a negative sum loses its sign": instead(
        secret_shared, "decode", lambda f, x, code: jnp.abs(f(x, code))
    ),
    "a matrix of the GRU has half of its gradient": instead(
        network,
        "gradient",
        lambda f, *args, **how: (lambda g: g._replace(recurrent_weight=g.recurrent_weight / 2))(
            f(*args, **how)
        ),
    ),
    "the last part of a minibatch is left out": instead(
        Simulation, "_in_parts", lambda f, *args: (lambda c, n: (c, n - 1))(*f(*args))
    ),
    "each array is clipped to C/n": instead(
        clipping, "clip_pytree", lambda f, x, norm, **how: f(x, norm / 8**0.5, **how)
    ),
    "nothing is clipped": instead(
        clipping, "clip_pytree", lambda f, x, norm, **how: f(x, 1e9, **how)
    ),
    "the noise is 1 % too large": wider_unit,
    "the noise is another draw": instead(
        mechanism, "words", lambda f, key, size: f(jax.random.fold_in(key, 0), size)
    ),
    "the divisor is off by one": instead(
        Release, "mean", lambda f, self, *args: f(replace(self, expected_batch_size=10), *args)
    ),
    "β1 and β2 are swapped": instead(simulations, "optimiser_for", swapped_betas),
    "weight decay passes through Adam": instead(simulations, "optimiser_for", coupled_decay),
    "the step size does not fall": instead(
        simulations, "rates_for", lambda f, *args: f(*args)._replace(step=jnp.ones(1))
    ),
    "target and average swap their rates": instead(
        simulations,
        "rates_for",
        lambda f, *args: (lambda r: r._replace(target=r.average, average=r.target))(f(*args)),
    ),
    "the anchor pulls half as much": instead(
        learning, "pull_to_anchor", lambda f, g, learner, strength: f(g, learner, strength / 2)
    ),
}


@cache
def small_update() -> tuple[Any, Any, list[list[Quantities]]]:
    sim = SMALL.simulation
    state, keys = random_state(sim, 0, 1, 4), update_keys(0, 1)
    assert samples(sim, state, keys)[0] > sim.part
    return state, keys, reference(sim, state, keys)


def small_errors() -> dict[str, float]:
    """Of an update as the program now is; compiled quickly, as other tests are."""
    state, keys, wanted = small_update()
    sim = SMALL.simulation
    return disagreement(sim, state, jax.jit(sim._update)(state, keys, jnp.ones(1, bool)), wanted)


def test_the_update_that_mutations_start_from_is_right() -> None:
    assert max(small_errors().values()) < TOLERANCE


OFTEN = (  # the others are `make test-slow`'s: each compiles an update
    "γ is 1 % less",
    "unavailable actions are not masked",
    "the mean is over one step more",
    "messages are rounded down",
    "the last part of a minibatch is left out",
    "each array is clipped to C/n",
    "the noise is 1 % too large",
    "β1 and β2 are swapped",
)


@pytest.mark.parametrize("name", [name if name in OFTEN else slow(name) for name in MUTATIONS])
def test_a_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_update()  # of the right program
    MUTATIONS[name](monkeypatch)
    assert max(small_errors().values()) > 20 * TOLERANCE
