"""Where episodes are kept: on the device, inside the state, or packed in the memory of the host.

`DeviceReplay` is part of the compiled program. `HostReplay` serves large teams, whose dense
buffers fit no device: the host packs what was played, one `PackedReplay` per agent, and returns the
episodes of a minibatch part by part. All mathematics stays in the compiled steps of `Simulation`.
`verification.dataflow` analyses the program with `DeviceReplay`, which does not include the host's
code here. That code moves an agent's episodes to its own replay, and from there into its own row of
a minibatch; it reads only their lengths, which are public.

Shapes: S lanes, N agents of one kind, E episodes, B slots of a part, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    def empty(self, lanes: int) -> tuple[Episode, ...]:
        def rows(spec: Any) -> Episode:
            return replay.empty(self.size, self.max_steps, spec.observation_size, spec.n_actions)

        shapes = self.team.shapes(rows, lanes)
        empty: tuple[Episode, ...] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return empty

    def store(self, state: State, episodes: tuple[Episode, ...], slots: Array) -> State:
        """APPEND each agent's own episodes (S, N, E, ...) to its own buffer, at slots (S, E)."""
        stored = (
            each_agent(replay.store, 1)(rows, slots, new)
            for rows, new in zip(state.replays, episodes, strict=True)
        )
        return state._replace(replays=tuple(stored))

    def lengths(self, state: State) -> Array:
        """Return the stored episodes' lengths (S, buffer_size + 1), the same for every agent."""
        return state.replays[0].length[:, 0]

    def fetch(self, state: State, slots: Array, steps: int) -> tuple[Episode, ...]:
        """Return the first `steps` steps of episodes (S, B), by kind (S, N, T, B, ...)."""
        return tuple(
            each_agent(partial(replay.fetch, steps=steps), 1)(rows, slots) for rows in state.replays
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
        self._shapes = {
            steps: self.team.shapes(
                partial(minibatch.empty_part, steps=steps, part=simulation.part), *lanes
            )
            for steps in simulation.horizons
        }
        append = program(simulation.append, state, counted, next_key, yes)
        plan = program(simulation.plan, state, lengths, keys, yes, limit)
        add = {
            steps: program(simulation.add_part, sums, state.learners, batches, padding, keys, part)
            for steps, batches in self._shapes.items()
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
            state = append(state, played._replace(episodes=()), next_key, active)
            lengths = np.stack([self.rows[0, lane, 0].length for lane in range(len(slots))])
            for keys in update_keys:
                state, ready, chosen, parts = plan(state, lengths, keys, active, limit)
                if np.any(ready):
                    chosen = np.asarray(chosen)
                    sums = simulation.no_sums(state)
                    for number in range(int(parts)):
                        slots = chosen[:, number * simulation.part : (number + 1) * simulation.part]
                        longest = np.take_along_axis(lengths, slots, axis=1).max()
                        steps = minibatch.horizon_for(longest, simulation.horizons)
                        batches, padding = self._unpack(slots, steps), slots == self.size
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
        for (k, lane, n), rows in self.rows.items():
            if active[lane]:
                for e, slot in enumerate(slots[lane]):
                    rows.store(slot, Episode(*(x[lane, n, e] for x in played[k])))

    def _unpack(self, slots: np.ndarray, steps: int) -> tuple[Episode, ...]:
        """Return the episodes in slots (S, B), by kind (S, N, T, B, ...)."""
        batches = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._shapes[steps])
        for (k, lane, n), rows in self.rows.items():
            rows.fetch(slots[lane], Episode(*(x[lane, n] for x in batches[k])))
        return batches
