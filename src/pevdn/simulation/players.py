"""Who plays: the compiled program itself, or a pool of worker processes.

`CompiledPlayer` plays worlds that are JAX functions, inside the program. `WorkerPlayer` plays
external worlds: workers step them, and one compiled call chooses the actions of all agents in all
episodes that wait. Both draw an episode's random numbers from the same keys, so that a world
trains the same team inside JAX and outside, with any number of workers.

Shapes: S lanes, E episodes of each, M = S · E numbered lane by lane, K workers' environments,
N agents, T steps; O and A are the sizes of all agents' observations and actions together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn._platform import compiler_options
from pevdn.agent import keys as derive
from pevdn.agent import networks
from pevdn.agent.networks import Parameters
from pevdn.agent.program import AgentProgram
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import UsageError, WorldFault
from pevdn.simulation import recording
from pevdn.simulation.state import Played, State, each_agent
from pevdn.simulation.team import TeamLayout
from pevdn.worlds.base import ExternalWorld, Step, World
from pevdn.worlds.external import sanitise
from pevdn.worlds.recording import EpisodeRecorder
from pevdn.worlds.workers import RESET, STEP, Fault, WorkerPool

WORKERS_PER_CORE = 4  # environments that share the cost of one call that chooses actions

Memories = tuple[tuple[Array, ...], tuple[Array, ...]]  # and last actions, by kind (S, N, E, ...)
Run = Callable[[State, Array], tuple[Played, Array, Array]]
Jit = Callable[..., Any]


@dataclass
class Actors:
    """All agents of all lanes, acting."""

    team: TeamLayout
    program: AgentProgram
    by_lane: Mapping[str, Array]  # settings that differ by lane, (S,)

    def begin(self, params: tuple[Parameters, ...], S: int, E: int) -> Memories:
        """Return the agents' initial memories, and −1 for their last actions."""
        kinds = list(zip(self.team.kinds, params, strict=True))
        memories = tuple(networks.of(p).initial_memory(p, S, len(k.members), E) for k, p in kinds)
        return memories, tuple(jnp.full((S, len(k.members), E), -1, jnp.int32) for k, _ in kinds)

    def act(
        self,
        params: tuple[Parameters, ...],
        memories: Memories,
        inputs: recording.Inputs,
        keys: Array,
        epsilon: Array,
    ) -> Memories:
        """Return each agent's next memory and ε-greedy action, from its own inputs; keys (S, E)."""

        def one(theta: Any, memory: Any, seen: Any, available: Any, last: Any, *rest: Any) -> Any:
            chance, epsilon, lane = rest
            program = self.program.vary(lane)
            return program.act(theta, memory, seen, available, last, chance, epsilon)

        draw = partial(derive.chances, agents=len(self.team))
        chances = jnp.swapaxes(jax.vmap(jax.vmap(draw))(keys), 1, 2)  # (S, N, E, 2)
        own = zip(params, memories[0], *inputs, memories[1], strict=True)
        acted = [
            each_agent(one, 6, 7)(*x, chances[:, jnp.array(kind.members)], epsilon, self.by_lane)
            for kind, x in zip(self.team.kinds, own, strict=True)
        ]
        return tuple(memory for memory, _ in acted), tuple(action for _, action in acted)

    def stored_reward(self, reward: Array) -> Array:
        """Return the team's reward (S, ...) as agents store it."""
        return jax.vmap(lambda r, lane: self.program.vary(lane).stored_reward(r))(
            reward, self.by_lane
        )


class CompiledPlayer:
    """Plays a world of pure JAX functions, as a part of the program that trains."""

    max_iterations = None  # per call of the program: any number
    name = "a compiled world"

    def __init__(self, world: World, actors: Actors, config: Config) -> None:
        self.world, self.actors, self.config = world, actors, config

    def close(self) -> None:
        """Do nothing: the program holds no resources."""

    def compile(self, simulation: Any, jit: Jit) -> Run:
        """Compile a block of episodes by itself, for replay buffers outside the program."""
        state = simulation.like()
        run: Run = jit(simulation.run_block, state).lower(state).compile()
        return lambda state, active: run(state)  # type: ignore[call-arg]

    def compile_evaluation(
        self, simulation: Any, params: tuple[Parameters, ...], keys: Array, jit: Jit
    ) -> Callable[[], Callable[..., Any]]:
        found: Callable[[], Callable[..., Any]] = (
            jit(simulation.evaluate, params, keys).lower(params, keys).compile
        )
        return found

    def play(
        self, params: tuple[Parameters, ...], keys: Array, epsilon: Array, record: bool
    ) -> Played:
        """Play E episodes in each lane, with keys (S, E), until all have ended."""
        (S, E), T, actors = keys.shape, self.world.max_steps, self.actors

        def everywhere(f: Callable[..., Any]) -> Callable[..., Any]:
            """Map over (S, E) as one axis: a world compiles faster mapped once than twice."""

            def mapped(*args: Any) -> Any:
                flat = jax.tree.map(lambda x: x.reshape(S * E, *x.shape[2:]), args)
                return jax.tree.map(lambda x: x.reshape(S, E, *x.shape[1:]), jax.vmap(f)(*flat))

            return mapped

        first = everywhere(lambda key: derive.of_reset(key, T))(keys)
        world_state, step = everywhere(self.world.reset)(first)
        recorded = recording.blank(actors.team, T, S, E) if record else ()

        def going(carry: Any) -> Array:
            t, *_, alive = carry
            return (t < T) & jnp.any(alive)

        def body(carry: Any) -> Any:
            t, world_state, step, memories, recorded, length, total, won, alive = carry
            acting, for_world = everywhere(lambda key: derive.of_step(key, t))(keys)
            memories = actors.act(params, memories, self._inputs(step), acting, epsilon)
            actions = memories[1]
            joint = actors.team.by_agent(actions, axis=1)
            world_state, after = everywhere(self.world.step)(for_world, world_state, joint)
            reward = jnp.where(alive, after.reward, 0.0)
            if record:
                ended = alive & after.done & ~after.truncated
                stored = actors.stored_reward(reward)
                seen = self._inputs(after)
                recorded = recording.write(recorded, t, seen, actions, stored, ended, alive)
            return (
                t + 1,
                world_state,
                after,
                memories,
                recorded,
                length + alive,
                total + reward,
                won | (alive & after.done & after.won),
                alive & ~after.done,
            )

        if record:
            recorded = recording.write_first(recorded, self._inputs(step))
        no, zero = jnp.zeros((S, E), bool), jnp.zeros((S, E))
        score = (jnp.zeros((S, E), jnp.int32), zero, no, ~no)
        carry = (0, world_state, step, actors.begin(params, S, E), recorded, *score)
        *_, recorded, length, total, won, _ = jax.lax.while_loop(going, body, carry)
        return Played(recording.as_episodes(recorded, length), length, total, won)

    def _inputs(self, step: Step) -> recording.Inputs:
        """Return observations and available actions by kind, (S, N, E, ...)."""
        by_kind = partial(self.actors.team.by_kind, axis=1)
        return by_kind(step.observations), by_kind(step.available)


class WorkerPlayer:
    """Plays an external world in worker processes; the compiled program only chooses actions."""

    max_iterations = 1  # so that a failing world leaves the state before the iteration
    name = "an external world"

    def __init__(
        self, world: ExternalWorld, actors: Actors, config: Config, options: RuntimeOptions
    ) -> None:
        self.world = sanitise(world) if config.private else world
        self.actors, self.config = actors, config
        if world.max_workers is not None and options.workers > world.max_workers:
            raise UsageError(
                f"workers is {options.workers}, but world '{world.name}' allows "
                f"{world.max_workers} at most; lower it."
            )
        usual = min(config.seeds * config.block_size, WORKERS_PER_CORE * (os.cpu_count() or 1))
        self.workers = options.workers or min(usual, world.max_workers or usual)
        self._timeout = options.world_timeout
        self._observed = self._columns([spec.observation_size for spec in world.agents])
        self._offered = self._columns([spec.n_actions for spec in world.agents])
        self._programs: dict[tuple[int, int, str], tuple[Any, Any]] = {}

    @cached_property
    def pool(self) -> WorkerPool:
        return WorkerPool(self.world, self.workers, self._timeout)

    def close(self) -> None:
        """Stop the workers."""
        if "pool" in self.__dict__:
            self.pool.close()
            del self.pool

    def compile(self, simulation: Any, jit: Jit) -> Run:
        state = simulation.like()
        _, keys, _, _ = jax.eval_shape(simulation.draw, state.key, state.env_steps)
        self._compiled(state.params, keys)
        draw = jax.jit(simulation.draw)

        def run(state: State, active: Array) -> tuple[Played, Array, Array]:
            """A block of episodes in the active lanes; nothing is played in the others."""
            next_key, keys, update_keys, epsilon = draw(state.key, state.env_steps)
            before = np.asarray(state.episodes)
            played = self.play(state.params, keys, epsilon, np.asarray(active), before)
            return played, next_key, update_keys

        return run

    def compile_evaluation(
        self, simulation: Any, params: tuple[Parameters, ...], keys: Array, jit: Jit
    ) -> Callable[[], Callable[..., Any]]:
        episodes = jax.eval_shape(simulation.evaluation_episodes, keys)

        def evaluate(params: tuple[Parameters, ...], keys: Array) -> Any:
            keys = simulation.evaluation_episodes(keys)
            lanes = len(keys)
            played = self.play(params, keys, jnp.zeros(lanes), np.ones(lanes, bool))
            return jax.tree.map(jnp.asarray, played).score

        def compiled() -> Callable[..., Any]:
            self._compiled(params, episodes)
            return evaluate

        return compiled

    def play(
        self,
        params: tuple[Parameters, ...],
        keys: Array,
        epsilon: Array,
        active: np.ndarray,
        before: np.ndarray | None = None,
    ) -> Played:
        """Do what `CompiledPlayer.play` does, with keys (S, E), in the active lanes (S,).

        `before` (S,) counts earlier training episodes; without it this is an evaluation, and
        nothing is recorded. A free worker plays the next episode that has not begun.
        """
        (S, E), T, rows = keys.shape, self.world.max_steps, self.pool.rows
        recorder = EpisodeRecorder(self.world.agents, S * E, T, before is not None)
        begin, decide = self._compiled(params, keys)
        seeds, memories = begin(params, keys)
        seeds = np.asarray(seeds).ravel()
        waiting = np.flatnonzero(np.repeat(active, E))[::-1].tolist()
        on = np.full(len(rows), -1)  # (K,) the episode that each environment plays
        while True:
            going = np.flatnonzero(on >= 0)
            if len(going):
                moving = np.zeros(S * E, bool)
                moving[on[going]] = True
                seen, available = recorder.seen, recorder.open
                actions, memories = decide(
                    params, memories, seen, available, keys, recorder.t, moving, epsilon
                )
                rows["actions"][going] = np.asarray(actions)[on[going]]
                rows["order"][going] = STEP
            for free in np.flatnonzero(on < 0)[: len(waiting)]:
                on[free] = waiting.pop()
                rows["seed"][free], rows["order"][free] = seeds[on[free]], RESET
            busy = np.flatnonzero(on >= 0)
            if not len(busy):
                return self._as_played(recorder, (S, E))
            try:
                self.pool.turn()
            except Fault as fault:
                episode = int(on[fault.worker])
                step = int(recorder.t[episode]) + 1 if fault.worker in going else 0
                seed = int(seeds[episode])
                raise self._fault(fault.what, episode, E, step, seed, before) from None
            recorder.step(on[going], rows[going])
            recorder.look(on[busy], rows[busy])
            over = rows["done"][going] | (recorder.t[on[going]] == T)
            on[going[over]] = -1

    def _fault(
        self, what: str, episode: int, E: int, step: int, seed: int, before: np.ndarray | None
    ) -> WorldFault:
        """Return an error that says which world failed, how, and where."""
        lane, number = divmod(episode, E)
        if before is not None:
            where = f"episode {before[lane] + number + 1}"
        else:
            where = f"episode {number + 1} of an evaluation"
        if self.config.seeds > 1:
            where += f" of seed {self.config.seed + lane}"
        when = f"at step {step} of" if step else "at the start of"
        return WorldFault(f"world '{self.world.name}' {what}, {when} {where} (reset with {seed})")

    def _as_played(self, recorder: EpisodeRecorder, shape: tuple[int, int]) -> Played:
        """Return episodes as stored, by kind (S, N, E, T, ...); none if nothing was recorded."""
        S, E = shape

        def turned(x: np.ndarray) -> Any:
            """(M, T, N, ...) to (S, N, E, T, ...)."""
            return np.moveaxis(x.reshape(S, E, *x.shape[1:]), 3, 1)

        def for_each(x: np.ndarray, agents: int) -> np.ndarray:
            """(M, T) to (M, T, N), the same for all agents."""
            return np.repeat(x[..., None], agents, axis=-1)

        stored = self.actors.stored_reward(recorder.rewards.reshape(S, E, -1))  # type: ignore[arg-type]
        rewards = np.asarray(stored).reshape(S * E, -1)
        length: Any = recorder.t.reshape(S, E)
        total: Any = recorder.total.reshape(S, E)
        won: Any = recorder.won.reshape(S, E)
        kinds = zip(self.actors.team.kinds, self._observed, self._offered, strict=True)
        episodes = [
            Episode(
                observations=turned(recorder.observations[..., seen]),
                available=turned(recorder.available[..., offered]),
                actions=turned(recorder.actions[..., kind.members]),
                rewards=turned(for_each(rewards, len(kind.members))),
                terminal=turned(for_each(recorder.terminal, len(kind.members))),
                length=length[:, None].repeat(len(kind.members), axis=1),
            )
            for kind, seen, offered in kinds
        ]
        return Played(tuple(episodes) if recorder.recording else (), length, total, won)

    def like_played(self, shape: tuple[int, int]) -> Played:
        """Return an empty block, to compile for."""
        M, T = shape[0] * shape[1], self.world.max_steps
        return self._as_played(EpisodeRecorder(self.world.agents, M, T, True), shape)

    def _columns(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return, by kind, the columns (N, size) of its agents in an array of all agents."""
        starts = np.cumsum([0, *sizes])
        return [
            np.stack([np.arange(starts[i], starts[i + 1]) for i in kind.members])
            for kind in self.actors.team.kinds
        ]

    # ---- the compiled steps -------------------------------------------------------------------

    def _compiled(self, params: tuple[Parameters, ...], keys: Any) -> tuple[Any, Any]:
        """Return `_begin` and `_decide`, compiled for keys (S, E)."""
        S, E = keys.shape
        which = S, E, str(keys.dtype)  # training and evaluation may have other generators
        if which not in self._programs:
            jit = partial(jax.jit, compiler_options=compiler_options())
            empty = EpisodeRecorder(self.world.agents, S * E, 0, False)
            _, memories = jax.eval_shape(self._begin, params, keys)
            epsilon = jax.ShapeDtypeStruct((S,), jnp.float32)
            moving = np.zeros(S * E, bool)
            given = (memories, empty.seen, empty.open, keys, empty.t, moving, epsilon)
            self._programs[which] = (
                jit(self._begin).lower(params, keys).compile(),
                jit(self._decide).lower(params, *given).compile(),
            )
        return self._programs[which]

    def _begin(self, params: tuple[Parameters, ...], keys: Array) -> tuple[Array, Memories]:
        """Return the seeds (S, E) of the world, and the agents' initial memories."""

        def seed(key: Array) -> Array:
            return derive.world_seed(derive.of_reset(key, self.world.max_steps))

        return jax.vmap(jax.vmap(seed))(keys), self.actors.begin(params, *keys.shape)

    def _decide(
        self,
        params: tuple[Parameters, ...],
        memories: Memories,
        seen: Array,
        available: Array,
        keys: Array,
        t: Array,
        moving: Array,
        epsilon: Array,
    ) -> tuple[Array, Memories]:
        """Return actions (M, N), and memories that change where an episode is `moving` (M,)."""
        S, E = keys.shape

        def by_kind(x: Array, columns: list[np.ndarray]) -> tuple[Array, ...]:
            return tuple(jnp.swapaxes(x.reshape(S, E, -1)[..., c], 1, 2) for c in columns)

        acting, _ = jax.vmap(jax.vmap(derive.of_step))(keys, t.reshape(S, E))
        inputs = by_kind(seen, self._observed), by_kind(available, self._offered)
        new, actions = self.actors.act(params, memories, inputs, acting, epsilon)
        joint = jnp.stack(self.actors.team.by_agent(actions, axis=1), axis=-1).reshape(S * E, -1)
        on = moving.reshape(S, 1, E)
        kept, last = memories
        remembered = tuple(jnp.where(on[..., None], a, b) for a, b in zip(new, kept, strict=True))
        done = tuple(jnp.where(on, a, b) for a, b in zip(actions, last, strict=True))
        return joint, (remembered, done)
