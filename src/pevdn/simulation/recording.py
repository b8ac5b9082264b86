"""Recording episodes while they are played: time first while writing, episodes first when stored.

Shapes: T steps, S lanes, N agents of one kind, E episodes side by side.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pevdn.agent.replay import Episode
from pevdn.simulation.team import Team

Views = tuple[tuple[Array, ...], tuple[Array, ...]]  # observations and available actions, by kind


def blank(team: Team, T: int, S: int, E: int) -> tuple[Episode, ...]:
    """Room for a recording, by kind: (T + 1, S, N, E, ...)."""
    tapes = []
    for kind in team.kinds:
        where = (S, len(kind.members), E)
        tapes.append(
            Episode(
                observations=jnp.zeros((T + 1, *where, kind.spec.observation_size)),
                available=jnp.zeros((T + 1, *where, kind.spec.n_actions), bool),
                actions=jnp.zeros((T, *where), jnp.int16),
                rewards=jnp.zeros((T, *where)),
                terminal=jnp.zeros((T, *where), bool),
                length=jnp.zeros(where, jnp.int32),
            )
        )
    return tuple(tapes)


def write_first(tapes: tuple[Episode, ...], views: Views) -> tuple[Episode, ...]:
    """Record what was seen before the first action."""
    return tuple(
        tape._replace(
            observations=tape.observations.at[0].set(seen),
            available=tape.available.at[0].set(open_),
        )
        for tape, seen, open_ in zip(tapes, *views, strict=True)
    )


def write(
    tapes: tuple[Episode, ...],
    t: Array,
    views: Views,
    actions: tuple[Array, ...],
    reward: Array,
    ended: Array,
    alive: Array,
) -> tuple[Episode, ...]:
    """Record step t: what was done, and what was seen after it. Zeros once an episode is over.

    `reward`, `ended` (by the game) and `alive` (still going before this step) are (S, E).
    """
    on = alive[:, None, :]  # (S, 1, E)
    return tuple(
        tape._replace(
            observations=tape.observations.at[t + 1].set(seen * on[..., None]),
            available=tape.available.at[t + 1].set(open_ & on[..., None]),
            actions=tape.actions.at[t].set((action * on).astype(jnp.int16)),
            rewards=tape.rewards.at[t].set(jnp.broadcast_to(reward[:, None], action.shape)),
            terminal=tape.terminal.at[t].set(jnp.broadcast_to(ended[:, None], action.shape)),
        )
        for tape, seen, open_, action in zip(tapes, *views, actions, strict=True)
    )


def as_episodes(tapes: tuple[Episode, ...], length: Array) -> tuple[Episode, ...]:
    """(T, S, N, E, ...) as recorded to (S, N, E, T, ...) as stored; `length` is (S, E)."""

    def stored(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 3)

    return tuple(
        Episode(
            observations=stored(tape.observations),
            available=stored(tape.available),
            actions=stored(tape.actions),
            rewards=stored(tape.rewards),
            terminal=stored(tape.terminal),
            length=jnp.broadcast_to(length[:, None], tape.length.shape),
        )
        for tape in tapes
    )
