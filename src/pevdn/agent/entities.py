"""One agent's entity Q-network: entities of one group share an encoder.

A world may declare which parts of an observation are entities (`interface.EntityGroup`): enemies,
allies, each a few numbers. One small encoder serves all entities of a group. The core network sums
their embeddings with that of the rest of the observation. An action that targets one entity
("attack enemy 3") is scored from the core and from that entity alone. The network has few
parameters, and what it learns about one enemy holds for all: it loses less to the noise of DP-SGD,
which grows with the number of parameters (docs/results.md). It has no memory and ignores the last
action. Without entity groups it is a plain network of two layers.

The derivative is hand-written, as in `recurrent`: per episode it is the same product, not summed.

Shapes: T steps, ... any batch axes, O observation, A actions, H hidden, n entities of a group, G
groups. Time is the leading axis.
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
    """Maps the core and one entity to the value of the action that targets it."""

    core_weight: Array  # (H, H)
    thing_weight: Array  # (H, H) from the entity; checkpoints and exported files have this name
    bias: Array  # (H,)
    output: Layer  # (H, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameters:
    """θ_i, the parameters of one agent's Q-function, and the shape of its interface."""

    own: Layer  # (numbers in no group, H)
    encoders: tuple[Layer, ...]  # by group, (size, H)
    core: Layer  # ((G + 1) · H, H): own, then the groups
    plain: Layer  # (H, actions without a target)
    scorers: tuple[Scorer, ...]  # by group with actions
    spec: AgentSpec = field(metadata={"static": True})


class Trace(NamedTuple):
    """Intermediate values of the forward pass that the derivative needs."""

    own: Array  # (T, ..., H)
    entities: tuple[Array, ...]  # by group (T, ..., n, H), zero if not visible
    core: Array  # (T, ..., H)
    scored: tuple[Array, ...]  # by group with actions (T, ..., n, H)


def initialise(key: Array, spec: AgentSpec, hidden_size: int) -> Parameters:
    """Return orthogonal weights and zero biases."""
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
        scorers=tuple(scorer() for _ in _targets(spec)),
        spec=spec,
    )


def initial_memory(params: Parameters, *batch: int) -> Array:
    """Return the empty memory (..., 0)."""
    return jnp.zeros((*batch, 0))


def sizes(params: Parameters) -> tuple[int, int]:
    """Return the size of an observation and the number of actions."""
    return params.spec.observation_size, params.spec.n_actions


def step(
    params: Parameters, memory: Array, observation: Array, last_action: Array
) -> tuple[Array, Array]:
    """Return the memory (..., 0) and the Q-values (..., A) of one step of acting."""
    return memory, _forward(params, observation)[0]


def unroll(params: Parameters, inputs: Inputs) -> tuple[Array, Trace]:
    """Return Q-values (T, ..., A) along whole episodes of inputs (T, ...), and the trace."""
    return _forward(params, inputs.observation)


def unroll_both(
    params: Parameters, target: Parameters, inputs: Inputs
) -> tuple[Array, Array, Trace]:
    """Return the Q-values of both networks and the trace of `params`.

    The networks run one after the other: stacked as in `recurrent`, XLA 0.10 crashes on the CPU.
    """
    q, trace = unroll(params, inputs)
    return q, unroll(target, inputs)[0], trace


def values(params: Parameters, inputs: Inputs) -> Array:
    """Return the Q-values of `unroll`, differentiable by the parameters."""
    return _forward(params, inputs.observation)[0]


def gradient(
    params: Parameters, inputs: Inputs, trace: Trace, q_bar: Array, *, by_episode: bool = False
) -> Parameters:
    """Return the gradient of the parameters from that of the Q-values, q_bar (T, ..., A).

    It is summed over the batch axes; with `by_episode` they are the leading axes of every array.
    """
    spec = params.spec
    lead = q_bar.ndim - 1  # axes before the last: time and batch

    def summed(product: str, *arrays: Array) -> Array:
        """Sum over time, the entities of a group and, unless `by_episode`, the batch."""
        arrays = tuple(x if x.ndim > lead + 1 else x[..., None, :] for x in arrays)
        if not by_episode:
            arrays = tuple(x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:]) for x in arrays)
        total = jnp.einsum(product, *arrays)
        return total if by_episode else total[0]

    def of_layer(left: Array, right: Array) -> Layer:
        return Layer(summed("t...ni,t...nj->...ij", left, right), summed("t...nj->...j", right))

    bars = iter(_split(q_bar, spec))
    plain_bar = next(bars)
    core_bar = plain_bar @ params.plain.weight.T
    entity_bars: list[Array] = [jnp.zeros(())] * len(spec.entities)
    scorers = []
    for (g, _), scorer, hidden, bar in zip(
        _targets(spec), params.scorers, trace.scored, bars, strict=True
    ):
        bar = bar[..., None]  # (T, ..., n, 1)
        hidden_bar = (bar * scorer.output.weight[:, 0]) * (hidden > 0)
        together = hidden_bar.sum(-2)
        core_bar = core_bar + together @ scorer.core_weight.T
        entity_bars[g] = hidden_bar @ scorer.thing_weight.T
        by_entity = of_layer(trace.entities[g], hidden_bar)
        scorers.append(
            Scorer(
                of_layer(trace.core, together).weight,
                by_entity.weight,
                by_entity.bias,
                of_layer(hidden, bar),
            )
        )
    core_bar = core_bar * (trace.core > 0)
    own_bar, *by_group = jnp.split(core_bar @ params.core.weight.T, 1 + len(spec.entities), axis=-1)
    own, entities = _parts(inputs.observation, spec)
    return Parameters(
        own=of_layer(own, own_bar * (trace.own > 0)),
        encoders=tuple(
            of_layer(seen, (bar[..., None, :] + more) * (embedded > 0))
            for seen, bar, more, embedded in zip(
                entities, by_group, entity_bars, trace.entities, strict=True
            )
        ),
        core=of_layer(_joined(trace.own, trace.entities), core_bar),
        plain=of_layer(trace.core, plain_bar),
        scorers=tuple(scorers),
        spec=spec,
    )


def _forward(params: Parameters, observation: Array) -> tuple[Array, Trace]:
    spec = params.spec
    own_part, entity_parts = _parts(observation, spec)
    own = jax.nn.relu(own_part @ params.own.weight + params.own.bias)
    entities = tuple(
        jax.nn.relu(x @ layer.weight + layer.bias) * jnp.any(x != 0, axis=-1, keepdims=True)
        for x, layer in zip(entity_parts, params.encoders, strict=True)
    )
    core = jax.nn.relu(_joined(own, entities) @ params.core.weight + params.core.bias)
    values, scored = [core @ params.plain.weight + params.plain.bias], []
    for (g, _), scorer in zip(_targets(spec), params.scorers, strict=True):
        from_core = (core @ scorer.core_weight + scorer.bias)[..., None, :]
        hidden = jax.nn.relu(from_core + entities[g] @ scorer.thing_weight)
        scored.append(hidden)
        values.append((hidden @ scorer.output.weight + scorer.output.bias)[..., 0])
    q = _ordered(jnp.concatenate(values, axis=-1), np.argsort(_order(spec)))
    return q, Trace(own, entities, core, tuple(scored))


def _joined(own: Array, entities: tuple[Array, ...]) -> Array:
    """Return the input of the core, (T, ..., (G + 1) · H)."""
    return jnp.concatenate([own, *(of_group.sum(-2) for of_group in entities)], axis=-1)


def _parts(x: Array, spec: AgentSpec) -> tuple[Array, list[Array]]:
    """Split an observation into the rest (..., rest) and each group's entities (..., n, size)."""
    entities = [
        x[..., g.start : g.start + g.count * g.size].reshape(*x.shape[:-1], g.count, g.size)
        for g in spec.entities
    ]
    rest = [x[..., part.start : part.stop] for part in _rest(spec)]
    return jnp.concatenate([x[..., :0], *rest], axis=-1), entities


def _split(per_action: Array, spec: AgentSpec) -> list[Array]:
    """Split (..., A) into the actions without a target and those of each group."""
    ordered = _ordered(per_action, _order(spec))
    counts = [len(_plain(spec)), *(len(actions) for _, actions in _targets(spec))]
    return list(jnp.split(ordered, np.cumsum(counts)[:-1], axis=-1))


def _ordered(per_action: Array, order: np.ndarray) -> Array:
    """Reorder (..., A); skip the gather if the order is the identity."""
    return per_action if np.all(order == np.arange(len(order))) else per_action[..., order]


def _targets(spec: AgentSpec) -> list[tuple[int, range]]:
    """Return the groups that actions target, and these actions."""
    return [
        (i, range(group.actions, group.actions + group.count))
        for i, group in enumerate(spec.entities)
        if group.actions is not None
    ]


def _targeted(spec: AgentSpec) -> list[int]:
    """Return the actions that target an entity."""
    return [action for _, actions in _targets(spec) for action in actions]


def _plain(spec: AgentSpec) -> list[int]:
    return [a for a in range(spec.n_actions) if a not in _targeted(spec)]


def _order(spec: AgentSpec) -> np.ndarray:
    """Return the actions in the order in which the network computes their values."""
    return np.array(_plain(spec) + _targeted(spec), dtype=int)


def _rest(spec: AgentSpec) -> list[range]:
    """Return the ranges of an observation that belong to no group."""
    parts, end = [], 0
    for group in sorted(spec.entities, key=lambda group: group.start):
        parts.append(range(end, group.start))
        end = max(end, group.start + group.count * group.size)
    return [part for part in (*parts, range(end, spec.observation_size)) if part]
