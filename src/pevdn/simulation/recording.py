"""Record episodes inside a compiled program: time is the first axis while writing.

Shapes: T steps, S lanes, N agents of one kind, E episodes side by side.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pevdn.agent.replay import Episode
from pevdn.simulation.team import TeamLayout

Inputs = tuple[tuple[Array, ...], tuple[Array, ...]]  # observations and available actions, by kind


def blank(team: TeamLayout, T: int, S: int, E: int) -> tuple[Episode, ...]:
    """Return an empty recording, by kind: (T + 1, S, N, E, ...)."""
    recordings = []
    for kind in team.kinds:
        where = (S, len(kind.members), E)
        recordings.append(
            Episode(
                observations=jnp.zeros((T + 1, *where, kind.spec.observation_size)),
                available=jnp.zeros((T + 1, *where, kind.spec.n_actions), bool),
                actions=jnp.zeros((T, *where), jnp.int16),
                rewards=jnp.zeros((T, *where)),
                terminal=jnp.zeros((T, *where), bool),
                length=jnp.zeros(where, jnp.int32),
            )
        )
    return tuple(recordings)


def write_first(recordings: tuple[Episode, ...], inputs: Inputs) -> tuple[Episode, ...]:
    """Record what each agent sees before its first action."""
    return tuple(
        recording._replace(
            observations=recording.observations.at[0].set(seen),
            available=recording.available.at[0].set(open_),
        )
        for recording, seen, open_ in zip(recordings, *inputs, strict=True)
    )


def write(
    recordings: tuple[Episode, ...],
    t: Array,
    inputs: Inputs,
    actions: tuple[Array, ...],
    reward: Array,
    ended: Array,
    alive: Array,
) -> tuple[Episode, ...]:
    """Record step t: the actions, and what each agent sees after them. Zeros after the end.

    `reward`, `ended` (by the game) and `alive` (still going before this step) are (S, E).
    """
    on = alive[:, None, :]  # (S, 1, E)
    return tuple(
        recording._replace(
            observations=recording.observations.at[t + 1].set(seen * on[..., None]),
            available=recording.available.at[t + 1].set(open_ & on[..., None]),
            actions=recording.actions.at[t].set((action * on).astype(jnp.int16)),
            rewards=recording.rewards.at[t].set(jnp.broadcast_to(reward[:, None], action.shape)),
            terminal=recording.terminal.at[t].set(jnp.broadcast_to(ended[:, None], action.shape)),
        )
        for recording, seen, open_, action in zip(recordings, *inputs, actions, strict=True)
    )


def as_episodes(recordings: tuple[Episode, ...], length: Array) -> tuple[Episode, ...]:
    """Transpose recordings (T, S, N, E, ...) to (S, N, E, T, ...) as stored; `length` is (S, E)."""

    def stored(recording: Episode) -> Episode:
        every = jnp.broadcast_to(length[:, None], recording.length.shape)
        fields = recording.map(lambda x: jnp.moveaxis(x, 0, 3) if x.ndim > 3 else x)
        return fields._replace(length=every)

    return tuple(map(stored, recordings))
