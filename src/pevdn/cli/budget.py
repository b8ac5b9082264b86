"""`pevdn budget`: what a training will cost, and what a budget affords."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table


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
    delta: Annotated[float | None, typer.Option(help="δ (default buffer_size^−1.1).")] = None,
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
    view: Annotated[str, typer.Option(help="Whose ε the target is for: agent or team.")] = "agent",
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
    from pevdn.errors import UsageError
    from pevdn.experiment import presets
    from pevdn.privacy import planner, search

    if target_epsilon is not None and batch_size is not None and noise_multiplier is not None:
        raise UsageError(
            "--target-epsilon, --batch-size and --noise-multiplier leave nothing to be found; "
            "leave out the noise multiplier to find the smallest, or the batch to find the largest."
        )
    if delta == 0:
        raise UsageError("delta is 0, but must be between 0 and 1; leave it out for the default.")
    given: dict[str, Any] = {
        "buffer_size": buffer_size,
        "batch_size": batch_size,
        "throughput": throughput,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "relation": relation,
        "update_every": update_every,
        "steps": steps,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        recipe = planner.Plan.of(presets.configure(None, preset=preset), agents)
        chosen = dataclasses.asdict(recipe) | chosen
    elif batch_size is None and buffer_size is not None:
        chosen["batch_size"] = min(32, buffer_size)
    plan = planner.Plan(**{**chosen, "agents": agents})
    if target_epsilon is not None:
        find = planner.smallest_noise if noise_multiplier is None else planner.largest_batch
        plan = find(plan, target_epsilon, view)
    document = planner.report(plan)
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
    unsound = "" if found["theorem_1_sound"] else "; not sound for a throughput above 1"
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
                "an outsider who sees one agent, its teammates' contributions held fixed",
            ],
            ["teammate", "none", "none", found["teammate"].removeprefix("none: ")],
            [
                "theorem-1",
                "–",
                figure("theorem_1_epsilon"),
                f"the paper's claim{claim_delta}, for comparison only{unsound}",
            ],
        ],
    )
    if "search" in found:
        _show_search(found["search"])
    if "plot" in found:
        typer.echo(f"picture  {found['plot']}")


def _show_search(rows: list[dict[str, Any]]) -> None:
    cases = [name for name in rows[0] if name not in ("view", "runs")]
    typer.echo(
        "Choosing among runs by their results: ε if every run plays episodes of its own (fresh), "
        "or if\nthe same episodes are learnt from again, and all runs are looked at, or only the "
        "best of a random\nnumber of runs with this mean (by its distribution; RDP)."
    )
    print_table(
        ["view", "runs", *cases],
        [[row["view"], row["runs"], *(_figure(row[case]) for case in cases)] for row in rows],
    )
