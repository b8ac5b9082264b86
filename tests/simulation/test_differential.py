"""One whole private update, compiled as in production, against NumPy in float64.

The reference (tests/harness/numpy_update.py) follows the paper's equations and shares no code with
the program.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import clipping
from numpy_update import Quantities, disagreement, numbers, reference
from optax.tree_utils import tree_get, tree_set
from support import PRODUCTION, slow, split_keys

from pevdn import worlds
from pevdn.agent import learning, recurrent
from pevdn.agent.program import AgentProgram
from pevdn.config import experiment as config
from pevdn.exchange import secret_shared
from pevdn.privacy import mechanism
from pevdn.privacy.mechanism import SubsampledGaussian
from pevdn.simulation.program import Simulation
from pevdn.worlds.base import AgentSpec, EntityGroup

TOLERANCE = 2e-5

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a GPU may multiply in less than float32"
)


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
    return sim, jax.jit(sim.update, compiler_options=PRODUCTION)


def samples(sim: Simulation, state: Any, keys: Any) -> list[int]:
    """How many episodes are sampled in each lane."""
    chosen = np.asarray(sim.sample(state, keys))
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
    keys = sim.draw(before.key, before.env_steps)[2][0]
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


def swapped_betas(right: Any, program: Any) -> Any:
    s = program.settings
    return optax.adamw(s.learning_rate, b1=0.999, b2=s.momentum, weight_decay=s.weight_decay)


def coupled_decay(right: Any, program: Any) -> Any:
    s = program.settings
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
    right = SubsampledGaussian.unit.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(SubsampledGaussian, "unit", property(lambda self: 1.01 * right(self)))


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
        recurrent,
        "gradient",
        lambda f, *args, **how: (lambda g: g._replace(recurrent_weight=g.recurrent_weight / 2))(
            f(*args, **how)
        ),
    ),
    "the last part of a minibatch is left out": instead(
        Simulation, "_in_parts", lambda f, *args: (lambda c, n: (c, n - 1))(*f(*args))
    ),
    "gradients are clipped to a third of C": instead(
        clipping, "clip_pytree", lambda f, x, norm, **how: f(x, norm / 3, **how)
    ),
    "nothing is clipped": instead(
        clipping, "clip_pytree", lambda f, x, norm, **how: f(x, 1e9, **how)
    ),
    "the noise is 1 % too large": wider_unit,
    "the noise is another draw": instead(
        mechanism, "words", lambda f, key, size: f(jax.random.fold_in(key, 0), size)
    ),
    "the divisor is off by one": instead(
        SubsampledGaussian,
        "mean",
        lambda f, self, *args: f(replace(self, expected_batch_size=10), *args),
    ),
    "β1 and β2 are swapped": instead(AgentProgram, "_optimiser", swapped_betas),
    "weight decay passes through Adam": instead(AgentProgram, "_optimiser", coupled_decay),
    "the step size does not fall": instead(
        AgentProgram, "_rates", lambda f, *args: f(*args)._replace(step=jnp.ones(()))
    ),
    "target and average swap their rates": instead(
        AgentProgram,
        "_rates",
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
    return disagreement(sim, state, jax.jit(sim.update)(state, keys, jnp.ones(1, bool)), wanted)


def test_the_update_that_mutations_start_from_is_right() -> None:
    assert max(small_errors().values()) < TOLERANCE


OFTEN = (  # the others are `make test-slow`'s: each compiles an update
    "γ is 1 % less",
    "unavailable actions are not masked",
    "the mean is over one step more",
    "messages are rounded down",
    "the last part of a minibatch is left out",
    "gradients are clipped to a third of C",
    "the noise is 1 % too large",
    "β1 and β2 are swapped",
)


@pytest.mark.parametrize("name", [name if name in OFTEN else slow(name) for name in MUTATIONS])
def test_a_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_update()  # of the right program
    MUTATIONS[name](monkeypatch)
    assert max(small_errors().values()) > 20 * TOLERANCE
