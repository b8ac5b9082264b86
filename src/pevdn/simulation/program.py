"""The simulation: a whole team in one compiled program that plays, stores, exchanges and learns.

Agents are an array axis here (one per kind, see `team`), and so are lanes: a *lane* is one
independent training with its own world, agents and random numbers. `--seeds 8` runs eight lanes of
one program; a search over numeric settings runs one lane per variant and seed. Algorithm 1 is
`Simulation.iterate`; each of its steps is a named method.

A simulation combines two choices: who plays (`players`: the program itself, or worker processes)
and where episodes are kept (`replays`: on the device, or on the host). If both are inside the
program, the whole loop is compiled; otherwise the host calls its compiled steps in the same order.

Shapes: S lanes, N agents (of one kind), E episodes of a block, U updates, T steps, B minibatch.
Arrays of agents are (S, N, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn.agent import evaluation, schedule
from pevdn.agent import keys as derive
from pevdn.agent.evaluation import Score
from pevdn.agent.networks import Parameters
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST
from pevdn.privacy.randomness import like_origins
from pevdn.simulation.players import Actors, CompiledPlayer, WorkerPlayer
from pevdn.simulation.replays import DeviceReplay, HostReplay
from pevdn.simulation.state import Played, State, where_lane
from pevdn.simulation.update import TeamUpdate
from pevdn.worlds.base import ExternalWorld, World


class Simulation(TeamUpdate):
    """A world and a configuration, ready to run; all state is in `State`."""

    def __init__(
        self,
        world: World | ExternalWorld,
        config: Config,
        options: RuntimeOptions | None = None,
        lane_settings: Sequence[Mapping[str, float]] = (),
    ) -> None:
        super().__init__(world.agents, world.max_steps, config, lane_settings)
        self.world, options = cast(Any, world), options or RuntimeOptions()
        actors = Actors(self.team, self.program, self.by_lane)
        self.player: Any
        if isinstance(world, ExternalWorld):
            self.player = WorkerPlayer(world, actors, config, options)
        else:
            self.player = CompiledPlayer(world, actors, config)
        replay = HostReplay if options.buffer == "host" else DeviceReplay
        self.replay = replay(self.team, config, world.max_steps)

    @property
    def compiled_whole(self) -> bool:
        """Whether the loop itself is compiled, and can be spread over devices."""
        return isinstance(self.player, CompiledPlayer) and not self.replay.on_host

    def close(self) -> None:
        """Stop the workers of an external world."""
        self.player.close()

    # ---- begin, advance, evaluate -------------------------------------------------------------

    def start(self, origins: Array) -> State:
        """Return a fresh team for each lane (S,), from the lane's own seed or key."""
        s, (S,) = self.settings, origins.shape
        if not jnp.issubdtype(origins.dtype, jax.dtypes.prng_key):
            origins = jax.vmap(jax.random.key)(origins)
        training, for_agents = jax.vmap(derive.of_lane)(origins)
        agents = jax.vmap(partial(derive.of_agents, agents=len(self.team)))(for_agents)
        learners = []
        for kind in self.team.kinds:
            begin = partial(self.program.begin, spec=kind.spec)
            # One lane after the other: large batches of orthogonal matrices hang on few cores.
            learners.append(jax.lax.map(jax.vmap(begin), agents[:, jnp.array(kind.members)]))
        zeros = jnp.zeros(S, jnp.int32)
        return State(
            learners=tuple(learners),
            replays=self.replay.empty(S),
            key=training,
            env_steps=zeros,
            episodes=zeros,
            updates=zeros,
            stored_at=jnp.zeros((S, s.buffer_size), jnp.int32),
            exposure=zeros,
            exhausted=jnp.zeros(S, bool),
            refused=jnp.zeros(S),
            anchored=jnp.zeros(S, bool),
            threshold=jnp.full(S, s.anchor_threshold),
        )

    def advance(self, state: State, until: Array, most: Array, limit: Array | int = MOST) -> State:
        """Iterate each lane until it has made `until` environment steps, at most `most` times.

        A lane that gets there first waits unchanged. So a lane depends on its own seed alone, and
        the result does not depend on how a run is split into calls. No update is made that would
        take an episode's exposure above the lane's `limit` (S,); such a lane is exhausted.
        """

        def unfinished(carry: tuple[State, Array]) -> Array:
            state, done = carry
            return jnp.any(self._active(state, until)) & (done < most)

        def body(carry: tuple[State, Array]) -> tuple[State, Array]:
            state, done = carry
            return self.iterate(state, self._active(state, until), limit), done + 1

        return jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]

    def compile(self, jit: Callable[..., Any]) -> Callable[..., State]:
        """Return `advance`, compiled; a call takes over the memory of the state it is given."""
        if not self.compiled_whole:
            run, absorb = self.player.compile(self, jit), self.replay.compile(self, jit)
            return partial(self._advance_by_steps, run, absorb)
        state = self.like()
        number, limit = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((), state.key.shape))
        given = (state, number, number, limit)
        program: Callable[..., State] = (
            jit(self.advance, *given, donate=(0,)).lower(*given).compile()
        )
        return program

    def _advance_by_steps(
        self,
        run: Callable[..., tuple[Played, Array, Array]],
        absorb: Callable[..., State],
        state: State,
        until: Array,
        most: Array,
        limit: Array | int = MOST,
    ) -> State:
        """Do what `advance` does, with the loop on the host."""
        limit = jnp.broadcast_to(jnp.asarray(limit, jnp.int32), state.key.shape)
        for _ in range(int(most)):
            active = self._active(state, until)
            if not np.any(active):
                break
            state = absorb(state, *run(state, active), active, limit)
        return state

    def like(self) -> State:
        """Return the shapes and types of this run's state."""
        state: State = jax.eval_shape(self.start, like_origins(self.config))
        return state

    @property
    def parameters(self) -> int:
        """The number of parameters of all agents of one lane."""
        return sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(self.like().params))

    def evaluate(self, params: tuple[Parameters, ...], keys: Array) -> Score:
        """Score greedy episodes in each lane, with keys (S,) that training never uses."""
        keys = self.evaluation_episodes(keys)
        return self.player.play(params, keys, jnp.zeros(keys.shape[0]), record=False).score

    def evaluation_episodes(self, keys: Array) -> Array:
        """Derive the keys of an evaluation's episodes (S, E) from its keys (S,)."""
        return jax.vmap(partial(derive.of_episodes, episodes=self.settings.eval_episodes))(keys)

    def compile_evaluation(
        self, params: tuple[Parameters, ...], keys: Array, jit: Callable[..., Any]
    ) -> Callable[[], Callable[..., Score]]:
        """Return a function that compiles `evaluate` for arguments like these, in any thread."""
        found: Callable[[], Callable[..., Score]]
        found = self.player.compile_evaluation(self, params, keys, jit)
        return found

    def keep_anchor(self, state: State, win_rate: Array) -> State:
        """Keep the average as the anchor where an evaluation (S,) of it beat the threshold.

        Without averaging, the average is the parameters themselves.
        """
        better = evaluation.beats(win_rate, state.threshold)
        learners = tuple(
            learner._replace(anchor=where_lane(better, learner.average, learner.anchor))
            for learner in state.learners
        )
        return state._replace(
            learners=learners,
            anchored=state.anchored | better,
            threshold=jnp.where(better, win_rate, state.threshold),
        )

    # ---- Algorithm 1 --------------------------------------------------------------------------

    def _active(self, state: State, until: Array) -> Array:
        return (state.env_steps < until) & (state.refused == 0) & ~state.exhausted

    def iterate(self, state: State, active: Array, limit: Array | int) -> State:
        """RUN a block of episodes, APPEND it and make the updates due, in the active lanes."""
        return self.absorb(state, *self.run_block(state), active, limit)

    def run_block(self, state: State) -> tuple[Played, Array, Array]:
        """RUN a block of episodes; also return the lanes' next keys, and the updates' (U, S, 4)."""
        next_key, episode_keys, update_keys, epsilon = self.draw(state.key, state.env_steps)
        played = self.player.play(state.params, episode_keys, epsilon, record=True)
        return played, next_key, update_keys

    def draw(self, keys: Array, env_steps: Array) -> tuple[Array, Array, Array, Array]:
        """Return next keys (S,), keys of episodes (S, E) and updates (U, S, 4), and ε (S,)."""
        block = partial(
            derive.of_block, episodes=self.config.block_size, updates=self.config.updates_due
        )
        next_key, episode_keys, update_keys = jax.vmap(block)(keys)
        epsilon = jax.vmap(lambda steps, lane: self.program.vary(lane).exploration(steps))(
            env_steps, self.by_lane
        )
        return next_key, episode_keys, jnp.swapaxes(update_keys, 0, 1), epsilon

    def absorb(
        self,
        state: State,
        played: Played,
        next_key: Array,
        update_keys: Array,
        active: Array,
        limit: Array | int,
    ) -> State:
        """APPEND a block of episodes, and make the openings and updates that are due."""
        block_key = state.key
        state = self.append(state, played, next_key, active)
        for number, age in enumerate(self.ages):
            slots = self.slots_of_age(state.episodes, age, active)
            state = self.open(state, slots, self.opening_keys(block_key, number))

        def update(state: State, keys: Array) -> tuple[State, None]:
            state, ready = self._due(state, keys, active, limit)
            return jax.lax.cond(jnp.any(ready), self.update, _skip, state, keys, ready), None

        return jax.lax.scan(update, state, update_keys)[0]

    def append(self, state: State, played: Played, next_key: Array, active: Array) -> State:
        """APPEND each agent's own episodes to its own replay, and count, in the active lanes."""
        size, block = self.settings.buffer_size, self.config.block_size
        slots = schedule.slots(state.episodes[:, None], jnp.arange(block), size)
        slots = jnp.where(active[:, None], slots, size)  # the scratch slot
        stored = jax.vmap(lambda row, slots, now: row.at[slots].set(now, mode="drop"))
        state = self.replay.store(state, played.episodes, slots)
        return state._replace(
            key=jnp.where(active, next_key, state.key),
            stored_at=stored(state.stored_at, slots, state.updates),
            env_steps=state.env_steps + jnp.where(active, played.length.sum(1), 0),
            episodes=state.episodes + jnp.where(active, block, 0),
        )

    @property
    def ages(self) -> list[int]:
        """The ages, in episodes, at which episodes are opened."""
        return schedule.opening_ages(self.config) if self.config.noised else []

    def slots_of_age(self, episodes: Array, age: int, active: Array) -> Array:
        """Return the slots (S, E) of the block stored `age` episodes before the newest one."""
        size, block = self.settings.buffer_size, self.config.block_size
        first = episodes - block - age
        slots = schedule.slots(first[:, None], jnp.arange(block), size)
        return jnp.where((active & (first >= 0))[:, None], slots, size)  # the scratch slot

    def opening_keys(self, block_key: Array, number: int) -> tuple[Array, Array]:
        """Return the keys (S,) of shares and noise of one opening of a block."""
        keys: tuple[Array, Array] = jax.vmap(partial(derive.of_opening, number=number))(block_key)
        return keys

    def _due(
        self, state: State, keys: Array, active: Array, limit: Array | int
    ) -> tuple[State, Array]:
        """Return which lanes (S,) make the next update; mark those whose budget is exhausted."""
        coin = jax.vmap(jax.random.uniform)(keys[:, derive.COIN])  # public: updates can be observed
        ready = active & (state.refused == 0)
        ready &= schedule.update_is_due(state.episodes, coin, self.config)
        if self.config.private:
            exhausted = state.exhausted | (ready & (self._exposed(state) >= limit))
            state = state._replace(exhausted=exhausted)
            ready &= ~exhausted
        return state, ready

    def plan(
        self, state: State, lengths: Array, keys: Array, active: Array, limit: Array
    ) -> tuple[State, Array, Array, Array]:
        """CHOOSE: return which lanes are ready, their slots in parts, and the number of parts."""
        state, ready = self._due(state, keys, active, limit)
        return state, ready, *self._in_parts(self.sample(state, keys), lengths)


def _skip(state: State, keys: Array, ready: Array) -> State:
    return state
