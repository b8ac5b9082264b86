"""`pevdn budget`: what a training will cost, and what a budget affords."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table

CONDITIONAL = (
    "The target is for the agent view, which is conditional: it is no bound for an observer of one "
    "agent, who sees what teammates learnt from the episode as well (docs/privacy.md)."
)


def main(
    preset: Annotated[
        str | None, typer.Option(help="Start from this preset; `pevdn presets` lists them.")
    ] = None,
    buffer_size: Annotated[
        int | None, typer.Option(help="Episodes that an agent keeps (default 1024).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch, in episodes (default 32).")
    ] = None,
    throughput: Annotated[
        float | None,
        typer.Option(help="An update that is due happens with probability 1/throughput."),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over clip norm (default 1).")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ (default: a tenth of one over the episodes).")
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(help="Protected episodes, for δ (default: as many as steps, or 400,000)."),
    ] = None,
    agents: Annotated[int, typer.Option(help="Agents in the team.")] = 3,
    steps: Annotated[
        int | None,
        typer.Option(help="Environment steps of the run (default: any number)."),
    ] = None,
    update_every: Annotated[
        int | None, typer.Option(help="Episodes from one update to the next (default 1).")
    ] = None,
    relation: Annotated[
        str | None,
        typer.Option(help="Neighbours: zero-out (default), add-or-remove or replace-one."),
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Find the smallest noise multiplier for this ε; with --noise-multiplier given, "
            "the largest batch."
        ),
    ] = None,
    view: Annotated[
        str,
        typer.Option(help="Whose ε the target is for: team, which is proven, or agent."),
    ] = "team",
    runs: Annotated[
        list[int] | None,
        typer.Option(help="Also say what a search by so many runs costs; may be repeated."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ε against noise and batch into this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what ε a training will cost, for every view; or find the settings for a target."""
    from pevdn.config import presets
    from pevdn.errors import UsageError
    from pevdn.privacy import planner, search

    if target_epsilon is not None and batch_size is not None and noise_multiplier is not None:
        raise UsageError(
            "--target-epsilon, --batch-size and --noise-multiplier leave nothing to be found; "
            "leave out the noise multiplier to find the smallest, or the batch to find the largest."
        )
    if delta == 0:
        raise UsageError("delta is 0, but must be between 0 and 1; leave it out for the default.")
    if delta is not None and episodes is not None:
        raise UsageError(
            f"--delta is {delta:g} and --episodes {episodes}, but δ follows from the episodes; "
            "leave one of them out."
        )
    given: dict[str, Any] = {
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
    chosen = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        recipe = planner.Plan.of(presets.configure(None, preset=preset), agents)
        own = {} if episodes is None else {"delta": 0.0}  # it follows from them
        chosen = dataclasses.asdict(recipe) | own | chosen
    elif batch_size is None and buffer_size is not None:
        chosen["batch_size"] = min(32, buffer_size)
    plan = planner.Plan(**{**chosen, "agents": agents})
    if target_epsilon is not None:
        find = planner.smallest_noise if noise_multiplier is None else planner.largest_batch
        plan = find(plan, target_epsilon, view)
    document = planner.report(plan)
    if (note := planner.large_delta(plan)) is not None:
        document["note"] = note
    if target_epsilon is not None and view == "agent":
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


def _show(found: dict[str, Any]) -> None:
    def figure(name: str) -> str:
        return _figure(found.get(name))

    many = f"all {found['agents']} agents" if found["agents"] > 1 else "the agent"
    unsound = "; not sound for a throughput above 1" if found["theorem_1_unsound"] else ""
    claim_delta = f" at δ = {found['theorem_1_delta']:.3g}"
    typer.echo(
        f"noise multiplier {found['noise_multiplier']:g}, batch {found['batch_size']} of "
        f"{found['buffer_size']} (q = {found['sampling_rate']:.4g}), at most {found['exposure']:,} "
        f"updates an episode, δ = {found['delta']:.3g}, {found['relation']}"
    )
    print_table(
        ["view", "ε (PLD)", "ε (RDP)", "holds against"],
        [
            [
                "team",
                figure("epsilon_team"),
                figure("epsilon_team_rdp"),
                f"an outsider who sees {many}, and so any who sees fewer; proven",
            ],
            [
                "agent",
                figure("epsilon_agent"),
                figure("epsilon_agent_rdp"),
                "conditional: an outsider who sees one agent, if its teammates had not learnt from "
                "the episode; no bound otherwise",
            ],
            ["teammate", "none", "none", found["teammate"].removeprefix("none: ")],
            [
                "theorem-1",
                "–",
                figure("theorem_1_epsilon"),
                f"the paper's claim of the agent view{claim_delta}, for comparison only{unsound}",
            ],
        ],
    )
    for name in ("note", "conditional"):
        if name in found:
            typer.echo(textwrap.fill(found[name], 100))
    if "search" in found:
        _show_search(found["search"])
    if "plot" in found:
        typer.echo(f"picture  {found['plot']}")


def _show_search(rows: list[dict[str, Any]]) -> None:
    cases = [name for name in rows[0] if name not in ("view", "runs")]
    typer.echo(
        "Choosing among runs by their results: ε if every run plays episodes of its own (fresh), "
        "or if\nthe same episodes are learnt from again, and all runs are looked at, or only the "
        "best of a random\nnumber of runs with this mean (by its distribution; RDP). The agent "
        "view is conditional here, too."
    )
    print_table(
        ["view", "runs", *cases],
        [[row["view"], row["runs"], *(_figure(row[case]) for case in cases)] for row in rows],
    )
