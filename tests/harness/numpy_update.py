"""A private update in NumPy and float64, from the paper's equations: the reference of tests.

It shares no code with the program: networks, next values, λ-returns, messages, their encoding and
sum, the team error, each episode's gradient, clipping, noise, optimiser, target network, average
and the pull to the anchor. Derivatives are complex steps, Im f(θ + ih)/h with h = 10⁻³⁰, which are
exact to float64. Three things are the program's own, because they have tests of their own: which
episodes were sampled (`Simulation.sample`), how fine the noise's unit is
(`SubsampledGaussian.spread`), and the integers that its sampler makes of a key's random words
(`released`).

Shapes: S lanes, N agents, B sampled episodes, T steps, A actions, K parameters of one agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax.tree_utils import tree_get

from pevdn.agent import learning
from pevdn.agent.entities import Parameters as EntityParameters
from pevdn.privacy import gaussian
from pevdn.simulation.program import Simulation

UNIT = 2.0**-24  # u, the unit roundoff of float32
STEP = 1e-30  # h of the complex step


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


def clipped(found: np.ndarray, s: Any) -> np.ndarray:
    """Each episode's gradient (B, K) within C, less what float32 may let pass: 2⁻¹² + K · 2⁻²⁴."""
    C = s.clip_norm * (1 - 2.0**-12 - found.shape[1] * 2.0**-24)
    norm = np.linalg.norm(found, axis=1, keepdims=True)
    return found * np.minimum(1.0, C / np.maximum(norm, 1e-300))


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
    chosen = np.asarray(sim.sample(state, keys))
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
            each = clipped(gradients(member, total, s), s)
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
