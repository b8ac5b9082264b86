"""The table as Markdown, and what has to be said beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pevdn.reproduction import default_directory, paper
from pevdn.reproduction.measure import Row
from pevdn.reproduction.targets import Wanted

NONE = "–"


def command(wanted: Wanted, study: str | None) -> str:
    """What to type for the same again; in Python, if the command line cannot ask for it."""
    if wanted.env or wanted.settings:
        given = {"study": study, "seeds": wanted.seeds, "steps": wanted.steps, "env": wanted.env}
        given |= {"quick": wanted.quick or None, "out": str(wanted.out), **wanted.settings}
        told = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"pevdn.reproduce({', '.join(told)})"
    words = ["pevdn reproduce", f"--seeds {wanted.seeds}", f"--steps {wanted.steps}"]
    words += [f"--study {study}"] * (study is not None) + ["--quick"] * wanted.quick
    if wanted.out != default_directory(study, wanted.quick):
        words.append(f"--out {wanted.out}")
    return " ".join(words)


def left_out(wanted: Wanted, seeds: int, steps: int) -> list[str]:
    """What a quick experiment has less of."""
    told = []
    if wanted.seeds < seeds:
        told.append(f"{wanted.seeds} seed{'s' * (wanted.seeds > 1)} instead of {seeds}")
    if wanted.steps < steps:
        told.append(f"{wanted.steps:,} steps instead of {steps:,}")
    return told


def reservations(rows: Sequence[Row], wanted: Wanted) -> list[str]:
    """What keeps figures from being results."""
    told = []
    for row in rows:
        if row["updates"] == 0 and row["released"]:
            told.append(
                f"{row['arm']} made no update: it begins to learn after {row['learning_starts']:,} "
                f"episodes, and {row['episodes']:,.0f} were played."
            )
    if wanted.quick:
        told.append(
            "These are no results: a quick experiment shows that everything runs, and its figures "
            "are of too few steps and seeds to be quoted or compared with the paper's."
        )
    elif wanted.seeds == 1:
        told.append("One seed shows no spread, so that there are no intervals.")
    return told


# ---- cells ----------------------------------------------------------------------------------


def rate(row: Row, name: str, form: str = ".3f") -> str:
    """`0.921 [0.912, 0.930]`, without an interval if there is none."""
    value, low, high = (row.get(f"{name}{x}") for x in ("", "_low", "_high"))
    if value is None:
        return NONE
    bounds = "" if low is None else f" [{low:{form}}, {high:{form}}]"
    return f"{value:{form}}{bounds}"


def soon(row: Row) -> str:
    """`150,000 (8 of 8)`."""
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
    """The content of table.md."""
    rows, versions = document["rows"], document["versions"]
    arms = [row for row in rows if row["released"]]
    parts = [
        f"# {document['title']}",
        f"`{document['command']}`, {document['date']}, {document['device']}, "
        f"pevdn {versions['pevdn']}, jax {versions['jax']}, Python {versions['python']}; "
        f"{document['training_hours']:.2f} hours of training in all.",
    ]
    if document["left_out"]:
        parts.append(f"Left out: {'; '.join(document['left_out'])}. **These are no results.**")
    parts += [
        "## How well, and how soon",
        _table(
            [
                *("arm", "model", "win rate", "paper", "share of VDN", "paper"),
                *("area", "paper", "steps to 80 % (seeds)", "paper"),
            ],
            (_learning(row) for row in rows),
        ),
        "*Win rate*: mean over the evaluations of the last 100,000 steps (the last quarter of a "
        "shorter run), then over seeds; [95 % bootstrap interval over seeds]. *Area*: under the "
        "curve, 1 at most. *Steps to 80 %*: until the mean of five evaluations is 0.8; median over "
        "seeds, and how many got there. *Share of VDN*: our recipe's is of the better of `vdn` and "
        "`vdn-ours`, which has our recipe's network. *Paper*: its one run, after as many "
        "steps. A model that a seed does not have yet wins 0.",
        "## How private, and at what traffic",
        _table(
            [
                *("arm", "ε team", "δ", "ε agent (conditional)", "Theorem 1 would claim"),
                *("paper claims", "messages sent", "bytes"),
            ],
            (_cost(row) for row in arms),
        ),
        "ε is what the run's ledger says at its end, the largest of the seeds; ∞ without "
        "differential privacy. ε team is proven; ε agent is conditional and in general no bound. "
        "Theorem 1 is about the agent view, not sound for a buffer throughput above 1, and shown "
        "for comparison; the paper claims its ε by it. "
        "*Sent*: by one agent in the training of one seed. A message "
        "is one 32-bit number for a step of a sampled episode; the number of these is computed "
        "from updates, batch size and the lengths of the episodes in the buffer, not counted one "
        "by one. `vdn`: every step once to the central node. Indices, rewards and the framing of "
        "packets are not included.",
    ]
    if document["refused"]:
        parts += ["## Refused", *(f"- {k}: {v}" for k, v in document["refused"].items())]
    parts += ["## In words", "\n".join(f"- {sentence}" for sentence in document["words"])]
    return "\n\n".join(parts) + "\n"


def _learning(row: Row) -> list[str]:
    original = row.get("paper")

    def theirs(name: str, form: str) -> str:
        value = original[name] if original is not None else None
        return NONE if value is None else f"{value:{form}}"

    return [
        row["arm"],
        row["model"],
        rate(row, "win_rate"),
        theirs("win_rate", ".3f"),
        rate(row, "share_of_vdn", ".0%"),
        theirs("share_of_vdn", ".0%"),
        rate(row, "area"),
        theirs("area", ".3f"),
        soon(row),
        NONE if original is None else soon(original).partition(" ")[0],
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
