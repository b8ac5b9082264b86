"""Recipes with a name: what to train with for a given budget of privacy.

A preset is a starting point, nothing that a run remembers: its settings go into config.yaml like
any others, and what is set beside it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pevdn.errors import UsageError, unknown
from pevdn.experiment import config
from pevdn.experiment.config import Config

STEPS = 400_000  # of the paper's experiment


@dataclass(frozen=True)
class Preset:
    """Settings that keep ε of the `view` within `epsilon`, for three agents."""

    name: str
    algorithm: str
    view: str
    epsilon: float
    steps: int
    settings: Mapping[str, Any]
    about: str


DELTA = 4.88e-4  # the paper's: 1024 episodes to the power of −1.1


def _private(name: str, view: str, epsilon: float, noise: float, about: str) -> Preset:
    """The defaults of pe-vdn-c, which are for these steps, with noise for the budget."""
    settings = {"noise_multiplier": noise, "delta": DELTA}
    return Preset(name, "pe-vdn-c", view, epsilon, STEPS, settings, about)


def _long(name: str, view: str, noise: float, about: str, anchor: bool) -> Preset:
    """Eight times the buffer at twice the batch: every episode is learnt from far less often."""
    settings = {
        "buffer_size": 32_768,
        "expected_batch_size": 256,
        "update_every": 8,
        "parallel_episodes": 256,
        "exploration_steps": 100_000,
        "learning_rate": 3e-3,
        "learning_rate_steps": 3_200_000,
        "learning_rate_end": 0.2,
        "momentum": 0.5,
        "reward_cap": 5.0,
        "average_decay": 0.9995,
        "clip_norm": 0.5,
        "noise_multiplier": noise,
        "delta": DELTA,
        "anchor": anchor,
        "anchor_penalty": 0.0,  # a choice of what to release, nothing to stay close to
        "eval_every": 40_000,
        "eval_episodes": 128,
        "checkpoint_every": 400_000,
    }
    return Preset(name, "pe-vdn-c", view, 2.9, 3_200_000, settings, about)


PAPER = {  # its private algorithm as it is described, and as its code has it
    "network": "recurrent",
    "hidden_size": 64,
    "buffer_size": 1024,
    "expected_batch_size": 32,
    "learning_starts": 1024,
    "update_every": 1,
    "parallel_episodes": 8,
    "optimizer": "sgd",
    "momentum": 0.9,
    "learning_rate": 5e-3,
    "learning_rate_end": 1.0,
    "weight_decay": 0.01,
    "target_rate": 0.005,
    "return_lambda": 0.0,
    "reward_cap": 0.0,
    "average_decay": 0.0,
    "clip_norm": 0.5,
    "anchor": True,
    "noise_multiplier": 1.344,
    "delta": DELTA,
}

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _private("private-2.9", "agent", 2.9, 1.344, "The paper's ε, kept."),
        _private("private-1", "agent", 1.0, 2.895, "A third of the paper's ε."),
        _private("private-team-2.9", "team", 2.9, 2.328, "Against who sees all three agents."),
        _long("private-2.9-long", "agent", 0.867, "More episodes, each used less.", anchor=False),
        _long(
            "private-team-2.9-long",
            "team",
            1.502,
            "The same against who sees all agents.",
            anchor=True,
        ),
        Preset(
            "paper-c",
            "pe-vdn-c",
            "agent",
            2.9,
            STEPS,
            PAPER,
            "The paper's optimiser, buffer and anchor, with noise for a sound ε.",
        ),
    )
}


def find(name: str) -> Preset:
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "`pevdn presets` lists all of them.")
    return PRESETS[name]


def settings_of(preset: str | None, algorithm: str | None) -> Mapping[str, Any]:
    """What a preset sets; it has to be made for the algorithm, if one is named."""
    if algorithm is not None:
        config.algorithm(algorithm)
    if preset is None:
        return {}
    chosen = find(preset)
    if algorithm not in (None, chosen.algorithm):
        raise UsageError(
            f"preset '{preset}' is for {chosen.algorithm}, not for {algorithm}; train "
            f"{chosen.algorithm}, or leave the preset out."
        )
    return chosen.settings


def configure(
    algorithm: str | None,
    env: str = "smax-sc2:3m",
    steps: int | None = None,
    seeds: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> Config:
    """A checked configuration, from a preset where one is named; what is given beside it wins."""
    own = settings_of(preset, algorithm)
    chosen = PRESETS[preset] if preset is not None else None
    name = chosen.algorithm if chosen is not None else str(algorithm)
    if steps is None:
        steps = chosen.steps if chosen is not None else STEPS
    return config.make(name, env, steps, seeds, seed, {**own, **(settings or {})})
