"""Presets: settings for a given privacy budget.

A preset is named after its proven ε (docs/privacy.md), for the steps and δ that it was made for:
that of the team observer for a number of agents, or ε record, which holds against teammates too.
Explicit settings override it. config.yaml holds the resulting settings, not the name of the preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pevdn.config import algorithms
from pevdn.config.experiment import STEPS, Config, default_delta, make
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import UsageError, unknown

AGENTS = 3  # of smax-sc2:3m, the world of the paper's experiment
LONG = 3_200_000  # steps
PAPER_DELTA = 4.88e-4  # 1024 episodes to the power of −1.1


@dataclass(frozen=True)
class Preset:
    """Settings that keep ε of the `observer` within `epsilon`, in a team of `agents`."""

    name: str
    algorithm: str
    epsilon: float
    steps: int
    settings: Mapping[str, Any]
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)  # runtime options
    agents: int = AGENTS
    observer: str = "team"  # whose ε the preset is named after: team, or record (pe-vdn-d)

    @property
    def delta(self) -> float:
        return float(self.settings["delta"])


_ANCHOR = {"anchor": True, "anchor_penalty": 0.0}  # only chooses the released model


def _short(name: str, epsilon: float, noise: float, about: str) -> Preset:
    """The defaults of pe-vdn-c, with noise for the budget."""
    settings = {"noise_multiplier": noise, "delta": default_delta(STEPS)}
    return Preset(name, "pe-vdn-c", epsilon, STEPS, settings, about)


def _long(name: str, epsilon: float, noise: float, about: str) -> Preset:
    """Eight times the steps and the buffer, twice the batch: a quarter of the sampling rate."""
    settings = {
        "buffer_size": 32_768,
        "expected_batch_size": 256,
        "update_every": 8,
        "parallel_episodes": 256,
        "exploration_steps": 100_000,
        "learning_rate": 3e-3,
        "learning_rate_steps": LONG,
        "learning_rate_end": 0.2,
        "momentum": 0.5,
        "reward_cap": 5.0,
        "average_decay": 0.9995,
        "clip_norm": 0.5,
        "noise_multiplier": noise,
        "delta": default_delta(LONG),
        **_ANCHOR,
        "eval_every": 40_000,
        "eval_episodes": 128,
    }
    options = {"checkpoint_every": 400_000}
    return Preset(name, "pe-vdn-c", epsilon, LONG, settings, about, options)


def _record(
    name: str, epsilon: float, noise: float, opening_noise: float, about: str, **settings: Any
) -> Preset:
    """The defaults of pe-vdn-d, with noise for a budget against all teammates together."""
    own = {
        **{"noise_multiplier": noise, "opening_noise": opening_noise, **_ANCHOR},
        **{"delta": default_delta(STEPS), "eval_every": 10_000, "eval_episodes": 64},
        **settings,
    }
    steps = LONG if own["delta"] == default_delta(LONG) else STEPS
    options = {"checkpoint_every": 400_000} if steps == LONG else {}
    return Preset(name, "pe-vdn-d", epsilon, steps, own, about, options, observer="record")


_RECORD_LONG = {
    "buffer_size": 8192,
    "parallel_episodes": 128,
    "exploration_steps": 100_000,
    "learning_rate": 3e-3,
    "learning_rate_steps": LONG,
    "learning_rate_end": 0.2,
    "average_decay": 0.9995,
    "clip_norm": 0.3,
    "delta": default_delta(LONG),
    "eval_every": 40_000,
    "eval_episodes": 128,
}

PAPER = {  # the private algorithm as in the paper and its code
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
    "delta": PAPER_DELTA,
}

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _record(
            "record-8",
            8.0,
            1.3,
            0.885,
            "The defaults of pe-vdn-d, for ε record 8 against all teammates together.",
        ),
        _record(
            "record-8-long",
            8.0,
            1.2,
            0.856,
            "Eight times the steps and twice the buffer, for ε record 8.",
            **_RECORD_LONG,
            message_norm=0.35,
            return_lambda=0.5,
        ),
        _record(
            "record-2.9-long",
            2.9,
            2.5,
            2.15,
            "The same with twice the noise, for ε record 2.9.",
            **_RECORD_LONG,
        ),
        _short("team-8", 8.0, 1.71, "The defaults of pe-vdn-c, for ε team 8."),
        _short("team-4", 4.0, 2.577, "The same with 1.5 times the noise, for ε team 4."),
        _long("team-8-long", 8.0, 1.268, "Eight times the steps and the buffer, for ε team 8."),
        _long("team-4-long", 4.0, 1.689, "The same with 1.3 times the noise, for ε team 4."),
        Preset(
            "paper-c",
            "pe-vdn-c",
            8.66,
            STEPS,
            PAPER,
            "The paper's optimiser, buffer, anchor and δ; ε agent is its 2.90, ε team 8.65.",
        ),
    )
}


class Renamed(NamedTuple):
    """Why a preset was renamed, and its replacement."""

    why: str
    new: str
    before: str  # settings that restore the old preset on top of the new one


_AGENT = "ε of the agent observer, which is not proven"
_LARGE_DELTA = "ε at δ 4.88e-4, which exceeds one over the number of its episodes"
RENAMED = {
    "private-2.9": Renamed(_AGENT, "team-8", "noise_multiplier=1.344 and delta=4.88e-4"),
    "private-1": Renamed(_AGENT, "team-4", "noise_multiplier=2.895 and delta=4.88e-4"),
    "private-team-2.9": Renamed(_LARGE_DELTA, "team-4", "noise_multiplier=2.328 and delta=4.88e-4"),
    "private-2.9-long": Renamed(
        _AGENT, "team-8-long", "anchor=false, noise_multiplier=0.867 and delta=4.88e-4"
    ),
    "private-team-2.9-long": Renamed(
        _LARGE_DELTA, "team-4-long", "noise_multiplier=1.502 and delta=4.88e-4"
    ),
}


def find(name: str) -> Preset:
    """Return the preset of this name."""
    if name in RENAMED:
        why, new, before = RENAMED[name]
        now = PRESETS[new]
        raise UsageError(
            f"preset '{name}' was named after {why}; use '{new}' (ε {now.observer} "
            f"{now.epsilon:g} at δ {now.delta:g}), or add {before} to train as before."
        )
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "`pevdn presets` lists all of them.")
    return PRESETS[name]


def settings_of(preset: str | None, algorithm: str | None) -> Mapping[str, Any]:
    """Return the settings of a preset; it must be for the algorithm, if one is named."""
    if algorithm is not None:
        algorithms.find(algorithm)
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
    """Return a checked configuration; explicit arguments override the preset."""
    own = settings_of(preset, algorithm)
    chosen = PRESETS[preset] if preset is not None else None
    name = chosen.algorithm if chosen is not None else str(algorithm)
    if steps is None:
        steps = chosen.steps if chosen is not None else STEPS
    return make(name, env, steps, seeds, seed, {**own, **(settings or {})})


def options_of(preset: str | None) -> RuntimeOptions:
    """Return the runtime options of a preset, or the defaults."""
    return RuntimeOptions().replace(find(preset).options if preset is not None else {})
