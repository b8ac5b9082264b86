"""Two tiny games with known optima, to test what a team can and cannot learn."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.errors import UsageError
from pevdn.worlds.base import AgentSpec, Step


class CoordinationState(NamedTuple):
    cues: Array  # (N,) int32, agent i's in [0, K_i)
    t: Array  # () int32, steps played
    earned: Array  # () float, the return so far


class Coordination:
    """Each agent recalls a private cue: an additive value with memory is necessary and sufficient.

    Agent i observes one of K_i equally likely cues (K_i is 2, 3, 2, 3, …, so that agents differ)
    and can wait (action 0) or name cue k (action k + 1). An observation is the cue, one-hot,
    followed by the step, one-hot.

    | step | observed      | available | reward                                   |
    |------|---------------|-----------|------------------------------------------|
    | 0    | cue and step  | all       | 0                                        |
    | 1    | step          | wait      | 0                                        |
    | 2    | step          | name      | 1 for each agent that names its own cue  |

    An unavailable action costs 1, so that ignoring the mask lowers the return.

    `optimum` is N: the reward has one term per agent, and memory makes each term 1.
    `best_memoryless` is Σ 1/K_i: at step 2 the observation does not depend on the cue, so any
    answer of agent i, random or not, is right with probability 1/K_i. Observing the last action
    does not help, because all agents wait at step 1.
    """

    def __init__(self, n_agents: int = 2) -> None:
        if n_agents < 1:
            raise UsageError(f"toy:coordination needs at least 1 agent, not {n_agents}")
        self.name = "toy:coordination"
        self.max_steps = 3
        self.cue_counts = tuple(2 + i % 2 for i in range(n_agents))  # K_i
        self.agents = tuple(AgentSpec(k + self.max_steps, k + 1) for k in self.cue_counts)
        self.optimum = float(n_agents)
        self.best_memoryless = sum(1 / k for k in self.cue_counts)

    def reset(self, key: Array) -> tuple[CoordinationState, Step]:
        cues = jax.random.randint(key, (len(self.agents),), 0, jnp.array(self.cue_counts))
        state = CoordinationState(cues, jnp.zeros((), jnp.int32), jnp.zeros(()))
        return state, self._result(state, jnp.zeros(()))

    def step(
        self, key: Array, state: CoordinationState, actions: tuple[Array, ...]
    ) -> tuple[CoordinationState, Step]:
        taken = jnp.stack(actions).astype(jnp.int32)  # (N,)
        masks = self._masks(state.t)
        allowed = jnp.stack([m[a] for m, a in zip(masks, taken, strict=True)])  # (N,)
        last = state.t == self.max_steps - 1
        right = last & (taken == state.cues + 1)  # (N,)
        reward = jnp.sum(jnp.where(allowed, right.astype(float), -1.0))
        state = CoordinationState(state.cues, state.t + 1, state.earned + reward)
        return state, self._result(state, reward)

    def _result(self, state: CoordinationState, reward: Array) -> Step:
        clock = jax.nn.one_hot(state.t, self.max_steps)
        cues = [
            jnp.where(state.t == 0, jax.nn.one_hot(cue, k), 0.0)
            for cue, k in zip(state.cues, self.cue_counts, strict=True)
        ]
        done = state.t >= self.max_steps
        return Step(
            observations=tuple(jnp.concatenate([cue, clock]) for cue in cues),
            available=self._masks(state.t),
            reward=reward,
            done=done,
            truncated=jnp.zeros((), bool),  # the last step is a rule of the game
            won=done & (state.earned >= self.optimum),
        )

    def _masks(self, t: Array) -> tuple[Array, ...]:
        """Return each agent's available actions at step `t`; after the end, only wait."""
        may_wait, may_name = t != self.max_steps - 1, (t == 0) | (t == self.max_steps - 1)
        return tuple(jnp.where(jnp.arange(k + 1) == 0, may_wait, may_name) for k in self.cue_counts)


START, GAME_A, GAME_B, END = range(4)
PAYOFFS = (  # (game A or B, action of agent 0, action of agent 1)
    ((7.0, 7.0), (7.0, 7.0)),
    ((0.0, 1.0), (1.0, 8.0)),
)


class TwoStep:
    """The two-step game of Rashid et al., "QMIX" (2018), which an additive value cannot represent.

    The first action of agent 0 selects game A or B, which both agents observe. The second joint
    action is rewarded by that game's matrix. `optimum` is 8, in game B. The best additive fit of B
    under uniform play is [[-1.5, 2.5], [2.5, 6.5]], which values B at 6.5: a team with an additive
    value takes the `additive_optimum` of 7 in game A.
    """

    def __init__(self) -> None:
        self.name = "toy:two-step"
        self.max_steps = 2
        self.agents: tuple[AgentSpec, ...] = (AgentSpec(3, 2), AgentSpec(3, 2))
        self.optimum = 8.0
        self.additive_optimum = 7.0

    def reset(self, key: Array) -> tuple[Array, Step]:
        state = jnp.full((), START, jnp.int32)
        return state, self._result(state, jnp.zeros(()))

    def step(self, key: Array, state: Array, actions: tuple[Array, ...]) -> tuple[Array, Step]:
        first, second = actions
        starting = state == START
        payoff = jnp.array(PAYOFFS)[state - GAME_A, first, second]
        reward = jnp.where(starting, 0.0, payoff)
        state = jnp.where(starting, GAME_A + first, END).astype(jnp.int32)
        return state, self._result(state, reward)

    def _result(self, state: Array, reward: Array) -> Step:
        observation = jax.nn.one_hot(state, 3)  # zeros at the end
        available = jnp.ones((2,), bool)
        done = state == END
        return Step(
            observations=(observation, observation),
            available=(available, available),
            reward=reward,
            done=done,
            truncated=jnp.zeros((), bool),
            won=done & (reward >= self.optimum),
        )
