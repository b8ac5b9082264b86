"""The final figures of a run: summary.json, and the same as text."""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pevdn import __version__
from pevdn._platform import peak_memory_bytes
from pevdn.config.experiment import Config
from pevdn.privacy import randomness
from pevdn.privacy.accounting import (
    DURATION,
    EMPTY_RECORD,
    RELATIONS,
    UNCOVERED,
    covers_teammates,
)
from pevdn.privacy.ledger import Ledger
from pevdn.training.directory import Run
from pevdn.training.metrics import by_seed, mean_of_seeds

if TYPE_CHECKING:
    from pevdn.training.checkpoint import Progress

WINDOW = 100_000  # environment steps that final figures are means over
MODELS = {"anchor": "anchor model", "average": "averaged model", "": "running model"}


def released(names: Collection[str]) -> str:
    """Return the model to deploy: the first of MODELS that has a win rate."""
    return next(model for model in MODELS if column("win_rate", model) in names)


def column(name: str, model: str) -> str:
    """Return the name of a model's figure in metrics.jsonl and summary.json."""
    return f"{name}_{model}" if model else name


def guarantee(config: Config, epsilon_record: float | None = None, openings: int = 0) -> str:
    """Explain what ε of a run covers and what it does not.

    ε record, if any, may be infinite; `openings` bounds those of a record.
    """
    own = _noised_guarantee(config, covers_teammates(epsilon_record), openings)
    return " ".join(
        (
            own if config.noised else _guarantee(config),
            "Not covered: evaluation episodes, the choice of settings, the team's reward, lengths "
            "and timing, and any other training on a copy of this run.",
            randomness.MEANING[randomness.source(config)],
        )
    )


def _guarantee(config: Config) -> str:
    relation = config.settings.relation
    return (
        f"ε is for one training episode under the {relation} relation: {RELATIONS[relation]}. "
        "epsilon_team and epsilon_agent cover the whole run as configured, plus all updates lost "
        "in crashes: they hold no matter when or why the run ended. epsilon_team_spent and "
        "epsilon_agent_spent cover the updates made so far, and hold only if the run was not "
        "stopped because of its results. "
        "epsilon_team holds against an outsider who sees all agents act or their parameters, and "
        "therefore against one who sees fewer. epsilon_agent is the loss through one agent's own "
        "updates with its teammates' contributions held fixed: it is conditional, and in general "
        "no bound. There is no differential privacy against teammates: they see the opened sums "
        "before any noise, and know the indices."
    )


def _noised_guarantee(config: Config, covered: bool, openings: int) -> str:
    s = config.settings
    t = f"up to t = {s.colluders} of its teammates" if s.colluders else "all its teammates"
    record = (
        f"There is {UNCOVERED}, because the opened sums and parameters that they see hide too "
        f"little at opening_noise {s.opening_noise:g} and noise_multiplier {s.noise_multiplier:g}. "
    )
    if covered:
        record = (
            "epsilon_record is for what one agent stored of one training episode: "
            f"{EMPTY_RECORD}. It holds against {t}, pooled with any outsider, who see all opened "
            f"sums (of each record n = {openings}, with noise) and all parameters "
            f"at all times; it does not cover {DURATION}. epsilon_coalition is for the same "
            "observers and a whole episode of all agents outside the coalition. "
        )
    return (
        f"{record}epsilon_team is for a whole episode, empty for the whole team, and holds "
        "against an outsider who sees all agents act or their parameters, but not the opened sums. "
        "epsilon_agent is the loss through one agent's own updates with its teammates' "
        "contributions held fixed: it is conditional, and in general no bound. All of them cover "
        "the whole run as configured, plus all updates and openings lost in crashes: they hold no "
        "matter when or why the run ended. Those that end in _spent cover what was made so far, "
        "and hold only if the run was not stopped because of its results. They do not cover what "
        "others observed themselves during an episode."
    )


def confidence(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half-width of its 95 % interval (Student's t; None for one value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    from scipy.stats import t

    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, float(t.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))


def final_window(end: float) -> float:
    """Return the length of the final window: WINDOW steps, or the last quarter of a shorter run."""
    return min(WINDOW, end / 4)


def final_mean(steps: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Return one seed's mean over the final window; None if it has no value there."""
    end = max(steps)
    start = end - final_window(end)
    pairs = zip(steps, values, strict=True)
    late = [v for step, v in pairs if v is not None and (step > start or step == end)]
    return sum(late) / len(late) if late else None


def _final_of(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    return final_mean([line["env_steps"] for line in lines], [line.get(name) for line in lines])


def summarise(
    run: Run,
    config: Config,
    progress: Progress,
    compile_seconds: float,
    devices: int,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Return the content of summary.json; a private run has a ledger."""
    import jax

    seeds = by_seed(run.metrics)
    last = [lines[-1] for lines in seeds.values()]
    late = [_final_of(lines, "win_rate") or 0.0 for lines in seeds.values()]
    mean, half = confidence(late)
    summary: dict[str, Any] = {
        "algorithm": config.algorithm,
        "env": config.env,
        "steps": config.steps,
        "seeds": sorted(seeds),
        "win_rate": sum(line["win_rate"] for line in last) / len(last),
        "return": sum(line["return"] for line in last) / len(last),
        "late_win_rate": mean,
        "late_win_rate_half_width_95": half,
        "late_win_rate_by_seed": late,
        "late_window_steps": int(final_window(max(line["env_steps"] for line in last))),
        "env_steps": max(line["env_steps"] for line in last),
        "episodes": sum(line["episodes"] for line in last),
        "updates": sum(line["updates"] for line in last),
    }
    for model in filter(None, MODELS):
        name = column("win_rate", model)
        if name not in last[0]:
            continue
        known = [v for lines in seeds.values() if (v := _final_of(lines, name)) is not None]
        if model == "anchor":
            summary["anchored_seeds"] = len(known)
        if known:
            late = known + [0.0] * (len(seeds) - len(known))  # no anchor counts as no win
            mean, half = confidence(late)
            summary[name] = sum(line[name] or 0.0 for line in last) / len(last)
            summary[f"late_{name}"] = mean
            summary[f"late_{name}_half_width_95"] = half
            summary[f"late_{name}_by_seed"] = late
    if ledger is not None:
        summary |= _privacy(ledger)
        summary["randomness"] = randomness.source(config)
        facts = summary.get("epsilon_record"), ledger.openings_bound
        summary["guarantee"] = guarantee(config, *facts)
        if config.settings.epsilon_budget:
            summary["epsilon_budget"] = config.settings.epsilon_budget
            summary["budget_observer"] = config.settings.budget_observer
            summary["stopped_by_budget"] = progress.budget_spent
    device = jax.local_devices()[0]
    summary |= {
        "env_steps_per_second": progress.training_steps / max(progress.training_seconds, 1e-9),
        "training_seconds": progress.training_seconds,
        "compile_seconds": compile_seconds,
        "wall_seconds": progress.wall_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "device": f"{device.platform} {device.device_kind}",
        "devices": devices,
        "versions": {
            "pevdn": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
    return summary


def _privacy(ledger: Ledger) -> dict[str, Any]:
    """Return ε of the worst seed, for the run as configured and for what was made so far."""
    guaranteed = mean_of_seeds([x.known for x in ledger.guaranteed()])  # of ε, the largest
    spent = mean_of_seeds([x.known for x in ledger.spent()])
    found: dict[str, Any] = {k: v for k, v in guaranteed.items() if k != "delta"}
    found |= {f"{name}_spent": spent[name] for name in found}
    if ledger.mechanism.noised:
        found |= {"epsilon_coalition": max(ledger.coalition())}
        found |= {"openings": ledger.openings_bound, "colluders": ledger.mechanism.colluders}
    found["epsilon_teammate"] = found.get("epsilon_record")
    return found | {"delta": ledger.mechanism.delta}


def describe(summary: dict[str, Any]) -> str:
    """Return the summary as a few lines of text."""
    lines = []
    for label, model in (("win rate", ""), ("average", "average"), ("anchor", "anchor")):
        name = column("win_rate", model)
        if name not in summary:
            continue
        half = summary[f"late_{name}_half_width_95"]
        spread = f" ± {half:.3f} (95 %, {len(summary['seeds'])} seeds)" if half is not None else ""
        lines.append(
            f"{label:8} {summary[name]:.3f} at the end; {summary[f'late_{name}']:.3f}{spread} "
            f"over the last {summary['late_window_steps']:,} steps"
        )
    if "epsilon_team" in summary:
        record, record_spent, teammate = "", "", "teammate none"
        if "epsilon_record" in summary:
            whom = f"against t = {summary['colluders']} teammates and any outsider"
            if not covers_teammates(summary["epsilon_record"]):
                whom = "no guarantee against teammates"
            record = (
                f"ε record {summary['epsilon_record']:.2f} ({whom}, n = {summary['openings']}), "
            )
            record_spent = f"record {summary['epsilon_record_spent']:.2f}, "
            teammate = f"coalition {summary['epsilon_coalition']:.2f}"
        lines.append(
            f"privacy  {record}ε team {summary['epsilon_team']:.2f}, "
            f"ε agent {summary['epsilon_agent']:.2f} (conditional), {teammate}, at "
            f"δ = {summary['delta']:.2g} (spent so far: {record_spent}team "
            f"{summary['epsilon_team_spent']:.2f}, agent {summary['epsilon_agent_spent']:.2f}): "
            f"{summary['guarantee']}"
        )
    if summary.get("stopped_by_budget"):
        lines.append(
            f"budget   training stopped at {summary['env_steps']:,} of {summary['steps']:,} steps: "
            f"another update would raise ε {summary['budget_observer']} above "
            f"{summary['epsilon_budget']:g}"
        )
    lines.append(
        f"speed    {summary['env_steps_per_second']:,.0f} environment steps/s, "
        f"{summary['wall_seconds']:,.0f} s in total, "
        f"peak memory {summary['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    return "\n".join(lines)
