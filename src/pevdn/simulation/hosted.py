"""The same training in a world outside of JAX: the host plays, the compiled program learns.

An episode gets the random numbers that `Simulation._play` would give it, and its world is reset
with a seed that comes from the key that a compiled world would get. So a world gives the same
training inside of JAX and outside, for any number of copies: a copy plays the next episode that
nobody plays yet, and all that wait for their agents get their actions from one call.

Shapes: S lanes, E episodes of each, M = S · E numbered lane by lane, K copies, N agents, T steps,
O and A the sizes of all agents' observations and actions together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn._platform import compiler_options
from pevdn.agent import learning, networks
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode
from pevdn.config.settings import Config
from pevdn.errors import UsageError, WorldFault
from pevdn.simulation.host import HostSimulation, SteppedSimulation
from pevdn.simulation.program import Played, Score, State, score_of, split_keys
from pevdn.worlds.base import AgentSpec, ExternalWorld
from pevdn.worlds.external import sanitise
from pevdn.worlds.workers import RESET, STEP, Fault, WorkerPool

COPIES_A_CORE = 4  # so many share the cost of one call that chooses their actions

Memories = tuple[tuple[Array, ...], tuple[Array, ...]]  # and last actions, by kind (S, N, E, ...)


def episode_seed(key: Array) -> Array:
    """What a world outside of JAX is reset with (31 bits), where one inside gets the key."""
    return (jax.random.bits(key, dtype=jnp.uint32) >> 1).astype(jnp.int32)


class Record:
    """M episodes on their way, and what was written down of them; zeros where nothing was.

    `which` (n,) are episodes, `rows` (n,) what their copies have given.
    """

    def __init__(self, agents: Sequence[AgentSpec], M: int, T: int, record: bool) -> None:
        N, steps = len(agents), T if record else 0
        O, A = sum(a.observation_size for a in agents), sum(a.n_actions for a in agents)
        self.record = record
        self.t = np.zeros(M, np.int32)
        self.total = np.zeros(M, np.float32)
        self.won = np.zeros(M, bool)
        self.seen = np.zeros((M, O), np.float32)
        self.open = np.zeros((M, A), bool)
        self.observations = np.zeros((M, steps + 1, O), np.float32)
        self.available = np.zeros((M, steps + 1, A), bool)
        self.actions = np.zeros((M, steps, N), np.int16)
        self.rewards = np.zeros((M, steps), np.float32)
        self.terminal = np.zeros((M, steps), bool)

    def step(self, which: np.ndarray, rows: np.ndarray) -> None:
        """They have made a step."""
        t = self.t[which]
        if self.record:
            self.actions[which, t] = rows["actions"]
            self.rewards[which, t] = rows["reward"]
            self.terminal[which, t] = rows["done"] & ~rows["truncated"]
        self.t[which] += 1
        self.total[which] += rows["reward"]
        self.won[which] |= rows["done"] & rows["won"]

    def look(self, which: np.ndarray, rows: np.ndarray) -> None:
        """They are where they see this, at their start or after a step."""
        self.seen[which], self.open[which] = rows["observations"], rows["available"]
        if self.record:
            self.observations[which, self.t[which]] = rows["observations"]
            self.available[which, self.t[which]] = rows["available"]


class HostedSimulation(SteppedSimulation):
    """A simulation whose world is stepped by the host."""

    at_once = 1  # so that a world that fails leaves the state of the iteration before

    def __init__(self, world: ExternalWorld, config: Config) -> None:
        super().__init__(sanitise(world) if config.private else world, config)
        wanted = config.settings.envs
        if world.max_workers is not None and wanted > world.max_workers:
            raise UsageError(
                f"envs is {wanted}, but there can be {world.max_workers} of world '{world.name}' "
                "at most; ask for no more."
            )
        usual = min(config.seeds * self.block, COPIES_A_CORE * (os.cpu_count() or 1))
        self.n_copies = wanted or min(usual, world.max_workers or usual)
        self._observed = self._columns([spec.observation_size for spec in world.agents])
        self._offered = self._columns([spec.n_actions for spec in world.agents])
        self._next_draw = jax.jit(self._draw)
        self._playing: dict[tuple[int, int], tuple[Any, Any]] = {}

    @cached_property
    def copies(self) -> WorkerPool:
        return WorkerPool(self.world, self.n_copies, self.settings.world_timeout)

    def close(self) -> None:
        if "copies" in self.__dict__:
            self.copies.close()
            del self.copies

    def compile(self, jit: Callable[..., Any]) -> Callable[..., State]:
        state = self.like()
        next_key, keys, update_keys, _ = jax.eval_shape(self._draw, state.key, state.env_steps)
        played = self._like_played(keys.shape)
        self._compile_playing(tuple(learner.params for learner in state.learners), keys)
        active, limit = (jax.ShapeDtypeStruct(state.key.shape, kind) for kind in (bool, jnp.int32))
        given = (state, played, next_key, update_keys, active, limit)
        self._learn_from_block = jit(self._absorb, *given, donate=(0,)).lower(*given).compile()
        return self.advance

    def prepare_evaluation(
        self, params: tuple[Parameters, ...], keys: Array, jit: Callable[..., Any]
    ) -> Callable[[], Callable[..., Score]]:
        episodes = jax.eval_shape(lambda keys: split_keys(keys, self.settings.eval_episodes), keys)

        def prepared() -> Callable[..., Score]:
            self._compile_playing(params, episodes)
            return self.evaluate

        return prepared

    def evaluate(self, params: tuple[Parameters, ...], keys: Array) -> Score:
        keys = split_keys(keys, self.settings.eval_episodes)
        lanes = len(keys)
        played = self._play_outside(params, keys, jnp.zeros(lanes), np.ones(lanes, bool))
        return score_of(jax.tree.map(jnp.asarray, played))

    # ---- Algorithm 1 --------------------------------------------------------------------------

    def _iteration(self, state: State, active: Array, limit: Array | int) -> State:
        run = self._run_outside(state, active)
        learnt: State = self._learn_from_block(state, *run, active, limit)
        return learnt

    def _run_outside(self, state: State, active: Array) -> tuple[Played, Array, Array]:
        """As `_run`; nothing is played in lanes that are not active."""
        next_key, keys, update_keys, epsilon = self._next_draw(state.key, state.env_steps)
        params = tuple(learner.params for learner in state.learners)
        before = np.asarray(state.episodes)
        played = self._play_outside(params, keys, epsilon, np.asarray(active), before)
        return played, next_key, update_keys

    def _play_outside(
        self,
        params: tuple[Parameters, ...],
        keys: Array,
        epsilon: Array,
        active: np.ndarray,
        before: np.ndarray | None = None,
    ) -> Played:
        """As `_play`, for keys (S, E), in the active lanes (S,).

        `before` (S,) are the episodes of training so far; without it this is an evaluation, and
        nothing is recorded.
        """
        (S, E), T, rows = keys.shape, self.world.max_steps, self.copies.rows
        record = Record(self.world.agents, S * E, T, before is not None)
        begin, decide = self._compile_playing(params, keys)
        seeds, memories = begin(params, keys)
        seeds = np.asarray(seeds).ravel()
        waiting = np.flatnonzero(np.repeat(active, E))[::-1].tolist()
        on = np.full(len(rows), -1)  # (K,) the episode that a copy plays
        while True:
            going = np.flatnonzero(on >= 0)
            if len(going):
                moving = np.zeros(S * E, bool)
                moving[on[going]] = True
                actions, memories = decide(
                    params, memories, record.seen, record.open, keys, record.t, moving, epsilon
                )
                rows["actions"][going] = np.asarray(actions)[on[going]]
                rows["order"][going] = STEP
            for copy in np.flatnonzero(on < 0)[: len(waiting)]:
                on[copy] = waiting.pop()
                rows["seed"][copy], rows["order"][copy] = seeds[on[copy]], RESET
            busy = np.flatnonzero(on >= 0)
            if not len(busy):
                return self._as_played(record, (S, E))
            try:
                self.copies.turn()
            except Fault as fault:
                episode = int(on[fault.worker])
                step = int(record.t[episode]) + 1 if fault.worker in going else 0
                raise self._told(
                    fault.what, episode, E, step, int(seeds[episode]), before
                ) from None
            record.step(on[going], rows[going])
            record.look(on[busy], rows[busy])
            over = rows["done"][going] | (record.t[on[going]] == T)
            on[going[over]] = -1

    def _told(
        self, what: str, episode: int, E: int, step: int, seed: int, before: np.ndarray | None
    ) -> WorldFault:
        """One sentence: which world, what, and where."""
        lane, number = divmod(episode, E)
        if before is not None:
            where = f"episode {before[lane] + number + 1}"
        else:
            where = f"episode {number + 1} of an evaluation"
        if self.config.seeds > 1:
            where += f" of seed {self.config.seed + lane}"
        when = f"at step {step} of" if step else "at the start of"
        return WorldFault(f"world '{self.world.name}' {what}, {when} {where} (reset with {seed})")

    def _as_played(self, record: Record, shape: tuple[int, int]) -> Played:
        """Episodes as they are stored, by kind (S, N, E, T, ...); none if nothing was recorded."""
        S, E = shape

        def turned(x: np.ndarray) -> Any:
            """(M, T, N, ...) to (S, N, E, T, ...)."""
            return np.moveaxis(x.reshape(S, E, *x.shape[1:]), 3, 1)

        def for_each(x: np.ndarray, agents: int) -> np.ndarray:
            """(M, T) to (M, T, N), the same for all."""
            return np.repeat(x[..., None], agents, axis=-1)

        kept: Any = record.rewards
        rewards = np.asarray(learning.kept_reward(kept, self.settings.reward_cap))
        length: Any = record.t.reshape(S, E)
        total: Any = record.total.reshape(S, E)
        won: Any = record.won.reshape(S, E)
        episodes = [
            Episode(
                observations=turned(record.observations[..., seen]),
                available=turned(record.available[..., offered]),
                actions=turned(record.actions[..., kind.members]),
                rewards=turned(for_each(rewards, len(kind.members))),
                terminal=turned(for_each(record.terminal, len(kind.members))),
                length=length[:, None].repeat(len(kind.members), axis=1),
            )
            for kind, seen, offered in zip(
                self.team.kinds, self._observed, self._offered, strict=True
            )
        ]
        return Played(tuple(episodes) if record.record else (), length, total, won)

    def _like_played(self, shape: tuple[int, int]) -> Played:
        """A block of nothing, to compile for."""
        record = Record(self.world.agents, shape[0] * shape[1], self.world.max_steps, True)
        return self._as_played(record, shape)

    def _columns(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Where the agents of a kind (N, size) are in an array of all of them."""
        starts = np.cumsum([0, *sizes])
        return [
            np.stack([np.arange(starts[i], starts[i + 1]) for i in kind.members])
            for kind in self.team.kinds
        ]

    # ---- the compiled steps -------------------------------------------------------------------

    def _compile_playing(self, params: tuple[Parameters, ...], keys: Any) -> tuple[Any, Any]:
        """`_begun` and `_decided` for keys (S, E)."""
        S, E = keys.shape
        if (S, E) not in self._playing:
            jit = partial(jax.jit, compiler_options=compiler_options())
            record = Record(self.world.agents, S * E, 0, False)
            _, memories = jax.eval_shape(self._begun, params, keys)
            epsilon = jax.ShapeDtypeStruct((S,), jnp.float32)
            given = (memories, record.seen, record.open, keys, record.t, record.won, epsilon)
            self._playing[S, E] = (
                jit(self._begun).lower(params, keys).compile(),
                jit(self._decided).lower(params, *given).compile(),
            )
        return self._playing[S, E]

    def _begun(self, params: tuple[Parameters, ...], keys: Array) -> tuple[Array, Memories]:
        """The seeds (S, E) of the world, and what agents remember before the first step."""
        (S, E), T = keys.shape, self.world.max_steps
        seeds = jax.vmap(jax.vmap(lambda key: episode_seed(jax.random.fold_in(key, T))))(keys)
        pairs = list(zip(self.team.kinds, params, strict=True))
        memories = tuple(networks.of(p).initial_memory(p, S, len(k.members), E) for k, p in pairs)
        last = tuple(jnp.full((S, len(k.members), E), -1, jnp.int32) for k, _ in pairs)
        return seeds, (memories, last)

    def _decided(
        self,
        params: tuple[Parameters, ...],
        memories: Memories,
        seen: Array,
        open_: Array,
        keys: Array,
        t: Array,
        moving: Array,
        epsilon: Array,
    ) -> tuple[Array, Memories]:
        """Actions (M, N) in the episodes that are moving, (M,); the others' agents keep still."""
        S, E = keys.shape

        def by_kind(x: Array, columns: list[np.ndarray]) -> tuple[Array, ...]:
            return tuple(jnp.swapaxes(x.reshape(S, E, -1)[..., c], 1, 2) for c in columns)

        def now(key: Array, t: Array) -> Array:
            return jax.random.split(jax.random.fold_in(key, t))[0]

        on = moving.reshape(S, 1, E)
        kept, last = memories
        new, actions = self._act(
            params,
            kept,
            by_kind(seen, self._observed),
            by_kind(open_, self._offered),
            last,
            jax.vmap(jax.vmap(now))(keys, t.reshape(S, E)),
            epsilon,
        )
        joint = jnp.stack(self.team.by_agent(actions, axis=1), axis=-1).reshape(S * E, -1)
        remembered = tuple(jnp.where(on[..., None], a, b) for a, b in zip(new, kept, strict=True))
        done = tuple(jnp.where(on, a, b) for a, b in zip(actions, last, strict=True))
        return joint, (remembered, done)


class HostedHostSimulation(HostedSimulation, HostSimulation):
    """The same, with the replay buffers in host memory as well."""

    _iteration = HostSimulation._iteration

    def compile(self, jit: Callable[..., Any]) -> Callable[..., State]:
        return HostSimulation.compile(self, jit)

    def _compile_play(
        self, program: Callable[..., Any], state: State, active: Any
    ) -> Callable[..., tuple[State, tuple[Episode, ...], Array]]:
        next_key, keys, _, _ = jax.eval_shape(self._draw, state.key, state.env_steps)
        played = self._like_played(keys.shape)._replace(episodes=())
        count = program(self._counted, state, played, next_key, active)

        def play_block(state: State, active: Array) -> tuple[State, tuple[Episode, ...], Array]:
            played, next_key, update_keys = self._run_outside(state, active)
            state = count(state, played._replace(episodes=()), next_key, active)
            return state, played.episodes, update_keys

        return play_block
