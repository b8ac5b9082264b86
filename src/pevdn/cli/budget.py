"""`pevdn budget`: the ε of a planned training, or the settings for a target ε."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.errors import UsageError

CONDITIONAL = (
    "The target is for the agent observer, whose ε is conditional: it does not bound what one "
    "agent reveals, because its teammates learnt from the episode as well (docs/privacy.md)."
)


def main(
    preset: Annotated[
        str | None, typer.Option(help="Start from this preset; `pevdn presets` lists them.")
    ] = None,
    buffer_size: Annotated[
        int | None, typer.Option(help="Episodes kept by each agent (default: 1024).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size, in episodes (default: 32).")
    ] = None,
    throughput: Annotated[
        float | None,
        typer.Option(help="A due update happens with probability 1/throughput (default: 1)."),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise in units of the clip norm (default: 1).")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ (default: 1/(10 · episodes)).")] = None,
    episodes: Annotated[
        int | None,
        typer.Option(help="Protected episodes, for δ (default: the steps, or 400,000)."),
    ] = None,
    agents: Annotated[int, typer.Option(help="Agents in the team.")] = 3,
    steps: Annotated[
        int | None,
        typer.Option(help="Environment steps of the run (default: unlimited)."),
    ] = None,
    update_every: Annotated[
        int | None, typer.Option(help="Episodes between updates (default: 1).")
    ] = None,
    relation: Annotated[
        str | None,
        typer.Option(
            help="Neighbouring relation: zero-out (default), add-or-remove or replace-one."
        ),
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Find the smallest noise multiplier for this ε; with --noise-multiplier, the "
            "largest batch."
        ),
    ] = None,
    observer: Annotated[
        str,
        typer.Option(
            "--observer", "--view", help="Observer of the target ε: team (proven) or agent."
        ),
    ] = "team",
    runs: Annotated[
        list[int] | None,
        typer.Option(help="Add the cost of choosing among this many runs; may be repeated."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ε against noise and batch size into this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the ε of a planned training, or the settings for a target ε."""
    from pevdn.config import presets
    from pevdn.privacy import planner, search

    if target_epsilon is not None and batch_size is not None and noise_multiplier is not None:
        raise UsageError(
            "--target-epsilon, --batch-size and --noise-multiplier leave nothing to find; "
            "omit the noise multiplier to find the smallest, or the batch to find the largest."
        )
    if delta == 0:
        raise UsageError("delta is 0, but must be between 0 and 1; leave it out for the default.")
    if delta is not None and episodes is not None:
        raise UsageError(
            f"--delta is {delta:g} and --episodes {episodes}, but δ follows from the episodes; "
            "leave one of them out."
        )
    options: dict[str, Any] = {
        "buffer_size": buffer_size,
        "batch_size": batch_size,
        "throughput": throughput,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "relation": relation,
        "update_every": update_every,
        "steps": steps,
        "episodes": episodes,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    if preset is not None:
        recipe = planner.Plan.of(presets.configure(None, preset=preset), agents)
        own = {} if episodes is None else {"delta": 0.0}  # derived from the episodes
        chosen = dataclasses.asdict(recipe) | own | chosen
    elif batch_size is None and buffer_size is not None:
        chosen["batch_size"] = min(32, buffer_size)
    plan = planner.Plan(**{**chosen, "agents": agents})
    if target_epsilon is not None:
        find = planner.smallest_noise if noise_multiplier is None else planner.largest_batch
        plan = find(plan, target_epsilon, observer)
    document = planner.report(plan)
    if (note := planner.large_delta(plan)) is not None:
        document["note"] = note
    if target_epsilon is not None and observer == "agent":
        document["conditional"] = CONDITIONAL
    if runs:
        document["search"] = search.report(plan, runs)
    if plot is not None:
        planner.draw(plan, plot)
        document["plot"] = str(plot)
    if as_json:
        print_json(document)
    else:
        _show(document)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def _show(document: dict[str, Any]) -> None:
    def figure(name: str) -> str:
        return _figure(document.get(name))

    many = f"all {document['agents']} agents" if document["agents"] > 1 else "the agent"
    unsound = "; not sound for a throughput above 1" if document["theorem_1_unsound"] else ""
    claim_delta = f" at δ = {document['theorem_1_delta']:.3g}"
    typer.echo(
        f"noise multiplier {document['noise_multiplier']:g}, batch {document['batch_size']} of "
        f"{document['buffer_size']} (q = {document['sampling_rate']:.4g}), at most "
        f"{document['exposure']:,} updates per episode, δ = {document['delta']:.3g}, "
        f"{document['relation']}"
    )
    print_table(
        ["observer", "ε (PLD)", "ε (RDP)", "holds against"],
        [
            [
                "team",
                figure("epsilon_team"),
                figure("epsilon_team_rdp"),
                f"an outsider who sees {many}, and therefore one who sees fewer; proven",
            ],
            [
                "agent",
                figure("epsilon_agent"),
                figure("epsilon_agent_rdp"),
                "conditional: an outsider who sees one agent, if its teammates did not learn from "
                "the episode; otherwise no bound",
            ],
            ["teammate", "none", "none", document["teammate"].removeprefix("none: ")],
            [
                "theorem-1",
                "–",
                figure("theorem_1_epsilon"),
                f"the paper's claim for the agent observer{claim_delta}, for comparison{unsound}",
            ],
        ],
    )
    for name in ("note", "conditional"):
        if name in document:
            typer.echo(textwrap.fill(document[name], 100))
    if "search" in document:
        _show_search(document["search"])
    if "plot" in document:
        typer.echo(f"picture  {document['plot']}")


def _show_search(rows: list[dict[str, Any]]) -> None:
    cases = [name for name in rows[0] if name not in ("observer", "runs")]
    typer.echo(
        "Choosing among runs by their results: ε if every run plays its own episodes (fresh), or "
        "if all\nruns learn from the same episodes and either all results are seen, or only the "
        "best of a random\nnumber of runs with this mean (by its distribution; RDP). The agent's ε "
        "is conditional here, too."
    )
    print_table(
        ["observer", "runs", *cases],
        [[row["observer"], row["runs"], *(_figure(row[case]) for case in cases)] for row in rows],
    )
