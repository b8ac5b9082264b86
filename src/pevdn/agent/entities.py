"""One agent's Q-network with the world's symmetry: entities of one type share an encoder.

A world may say how an observation is made of *entities*: so many enemies, so many allies, each some
numbers (`interface.EntityGroup`). One small encoder serves all entities of a group, a core adds
them up with what is left of the observation, and an action that is about one thing ("attack enemy
3") is scored from the core and from that thing alone. Few parameters, and every enemy teaches
about all of them: noise, which grows with the number of parameters, buys more here (docs/results).
It has no memory, and does not look at its last action. A world that says nothing gets two plain
layers.

The derivative is by hand, as in `network`: by episode it is a product of what the plain one has.

Shapes: T steps, ... any batch axes, O observation, A actions, H hidden, n entities of a group, G
groups. Time comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent.recurrent import Inputs
from pevdn.worlds.interface import AgentSpec

SMALL = 0.5  # gain of the last layers


class Layer(NamedTuple):
    weight: Array  # (in, out)
    bias: Array  # (out,)


class Scorer(NamedTuple):
    """From the core and one thing to the value of the action that is about it."""

    core_weight: Array  # (H, H)
    thing_weight: Array  # (H, H)
    bias: Array  # (H,)
    output: Layer  # (H, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameters:
    """θ_i, the parameters of one agent's Q-function, and the shape of its interface."""

    own: Layer  # (what is in no group, H)
    encoders: tuple[Layer, ...]  # by group, (size, H)
    core: Layer  # ((G + 1) · H, H): own, then the groups
    plain: Layer  # (H, actions about no thing)
    scorers: tuple[Scorer, ...]  # by group with actions
    spec: AgentSpec = field(metadata={"static": True})


class Trace(NamedTuple):
    """What the derivative needs of the way forward."""

    own: Array  # (T, ..., H)
    entities: tuple[Array, ...]  # by group (T, ..., n, H), zero where nothing is seen
    core: Array  # (T, ..., H)
    scored: tuple[Array, ...]  # by group with actions (T, ..., n, H)


def initialise(key: Array, spec: AgentSpec, hidden_size: int) -> Parameters:
    """Orthogonal weights, zero biases."""
    H, keys = hidden_size, iter(jax.random.split(key, 3 + 4 * len(spec.entities)))

    def layer(inputs: int, outputs: int, gain: float = 1.0) -> Layer:
        key = next(keys)
        if inputs * outputs == 0:
            return Layer(jnp.zeros((inputs, outputs)), jnp.zeros(outputs))
        make = jax.nn.initializers.orthogonal(gain)
        return Layer(make(key, (inputs, outputs)), jnp.zeros(outputs))

    def scorer() -> Scorer:
        both = layer(2 * H, H)
        return Scorer(both.weight[:H], both.weight[H:], both.bias, layer(H, 1, SMALL))

    return Parameters(
        own=layer(sum(map(len, _rest(spec))), H),
        encoders=tuple(layer(group.size, H) for group in spec.entities),
        core=layer((1 + len(spec.entities)) * H, H),
        plain=layer(H, len(_plain(spec)), SMALL),
        scorers=tuple(scorer() for _ in _acted_on(spec)),
        spec=spec,
    )


def initial_memory(params: Parameters, *batch: int) -> Array:
    """Nothing is remembered, (..., 0)."""
    return jnp.zeros((*batch, 0))


def sizes(params: Parameters) -> tuple[int, int]:
    """Of an observation, and the number of actions."""
    return params.spec.observation_size, params.spec.n_actions


def step(
    params: Parameters, memory: Array, observation: Array, last_action: Array
) -> tuple[Array, Array]:
    """One step of acting: memory (..., 0) and Q-values (..., A)."""
    return memory, _forward(params, observation)[0]


def unroll(params: Parameters, inputs: Inputs) -> tuple[Array, Trace]:
    """Q-values (T, ..., A) along whole episodes of inputs (T, ...)."""
    return _forward(params, inputs.seen)


def unroll_both(
    params: Parameters, target: Parameters, inputs: Inputs
) -> tuple[Array, Array, Trace]:
    """The values of both, and the first one's trace.

    One after the other: stacked, as in `network`, XLA 0.10's program for the CPU crashes.
    """
    q, trace = unroll(params, inputs)
    return q, unroll(target, inputs)[0], trace


def values(params: Parameters, inputs: Inputs) -> Array:
    """The Q-values of `unroll`, for whoever differentiates a loss of them by the parameters."""
    return _forward(params, inputs.seen)[0]


def gradient(
    params: Parameters, inputs: Inputs, trace: Trace, q_bar: Array, *, by_episode: bool = False
) -> Parameters:
    """What q_bar (T, ..., A), the derivative by the Q-values, makes of the parameters.

    Summed over the batch axes; with `by_episode` these come first in every array instead.
    """
    spec = params.spec
    lead = q_bar.ndim - 1  # axes before the last: time and batch

    def summed(product: str, *arrays: Array) -> Array:
        """Σ over time, the entities of a group and, unless by episode, the batch."""
        arrays = tuple(x if x.ndim > lead + 1 else x[..., None, :] for x in arrays)
        if not by_episode:
            arrays = tuple(x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:]) for x in arrays)
        found = jnp.einsum(product, *arrays)
        return found if by_episode else found[0]

    def of_layer(left: Array, right: Array) -> Layer:
        return Layer(summed("t...ni,t...nj->...ij", left, right), summed("t...nj->...j", right))

    bars = iter(_split(q_bar, spec))
    plain_bar = next(bars)
    core_bar = plain_bar @ params.plain.weight.T
    thing_bars: list[Array] = [jnp.zeros(())] * len(spec.entities)
    scorers = []
    for (g, _), scorer, hidden, bar in zip(
        _acted_on(spec), params.scorers, trace.scored, bars, strict=True
    ):
        bar = bar[..., None]  # (T, ..., n, 1)
        hidden_bar = (bar * scorer.output.weight[:, 0]) * (hidden > 0)
        together = hidden_bar.sum(-2)
        core_bar = core_bar + together @ scorer.core_weight.T
        thing_bars[g] = hidden_bar @ scorer.thing_weight.T
        by_thing = of_layer(trace.entities[g], hidden_bar)
        scorers.append(
            Scorer(
                of_layer(trace.core, together).weight,
                by_thing.weight,
                by_thing.bias,
                of_layer(hidden, bar),
            )
        )
    core_bar = core_bar * (trace.core > 0)
    own_bar, *by_group = jnp.split(core_bar @ params.core.weight.T, 1 + len(spec.entities), axis=-1)
    own, entities = _parts(inputs.seen, spec)
    return Parameters(
        own=of_layer(own, own_bar * (trace.own > 0)),
        encoders=tuple(
            of_layer(seen, (bar[..., None, :] + more) * (embedded > 0))
            for seen, bar, more, embedded in zip(
                entities, by_group, thing_bars, trace.entities, strict=True
            )
        ),
        core=of_layer(_joined(trace.own, trace.entities), core_bar),
        plain=of_layer(trace.core, plain_bar),
        scorers=tuple(scorers),
        spec=spec,
    )


def _forward(params: Parameters, seen: Array) -> tuple[Array, Trace]:
    spec = params.spec
    own_seen, entities_seen = _parts(seen, spec)
    own = jax.nn.relu(own_seen @ params.own.weight + params.own.bias)
    entities = tuple(
        jax.nn.relu(x @ layer.weight + layer.bias) * jnp.any(x != 0, axis=-1, keepdims=True)
        for x, layer in zip(entities_seen, params.encoders, strict=True)
    )
    core = jax.nn.relu(_joined(own, entities) @ params.core.weight + params.core.bias)
    values, scored = [core @ params.plain.weight + params.plain.bias], []
    for (g, _), scorer in zip(_acted_on(spec), params.scorers, strict=True):
        from_core = (core @ scorer.core_weight + scorer.bias)[..., None, :]
        hidden = jax.nn.relu(from_core + entities[g] @ scorer.thing_weight)
        scored.append(hidden)
        values.append((hidden @ scorer.output.weight + scorer.output.bias)[..., 0])
    q = _ordered(jnp.concatenate(values, axis=-1), np.argsort(_order(spec)))
    return q, Trace(own, entities, core, tuple(scored))


def _joined(own: Array, entities: tuple[Array, ...]) -> Array:
    """What the core is given, (T, ..., (G + 1) · H)."""
    return jnp.concatenate([own, *(of_group.sum(-2) for of_group in entities)], axis=-1)


def _parts(seen: Array, spec: AgentSpec) -> tuple[Array, list[Array]]:
    """What is in no group (..., rest), and each group's entities (..., n, size)."""
    entities = [
        seen[..., g.start : g.start + g.count * g.size].reshape(*seen.shape[:-1], g.count, g.size)
        for g in spec.entities
    ]
    rest = [seen[..., part.start : part.stop] for part in _rest(spec)]
    return jnp.concatenate([seen[..., :0], *rest], axis=-1), entities


def _split(per_action: Array, spec: AgentSpec) -> list[Array]:
    """(..., A) into actions about no thing, then each group's."""
    ordered = _ordered(per_action, _order(spec))
    counts = [len(_plain(spec)), *(len(actions) for _, actions in _acted_on(spec))]
    return list(jnp.split(ordered, np.cumsum(counts)[:-1], axis=-1))


def _ordered(per_action: Array, order: np.ndarray) -> Array:
    """(..., A) in another order, and untouched if it is the same."""
    return per_action if np.all(order == np.arange(len(order))) else per_action[..., order]


def _acted_on(spec: AgentSpec) -> list[tuple[int, range]]:
    """The groups that actions are about, and their actions."""
    return [
        (i, range(group.actions, group.actions + group.count))
        for i, group in enumerate(spec.entities)
        if group.actions is not None
    ]


def _of_groups(spec: AgentSpec) -> list[int]:
    """The actions that are about a thing."""
    return [action for _, actions in _acted_on(spec) for action in actions]


def _plain(spec: AgentSpec) -> list[int]:
    return [a for a in range(spec.n_actions) if a not in _of_groups(spec)]


def _order(spec: AgentSpec) -> np.ndarray:
    """The actions in the order in which the network makes their values."""
    return np.array(_plain(spec) + _of_groups(spec), dtype=int)


def _rest(spec: AgentSpec) -> list[range]:
    """Where in an observation there is no thing."""
    parts, end = [], 0
    for group in sorted(spec.entities, key=lambda group: group.start):
        parts.append(range(end, group.start))
        end = max(end, group.start + group.count * group.size)
    return [part for part in (*parts, range(end, spec.observation_size)) if part]
