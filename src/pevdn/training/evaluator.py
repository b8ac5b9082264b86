"""Evaluations of a training: greedy episodes for every model, the anchor, and metrics lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.agent import evaluation
from pevdn.agent.keys import of_evaluation
from pevdn.privacy.accounting import Spent
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State
from pevdn.training.metrics import Line


@jax.jit
def evaluation_keys(seeds: Array, number: int) -> Array:
    """Return the keys (S,) of an evaluation, which depend on seed and number alone."""
    return jax.vmap(of_evaluation, (0, None))(seeds, number)


class Evaluator:
    """Evaluates all lanes of a simulation; `seeds` (S,) are those of the lanes."""

    def __init__(self, simulation: Simulation, seeds: Array, jit: Callable[..., Any]) -> None:
        self.settings, self.seeds = simulation.settings, seeds
        state = simulation.like()
        keys = jax.eval_shape(jax.vmap(jax.random.key), seeds)
        self._compile = simulation.compile_evaluation(state.params, keys, jit)
        self._keep_anchor = jit(simulation.keep_anchor, state, seeds)

    def compile(self) -> None:
        """Compile the evaluation, in any thread; call once before the first evaluation."""
        self._evaluate = self._compile()

    def __call__(
        self, state: State, number: int, spent: Sequence[Spent] | None = None
    ) -> tuple[State, list[Line]]:
        """Make evaluation `number`; return the state, with a new anchor where due, and the lines.

        `spent` is the privacy that each lane has spent.
        """
        s, scores = self.settings, dict[str, Any]()
        for model in evaluation.models(s):
            if model == "anchor":
                win_rate = scores[evaluation.candidate(s)].win_rate
                state = self._keep_anchor(state, win_rate)
            params = tuple(getattr(learner, model) for learner in state.learners)
            keys = evaluation_keys(self.seeds, evaluation.key_number(number, model))
            scores[model] = self._evaluate(params, keys)
        return state, self._lines(state, jax.device_get(scores), spent)

    def _lines(
        self, state: State, scores: dict[str, Any], spent: Sequence[Spent] | None
    ) -> list[Line]:
        """Return a line for each lane, from the scores (S,) of each model."""
        public = state._replace(learners=(), replays=(), key=jnp.zeros(()))
        counters = jax.device_get(public)._asdict()
        lines = []
        for lane, seed in enumerate(self.seeds.tolist()):
            own = {
                model: evaluation.Score(*(x[lane] for x in score))
                if model != "anchor" or counters["anchored"][lane]
                else None
                for model, score in scores.items()
            }
            counted = {name: counters[name][lane] for name in ("env_steps", "episodes", "updates")}
            privacy = None if spent is None else spent[lane]._asdict()
            lines.append(evaluation.metrics_line(seed, counted, own, privacy))
        return lines
