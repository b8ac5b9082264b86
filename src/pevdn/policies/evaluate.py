"""Evaluate a trained team on greedy episodes, with confidence intervals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pevdn._platform import cache_compilations
from pevdn.agent.keys import AFTER_TRAINING
from pevdn.config.settings import MOST, number
from pevdn.policies.policy import as_run, team_parameters
from pevdn.simulation.program import Simulation
from pevdn.training import world as environment
from pevdn.training.directory import Run
from pevdn.training.evaluator import evaluation_keys


def wilson(successes: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson's score)."""
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2)) / (1 + z * z / trials)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def evaluate(
    run: Run | str | Path,
    *,
    env: Any = None,
    episodes: int = 128,
    seed: int = 0,
    model: str = "best",
) -> list[dict[str, Any]]:
    """Return one row per seed of the run; `seed` selects the episodes, the same for all models.

    A run in an environment object needs it again, as `env`.
    """

    episodes = number("episodes", episodes, int, 1, MOST)
    seed = number("seed", seed, int, 0, MOST)
    cache_compilations()
    run = as_run(run)
    config = run.config
    world = environment.again(run, env)
    params, _ = team_parameters(run, model)
    settings = dataclasses.replace(config.settings, eval_episodes=episodes)
    simulation = Simulation(world, dataclasses.replace(config, settings=settings), run.options)
    keys = evaluation_keys(jnp.full(config.seeds, seed), AFTER_TRAINING)
    try:
        play = simulation.compile_evaluation(params, keys, lambda f, *_: jax.jit(f))()
        score = play(params, keys)
    finally:
        simulation.close()
    rows = []
    for lane in range(config.seeds):
        rate = float(score.win_rate[lane])
        low, high = wilson(rate * episodes, episodes)
        rows.append(
            {
                "seed": config.seed + lane,
                "win_rate": rate,
                "win_rate_low": low,
                "win_rate_high": high,
                "return": float(score.total_reward[lane]),
                "episode_length": float(score.length[lane]),
            }
        )
    return rows
