"""Compare settings in one compiled program: every variant and every seed is a lane.

Use it on simulated episodes only. A search on private episodes costs privacy (docs/privacy.md,
`pevdn.privacy.search`), which this module does not account for: it keeps no ledger, and its noise
derives from the seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pevdn._platform import cache_compilations, refuse_miscompiling_jaxlib
from pevdn.agent import schedule
from pevdn.agent.program import BY_LANE
from pevdn.config import presets
from pevdn.config.experiment import Config
from pevdn.config.settings import MOST
from pevdn.errors import Interrupted, UsageError, unknown
from pevdn.privacy.planner import Plan
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation
from pevdn.storage.files import append, make_private
from pevdn.storage.signals import StopRequest, stop_requests
from pevdn.storage.strict_json import to_json
from pevdn.training import metrics
from pevdn.training import world as environment
from pevdn.training.evaluator import Evaluator
from pevdn.training.progress import Moment, Reporter, Silent
from pevdn.training.summary import column, confidence, final_mean, released
from pevdn.worlds.external import require_jax

FILE = "search.jsonl"
CALL = 8  # iterations of one call of the compiled program, so that a signal is noticed


def search(
    algorithm: str,
    variants: Sequence[Mapping[str, Any]],
    env: Any = "smax-sc2:3m",
    *,
    steps: int | None = None,
    seeds: int = 4,
    seed: int = 0,
    preset: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter | None = None,
    **settings: Any,
) -> list[metrics.Line]:
    """Train every variant with the same seeds, and return the lines of all evaluations.

    A variant changes settings that are numbers and no shape depends on (`BY_LANE`); `settings` hold
    for all. A line has the number of its variant, its changes, and, if private, the ε of its plan.
    With `out`, lines are also appended to search.jsonl there as they are made.
    """
    world = require_jax(environment.find(env), "a search")
    configs = _configs(algorithm, variants, world, steps, seeds, seed, preset, settings)
    refuse_miscompiling_jaxlib()
    cache_compilations()
    base = _for_all_lanes(configs, seeds)
    simulation = Simulation(world, base, lane_settings=_lane_settings(variants, configs, seeds))
    facts = [
        _facts(i, variant, config, len(world.agents))
        for i, (variant, config) in enumerate(zip(variants, configs, strict=True))
    ]
    if out is not None:
        make_private(Path(out))
    lines: list[metrics.Line] = []
    display = reporter or Silent()
    with stop_requests() as stop:
        for found in _evaluations(simulation, base, seeds, display, stop):
            new = [facts[lane // seeds] | line for lane, line in enumerate(found)]
            if out is not None:
                append(Path(out) / FILE, "".join(to_json(line) + "\n" for line in new))
            lines += new
    return lines


def table(lines: Sequence[metrics.Line]) -> list[dict[str, Any]]:
    """Return a row per variant, best first: its changes, and the final win rate over its seeds.

    The win rate is that of the model that would be released, with the half-width of its 95 %
    confidence interval.
    """
    rows = []
    for number in sorted({line["variant"] for line in lines}):
        own = [line for line in lines if line["variant"] == number]
        name = column("win_rate", released(own[-1]))
        final = [
            final_mean([x["env_steps"] for x in of_seed], [x[name] for x in of_seed]) or 0.0
            for of_seed in metrics.by_seed(own).values()
        ]
        mean, half = confidence(final)
        facts = ("variant", "changes", "epsilon_record", "epsilon_team")
        first = {name: own[0][name] for name in facts if name in own[0]}
        rows.append({**first, "win_rate": mean, "half_width_95": half, "by_seed": final})
    return sorted(rows, key=lambda row: -row["win_rate"])


def _configs(
    algorithm: str,
    variants: Sequence[Mapping[str, Any]],
    world: Any,
    steps: int | None,
    seeds: int,
    seed: int,
    preset: str | None,
    settings: Mapping[str, Any],
) -> list[Config]:
    """Return the checked configuration of every variant."""
    if not variants:
        raise UsageError("variants is empty; give at least one, {} for the settings as they are.")
    if settings.get("epsilon_budget"):
        raise UsageError(
            f"epsilon_budget is {settings['epsilon_budget']}, but a search keeps no ledger to stop "
            "by; leave it out."
        )
    for name in (name for variant in variants for name in variant):
        if name not in BY_LANE:
            raise unknown("setting that may differ within a search:", name, BY_LANE)
    return [
        presets.configure(
            algorithm, world.name, steps, seeds, seed, {**settings, **variant}, preset
        )
        for variant in variants
    ]


def _for_all_lanes(configs: Sequence[Config], seeds: int) -> Config:
    """Return the configuration of the whole program: a lane for every variant and seed."""
    average = max(config.settings.average_decay for config in configs)  # evaluated if any has one
    first = configs[0]
    settings = dataclasses.replace(first.settings, average_decay=average, randomness="seed")
    return dataclasses.replace(first, settings=settings, seeds=len(configs) * seeds)


def _lane_settings(
    variants: Sequence[Mapping[str, Any]], configs: Sequence[Config], seeds: int
) -> list[dict[str, float]]:
    """Return the settings that differ between variants, by lane, as checked numbers."""
    names = sorted({"average_decay", *(name for variant in variants for name in variant)})
    own = [{name: getattr(config.settings, name) for name in names} for config in configs]
    return [settings for settings in own for _ in range(seeds)]


def _facts(number: int, variant: Mapping[str, Any], config: Config, agents: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"variant": number, "changes": dict(variant)}
    if config.private:
        plan = Plan.of(config, agents)
        record = {"epsilon_record": plan.epsilon("record")} if plan.openings else {}
        facts |= {**record, "epsilon_team": plan.epsilon("team"), "delta": plan.delta}
    return facts


def _evaluations(
    simulation: Simulation, base: Config, seeds: int, display: Reporter, stop: StopRequest
) -> Iterator[list[metrics.Line]]:
    """Train all lanes, and yield the lines of every evaluation."""
    placement = Lanes(1, base.seeds, display.note)
    own_seeds = base.seed + jnp.arange(base.seeds) % seeds
    state = placement.jit(simulation.start, own_seeds)(own_seeds)
    display.note("compiling (cached for the next run) …")
    advance = simulation.compile(placement.jit)
    evaluate = Evaluator(simulation, own_seeds, placement.jit)
    evaluate.compile()
    limit = jnp.full(base.seeds, MOST, jnp.int32)
    display.start(f"{base.algorithm} on {base.env} × {base.seeds} lanes", base.steps, 0)
    try:
        for number in range(schedule.evaluations(base)):
            until = schedule.steps_before(number, base)
            while np.any((state.env_steps < until) & (state.refused == 0)):
                state = advance(state, jnp.int32(until), jnp.int32(CALL), limit)
                if stop:
                    raise Interrupted("stopped; the evaluations so far are written.")
                display.moment(Moment(int(np.mean(state.env_steps)), 0.0))
            state, lines = evaluate(state, number)
            yield lines
    finally:
        display.stop()
