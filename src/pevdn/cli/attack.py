"""`pevdn attack`: measure what a curious teammate and an outsider learn from a run."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.errors import UsageError

FORMATS = (".png", ".pdf", ".svg")
OBSERVERS = {"agent": "one agent", "team": "whole team"}


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    episodes: Annotated[
        int | None, typer.Option(help="Episodes played for the curious teammate (default: 1024).")
    ] = None,
    shadows: Annotated[
        int | None,
        typer.Option(help="Shadow teams per membership-inference attack (default: 12)."),
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help="Updates of each shadow team (default: 120).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Use 256 episodes, 6 teams and 60 updates; intervals are wider."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Picture file (default: RUN/attack.png).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack a trained team: infer private features and the membership of episodes."""
    from pevdn.storage.files import disk_errors
    from pevdn.training.directory import Run
    from pevdn.training.progress import reporter

    path = out or run / "attack.png"
    Run(run).config  # noqa: B018  (check that it is a run before loading JAX)
    _check_writable(path)
    from pevdn.verification.attacks import FULL, QUICK, attack
    from pevdn.verification.attacks.picture import draw

    show = reporter()
    options = {"episodes": episodes, "shadows": shadows, "updates": updates}
    chosen = {name: value for name, value in options.items() if value is not None}
    effort = (QUICK if quick else FULL)._replace(**chosen)
    if quick:
        reduced = [
            f"{name} {getattr(effort, name)} instead of {getattr(FULL, name)}"
            for name in effort._fields
            if name not in chosen
        ]
        show.note(f"quick: {', '.join(reduced) or 'nothing left to reduce'}")
    document = attack(run, effort, seed, show)
    with disk_errors(path.parent):
        draw(document, path)
    document["picture"] = str(path)
    if as_json:
        print_json(document)
        return
    _show_channels(document)
    _show_team_sizes(document)
    _show_noised_sums(document)
    _show_records(document)
    _show_membership(document)
    typer.echo(f"{document['seconds']:.0f} seconds\npicture  {path}")


def _check_writable(path: Path) -> None:
    """Check the picture file before the attacks, which take minutes."""

    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--out is {path}, but must end in {', '.join(FORMATS)}.")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--out is {path}, but must be a file in a directory that exists.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written; choose another file with --out.")


# ---- tables and conclusions -----------------------------------------------------------------


def _show_channels(document: dict[str, Any]) -> None:
    own = [row for row in document["teammate"] if not row["composed"]]
    features = document["features"]
    meanings = ", ".join(f"{name}: {meaning}" for name, meaning in features.items())
    _print(
        f"What agent 1 infers about agent 0 in this team of {document['agents']}: AUC [95 % "
        "interval]. pe-vdn-a sends the message, pe-vdn-b and c send shares, all open the sum "
        "(pe-vdn-d with noise, below). "
        f"({meanings})"
    )
    channels = list(dict.fromkeys(row["channel"] for row in own))
    by = {(row["channel"], row["feature"]): row for row in own}
    print_table(
        ["received", *features],
        [[c, *(_cell(by[c, f]) for f in features)] for c in channels],
    )
    shares = [row for row in own if "share" in row["channel"] and row["auc"] is not None]
    blind = sum(row["low"] <= 0.5 <= row["high"] for row in shares)
    _print(
        f"Above chance from the message: {_revealed(own, 'message')}; from the opened sum: "
        f"{_revealed(own, 'opened sum')}. Of the shares, {blind} of {len(shares)} intervals "
        "contain 0.5 (each is the best of one attack for every choice of shares, widened so that "
        "all hold at once).\n"
    )


def _revealed(rows: list[dict[str, Any]], channel: str) -> str:
    """Return the features that a channel reveals."""
    known = [r for r in rows if r["channel"] == channel and r["auc"] is not None]
    return ", ".join(row["feature"] for row in known if row["low"] > 0.5) or "nothing"


def _show_team_sizes(document: dict[str, Any]) -> None:
    sums = [row for row in document["teammate"] if row["channel"] == "opened sum"]
    features = document["features"]
    _print(
        "What the opened sum reveals, by team size: AUC [95 % interval]. (composed: the "
        "victim's message plus those of this run's agents in other episodes)"
    )
    by = {(row["agents"], row["composed"], row["feature"]): row for row in sums}
    teams = sorted({(row["agents"], row["composed"]) for row in sums})
    print_table(
        ["agents", *features],
        [
            [f"{n}, composed" if made else f"{n}, this run's"]
            + [_cell(by[n, made, f]) for f in features]
            for n, made in teams
        ],
    )
    sizes = [n for n, made in teams if made]
    least, most = min(sizes), max(sizes)
    changes = [
        f"{f} from {by[least, True, f]['auc']:.2f} to {by[most, True, f]['auc']:.2f}"
        for f in features
        if by[least, True, f]["auc"] is not None and by[most, True, f]["auc"] is not None
    ]
    _print(
        f"From {least} agents, where the sum is the message, to {most}: "
        f"{', '.join(changes) or 'nothing could be measured'}.\n"
    )


def _show_noised_sums(document: dict[str, Any]) -> None:
    features, rows = list(document["features"]), document["noised_sums"]
    _print(
        "What a noised sum (pe-vdn-d) reveals to a teammate: AUC [95 % interval], beside the sum "
        "of pe-vdn-b. The noise is the least that keeps the openings of a record within ε at δ "
        f"{document['delta']:.2g}, for all other agents colluding; with 2 agents the teammate is "
        "all others. (limit: the largest AUC of any attack on the sums at this ε)"
    )
    plain = {
        (row["agents"], row["feature"]): row
        for row in document["teammate"]
        if row["channel"] == "opened sum" and row["composed"]
    }
    by = {(row["agents"], row["epsilon"], row["own"], row["feature"]): row for row in rows}
    table: list[list[str]] = []
    shown: set[int] = set()
    for agents, epsilon, mine in dict.fromkeys(key[:3] for key in by):
        if agents in {size for size, _ in plain} - shown:
            shown.add(agents)
            own = (_cell(plain[agents, f]) for f in features)
            table.append([f"{agents}, pe-vdn-b", *own, "1.00"])
        found = [by[agents, epsilon, mine, f] for f in features]
        name = f"{agents}, ε {_epsilon(epsilon)}" + (" (this run's)" if mine else "")
        table.append([name, *map(_cell, found), f"{found[0]['largest_auc']:.2f}"])
    print_table(["agents", *features, "limit"], table)
    known = [row for row in rows if row["auc"] is not None and row["epsilon"] != float("inf")]
    worst = max(known, key=lambda row: abs(row["auc"] - 0.5), default=None)
    if worst is not None:
        _print(
            f"At a finite ε, farthest from chance: {worst['auc']:.3f} for {worst['feature']} with "
            f"{worst['agents']} agents at ε {_epsilon(worst['epsilon'])}; intervals that contain "
            f"0.5: {sum(row['low'] <= 0.5 <= row['high'] for row in known)} of {len(known)}.\n"
        )


def _show_records(document: dict[str, Any]) -> None:
    rows = document["records"]
    _print(
        "Whether an agent's record is in the sum or empty, for a coalition of all others that "
        "knows the record: AUC [95 % interval]."
    )
    print_table(
        ["agents", "ε", "noise", "AUC", "limit"],
        [
            [
                f"{row['agents']}, this run's" if row["own"] else str(row["agents"]),
                _epsilon(row["epsilon"]),
                f"{row['opening_noise']:g}",
                _cell(row),
                f"{row['largest_auc']:.2f}",
            ]
            for row in rows
        ],
    )
    over = [row for row in rows if row["low"] > row["largest_auc"]]
    _print(f"Above its limit: {len(over) or 'nothing'}.\n")


def _show_membership(document: dict[str, Any]) -> None:
    rows = document["membership"]
    _print(
        "Membership inference: AUC [95 % interval] from the Q-values of one agent, and of the "
        f"whole team. ({document['shadows']} teams, {document['updates']} updates on about half of "
        f"{document['candidates']} episodes, δ {document['delta']:.2g}; limit: the largest AUC "
        "of any attack at this ε team; *: conditional; own: pe-vdn-c with this run's noise, or "
        "at its ε agent)"
    )
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    print_table(
        ["training", "ε team", "ε agent*", "one agent", "whole team", "limit"],
        [
            [
                f"own {agent['own']}" if agent["own"] else agent["algorithm"],
                _epsilon(agent["epsilon_team"]),
                _epsilon(agent["epsilon_agent"]),
                _cell(agent),
                _cell(team),
                f"{agent['largest_auc']:.2f}",
            ]
            for agent, team in pairs
        ],
    )
    above: dict[str, list[str]] = {}
    for row in rows:
        if row["low"] > 0.5:
            above.setdefault(_training(row), []).append(OBSERVERS[row["observer"]])
    significant = [f"{training} ({' and '.join(seen)})" for training, seen in above.items()]
    rest = sum(row["low"] <= 0.5 for row in rows)
    over = [_training(row) for row in rows if row["low"] > row["largest_auc"]]
    _print(
        f"Above chance: {', '.join(significant) or 'nothing'}; the other {rest} of {len(rows)} "
        f"intervals reach down to 0.5. Above its limit: {', '.join(over) or 'nothing'}.\n"
    )


def _training(row: dict[str, Any]) -> str:
    epsilon = "" if row["epsilon_team"] is None else f" at ε team {_epsilon(row['epsilon_team'])}"
    return f"{row['algorithm']}{epsilon}"


def _print(text: str) -> None:
    typer.echo(textwrap.fill(text, 80) + ("\n" if text.endswith("\n") else ""))


def _epsilon(value: float | None) -> str:
    return "none" if value is None else "∞" if value == float("inf") else f"{value:.2f}"


def _cell(row: dict[str, Any]) -> str:
    if row["auc"] is None:
        return "never varies"
    return f"{row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
