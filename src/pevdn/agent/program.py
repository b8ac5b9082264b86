"""One agent's program: act, message, gradient, update. Both runtimes call it.

The simulation maps it over the agents of a team and over lanes; a party compiles it for itself.
Every argument is the agent's own or public. `release` (privacy/mechanism.py) turns gradients into
the gradient to learn from.

Shapes: ... any batch axes, T steps, B episodes, O observation, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pevdn.agent import acting, learning, networks
from pevdn.agent.learning import Learner, Memo, Rates
from pevdn.agent.networks import Parameters
from pevdn.agent.replay import Episode
from pevdn.config.experiment import Config
from pevdn.config.settings import Settings
from pevdn.worlds.interface import AgentSpec

# Settings that may differ by lane: numbers that no shape and no branch of the program depends on.
BY_LANE = (
    "gamma",
    "learning_rate",
    "momentum",
    "weight_decay",
    "target_rate",
    "return_lambda",
    "reward_cap",
    "learning_rate_end",
    "learning_rate_steps",
    "average_decay",
    "exploration_start",
    "exploration_end",
    "exploration_steps",
    "noise_multiplier",
    "clip_norm",
    "message_norm",
    "opening_noise",
    "anchor_penalty",
)


@dataclass(frozen=True)
class AgentProgram:
    """What one agent computes, for one set of settings."""

    settings: Settings
    release: Any  # privacy.mechanism.Release
    opening: Any = None  # privacy.mechanism.NoisedOpening, if openings are noised

    @classmethod
    def of(cls, config: Config, release: Any, opening: Any = None) -> AgentProgram:
        s = config.settings
        if config.private:  # already clipped by episode
            s = dataclasses.replace(s, max_gradient_norm=0.0)
        return cls(s, release, opening)

    def vary(self, lane: Mapping[str, Any]) -> AgentProgram:
        """Return this program with the settings of one lane, which may be traced numbers."""
        if not lane:
            return self

        def varied(mechanism: Any) -> Any:
            own = {k: v for k, v in lane.items() if hasattr(mechanism, k)}
            return dataclasses.replace(mechanism, **own) if own else mechanism

        settings = dataclasses.replace(self.settings, **lane)
        return AgentProgram(settings, varied(self.release), varied(self.opening))

    # ---- begin and act -----------------------------------------------------------------------

    def begin(self, key: Array, spec: AgentSpec) -> Learner:
        """Return a fresh agent."""
        s = self.settings
        params = networks.initialise(s.network, key, spec, s.hidden_size)
        return learning.begin(params, self._optimiser())

    def exploration(self, env_steps: Array) -> Array:
        """Return ε of ε-greedy after `env_steps` environment steps."""
        s = self.settings
        return acting.exploration(
            env_steps, s.exploration_start, s.exploration_end, s.exploration_steps
        )

    def act(
        self,
        params: Parameters,
        memory: Array,
        seen: Array,
        available: Array,
        last: Array,
        chance: Array,
        epsilon: Array,
    ) -> tuple[Array, Array]:
        """Return the next memory and an ε-greedy action (...) for an observation (..., O).

        `last` is the previous action, −1 at first; `chance` (..., 2) is uniform on [0, 1).
        """
        memory, q = networks.of(params).step(params, memory, seen, last)
        return memory, acting.epsilon_greedy(chance, q, available, epsilon)

    def stored_reward(self, reward: Array) -> Array:
        """Return the team's reward for a step as an agent stores it."""
        return learning.capped_reward(reward, self.settings.reward_cap)

    # ---- update ------------------------------------------------------------------------------

    def message(self, params: Parameters, target: Parameters, batch: Episode) -> tuple[Array, Memo]:
        """COMPUTE m_i (T, B); also return what `gradient` needs once the sum is opened."""
        s = self.settings
        if not s.bootstrap_timeouts:
            batch = learning.end_by_clock(batch)
        return learning.message(params, target, batch, s.gamma, s.double_q, s.return_lambda)

    def share_of_error(self, params: Parameters, target: Parameters, batch: Episode) -> Array:
        """Return the agent's share of the team error (T, B): m_i centred by the public reward.

        The shares of all agents add up to the team error. A share is several times smaller than
        m_i, so it can be clipped to a smaller norm. That of an empty record is 0.
        """
        message, _ = self.message(params, target, batch)
        return message + self._share_of_rewards(batch)

    def _share_of_rewards(self, batch: Episode) -> Array:
        rate = self.settings.gamma * self.settings.return_lambda
        return learning.team_rewards(batch, rate) / self.opening.n_agents

    def offer(
        self, params: Parameters, target: Parameters, batch: Episode, words: Array
    ) -> tuple[Array, Array]:
        """Return what the agent enters into an opening (T, B), and what it later subtracts.

        Both are in whole units. `words` (T, B, 4, 4) are uniform: noise covers every step.
        """
        shares = self.share_of_error(params, target, batch)
        own = jax.vmap(self.opening.clip, 1, 1)(shares)
        offered = own + self.opening.noise(words)
        return offered, offered if self.opening.removes_own_noise else own

    def opened(self, total: Array, own: Array, batch: Episode) -> Array:
        """Return what the agent stores of an opened sum (T, B): the team error without its m_i."""
        others = self.opening.others(total, own)
        return (others + self._share_of_rewards(batch)) * learning.valid(batch)

    def gradient(
        self, params: Parameters, memo: Memo, total: Array, batch: Episode, padding: Array
    ) -> Parameters:
        """Return the sum of this agent's gradients over a part, given the sum of messages (T, B).

        If private, each episode's gradient is clipped and the sum is in whole units. If openings
        are noised, `total` is the agent's own message, and what was opened stands for the rest.
        """
        if batch.opened is None:
            rate = self.settings.gamma * self.settings.return_lambda
            error = learning.team_error(total, batch, rate)
        else:
            error = (batch.opened + total) * learning.valid(batch)
        gradients = learning.local_gradient(
            params, memo, error, batch, by_episode=self.release.by_episode
        )
        found: Parameters = self.release.total(gradients, padding)
        return found

    def update(
        self,
        learner: Learner,
        gradient: Parameters,
        updates: Array,
        env_steps: Array,
        anchored: Array,
    ) -> Learner:
        """UPDATE parameters, target network and average with a released gradient.

        `updates` and `env_steps` are the counts before this update.
        """
        s = self.settings
        if s.anchor:
            pull = jnp.where(anchored, s.anchor_penalty, 0.0)
            gradient = learning.pull_to_anchor(gradient, learner, pull)
        return learning.improve(
            learner, gradient, self._optimiser(), self._rates(updates, env_steps)
        )

    def _rates(self, updates: Array, env_steps: Array) -> Rates:
        s, made = self.settings, updates + 1
        share = 1.0 - s.learning_rate_end
        step = 1.0 - share * jnp.minimum(env_steps / s.learning_rate_steps, 1.0)
        average = 1.0 - jnp.minimum(s.average_decay, (1.0 + made) / (10.0 + made))
        return Rates(step, jnp.asarray(s.target_rate, jnp.float32), average)

    def _optimiser(self) -> optax.GradientTransformation:
        s = self.settings
        if s.optimizer == "adam":
            optimiser = optax.adamw(s.learning_rate, b1=s.momentum, weight_decay=s.weight_decay)
        else:
            optimiser = optax.chain(
                optax.add_decayed_weights(s.weight_decay),
                optax.sgd(s.learning_rate, momentum=s.momentum),
            )
        if s.max_gradient_norm == 0:
            return optimiser
        return optax.chain(optax.clip_by_global_norm(s.max_gradient_norm), optimiser)
