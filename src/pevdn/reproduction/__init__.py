"""The paper's experiment, and the studies it announces: trained, measured, drawn and put in words.

`reproduce` is all of it. An experiment is a module (`figure1`, `study_privacy`, …) that names its
arms and reads them; `campaign` trains them, `measure` makes the table.
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
    from pevdn.reproduction.targets import Experiment


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
    """Train all arms of the paper's experiment, or of a `study`, and return what came out.

    The same call, given again, goes on where it was stopped. `out` gets a run directory for each
    arm, the picture (PNG and PDF), `table.md` and `results.json`, which holds what is returned.
    Seeds are 8 and steps 400,000, or few if `quick`. `jobs` arms train at a time, in processes of
    their own. `env` and settings, if given, are for every arm: then it is another experiment.
    """
    from pevdn.reproduction import campaign, measure, text
    from pevdn.reproduction.targets import Wanted

    experiment, observer = _experiment(study), observer or Silent()
    jobs = number("jobs", jobs, int, 1, 1000)
    whole = (experiment.SEEDS, experiment.STEPS)
    few = (experiment.QUICK_SEEDS, experiment.QUICK_STEPS) if quick else whole
    wanted = Wanted(
        Path(out) if out is not None else default_directory(study, quick),
        few[0] if seeds is None else seeds,
        few[1] if steps is None else steps,
        quick,
        env,
        settings,
    )
    if wanted.out.exists() and not wanted.out.is_dir():
        raise UsageError(f"{wanted.out} is a file; choose another directory with --out.")
    arms = experiment.arms(wanted)
    left_out = text.left_out(wanted, *whole) + experiment.left_out(wanted) if quick else []
    if left_out:
        observer.note(f"quick: {'; '.join(left_out)}.")
    campaign.train_all(arms, observer, devices, jobs, may_refuse=study == "precision")
    done = [arm for arm in arms if not arm.refused]
    rows = measure.table(done, experiment.original, experiment.baselines)
    summaries = [arm.run.summary for arm in done]
    document: dict[str, Any] = {
        "experiment": experiment.NAME,
        "title": experiment.TITLE,
        "command": text.command(wanted, study),
        "date": time.strftime("%Y-%m-%d"),
        "device": summaries[0]["device"],
        "versions": summaries[0]["versions"],
        "training_hours": sum(x["wall_seconds"] for x in summaries) / 3600,
        "seeds": wanted.seeds,
        "steps": wanted.steps,
        "left_out": left_out,
        "rows": rows,
        "refused": {arm.name: arm.refused for arm in arms if arm.refused},
        "words": [*experiment.words(rows, arms), *text.reservations(rows, wanted)],
    }
    pictures = [wanted.out / f"{experiment.NAME}.{kind}" for kind in ("png", "pdf")]
    files = [*pictures, wanted.out / "table.md", wanted.out / "results.json"]
    document["files"] = [str(file) for file in files]
    with disk_errors(wanted.out):
        _draw(experiment, arms, rows, pictures)
        write_atomically(files[-2], text.markdown(document))
        write_atomically(files[-1], to_json(document, indent=2) + "\n")
    return document


def default_directory(study: str | None, quick: bool) -> Path:
    """Always the same, so that the same command goes on."""
    return Path("runs") / f"{f'study-{study}' if study else 'reproduce'}{'-quick' * quick}"


def _experiment(study: str | None) -> Experiment:
    from pevdn.reproduction import figure1, study_agents, study_precision, study_privacy

    known: dict[str, Experiment] = {
        "privacy": study_privacy,
        "precision": study_precision,
        "agents": study_agents,
    }
    if study is None:
        return figure1
    if study not in known:
        raise unknown("study", study, known)
    return known[study]


def _draw(experiment: Any, arms: Any, rows: Any, paths: list[Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    experiment.draw(figure, arms, rows)
    for path in paths:
        figure.savefig(path, dpi=160)
