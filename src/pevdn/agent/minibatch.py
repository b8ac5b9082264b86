"""Split a minibatch into parts: episodes computed side by side, for the same number of steps.

Most episodes are far shorter than the world allows, and a Poisson sample may have any size. So a
minibatch is computed in parts of a fixed number of episodes, each for the smallest compiled
horizon that its longest episode needs.

Shapes: S lanes, B slots, T steps, P episodes of a part. `lengths` (S, capacity + 1) are those of
the stored episodes; the last slot is scratch and has length 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent import replay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.worlds.interface import AgentSpec

PART = 8  # episodes; more fill the cache, fewer leave the products too small
OWN_PART = 6  # where each agent has its own sample: a part waits for the agent with the most


def _wide() -> bool:
    """Whether width is nearly free and every step costs, as on a GPU."""
    return jax.default_backend() != "cpu"


def horizons(max_steps: int) -> list[int]:
    """Return the numbers of steps that an update is compiled for, up to the world's limit."""
    if max_steps < 20 or _wide():
        return [max_steps]
    return [-(-part * max_steps // 12) for part in (4, 5, 8, 12)]


def horizon_for(longest: int, horizons: Sequence[int]) -> int:
    """Return the smallest horizon that covers an episode of `longest` steps."""
    return next(steps for steps in horizons if steps >= longest)


def part_size(config: Config) -> int:
    """Return the number of episodes of a minibatch that are computed side by side.

    Few on a CPU, so that short episodes do not wait for long ones. On an accelerator all of
    them: for a Poisson sample, three standard deviations more than expected.
    """
    s = config.settings
    if not _wide():
        return min(OWN_PART if config.noised else PART, s.expected_batch_size)
    spread = 3 * math.sqrt(s.expected_batch_size) if config.private else 0
    return min(s.buffer_size, math.ceil(s.expected_batch_size + spread))


def in_parts(
    slots: Array, lengths: Array, horizons: Sequence[int], part: int, private: bool
) -> tuple[Array, Array]:
    """Arrange slots (S, B) in parts, padded with scratch; also return the number of parts.

    The longest episodes come first, so that few padding steps are computed. If private, parts are
    grouped by horizon instead: what is computed of an episode then depends on its own length, and
    not on which others were sampled.
    """
    if private:
        return _by_horizon(slots, lengths, horizons, part)
    scratch = lengths.shape[1] - 1
    slots = jax.vmap(_longest_first)(slots, lengths)
    slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % part)), constant_values=scratch)
    return slots, -(-jnp.max(jnp.sum(slots != scratch, axis=1)) // part)


def _longest_first(slots: Array, lengths: Array) -> Array:
    """Sort slots (B,) by the length of their episodes (capacity + 1,), scratch at the end."""
    scratch = lengths.shape[0] - 1
    return slots[jnp.argsort(jnp.where(slots == scratch, 1, -lengths[slots]))]


def _by_horizon(
    slots: Array, lengths: Array, horizons: Sequence[int], part: int
) -> tuple[Array, Array]:
    """Arrange slots in parts whose episodes need the same horizon, the same in all lanes."""
    (S, B), scratch, H = slots.shape, lengths.shape[1] - 1, len(horizons)
    own = jnp.searchsorted(jnp.asarray(horizons), jnp.take_along_axis(lengths, slots, axis=1))
    mine = (own[..., None] == jnp.arange(H)) & (slots != scratch)[..., None]  # (S, B, H)
    parts = jnp.max(-(-mine.sum(1) // part), axis=0)  # (H,)
    first = (jnp.cumsum(parts) - parts) * part
    place = jnp.sum(jnp.where(mine, first + jnp.cumsum(mine, axis=1) - 1, 0), axis=-1)
    size = H * -(-B // part) * part
    place = jnp.where(slots == scratch, size, place)
    lanes = jnp.arange(S)[:, None]
    arranged = jnp.full((S, size), scratch, slots.dtype).at[lanes, place].set(slots, mode="drop")
    return arranged, parts.sum()


def empty_part(spec: AgentSpec, steps: int, part: int, opened: bool = False) -> Episode:
    """Return an empty part of one agent, (T, P, ...)."""
    sizes = spec.observation_size, spec.n_actions
    return replay.time_first(replay.empty(part - 1, steps, *sizes, opened))
