"""One update of a whole team: sample, message, exchange, gradient, release, improve.

Agents are an array axis here (one per kind, see `team`), and so are lanes. Agent code is mapped
over both and sees neither. `TeamUpdate._totals` has the only line where agents meet; if openings
are noised, `TeamUpdate.form_sum` has it, and each agent then learns alone from its own sample.

Shapes: S lanes, N agents (of one kind), T steps, B minibatch. Arrays of agents are (S, N, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent import keys as derive
from pevdn.agent import learning, minibatch, schedule
from pevdn.agent.learning import Learner
from pevdn.agent.networks import Parameters
from pevdn.agent.program import BY_LANE, AgentProgram
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.config.settings import Settings
from pevdn.exchange import Exchange, central
from pevdn.exchange.alone import alone
from pevdn.exchange.broadcast import broadcast
from pevdn.exchange.secret_shared import Code, secret_shared, sum_shares
from pevdn.privacy import mechanism
from pevdn.privacy.mechanism import NoisedOpening, SubsampledGaussian, release_for
from pevdn.simulation.state import State, Sums, each_agent, where_lane
from pevdn.simulation.team import TeamLayout
from pevdn.worlds.interface import AgentSpec


def exchange_for(config: Config, n_agents: int) -> Exchange | None:
    """Return the exchange of the algorithm; None for the central node, which exchanges nothing.

    With DP a message that does not fit saturates: stopping would reveal private data.
    """
    code = Code(config.settings.precision, config.settings.modulus).checked(n_agents)
    exchanges: dict[str, Exchange | None] = {
        "alone": alone,
        "broadcast": broadcast,
        "secret_shared": partial(secret_shared, code=code, saturating=config.private),
        "central": None,
        "noised": alone,  # agents met when the episode was opened (`TeamUpdate.form_sum`)
    }
    return exchanges[config.exchange]


class TeamUpdate:
    """How a team learns from its stored episodes.

    `lane_settings`, one mapping per seed of the configuration, overrides settings by lane; only
    numbers that no shape depends on may differ (`agent.program.BY_LANE`).
    """

    replay: Any  # where episodes are kept: `replays.DeviceReplay` or `HostReplay`

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        max_steps: int,
        config: Config,
        lane_settings: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self.config, self.team = config, TeamLayout.of(agents)
        self.exchange = exchange_for(config, len(self.team))
        self.by_lane = _by_lane(lane_settings, config)
        self.release: Any = release_for(config)
        if config.private and "noise_multiplier" in self.by_lane:
            noises = [float(x) for x in self.by_lane["noise_multiplier"] if x > 0]
            self.release = SubsampledGaussian.of(config.settings, min(noises, default=0.0))
        self.opening = self._opening() if config.noised else None
        self.program = AgentProgram.of(config, self.release, self.opening)
        self.horizons = minibatch.horizons(max_steps)
        self.part = minibatch.part_size(config)

    def _opening(self) -> NoisedOpening:
        noises = [float(x) for x in self.by_lane.get("opening_noise", ()) if x > 0]
        return NoisedOpening.of(self.settings, len(self.team), min(noises, default=None))

    @property
    def settings(self) -> Settings:
        return self.config.settings

    def update(self, state: State, keys: Array, ready: Array) -> State:
        """CHOOSE episodes, compute every agent's gradient, and learn, where a lane is ready."""
        return self._improve(state, *self.gradients(state, keys), ready)

    def gradients(self, state: State, keys: Array) -> tuple[tuple[Parameters, ...], Array]:
        """Return the released gradients (S, N, ...) and the largest refused message (S,)."""
        slots = self.sample(state, keys)
        total, refused = self.sum_minibatch(state, slots, keys)
        return self._release(total, keys), refused

    def open(self, state: State, slots: Array, keys: tuple[Array, Array]) -> State:
        """Open the team errors of the episodes in slots (S, E), with noise inside the sum.

        Each agent stores what it opened in its own replay; keys (S,) are for shares and noise.
        """
        batches = self.replay.fetch(state, slots, self.horizons[-1])
        return self.replay.store_opened(state, slots, self.opened(state.learners, batches, *keys))

    def opened(
        self,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        share_keys: Array,
        noise_keys: Array,
    ) -> tuple[Array, ...]:
        """Return what each agent stores of an opening of episodes, by kind (S, N, T, E)."""
        assert self.opening is not None
        own_keys = jax.vmap(partial(derive.of_agents, agents=len(self.team)))(noise_keys)

        def offer(key: Array, theta: Any, target: Any, batch: Episode, lane: Any) -> Any:
            words = mechanism.words(key, *batch.rewards.shape)
            program = self.program.vary(lane)
            offered, own = program.offer(theta, target, batch, words)
            return program.opening.encode(offered), own

        def keep(total: Array, own: Array, batch: Episode, lane: Any) -> Array:
            return self.program.vary(lane).opened(total, own, batch)

        offers = [
            each_agent(offer, 4)(
                own_keys[:, jnp.array(kind.members)],
                learner.params,
                learner.target,
                batch,
                self.by_lane,
            )
            for kind, learner, batch in zip(self.team.kinds, learners, batches, strict=True)
        ]
        words = jnp.stack(self.team.by_agent([w for w, _ in offers], axis=1), axis=1)
        total = self.form_sum(share_keys, words)
        return tuple(
            each_agent(keep, 0, 3)(total, own, batch, self.by_lane)
            for (_, own), batch in zip(offers, batches, strict=True)
        )

    def form_sum(self, keys: Array, words: Array) -> Array:
        """Return the sums modulo p (S, T, E) of all agents' words (S, N, T, E), opened to all."""
        assert self.opening is not None
        form = partial(sum_shares, modulus=self.opening.modulus)
        return jax.vmap(form)(keys, words)  # the only line where agents meet

    def sample(self, state: State, keys: Array) -> Array:
        """CHOOSE the slots of a minibatch (S, B); of each agent's own one (S, N, B) if noised."""
        size = self.settings.buffer_size
        filled = schedule.filled(state.episodes, size)

        def draw(key: Array, filled: Array) -> Array:
            return self.release.sample(jax.random.bits(key, (size,), jnp.uint32), filled)

        if not self.config.noised:
            return jax.vmap(draw)(keys[:, derive.MINIBATCH], filled)
        of_agents = partial(derive.of_agents, agents=len(self.team))
        own_keys = jax.vmap(of_agents)(keys[:, derive.MINIBATCH])
        return each_agent(draw, 1)(own_keys, filled)

    def sum_minibatch(self, state: State, slots: Array, keys: Array) -> Sums:
        """Sum every agent's gradients over the episodes in slots, part by part.

        Slots are (S, B), or (S, N, B) if each agent has its own sample.
        """
        lengths, P = self.replay.lengths(state), self.part
        slots, parts = self._in_parts(slots, lengths)
        lengths = lengths.reshape(len(lengths), *([1] * (slots.ndim - 2)), -1)

        def sum_part(slots: Array, part: Array, steps: int) -> Sums:
            batches = self.replay.fetch(state, slots, steps)
            padding = slots == self.settings.buffer_size
            return self._sum_part(state.learners, batches, padding, keys, part)

        horizons = [partial(sum_part, steps=steps) for steps in self.horizons]

        def add(carry: tuple[Array, Sums]) -> tuple[Array, Sums]:
            part, sums = carry
            own = jax.lax.dynamic_slice_in_dim(slots, part * P, P, axis=-1)
            played = jnp.take_along_axis(lengths, own, axis=-1)
            longest = jnp.max(jnp.where(own == self.settings.buffer_size, 0, played))
            which = jnp.searchsorted(jnp.array(self.horizons), longest)
            return part + 1, _add(sums, jax.lax.switch(which, horizons, own, part))

        start = (jnp.int32(0), self.no_sums(state))
        return jax.lax.while_loop(lambda carry: carry[0] < parts, add, start)[1]

    def _in_parts(self, slots: Array, lengths: Array) -> tuple[Array, Array]:
        private = self.config.private
        if slots.ndim == 2:
            return minibatch.in_parts(slots, lengths, self.horizons, self.part, private)
        S, N, B = slots.shape
        flat, lengths = slots.reshape(S * N, B), jnp.repeat(lengths, N, axis=0)
        flat, parts = minibatch.in_parts(flat, lengths, self.horizons, self.part, private)
        return flat.reshape(S, N, -1), parts

    def no_sums(self, state: State) -> Sums:
        """Return the sums over no episodes, with no message refused."""
        return self.release.zeros(state.params), jnp.zeros(state.key.shape)

    def _sum_part(
        self,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        padding: Array,
        keys: Array,
        part: Array,
    ) -> Sums:
        """Sum every agent's gradients over one part of a minibatch."""
        shares = jax.vmap(jax.random.fold_in, (0, None))(keys[:, derive.SHARES], part)
        return self.sum_batch(learners, batches, padding, shares)

    def sum_batch(
        self,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        padding: Array,
        keys: Array,
    ) -> Sums:
        """Sum every agent's gradients over episodes by kind (S, N, T, B, ...).

        `padding` marks empty slots, (S, B) or by agent (S, N, B); keys (S,) are for the shares.
        """
        params = [learner.params for learner in learners]
        targets = [learner.target for learner in learners]
        if self.exchange is None:
            joint = jax.vmap(self._central)(params, targets, batches, self.by_lane)
            return tuple(joint), jnp.zeros(keys.shape)

        def message(theta: Any, target: Any, batch: Episode, lane: Any) -> Any:
            return self.program.vary(lane).message(theta, target, batch)

        def gradient(theta: Any, memo: Any, total: Array, batch: Any, *of_lane: Any) -> Any:
            padding, lane = of_lane
            return self.program.vary(lane).gradient(theta, memo, total, batch, padding)

        computed = [
            each_agent(message, 3)(*own, self.by_lane)
            for own in zip(params, targets, batches, strict=True)
        ]
        totals, refused = self._totals([m for m, _ in computed], keys)
        paddings = jnp.broadcast_to(
            padding.reshape(len(padding), -1, padding.shape[-1]),
            (len(padding), len(self.team), padding.shape[-1]),
        )
        return tuple(
            each_agent(gradient, 5)(
                theta, memo, total, batch, paddings[:, jnp.array(kind.members)], self.by_lane
            )
            for kind, theta, (_, memo), total, batch in zip(
                self.team.kinds, params, computed, totals, batches, strict=True
            )
        ), refused

    def _totals(self, messages: list[Array], keys: Array) -> tuple[Sequence[Array], Array]:
        """Return what each agent learns from, by kind (S, N, T, B), and the refused messages."""
        if self.exchange is alone:  # its own message: nothing is sent
            return messages, jnp.zeros(keys.shape)
        assert self.exchange is not None
        sent = jnp.stack(self.team.by_agent(messages, axis=1), axis=1)
        opened = jax.vmap(self.exchange)(keys, sent)  # the only line where agents meet
        by_agent = [opened.total[:, i] for i in range(len(self.team))]
        return self.team.by_kind(by_agent, axis=1), opened.refused

    def _central(self, params: Any, targets: Any, batches: Any, lane: Mapping[str, Any]) -> Any:
        s = self.program.vary(lane).settings
        if not s.bootstrap_timeouts:
            batches = [jax.vmap(learning.end_by_clock)(batch) for batch in batches]
        return central.team_gradient(
            params, targets, batches, gamma=s.gamma, double_q=s.double_q, lam=s.return_lambda
        )

    def _release(self, total: tuple[Parameters, ...], keys: Array) -> tuple[Parameters, ...]:
        """Turn sums over a minibatch into the gradients to learn from; if private, add noise."""

        def mean(key: Array, total: Parameters, lane: Mapping[str, Any]) -> Parameters:
            release = self.program.vary(lane).release
            found: Parameters = release.mean(total, partial(mechanism.words, key))
            return found

        of_agents = partial(derive.of_agents, agents=len(self.team))
        noise_keys = jax.vmap(of_agents)(keys[:, derive.NOISE])
        return tuple(
            each_agent(mean, 2)(noise_keys[:, jnp.array(kind.members)], own, self.by_lane)
            for kind, own in zip(self.team.kinds, total, strict=True)
        )

    def _improve(
        self, state: State, gradients: tuple[Parameters, ...], refused: Array, ready: Array
    ) -> State:
        """UPDATE parameters, where a lane is ready and no message was refused."""
        applied = ready & (refused == 0)

        def update(learner: Learner, gradient: Parameters, *of_lane: Any) -> Learner:
            *counters, lane = of_lane
            return self.program.vary(lane).update(learner, gradient, *counters)

        counters = (state.updates, state.env_steps, state.anchored, self.by_lane)
        learners = tuple(
            where_lane(applied, each_agent(update, 2, 3, 4, 5)(*own, *counters), own[0])
            for own in zip(state.learners, gradients, strict=True)
        )
        state = state._replace(
            learners=learners,
            updates=state.updates + applied,
            refused=jnp.where(ready, jnp.maximum(state.refused, refused), state.refused),
        )
        return state._replace(exposure=jnp.maximum(state.exposure, self._exposed(state)))

    def _exposed(self, state: State) -> Array:
        """Return the updates made (S,) since the oldest episode in the buffer was stored."""
        exposure = partial(schedule.exposure, buffer_size=self.settings.buffer_size)
        return jax.vmap(exposure)(state.updates, state.episodes, state.stored_at)

    # ---- steps of an update that a host calls ------------------------------------------------

    def add_part(
        self,
        sums: Sums,
        learners: tuple[Learner, ...],
        batches: tuple[Episode, ...],
        padding: Array,
        keys: Array,
        part: Array,
    ) -> Sums:
        """Return the sums with one more part of the minibatch added."""
        return _add(sums, self._sum_part(learners, batches, padding, keys, part))

    def finish(self, state: State, sums: Sums, keys: Array, ready: Array) -> State:
        """Release the sums and UPDATE."""
        total, refused = sums
        return self._improve(state, self._release(total, keys), refused, ready)


def _add(sums: Sums, more: Sums) -> Sums:
    """Add two sums; keep the larger refused message."""
    return jax.tree.map(jnp.add, sums[0], more[0]), jnp.maximum(sums[1], more[1])


def _by_lane(lane_settings: Sequence[Mapping[str, float]], config: Config) -> dict[str, Array]:
    """Return the settings that differ by lane, as arrays (S,)."""
    names = {name for own in lane_settings for name in own}
    assert names <= set(BY_LANE), f"{names} must be in BY_LANE"
    assert not lane_settings or len(lane_settings) == config.seeds
    return {
        name: jnp.array([own.get(name, getattr(config.settings, name)) for own in lane_settings])
        for name in sorted(names)
    }
