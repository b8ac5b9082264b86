"""The whole team in one compiled program: play, remember, exchange, learn, evaluate.

Agents are an array axis here (one per kind, see `team`), and so are seeds: a *lane* is one
independent training run with its own world, agents and random numbers, and `--seeds 8` is eight
lanes of one program. Algorithm 1 is `Simulation._iteration`; every step of it is a named method.

Shapes: S lanes, N agents (of one kind), E episodes played side by side, T steps, B minibatch.
Arrays of agents are (S, N, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pevdn.agent import acting, learning, networks, replay
from pevdn.agent.learning import Learner, Memo, Rates
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST, Settings
from pevdn.exchange import Exchange, central, indices
from pevdn.exchange.alone import alone
from pevdn.exchange.broadcast import broadcast
from pevdn.exchange.secret_shared import Code, secret_shared
from pevdn.privacy import mechanism
from pevdn.privacy.mechanism import Release
from pevdn.privacy.randomness import like_origins
from pevdn.simulation import recording as tape
from pevdn.simulation.team import Team
from pevdn.worlds.base import AgentSpec, ExternalWorld, Step, World

PART = 8  # episodes; more fill the cache, fewer leave the products too small


class State(NamedTuple):
    """Everything a run is, between two iterations. Counters are (S,)."""

    learners: tuple[Learner, ...]  # by kind, (S, N, ...)
    replays: tuple[Episode, ...]  # by kind, (S, N, buffer_size + 1, ...)
    key: Array  # (S,) random keys
    env_steps: Array
    episodes: Array
    updates: Array
    stored_at: Array  # (S, buffer_size) how many updates had been made when a slot was written
    exposure: Array  # the most updates that any one episode was in the buffer for
    exhausted: Array  # bool: an update was due that the privacy budget does not cover
    refused: Array  # the largest message that did not fit, 0 as long as all did
    anchored: Array  # bool: an anchor exists
    threshold: Array  # win rate that the next anchor must beat


class Played(NamedTuple):
    """Episodes as they were played, (S, E)."""

    episodes: tuple[Episode, ...]  # by kind, (S, N, E, ...)
    length: Array
    total_reward: Array
    won: Array


class Score(NamedTuple):
    """Means over the evaluation episodes, (S,)."""

    win_rate: Array
    total_reward: Array
    length: Array


def each_agent(f: Callable[..., Any], *shared: int) -> Callable[..., Any]:
    """Map a function of one agent over (S, N, ...); arguments `shared` are per lane, (S, ...)."""

    def mapped(*args: Any) -> Any:
        over_agents = [None if i in shared else 0 for i in range(len(args))]
        return jax.vmap(jax.vmap(f, in_axes=over_agents))(*args)

    return mapped


def where_lane(condition: Array, new: Any, old: Any) -> Any:
    """`new` in the lanes where the condition (S,) holds, `old` in the others."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(-1, *([1] * (a.ndim - 1))), a, b)

    return jax.tree.map(choose, new, old)


def split_keys(keys: Array, *shape: int) -> Array:
    """Keys (S,) to (S, *shape)."""
    return jax.vmap(lambda key: jax.random.split(key, shape))(keys)


def optimiser_for(config: Config) -> optax.GradientTransformation:
    s = config.settings
    if s.optimizer == "adam":
        optimiser = optax.adamw(s.learning_rate, b1=s.momentum, weight_decay=s.weight_decay)
    else:
        optimiser = optax.chain(
            optax.add_decayed_weights(s.weight_decay),
            optax.sgd(s.learning_rate, momentum=s.momentum),
        )
    if config.private or s.max_gradient_norm == 0:
        return optimiser
    return optax.chain(optax.clip_by_global_norm(s.max_gradient_norm), optimiser)


def exchange_for(config: Config, n_agents: int) -> Exchange | None:
    """The exchange of the algorithm; None for the central node, which exchanges nothing.

    With DP a message that does not fit saturates: stopping would tell of private data.
    """
    code = Code(config.settings.precision, config.settings.modulus).checked(n_agents)
    exchanges: dict[str, Exchange | None] = {
        "alone": alone,
        "broadcast": broadcast,
        "secret_shared": partial(secret_shared, code=code, saturating=config.private),
        "central": None,
    }
    return exchanges[config.exchange]


def release_for(config: Config) -> Release | None:
    """How gradients are released; None without differential privacy."""
    s = config.settings
    if not config.private:
        return None
    return Release(s.clip_norm, s.noise_multiplier, s.expected_batch_size)


def _wide() -> bool:
    """Whether width is nearly free and every step costs, as on a GPU."""
    return jax.default_backend() != "cpu"


def horizons_for(T: int) -> list[int]:
    """How many steps an update is compiled for; the last is all the world allows."""
    return [T] if T < 20 or _wide() else [-(-part * T // 12) for part in (4, 5, 8, 12)]


def part_for(config: Config) -> int:
    """Episodes of a minibatch that are learnt from side by side.

    On a CPU few, so that short episodes do not wait for long ones. On an accelerator all of
    them: three standard deviations more than expected, if their number varies.
    """
    s = config.settings
    if not _wide():
        return min(PART, s.expected_batch_size)
    spread = 3 * math.sqrt(s.expected_batch_size) if config.sampling == "poisson" else 0
    return min(s.buffer_size, math.ceil(s.expected_batch_size + spread))


def rates_for(s: Settings, updates: Array, env_steps: Array) -> Rates:
    """How far the update that follows after `updates` ones moves things, (...)."""
    made, share = updates + 1, 1.0 - s.learning_rate_end
    step = 1.0 - share * jnp.minimum(env_steps / s.learning_rate_steps, 1.0)
    target = jnp.full(made.shape, s.target_rate)
    average = 1.0 - jnp.minimum(s.average_decay, (1.0 + made) / (10.0 + made))
    return Rates(step, target, average)


def score_of(played: Played) -> Score:
    return Score(played.won.mean(1), played.total_reward.mean(1), played.length.mean(1))


class Simulation:
    """A world and a configuration, ready to run; all state is in `State`."""

    at_once = MOST  # iterations that one call of `advance` may make

    def __init__(
        self,
        world: World | ExternalWorld,
        config: Config,
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        self.world: Any = world
        self.config, self.options = config, options
        self.team = Team.of(world.agents)
        self.optimiser = optimiser_for(config)
        self.exchange = exchange_for(config, len(self.team))
        self.release = release_for(config)

    @property
    def settings(self) -> Settings:
        return self.config.settings

    @property
    def updates_due(self) -> int:
        """Updates that are due after one block of episodes."""
        return -(-self.settings.parallel_episodes // self.settings.update_every)

    @property
    def block(self) -> int:
        """Episodes played side by side: parallel_episodes, up to a multiple of update_every."""
        return self.updates_due * self.settings.update_every

    @property
    def horizons(self) -> list[int]:
        return horizons_for(self.world.max_steps)

    @property
    def part(self) -> int:
        return part_for(self.config)

    @property
    def host_bytes(self) -> int:
        """What is kept of episodes outside of the state."""
        return 0

    # ---- the three programs ---------------------------------------------------------------

    def start(self, origins: Array) -> State:
        """A fresh team for each lane (S,), from a seed or a key of its own."""
        s, (S,) = self.settings, origins.shape
        if not jnp.issubdtype(origins.dtype, jax.dtypes.prng_key):
            origins = jax.vmap(jax.random.key)(origins)
        keys = split_keys(origins, 2)
        learners, replays = [], []
        agent_keys = split_keys(keys[:, 1], len(self.team))
        for kind in self.team.kinds:
            sizes = (kind.spec.observation_size, kind.spec.n_actions)

            def begin(key: Array, spec: AgentSpec = kind.spec) -> Learner:
                params = networks.initialise(s.network, key, spec, s.hidden_size)
                return learning.begin(params, self.optimiser)

            # One lane after the other: large batches of orthogonal matrices hang on few cores.
            own_keys = agent_keys[:, jnp.array(kind.members)]
            learners.append(jax.lax.map(jax.vmap(begin), own_keys))
            rows = replay.empty(s.buffer_size, self.world.max_steps, *sizes)
            copies = (S, len(kind.members))
            replays.append(jax.tree.map(lambda x, c=copies: jnp.zeros(c + x.shape, x.dtype), rows))
        zeros = jnp.zeros(S, jnp.int32)
        return State(
            learners=tuple(learners),
            replays=tuple(replays),
            key=keys[:, 0],
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
        """Iterate each lane until it has made `until` environment steps, `most` times at most.

        A lane that is there first waits unchanged, so that what a lane does depends on its own
        seed alone, and so that calls of any length add up to the same run. No update is made that
        would take an episode's exposure above the lane's `limit` (S,); such a lane is exhausted.
        """

        def unfinished(carry: tuple[State, Array]) -> Array:
            state, done = carry
            return jnp.any(self._active(state, until)) & (done < most)

        def body(carry: tuple[State, Array]) -> tuple[State, Array]:
            state, done = carry
            return self._iteration(state, self._active(state, until), limit), done + 1

        return jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]

    def like(self) -> State:
        """The shapes and types of a state of this run."""
        state: State = jax.eval_shape(self.start, like_origins(self.config))
        return state

    @property
    def parameters(self) -> int:
        """Numbers that all agents of one lane learn."""
        learners = [learner.params for learner in self.like().learners]
        return sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(learners))

    def compile(self, jit: Callable[..., Any]) -> Callable[..., State]:
        """`advance`, compiled; the state that it is given is used up."""
        state = self.like()
        number, limit = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((), state.key.shape))
        given = (state, number, number, limit)
        program: Callable[..., State] = (
            jit(self.advance, *given, donate=(0,)).lower(*given).compile()
        )
        return program

    def evaluate(self, params: tuple[Parameters, ...], keys: Array) -> Score:
        """Greedy episodes for each lane, with keys (S,) that training never sees."""
        keys = split_keys(keys, self.settings.eval_episodes)
        played = self._play(params, keys, jnp.zeros(keys.shape[0]), record=False)
        return score_of(played)

    def prepare_evaluation(
        self, params: tuple[Parameters, ...], keys: Array, jit: Callable[..., Any]
    ) -> Callable[[], Callable[..., Score]]:
        """What compiles `evaluate` for arguments like these, in any thread."""
        found: Callable[[], Callable[..., Score]] = (
            jit(self.evaluate, params, keys).lower(params, keys).compile
        )
        return found

    def close(self) -> None:
        """Give back what a world outside of JAX holds."""

    def keep_anchor(self, state: State, win_rate: Array) -> State:
        """Where an evaluation (S,) of the average, or else of the parameters, beat the threshold:
        keep it as the anchor, raise the threshold."""
        better = win_rate > state.threshold
        learners = tuple(
            learner._replace(anchor=where_lane(better, learner.average, learner.anchor))
            for learner in state.learners
        )
        return state._replace(
            learners=learners,
            anchored=state.anchored | better,
            threshold=jnp.where(better, win_rate, state.threshold),
        )

    # ---- Algorithm 1 ----------------------------------------------------------------------

    def _active(self, state: State, until: Array) -> Array:
        return (state.env_steps < until) & (state.refused == 0) & ~state.exhausted

    def _iteration(self, state: State, active: Array, limit: Array | int) -> State:
        """RUN episodes, APPEND them, then the updates they call for; in the active lanes."""
        return self._absorb(state, *self._run(state), active, limit)

    def _absorb(
        self,
        state: State,
        played: Played,
        next_key: Array,
        update_keys: Array,
        active: Array,
        limit: Array | int,
    ) -> State:
        """What follows after a block of episodes was played."""
        state = self._append(state, played, active)
        state = state._replace(key=jnp.where(active, next_key, state.key))

        def update(state: State, keys: Array) -> tuple[State, None]:
            state, ready = self._due(state, keys, active, limit)
            return jax.lax.cond(jnp.any(ready), self._update, _skip, state, keys, ready), None

        return jax.lax.scan(update, state, update_keys)[0]

    def _run(self, state: State) -> tuple[Played, Array, Array]:
        """A block of episodes, the lanes' next keys, and keys (U, S, 4) for the U updates due."""
        next_key, episode_keys, update_keys, epsilon = self._draw(state.key, state.env_steps)
        params = tuple(learner.params for learner in state.learners)
        played = self._play(params, episode_keys, epsilon, record=True)
        return played, next_key, update_keys

    def _draw(self, keys: Array, env_steps: Array) -> tuple[Array, Array, Array, Array]:
        """The lanes' next keys, keys of a block (S, E) and of its updates (U, S, 4), and ε (S,)."""
        keys, s = split_keys(keys, 3), self.settings
        epsilon = acting.exploration(
            env_steps, s.exploration_start, s.exploration_end, s.exploration_steps
        )
        update_keys = jnp.swapaxes(split_keys(keys[:, 2], self.updates_due, 4), 0, 1)
        return keys[:, 0], split_keys(keys[:, 1], self.block), update_keys, epsilon

    def _due(
        self, state: State, keys: Array, active: Array, limit: Array | int
    ) -> tuple[State, Array]:
        """Which lanes (S,) make the update that is due; a lane may turn out to be exhausted."""
        ready = active & (state.episodes >= self.config.learning_starts) & (state.refused == 0)
        coin = jax.vmap(jax.random.uniform)(keys[:, 0])
        ready &= coin * self.settings.buffer_throughput < 1  # public: an update shows
        if self.config.private:
            exhausted = state.exhausted | (ready & (self._exposed(state) >= limit))
            state = state._replace(exhausted=exhausted)
            ready &= ~exhausted
        return state, ready

    def _play(
        self, params: tuple[Parameters, ...], keys: Array, epsilon: Array, record: bool
    ) -> Played:
        """E episodes in each lane, for keys (S, E), until the last one has ended."""
        S, E = keys.shape
        T, kinds = self.world.max_steps, self.team.kinds

        def everywhere(f: Callable[..., Any]) -> Callable[..., Any]:
            """Map over (S, E) as one axis: mapped once, a world compiles faster than twice."""

            def mapped(*args: Any) -> Any:
                flat = jax.tree.map(lambda x: x.reshape(S * E, *x.shape[2:]), args)
                return jax.tree.map(lambda x: x.reshape(S, E, *x.shape[1:]), jax.vmap(f)(*flat))

            return mapped

        first = everywhere(lambda key: _fold(key, T))(keys)
        world_state, step = everywhere(self.world.reset)(first)
        memories = tuple(
            networks.of(p).initial_memory(p, S, len(k.members), E)
            for k, p in zip(kinds, params, strict=True)
        )
        last = tuple(jnp.full((S, len(k.members), E), -1, jnp.int32) for k in kinds)
        recorded = tape.blank(self.team, T, S, E) if record else ()

        def going(carry: Any) -> Array:
            t, *_, alive = carry
            return (t < T) & jnp.any(alive)

        def body(carry: Any) -> Any:
            t, world_state, step, memories, last, recorded, length, total, won, alive = carry
            now = everywhere(lambda key: jax.random.split(_fold(key, t)))(keys)  # (S, E, 2)
            observations, available = self._views(step)
            memories, actions = self._act(
                params, memories, observations, available, last, now[..., 0], epsilon
            )
            joint = self.team.by_agent(actions, axis=1)
            world_state, after = everywhere(self.world.step)(now[..., 1], world_state, joint)
            reward = jnp.where(alive, after.reward, 0.0)
            if record:
                seen = self._views(after)
                ended = alive & after.done & ~after.truncated
                kept = learning.kept_reward(reward, self.settings.reward_cap)
                recorded = tape.write(recorded, t, seen, actions, kept, ended, alive)
            return (
                t + 1,
                world_state,
                after,
                memories,
                actions,
                recorded,
                length + alive,
                total + reward,
                won | (alive & after.done & after.won),
                alive & ~after.done,
            )

        if record:
            recorded = tape.write_first(recorded, self._views(step))
        none, nought = jnp.zeros((S, E), bool), jnp.zeros((S, E))
        score = (jnp.zeros((S, E), jnp.int32), nought, none, ~none)
        carry = (0, world_state, step, memories, last, recorded, *score)
        *_, recorded, length, total, won, _ = jax.lax.while_loop(going, body, carry)
        return Played(tape.as_episodes(recorded, length), length, total, won)

    def _act(
        self,
        params: tuple[Parameters, ...],
        memories: tuple[Array, ...],
        observations: tuple[Array, ...],
        available: tuple[Array, ...],
        last: tuple[Array, ...],
        keys: Array,
        epsilon: Array,
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Every agent's next memory and ε-greedy action, from what it alone has seen."""

        def one(
            theta: Parameters,
            memory: Array,
            seen: Array,
            open_: Array,
            last: Array,
            chance: Array,
            epsilon: Array,
        ) -> tuple[Array, Array]:
            memory, q = networks.of(theta).step(theta, memory, seen, last)
            return memory, acting.epsilon_greedy(chance, q, open_, epsilon)

        draw = partial(jax.random.uniform, shape=(len(self.team), 2))
        chances = jnp.swapaxes(jax.vmap(jax.vmap(draw))(keys), 1, 2)  # (S, N, E, 2)
        new_memories, actions = [], []
        for k, kind in enumerate(self.team.kinds):
            own = chances[:, jnp.array(kind.members)]
            memory, action = each_agent(one, 6)(
                params[k], memories[k], observations[k], available[k], last[k], own, epsilon
            )
            new_memories.append(memory)
            actions.append(action)
        return tuple(new_memories), tuple(actions)

    def _append(self, state: State, played: Played, active: Array) -> State:
        """APPEND each agent's own episodes to its own replay buffer, in the active lanes."""
        size = self.settings.buffer_size
        slots = jax.vmap(lambda n: replay.slots_for(n, self.block, size))(state.episodes)
        slots = jnp.where(active[:, None], slots, size)  # the scratch slot
        stored = jax.vmap(lambda row, slots, now: row.at[slots].set(now, mode="drop"))
        return state._replace(
            replays=tuple(
                each_agent(replay.store, 1)(rows, slots, new)
                for rows, new in zip(state.replays, played.episodes, strict=True)
            ),
            stored_at=stored(state.stored_at, slots, state.updates),
            env_steps=state.env_steps + jnp.where(active, played.length.sum(1), 0),
            episodes=state.episodes + jnp.where(active, self.block, 0),
        )

    def _update(self, state: State, keys: Array, ready: Array) -> State:
        """CHOOSE indices, compute every agent's gradient, and learn, where a lane is ready."""
        return self._improve(state, *self._gradients(state, keys), ready)

    def _improve(
        self, state: State, gradients: tuple[Parameters, ...], refused: Array, ready: Array
    ) -> State:
        """Learn from the gradients, where a lane is ready and no message was refused."""
        applied = ready & (refused == 0)
        s, rates = self.settings, rates_for(self.settings, state.updates, state.env_steps)
        pull = jnp.where(state.anchored, s.anchor_penalty, 0.0)

        def improve(learner: Learner, gradient: Parameters, rates: Rates, pull: Array) -> Learner:
            if s.anchor:
                gradient = learning.pull_to_anchor(gradient, learner, pull)
            return learning.improve(learner, gradient, self.optimiser, rates)

        learners = tuple(
            where_lane(applied, each_agent(improve, 2, 3)(learner, gradient, rates, pull), learner)
            for learner, gradient in zip(state.learners, gradients, strict=True)
        )
        state = state._replace(
            learners=learners,
            updates=state.updates + applied,
            refused=jnp.where(ready, jnp.maximum(state.refused, refused), state.refused),
        )
        return state._replace(exposure=jnp.maximum(state.exposure, self._exposed(state)))

    def _exposed(self, state: State) -> Array:
        """Updates made (S,) since the oldest episode now in the buffer was stored."""
        size = self.settings.buffer_size
        oldest = jnp.where(state.episodes > size, state.episodes % size, 0)
        return state.updates - jnp.take_along_axis(state.stored_at, oldest[:, None], 1)[:, 0]

    # ---- gradients ------------------------------------------------------------------------

    def _gradients(self, state: State, keys: Array) -> tuple[tuple[Parameters, ...], Array]:
        """Every agent's gradient by kind (S, N, ...), and the largest refused message (S,)."""
        chosen = self._choose(state, keys[:, 1])
        total, refused = self._minibatch(state, chosen, keys[:, 2])
        return self._release(total, keys[:, 3]), refused

    def _choose(self, state: State, keys: Array) -> Array:
        """The slots of a minibatch (S, B)."""
        s, size = self.settings, self.settings.buffer_size
        filled = jnp.minimum(state.episodes, size)
        if self.config.sampling == "uniform":
            choose = partial(indices.uniform, capacity=size, batch_size=s.expected_batch_size)
        else:
            choose = partial(indices.poisson, capacity=size, rate=self.config.sampling_rate)
        return jax.vmap(choose)(keys, filled)

    def _release(self, total: tuple[Parameters, ...], keys: Array) -> tuple[Parameters, ...]:
        """From the sum over a minibatch to the mean; if private, with noise."""
        release = self.release
        if release is None:
            return jax.tree.map(lambda g: g / self.settings.expected_batch_size, total)

        def noised(key: Array, summed: Parameters) -> Parameters:
            return release.mean(summed, partial(mechanism.words, key))

        noise_keys = split_keys(keys, len(self.team))
        return tuple(
            each_agent(noised)(noise_keys[:, jnp.array(kind.members)], summed)
            for kind, summed in zip(self.team.kinds, total, strict=True)
        )

    def _minibatch(
        self, state: State, chosen: Array, keys: Array
    ) -> tuple[tuple[Parameters, ...], Array]:
        """Sum over the chosen episodes (S, B) of every agent's gradient, by kind (S, N, ...).

        If private, each episode's is clipped, and sums are in whole units. Most episodes are far
        shorter than the world allows, and a sample may have any size: so they are worked off in
        parts, and no part takes more steps than its longest episode needs, to the next of the
        `horizons`.
        """
        scratch, n = self.settings.buffer_size, self.part
        lengths = state.replays[0].length[:, 0]  # (S, buffer_size + 1), the same for every agent
        chosen, parts = self._in_parts(chosen, lengths)
        learn = [partial(self._learn_from, steps=steps) for steps in self.horizons]

        def one_part(carry: Any) -> Any:
            part, total, refused = carry
            slots = jax.lax.dynamic_slice_in_dim(chosen, part * n, n, axis=1)
            played = jnp.take_along_axis(lengths, slots, axis=1)
            longest = jnp.max(jnp.where(slots == scratch, 0, played))
            which = jnp.searchsorted(jnp.array(self.horizons), longest)
            part_keys = jax.vmap(_fold, (0, None))(keys, part)
            more, worse = jax.lax.switch(
                which, learn, state.learners, state.replays, slots, part_keys
            )
            return part + 1, jax.tree.map(jnp.add, total, more), jnp.maximum(refused, worse)

        start = (jnp.int32(0), *self._nothing(state))
        _, total, refused = jax.lax.while_loop(lambda carry: carry[0] < parts, one_part, start)
        return total, refused

    def _nothing(self, state: State) -> tuple[tuple[Parameters, ...], Array]:
        """The sum over no episodes (if private in whole units), with no message refused."""
        kind = None if self.release is None else jnp.int32
        nothing = jax.tree.map(
            lambda x: jnp.zeros_like(x, kind), tuple(x.params for x in state.learners)
        )
        return nothing, jnp.zeros(state.key.shape)

    def _in_parts(self, chosen: Array, lengths: Array) -> tuple[Array, Array]:
        """The chosen slots (S, B) in parts, filled up with scratch, and how many parts.

        `lengths` (S, buffer_size + 1) are those of the stored episodes. Longest first, so that few
        steps are computed in vain; if private, by horizon: sampling one episode must not change
        how another's gradient is rounded.
        """
        scratch, n = self.settings.buffer_size, self.part
        if self.release is not None:
            return indices.by_horizon(chosen, lengths, self.horizons, n)
        chosen = jax.vmap(indices.longest_first)(chosen, lengths)
        chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % n)), constant_values=scratch)
        return chosen, -(-jnp.max(jnp.sum(chosen != scratch, axis=1)) // n)

    def _learn_from(
        self,
        learners: tuple[Learner, ...],
        replays: tuple[Episode, ...],
        slots: Array,
        keys: Array,
        steps: int,
    ) -> tuple[tuple[Parameters, ...], Array]:
        """The same for a few episodes (S, B) of which none is longer than `steps`."""
        fetch = each_agent(partial(replay.fetch, steps=steps), 1)
        batches = tuple(fetch(rows, slots) for rows in replays)
        return self._learn(learners, batches, slots == self.settings.buffer_size, keys)

    def _learn(
        self,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        padding: Array,
        keys: Array,
    ) -> tuple[tuple[Parameters, ...], Array]:
        """The same for fetched episodes by kind (S, N, T, B, ...); `padding` (S, B) is nobody's."""
        params = [learner.params for learner in learners]
        targets = [learner.target for learner in learners]
        s = self.settings
        if self.exchange is None:
            joint = partial(
                central.team_gradient, gamma=s.gamma, double_q=s.double_q, lam=s.return_lambda
            )
            return tuple(jax.vmap(joint)(params, targets, batches)), jnp.zeros(keys.shape)

        compute = partial(learning.message, gamma=s.gamma, double_q=s.double_q, lam=s.return_lambda)
        computed = [
            each_agent(compute)(*args) for args in zip(params, targets, batches, strict=True)
        ]
        messages = jnp.stack(self.team.by_agent([m for m, _ in computed], axis=1), axis=1)
        opened = jax.vmap(self.exchange)(keys, messages)  # the only line where agents meet
        totals = self.team.by_kind([opened.total[:, i] for i in range(len(self.team))], axis=1)

        def own(
            theta: Parameters, memo: Memo, total: Array, batch: Episode, padding: Array
        ) -> Parameters:
            rate = s.gamma * s.return_lambda
            if self.release is None:
                return learning.local_gradient(theta, memo, total, batch, rate)
            each = learning.local_gradient(theta, memo, total, batch, rate, by_episode=True)
            return self.release.clipped_sum(each, padding)

        return tuple(
            each_agent(own, 4)(theta, memo, total, batch, padding)
            for theta, (_, memo), total, batch in zip(
                params, computed, totals, batches, strict=True
            )
        ), opened.refused

    def _views(self, step: Step) -> tape.Views:
        """Observations and available actions by kind, (S, N, E, ...)."""
        return (
            self.team.by_kind(step.observations, axis=1),
            self.team.by_kind(step.available, axis=1),
        )


def _fold(key: Array, number: Array | int) -> Array:
    return jax.random.fold_in(key, number)


def _skip(state: State, keys: Array, ready: Array) -> State:
    return state
