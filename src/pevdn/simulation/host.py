"""The same training with the replay buffers in the memory of the host, for large teams.

Dense buffers of a large team fit into no memory. Here the host goes through Algorithm 1: it calls
the compiled steps of `Simulation` one by one, keeps episodes in one `PackedReplay` per agent,
and hands the episodes of a minibatch back, part by part. All mathematics, random keys included,
are `Simulation`'s, and so is the only line where agents meet (in `Simulation._learn`).
`privacy.dataflow` follows `Simulation.advance`, which is made of the same steps; the lines of the
host are outside of it. They move an agent's episodes from its world to its replay and from there
into its own row of a minibatch, and read nothing of them but their lengths, which all know.

Shapes as in `simulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import replay
from pevdn.agent.learning import Learner
from pevdn.agent.networks import Parameters
from pevdn.agent.packed_replay import PackedReplay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST
from pevdn.simulation.program import Played, Simulation, State, split_keys
from pevdn.worlds.base import ExternalWorld, World

Sums = tuple[tuple[Parameters, ...], Array]  # of gradients by kind, and the largest refused message


def simulation_for(
    world: World | ExternalWorld, config: Config, options: RuntimeOptions = RuntimeOptions()
) -> Simulation:
    """The runtime that the world and the option `buffer` ask for."""
    from pevdn.simulation.hosted import HostedHostSimulation, HostedSimulation

    on_host = options.buffer == "host"
    if isinstance(world, ExternalWorld):
        return (HostedHostSimulation if on_host else HostedSimulation)(world, config, options)
    return (HostSimulation if on_host else Simulation)(world, config, options)


class SteppedSimulation(Simulation):
    """A simulation whose iterations the host makes, one after the other."""

    def advance(self, state: State, until: Array, most: Array, limit: Array | int = MOST) -> State:
        limit = jnp.broadcast_to(jnp.asarray(limit, jnp.int32), state.key.shape)
        for _ in range(int(most)):
            active = self._active(state, until)
            if not np.any(active):
                break
            state = self._iteration(state, active, limit)
        return state


class HostSimulation(SteppedSimulation):
    """A simulation whose episodes are in `replays`, beside the state and not in it."""

    def __init__(
        self,
        world: World | ExternalWorld,
        config: Config,
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        super().__init__(world, config, options)
        size = config.settings.buffer_size
        self.replays = {  # by kind, lane and agent
            (k, lane, n): PackedReplay(size)
            for k, kind in enumerate(self.team.kinds)
            for lane in range(config.seeds)
            for n in range(len(kind.members))
        }

    @property
    def host_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.replays.values())

    def save(self, folder: Path) -> None:
        for name, rows in self.replays.items():
            rows.save(folder / ".".join(map(str, name)))

    def load(self, folder: Path) -> None:
        for name, rows in self.replays.items():
            rows.load(folder / ".".join(map(str, name)))

    def start(self, origins: Array) -> State:
        return super().start(origins)._replace(replays=())

    def compile(self, jit: Callable[..., Any]) -> Callable[..., State]:
        def program(f: Callable[..., Any], *args: Any) -> Any:
            return jit(f, *args).lower(*args).compile()

        state = self.like()
        (lanes,), part = state.key.shape, jax.ShapeDtypeStruct((), jnp.int32)
        yes = jax.ShapeDtypeStruct((lanes,), bool)
        limit = jax.ShapeDtypeStruct((lanes,), jnp.int32)
        lengths = jax.ShapeDtypeStruct((lanes, self.settings.buffer_size + 1), jnp.int32)
        padding = jax.ShapeDtypeStruct((lanes, self.part), bool)
        keys = jax.eval_shape(lambda key: split_keys(key, 4), state.key)
        sums = jax.eval_shape(self._nothing, state)
        self._shapes = {steps: self._batch_shapes(lanes, steps) for steps in self.horizons}
        self._play_block = self._compile_play(program, state, yes)
        self._plan = program(self._planned, state, lengths, keys, yes, limit)
        self._add = {
            steps: program(self._added, sums, state.learners, batches, padding, keys, part)
            for steps, batches in self._shapes.items()
        }
        self._finish = program(self._finished, state, sums, keys, yes)
        return self.advance

    def _compile_play(
        self, program: Callable[..., Any], state: State, active: Any
    ) -> Callable[..., tuple[State, tuple[Episode, ...], Array]]:
        return program(self._played, state, active)

    # ---- the host's part of Algorithm 1 -------------------------------------------------------

    def _iteration(self, state: State, active: Array, limit: Array | int) -> State:
        slots = np.asarray(state.episodes)[:, None] + np.arange(self.block)
        state, episodes, update_keys = self._play_block(state, active)
        self._store(episodes, slots % self.settings.buffer_size, np.asarray(active))
        lengths = np.stack([self.replays[0, lane, 0].length for lane in range(len(slots))])
        for keys in update_keys:
            state, ready, chosen, parts = self._plan(state, lengths, keys, active, limit)
            if np.any(ready):
                sums = self._sum(state, lengths, np.asarray(chosen), int(parts), keys)
                state = self._finish(state, sums, keys, ready)
        return state

    def _store(self, episodes: tuple[Episode, ...], slots: np.ndarray, active: np.ndarray) -> None:
        """APPEND each agent's own episodes (S, N, E, ...) to its own replay buffer."""
        played = jax.device_get(episodes)
        for (k, lane, n), rows in self.replays.items():
            if active[lane]:
                for e, slot in enumerate(slots[lane]):
                    rows.store(slot, Episode(*(x[lane, n, e] for x in played[k])))

    def _sum(
        self, state: State, lengths: np.ndarray, chosen: np.ndarray, parts: int, keys: Array
    ) -> Sums:
        """As `_minibatch`, with the parts fetched from here."""
        scratch, n = self.settings.buffer_size, self.part
        sums = self._nothing(state)
        for part in range(parts):
            slots = chosen[:, part * n : (part + 1) * n]
            longest = np.take_along_axis(lengths, slots, axis=1).max()  # scratch has length 0
            steps = next(steps for steps in self.horizons if steps >= longest)
            batches = self._fetch(slots, steps)
            jax.block_until_ready(sums)  # no more than two parts in memory
            add = self._add[steps]
            sums = add(sums, state.learners, batches, slots == scratch, keys, jnp.int32(part))
        return sums

    def _fetch(self, slots: np.ndarray, steps: int) -> tuple[Episode, ...]:
        """The episodes in the slots (S, B), by kind (S, N, T, B, ...)."""
        batches = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._shapes[steps])
        for (k, lane, n), rows in self.replays.items():
            rows.fetch(slots[lane], Episode(*(x[lane, n] for x in batches[k])))
        return batches

    def _batch_shapes(self, lanes: int, steps: int) -> tuple[Episode, ...]:
        shapes = []
        for kind in self.team.kinds:
            sizes = (steps, kind.spec.observation_size, kind.spec.n_actions)
            one = jax.eval_shape(lambda s=sizes: replay.time_first(replay.empty(self.part - 1, *s)))
            where = (lanes, len(kind.members))
            shapes.append(
                jax.tree.map(lambda x, w=where: jax.ShapeDtypeStruct(w + x.shape, x.dtype), one)
            )
        return tuple(shapes)

    # ---- the compiled steps ----------------------------------------------------------------

    def _played(self, state: State, active: Array) -> tuple[State, tuple[Episode, ...], Array]:
        """RUN episodes: the state after them, themselves, and keys for the updates due."""
        played, next_key, update_keys = self._run(state)
        state = self._counted(state, played._replace(episodes=()), next_key, active)
        return state, played.episodes, update_keys

    def _counted(self, state: State, played: Played, next_key: Array, active: Array) -> State:
        """The state after episodes that are kept elsewhere."""
        state = self._append(state, played, active)
        return state._replace(key=jnp.where(active, next_key, state.key))

    def _planned(
        self, state: State, lengths: Array, keys: Array, active: Array, limit: Array
    ) -> tuple[State, Array, Array, Array]:
        """CHOOSE indices: which lanes are ready, their slots in parts, and how many parts."""
        state, ready = self._due(state, keys, active, limit)
        return state, ready, *self._in_parts(self._choose(state, keys[:, 1]), lengths)

    def _added(
        self,
        sums: Sums,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        padding: Array,
        keys: Array,
        part: Array,
    ) -> Sums:
        """The sums with one more part of the minibatch."""
        part_keys = jax.vmap(jax.random.fold_in, (0, None))(keys[:, 2], part)
        more, worse = self._learn(learners, batches, padding, part_keys)
        return jax.tree.map(jnp.add, sums[0], more), jnp.maximum(sums[1], worse)

    def _finished(self, state: State, sums: Sums, keys: Array, ready: Array) -> State:
        total, refused = sums
        return self._improve(state, self._release(total, keys[:, 3]), refused, ready)
