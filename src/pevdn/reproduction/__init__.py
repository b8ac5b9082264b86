"""Reproduce the paper's experiment and the studies it announces: train, measure, draw, explain.

`reproduce` runs all steps. An experiment is a module (`figure1`, `study_privacy`, …) that defines
its arms and interprets their results; `campaign` trains the arms, `measure` makes the table.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pevdn.config.settings import number
from pevdn.errors import UsageError, unknown
from pevdn.storage.files import disk_errors, write_atomically
from pevdn.storage.strict_json import to_json
from pevdn.training.progress import Observer, Silent

if TYPE_CHECKING:
    from pevdn.reproduction.experiment import Experiment


def reproduce(
    *,
    seeds: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    quick: bool = False,
    study: str | None = None,
    jobs: int = 1,
    devices: int | str = 1,
    observer: Observer | None = None,
    env: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train all arms of the paper's experiment, or of a `study`, and return the results.

    Repeating the call continues where it stopped. `out` gets one run directory per arm, the figure
    (PNG and PDF), `table.md` and `results.json`, which holds the returned document. The defaults
    are 8 seeds and 400,000 steps, or fewer if `quick`. `jobs` arms train at a time, in separate
    processes. `env` and settings apply to every arm and so define a different experiment.
    """
    from pevdn.reproduction import campaign, measure, text
    from pevdn.reproduction.experiment import Request

    experiment, observer = _experiment(study), observer or Silent()
    jobs = number("jobs", jobs, int, 1, 1000)
    full = (experiment.SEEDS, experiment.STEPS)
    default = (experiment.QUICK_SEEDS, experiment.QUICK_STEPS) if quick else full
    request = Request(
        Path(out) if out is not None else default_directory(study, quick),
        default[0] if seeds is None else seeds,
        default[1] if steps is None else steps,
        quick,
        env,
        settings,
    )
    if request.out.exists() and not request.out.is_dir():
        raise UsageError(f"{request.out} is a file; choose another directory with --out.")
    arms = experiment.arms(request)
    left_out = text.left_out(request, *full) + experiment.left_out(request) if quick else []
    if left_out:
        observer.note(f"quick: {'; '.join(left_out)}.")
    campaign.train_all(arms, observer, devices, jobs, may_refuse=study == "precision")
    done = [arm for arm in arms if not arm.refused]
    rows = measure.table(done, experiment.original, experiment.baselines)
    summaries = [arm.run.summary for arm in done]
    document: dict[str, Any] = {
        "experiment": experiment.NAME,
        "title": experiment.TITLE,
        "command": text.command(request, study),
        "date": time.strftime("%Y-%m-%d"),
        "device": summaries[0]["device"],
        "versions": summaries[0]["versions"],
        "training_hours": sum(x["wall_seconds"] for x in summaries) / 3600,
        "seeds": request.seeds,
        "steps": request.steps,
        "left_out": left_out,
        "rows": rows,
        "refused": {arm.name: arm.refused for arm in arms if arm.refused},
        "words": [*experiment.conclusions(rows, arms), *text.caveats(rows, request)],
    }
    figures = [request.out / f"{experiment.NAME}.{kind}" for kind in ("png", "pdf")]
    files = [*figures, request.out / "table.md", request.out / "results.json"]
    document["files"] = [str(file) for file in files]
    with disk_errors(request.out):
        _draw(experiment, arms, rows, figures)
        write_atomically(files[-2], text.markdown(document))
        write_atomically(files[-1], to_json(document, indent=2) + "\n")
    return document


def default_directory(study: str | None, quick: bool) -> Path:
    """Return a fixed path, so that repeating a command continues it."""
    return Path("runs") / f"{f'study-{study}' if study else 'reproduce'}{'-quick' * quick}"


def _experiment(study: str | None) -> Experiment:
    from pevdn.reproduction import figure1, study_agents, study_precision, study_privacy

    studies: dict[str, Experiment] = {
        "privacy": study_privacy,
        "precision": study_precision,
        "agents": study_agents,
    }
    if study is None:
        return figure1
    if study not in studies:
        raise unknown("study", study, studies)
    return studies[study]


def _draw(experiment: Any, arms: Any, rows: Any, paths: list[Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    experiment.draw(figure, arms, rows)
    for path in paths:
        figure.savefig(path, dpi=160)
