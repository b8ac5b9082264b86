"""Where episodes are kept: on the device, inside the state, or packed in the memory of the host.

`DeviceReplay` is part of the compiled program. `HostReplay` serves large teams, whose dense
buffers fit no device: the host packs what was played, one `PackedReplay` per agent, and returns the
episodes of a minibatch part by part. All mathematics stays in the compiled steps of `Simulation`.
`verification.dataflow` analyses the program with `DeviceReplay`, which does not include the host's
code here. That code moves an agent's episodes to its own replay, and from there into its own row of
a minibatch; it reads only their lengths, which are public, and what is opened, for a checksum.

Shapes: S lanes, N agents of one kind, E episodes, B slots of a part, T steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import minibatch, replay, schedule
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.simulation.state import Played, State, each_agent
from pevdn.simulation.team import TeamLayout

if TYPE_CHECKING:
    from pevdn.simulation.program import Simulation

Absorb = Callable[[State, Played, Array, Array, Array, Array], State]
Jit = Callable[..., Any]


class DeviceReplay:
    """Dense arrays (S, N, buffer_size + 1, ...) in `State.replays`."""

    on_host = False
    nbytes = 0  # of episodes outside the state

    def __init__(self, team: TeamLayout, config: Config, max_steps: int) -> None:
        self.team, self.size, self.max_steps = team, config.settings.buffer_size, max_steps
        self.opened = config.noised

    def empty(self, lanes: int) -> tuple[Episode, ...]:
        def rows(spec: Any) -> Episode:
            sizes = spec.observation_size, spec.n_actions
            return replay.empty(self.size, self.max_steps, *sizes, self.opened)

        shapes = self.team.shapes(rows, lanes)
        empty: tuple[Episode, ...] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return empty

    def store(self, state: State, episodes: tuple[Episode, ...], slots: Array) -> State:
        """APPEND each agent's own episodes (S, N, E, ...) to its own buffer, at slots (S, E)."""
        if self.opened:  # not yet
            episodes = tuple(e._replace(opened=jnp.zeros_like(e.rewards)) for e in episodes)
        stored = (
            each_agent(replay.store, 1)(rows, slots, new)
            for rows, new in zip(state.replays, episodes, strict=True)
        )
        return state._replace(replays=tuple(stored))

    def store_opened(self, state: State, slots: Array, opened: tuple[Array, ...]) -> State:
        """Write what each agent stores of an opening (S, N, T, E) at slots (S, E)."""

        def write(rows: Array, slots: Array, new: Array) -> Array:
            return rows.at[slots].set(new.T)

        return state._replace(
            replays=tuple(
                rows._replace(opened=each_agent(write, 1)(rows.opened, slots, new))
                for rows, new in zip(state.replays, opened, strict=True)
            )
        )

    def checksum(self, state: State) -> bytes:
        """Return a checksum of all that is opened: other openings hardly ever have the same."""
        return b"".join(np.asarray(_mixed(rows.opened)).tobytes() for rows in state.replays)

    def lengths(self, state: State) -> Array:
        """Return the stored episodes' lengths (S, buffer_size + 1), the same for every agent."""
        return state.replays[0].length[:, 0]

    def fetch(self, state: State, slots: Array, steps: int) -> tuple[Episode, ...]:
        """Return the first `steps` steps of episodes, by kind (S, N, T, B, ...).

        Slots are (S, B), or (S, N, B) where each agent has its own.
        """
        first = partial(replay.fetch, steps=steps)
        if slots.ndim == 2:
            return tuple(each_agent(first, 1)(rows, slots) for rows in state.replays)
        return tuple(
            each_agent(first)(rows, slots[:, jnp.array(kind.members)])
            for kind, rows in zip(self.team.kinds, state.replays, strict=True)
        )

    def compile(self, simulation: Simulation, jit: Jit) -> Absorb:
        """Compile everything that follows a block of episodes played in an external world."""
        state = simulation.like()
        next_key, keys, update_keys, _ = jax.eval_shape(simulation.draw, state.key, state.env_steps)
        played = simulation.player.like_played(keys.shape)
        lanes = state.key.shape
        active, limit = (jax.ShapeDtypeStruct(lanes, kind) for kind in (bool, jnp.int32))
        given = (state, played, next_key, update_keys, active, limit)
        absorb: Absorb = jit(simulation.absorb, *given, donate=(0,)).lower(*given).compile()
        return absorb


class HostReplay:
    """One `PackedReplay` per agent, beside the state."""

    on_host = True

    def __init__(self, team: TeamLayout, config: Config, max_steps: int) -> None:
        self.team, self.size = team, config.settings.buffer_size
        self.opened = config.noised
        self.rows = {  # by kind, lane and agent
            (k, lane, n): PackedReplay(self.size)
            for k, kind in enumerate(team.kinds)
            for lane in range(config.seeds)
            for n in range(len(kind.members))
        }

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())

    def save(self, folder: Path) -> None:
        for name, rows in self.rows.items():
            rows.save(folder / ".".join(map(str, name)))

    def load(self, folder: Path) -> None:
        for name, rows in self.rows.items():
            rows.load(folder / ".".join(map(str, name)))

    def checksum(self, state: State) -> bytes:
        """Return a checksum of all that is opened."""
        total = 0
        for rows in self.rows.values():
            for row, n in zip(rows.rows, rows.length.tolist(), strict=False):
                total = zlib.crc32(row[len(row) - 4 * n :], total)  # as `PackedReplay.open` does
        return total.to_bytes(4, "big")

    def empty(self, lanes: int) -> tuple[Episode, ...]:
        return ()

    def store(self, state: State, episodes: tuple[Episode, ...], slots: Array) -> State:
        """Leave the state unchanged: the host stores the episodes (`_pack`)."""
        return state

    def compile(self, simulation: Simulation, jit: Jit) -> Absorb:
        """Compile the steps that follow a block of episodes, for the host to call in order."""

        def program(f: Callable[..., Any], *args: Any) -> Any:
            return jit(f, *args).lower(*args).compile()

        state = simulation.like()
        lanes = state.key.shape
        next_key, blocks, updates, _ = jax.eval_shape(simulation.draw, state.key, state.env_steps)
        types = (jnp.int32, jnp.float32, bool)
        public: Any = [jax.ShapeDtypeStruct(blocks.shape, kind) for kind in types]
        counted = Played((), *public)
        yes, limit, lengths = (
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in (
                (lanes, bool),
                (lanes, jnp.int32),
                ((*lanes, self.size + 1), jnp.int32),
            )
        )
        part, padding = (
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((*lanes, simulation.part), bool),
        )
        keys = jax.ShapeDtypeStruct(updates.shape[1:], updates.dtype)
        sums = jax.eval_shape(simulation.no_sums, state)

        def shapes(steps: int, part: int) -> tuple[Episode, ...]:
            empty = partial(minibatch.empty_part, steps=steps, part=part, opened=self.opened)
            return self.team.shapes(empty, *lanes)

        parts = {steps: shapes(steps, simulation.part) for steps in simulation.horizons}
        block = shapes(simulation.horizons[-1], blocks.shape[1])
        if self.opened:
            padding = jax.ShapeDtypeStruct((*lanes, len(self.team), simulation.part), bool)
            opened = program(simulation.opened, state.learners, block, next_key, next_key)
        append = program(simulation.append, state, counted, next_key, yes)
        plan = program(simulation.plan, state, lengths, keys, yes, limit)
        add = {
            steps: program(simulation.add_part, sums, state.learners, batches, padding, keys, part)
            for steps, batches in parts.items()
        }
        finish = program(simulation.finish, state, sums, keys, yes)

        def absorb(
            state: State,
            played: Played,
            next_key: Array,
            update_keys: Array,
            active: Array,
            limit: Array,
        ) -> State:
            first = np.asarray(state.episodes)[:, None]
            slots = schedule.slots(first, np.arange(played.length.shape[1]), self.size)
            self._pack(played.episodes, slots, np.asarray(active))
            block_key = state.key
            state = append(state, played._replace(episodes=()), next_key, active)
            for number, age in enumerate(simulation.ages):
                slots = np.asarray(simulation.slots_of_age(state.episodes, age, active))
                keys = simulation.opening_keys(block_key, number)
                self._open(slots, opened(state.learners, self._unpack(slots, block), *keys))
            lengths = np.stack([self.rows[0, lane, 0].length for lane in range(len(slots))])
            for keys in update_keys:
                state, ready, chosen, count = plan(state, lengths, keys, active, limit)
                if np.any(ready):
                    chosen = np.asarray(chosen)
                    sums = simulation.no_sums(state)
                    every = lengths.reshape(len(lengths), *([1] * (chosen.ndim - 2)), -1)
                    for number in range(int(count)):
                        start = number * simulation.part
                        slots = chosen[..., start : start + simulation.part]
                        longest = np.take_along_axis(every, slots, axis=-1).max()
                        steps = minibatch.horizon_for(longest, simulation.horizons)
                        batches = self._unpack(slots, parts[steps])
                        padding = slots == self.size
                        jax.block_until_ready(sums)  # no more than two parts in memory
                        sums = add[steps](
                            sums, state.learners, batches, padding, keys, jnp.int32(number)
                        )
                    state = finish(state, sums, keys, ready)
            return state

        return absorb

    def _pack(self, episodes: tuple[Episode, ...], slots: np.ndarray, active: np.ndarray) -> None:
        """APPEND each agent's own episodes (S, N, E, ...) to its own buffer."""
        played = jax.device_get(episodes)
        if self.opened:  # not yet
            played = [e._replace(opened=np.zeros_like(e.rewards)) for e in played]
        for (k, lane, n), rows in self.rows.items():
            if active[lane]:
                for e, slot in enumerate(slots[lane]):
                    rows.store(slot, played[k].map(itemgetter((lane, n, e))))

    def _open(self, slots: np.ndarray, opened: tuple[Array, ...]) -> None:
        """Write what each agent stores of an opening (S, N, T, E) at slots (S, E)."""
        found = jax.device_get(opened)
        for (k, lane, n), rows in self.rows.items():
            for e, slot in enumerate(slots[lane]):
                if slot < self.size:
                    rows.open(slot, found[k][lane, n, :, e])

    def _unpack(self, slots: np.ndarray, shapes: tuple[Episode, ...]) -> tuple[Episode, ...]:
        """Return the episodes in slots (S, B) or (S, N, B), by kind (S, N, T, B, ...)."""
        batches: tuple[Episode, ...] = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        for (k, lane, n), rows in self.rows.items():
            own = slots[lane]
            own = own if own.ndim == 1 else own[self.team.kinds[k].members[n]]
            rows.fetch(own, batches[k].map(itemgetter((lane, n))))
        return batches


@jax.jit
def _mixed(opened: Array) -> Array:
    """Return a weighted sum (modulo 2³²) of the bits of numbers, different in every place."""
    bits = jax.lax.bitcast_convert_type(opened, jnp.uint32).ravel()
    places = jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum((bits ^ (bits >> 15)) * (places * jnp.uint32(0x9E3779B1) | 1), dtype=jnp.uint32)
