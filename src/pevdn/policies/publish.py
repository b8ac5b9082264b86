"""Publish a finished private run: copy only what its guarantee covers.

Every file is written from an allow-list: policies (post-processing of parameters that the theorem
covers), settings, evaluation metrics, ε. Other files of the run are never opened. Seeds are
replaced by lane numbers; no digest, time, path or machine name is copied.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pevdn
from pevdn.config.experiment import Config, fingerprint
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.policies import export
from pevdn.policies.policy import as_run, of_lane, team_parameters
from pevdn.privacy import accounting, randomness
from pevdn.privacy.accounting import DURATION, RELATIONS, UNCOVERED, Spent, teammate
from pevdn.privacy.ledger import Ledger
from pevdn.storage.readme import FILE as README
from pevdn.storage.strict_json import to_json
from pevdn.training import figures, readme
from pevdn.training.directory import Run
from pevdn.training.summary import guarantee

MODELS = ("", "_average", "_anchor")
EPSILONS = (
    *("epsilon_agent", "epsilon_team", "epsilon_agent_spent", "epsilon_team_spent"),
    *("epsilon_record", "epsilon_record_spent", "epsilon_coalition", "openings", "colluders"),
    "delta",
)
METRICS = (  # of a line of metrics.jsonl
    *("env_steps", "episodes", "updates", "episode_length"),
    *(f"win_rate{model}" for model in MODELS),
    *(f"return{model}" for model in MODELS),
    *EPSILONS,
)
SUMMARY = (
    *("algorithm", "steps", "return", "late_window_steps", "env_steps", "episodes", "updates"),
    *(f"win_rate{model}" for model in MODELS),
    *(f"late_win_rate{model}" for model in MODELS),
    *(f"late_win_rate{model}_half_width_95" for model in MODELS),
    *("anchored_seeds", "epsilon_budget", "budget_observer", "stopped_by_budget"),
    *EPSILONS,
)
BY_SEED = tuple(f"late_win_rate{model}_by_seed" for model in MODELS)
SETTINGS = (
    # replay
    *("buffer_size", "expected_batch_size", "learning_starts", "update_every"),
    *("buffer_throughput", "parallel_episodes"),
    # learning
    *("gamma", "learning_rate", "optimizer", "momentum", "weight_decay", "max_gradient_norm"),
    *("double_q", "target_rate", "return_lambda", "reward_cap"),
    *("learning_rate_end", "learning_rate_steps", "average_decay", "network", "hidden_size"),
    # acting and exchange
    *("exploration_start", "exploration_end", "exploration_steps", "precision", "modulus"),
    *("bootstrap_timeouts", "openings", "message_norm", "opening_noise", "colluders"),
    # differential privacy
    *("noise_multiplier", "clip_norm", "delta", "relation", "randomness"),
    *("epsilon_budget", "budget_observer", "anchor", "anchor_threshold", "anchor_penalty"),
    # evaluation
    *("eval_every", "eval_episodes"),
)
UNIT = "; for the observer 'record', one agent's record of it"
NOISED = "; discrete Gaussian noise on opened sums of clipped messages"
BARE = "; opened sums of clipped messages, with too little noise for a finite ε"
OPENED = {
    "record": "up to t teammates and any outsider, who see all opened sums and parameters",
    "coalition": "the same, for a whole episode of all agents outside the coalition",
}
PROVEN = f"; proven, but does not cover {DURATION}"
TEAMMATES = "Teammates: they saw the opened sums before any noise, and knew the indices."
OPEN = f"Teammates: there is {UNCOVERED}."
TIME = f"{DURATION.capitalize()}: it grows with an agent's secret sample."
EYES = "What others, such as teammates and the host of the world, observed during an episode."
NOT_COVERED = (
    "Evaluation episodes: all win rates and returns here are computed from them without noise.",
    "The selection of settings or of this run by results on the same episodes.",
    "Rewards, lengths, number and timing of the training episodes as such.",
    "Other trainings on the same episodes, such as a copy of the run: add up their ε.",
    "Observers who know the random numbers of the training.",
)


class Published(NamedTuple):
    """A published directory."""

    path: Path
    files: tuple[str, ...]
    privacy: dict[str, Any]  # the content of privacy.json


def publish(
    run: Run | str | Path,
    out: str | Path,
    *,
    model: str = "best",
    format: str = "safetensors",
) -> Published:
    """Write the publishable parts of a finished private run into a new directory `out`.

    These are a policy per agent (and lane, if the run has several seeds), config.yaml,
    metrics.jsonl, summary.json, curve.png, privacy.json and README.md. `model` is that of
    `pevdn.load`, `format` that of `pevdn.export`.
    """
    run, out = as_run(run), Path(out)
    config = run.config
    if format not in export.FORMATS:
        raise unknown("format", format, export.FORMATS)
    write = export.FORMATS[format]()
    _require_private(run, config)
    summary = run.summary  # raises if the run is not finished
    _require_empty(out)
    privacy = _privacy(run, config)
    public = dataclasses.replace(config, env=export.public_world(config.env))
    lines = _metrics(run, config)

    with _all_or_nothing(out) as draft:
        policies = _policies(run, public, model, format, write, draft)
        _write_config(public, draft / "config.yaml")
        texts = {
            "metrics.jsonl": "".join(to_json(line) + "\n" for line in lines),
            "summary.json": to_json(_summary(summary, public), indent=2) + "\n",
            "privacy.json": to_json(privacy, indent=2) + "\n",
            README: readme.of_publication(public, policies, privacy["epsilon"], privacy["delta"]),
        }
        for name, text in texts.items():
            (draft / name).write_text(text)
        epsilon, delta = privacy["epsilon"], privacy["delta"]
        guaranteed = Spent(epsilon["agent"], epsilon["team"], delta, epsilon.get("record"))
        figures.draw_lines(public, _by_seed(lines), draft / "curve.png", guaranteed)
        files = tuple(sorted((*policies, *texts, "config.yaml", "curve.png")))
    return Published(out, files, privacy)


# ---- preconditions ----------------------------------------------------------------------------


def _require_private(run: Run, config: Config) -> None:
    if not (run.path / "checkpoints").exists() and any(run.path.glob("snapshot-*")):
        raise UsageError(
            f"{run.path} is the data of one party, which does not know whether its team rehearsed; "
            f"export only its policy with `pevdn export {run.path} --out FILE`."
        )
    fix = f"if these episodes are not secret, use `pevdn export {run.path} --agent 0`"
    if not config.private:
        raise UsageError(
            f"{run.path} was trained with {config.algorithm}, without differential privacy: its "
            f"parameters carry no guarantee for the training episodes; {fix}."
        )
    if config.settings.noise_multiplier == 0:
        raise UsageError(
            f"{run.path} was trained with noise_multiplier 0: ε is infinite and its parameters "
            f"carry no guarantee; {fix}."
        )


def _require_empty(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose another directory with --out.")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; choose a new directory with --out.")


# ---- files ------------------------------------------------------------------------------------


def _privacy(run: Run, config: Config) -> dict[str, Any]:
    """Return the content of privacy.json, from the ledger."""
    ledger = Ledger.read(run.path, fingerprint(config))
    mechanism = ledger.mechanism._replace(openings=ledger.openings_bound)
    lanes = []
    for lane in range(config.seeds):
        facts = export.promise(run, lane)
        epsilons = {name: float(facts[name]) for name in EPSILONS if name in facts}
        if not math.isfinite(epsilons.get("epsilon_team", math.inf)):
            raise UsageError(
                f"{run.path} was trained with noise_multiplier "
                f"{config.settings.noise_multiplier:g}, for which ε is infinite: its parameters "
                "carry no guarantee; train with more noise to publish."
            )
        lanes.append({"lane": lane, **epsilons})
    relation, source = config.settings.relation, randomness.source(config)

    def worst(name: str) -> float:
        return max(lane[f"epsilon_{name}"] for lane in lanes)

    noised = {name: worst(name) for name in ("record", "coalition") if mechanism.noised}
    record = noised.get("record")
    covered = accounting.covers_teammates(record)
    uncovered = [EYES, TIME] if covered else [OPEN, EYES, TIME] if noised else [TEAMMATES]
    meaning = RELATIONS[relation]
    if noised:
        meaning = (
            f"for ε record, {accounting.EMPTY_RECORD}; for ε coalition, "
            f"{accounting.EMPTY_RECORDS}; for ε team and ε agent, {meaning}"
        )
    return {
        "unit": "one training episode of the whole team" + (UNIT if mechanism.noised else ""),
        "relation": {"name": relation, "meaning": meaning},
        "epsilon": {
            **noised,
            "team": worst("team"),
            "agent": worst("agent"),
            "teammate": record,
        },
        "delta": mechanism.delta,
        "lanes": lanes,
        "observers": {
            **{
                name: OPENED[name] + (PROVEN if math.isfinite(x) else "; ε is infinite: no bound")
                for name, x in noised.items()
            },
            "team": "sees at most all agents' parameters and actions; proven",
            "agent": "sees one agent's gradients, with its teammates' held fixed; no bound",
            "teammate": teammate(mechanism, record),
        },
        "mechanism": {
            "name": "Poisson-subsampled discrete Gaussian noise on clipped per-episode gradients"
            + (NOISED if covered else BARE if noised else ""),
            "clip_norm": config.settings.clip_norm,
            **mechanism._asdict(),
        },
        "randomness": {"source": source, "meaning": randomness.MEANING[source]},
        "guarantee": guarantee(config, record, mechanism.openings),
        "not_covered": [*uncovered, *NOT_COVERED],
        "pevdn_version": pevdn.__version__,
    }


def _policies(
    run: Run, config: Config, model: str, format: str, write: Any, draft: Path
) -> list[str]:
    """Write one file per agent, in a folder per lane if there are several; return their names."""
    params, team = team_parameters(run, model)
    names = []
    for lane in range(config.seeds):
        promised = export.promise(run, lane)
        for agent, own in enumerate(of_lane(params, team, lane)):
            name = f"agent-{agent}.{format}"
            if config.seeds > 1:
                name = f"lane-{lane}/{name}"
            path = draft / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(write(own, export.facts_of(config, agent, model, own, promised)))
            names.append(name)
    return names


def _metrics(run: Run, config: Config) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl with lanes instead of seeds."""
    lines = []
    for line in run.metrics:
        lane = line["seed"] - config.seed
        if not 0 <= lane < config.seeds:
            raise PevdnError(
                f"{run.path / 'metrics.jsonl'} has a seed that is not in config.yaml; restore the "
                "run from a backup."
            )
        metrics = _allowed(line, METRICS)
        # They are spent so far, unlike in summary.json.
        for name in ("epsilon_record", "epsilon_team", "epsilon_agent"):
            if name in metrics:
                metrics[f"{name}_spent"] = metrics.pop(name)
        lines.append({"lane": lane, **metrics})
    return lines


def _summary(summary: dict[str, Any], config: Config) -> dict[str, Any]:
    by_lane = {
        name.replace("_by_seed", "_by_lane"): summary[name] for name in BY_SEED if name in summary
    }
    facts = {"env": config.env, "lanes": config.seeds, **_allowed(summary, SUMMARY), **by_lane}
    return {**facts, "pevdn_version": pevdn.__version__}


def _write_config(config: Config, path: Path) -> None:
    import yaml

    document = {
        "algorithm": config.algorithm,
        "env": config.env,
        "steps": config.steps,
        "lanes": config.seeds,
        "settings": _allowed(dataclasses.asdict(config.settings), SETTINGS),
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def _by_seed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with the key that `draw_lines` needs."""
    return [{**line, "seed": line["lane"]} for line in lines]


def _allowed(facts: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: facts[name] for name in names if name in facts}


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `out` when complete, and removed on failure."""
    target = out.resolve()
    draft = target.with_name(f".{target.name}.draft")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        yield draft
        draft.rename(target)
    except OSError as problem:
        raise PevdnError(f"cannot write {out}: {problem.strerror or problem}.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
