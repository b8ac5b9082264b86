"""Write the results as Markdown, with their caveats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pevdn.reproduction import default_directory, paper
from pevdn.reproduction.experiment import Request
from pevdn.reproduction.measure import Row

NONE = "–"


def command(request: Request, study: str | None) -> str:
    """Return the command that repeats the experiment, in Python if the CLI has no such options."""
    if request.env or request.settings:
        options = {name: getattr(request, name) for name in ("seeds", "steps", "env")}
        options |= {"quick": request.quick or None, "out": str(request.out), **request.settings}
        options = {"study": study} | options
        arguments = (f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"pevdn.reproduce({', '.join(arguments)})"
    words = ["pevdn reproduce", f"--seeds {request.seeds}", f"--steps {request.steps}"]
    words += [f"--study {study}"] * (study is not None) + ["--quick"] * request.quick
    if request.out != default_directory(study, request.quick):
        words.append(f"--out {request.out}")
    return " ".join(words)


def left_out(request: Request, seeds: int, steps: int) -> list[str]:
    """Return what a quick experiment reduces."""
    reduced = []
    if request.seeds < seeds:
        reduced.append(f"{request.seeds} seed{'s' * (request.seeds > 1)} instead of {seeds}")
    if request.steps < steps:
        reduced.append(f"{request.steps:,} steps instead of {steps:,}")
    return reduced


def caveats(rows: Sequence[Row], request: Request) -> list[str]:
    """Return the reasons why figures are not results."""
    sentences = []
    for row in rows:
        if row["updates"] == 0 and row["released"]:
            sentences.append(
                f"{row['arm']} made no update: learning starts after {row['learning_starts']:,} "
                f"episodes, and {row['episodes']:,.0f} were played."
            )
    if request.quick:
        sentences.append(
            "These are not results: a quick experiment shows that everything runs, but has too few "
            "steps and seeds to be quoted or compared with the paper."
        )
    elif request.seeds == 1:
        sentences.append("One seed has no spread, so there are no intervals.")
    return sentences


# ---- cells ----------------------------------------------------------------------------------


def rate(row: Row, name: str, form: str = ".3f") -> str:
    """Return `0.921 [0.912, 0.930]`, without the interval if there is none."""
    value, low, high = (row.get(f"{name}{x}") for x in ("", "_low", "_high"))
    if value is None:
        return NONE
    bounds = "" if low is None else f" [{low:{form}}, {high:{form}}]"
    return f"{value:{form}}{bounds}"


def steps_to_goal(row: Row) -> str:
    """Return `150,000 (8 of 8)`."""
    seeds = len(row["win_rate_by_seed"])
    median = "never" if row["steps_to_80"] is None else f"{row['steps_to_80']:,.0f}"
    return f"{median} ({row['seeds_at_80']} of {seeds})"


def epsilon(row: Row, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else "∞"


def amount(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def markdown(document: dict[str, Any]) -> str:
    """Return the content of table.md."""
    rows, versions = document["rows"], document["versions"]
    arms = [row for row in rows if row["released"]]
    parts = [
        f"# {document['title']}",
        f"`{document['command']}`, {document['date']}, {document['device']}, "
        f"pevdn {versions['pevdn']}, jax {versions['jax']}, Python {versions['python']}; "
        f"{document['training_hours']:.2f} hours of training in total.",
    ]
    if document["left_out"]:
        parts.append(f"Left out: {'; '.join(document['left_out'])}. **These are not results.**")
    parts += [
        "## Win rate and speed",
        _table(
            [
                *("arm", "model", "win rate", "paper", "share of VDN", "paper"),
                *("area", "paper", "steps to 80 % (seeds)", "paper"),
            ],
            (_learning(row) for row in rows),
        ),
        "*Win rate*: mean over the evaluations of the last 100,000 steps (the last quarter of a "
        "shorter run), then over seeds; [95 % bootstrap interval over seeds]. *Area*: under the "
        "curve, at most 1. *Steps to 80 %*: until the mean of five evaluations reaches 0.8; median "
        "over seeds, and how many reached it. *Share of VDN*: for our recipe, of the better of "
        "`vdn` and `vdn-ours`, which has our recipe's network. *Paper*: its single run, after the "
        "same number of steps. A model that a seed does not have yet counts as win rate 0.",
        "## Privacy and traffic",
        _table(
            [
                *("arm", "ε team", "δ", "ε agent (conditional)", "Theorem 1 would claim"),
                *("paper claims", "messages sent", "bytes"),
            ],
            (_cost(row) for row in arms),
        ),
        "ε is from the run's ledger at its end, the largest of the seeds; ∞ without differential "
        "privacy. ε team is proven; ε agent is conditional and in general no bound. Theorem 1 is "
        "about the agent observer, not sound for a buffer throughput above 1, and shown for "
        "comparison; the paper claims its ε by it. *Sent*: by one agent in the training of one "
        "seed. A message is one 32-bit number for a step of a sampled episode; the number of "
        "messages is computed from updates, batch size and the lengths of the episodes in the "
        "buffer, not counted one by one. `vdn`: every step once to the central node. Indices, "
        "rewards and packet framing are not included.",
    ]
    if document["refused"]:
        parts += ["## Refused", *(f"- {k}: {v}" for k, v in document["refused"].items())]
    parts += ["## Conclusions", "\n".join(f"- {sentence}" for sentence in document["words"])]
    return "\n\n".join(parts) + "\n"


def _learning(row: Row) -> list[str]:
    original = row.get("paper")

    def published(name: str, form: str) -> str:
        value = original[name] if original is not None else None
        return NONE if value is None else f"{value:{form}}"

    return [
        row["arm"],
        row["model"],
        rate(row, "win_rate"),
        published("win_rate", ".3f"),
        rate(row, "share_of_vdn", ".0%"),
        published("share_of_vdn", ".0%"),
        rate(row, "area"),
        published("area", ".3f"),
        steps_to_goal(row),
        NONE if original is None else steps_to_goal(original).partition(" ")[0],
    ]


def _cost(row: Row) -> list[str]:
    claim = (
        f"{row['theorem_1_epsilon']:.2f} at δ {row['theorem_1_delta']:.3g}"
        if "theorem_1_epsilon" in row
        else NONE
    )
    return [
        row["arm"],
        epsilon(row, "epsilon_team"),
        f"{row['delta']:.3g}" if "delta" in row else NONE,
        epsilon(row, "epsilon_agent"),
        claim,
        f"{paper.EPSILON:.2f} at δ {paper.DELTA:.3g}" if "paper" in row and claim != NONE else NONE,
        amount(row["messages_per_agent"]).strip(),
        f"{amount(row['bytes_per_agent'])}B",
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
