"""`pevdn budget`: the ε of a planned training, or the settings for a target ε."""

from __future__ import annotations

import dataclasses
import math
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
    openings: Annotated[
        int | None,
        typer.Option(help="Noised openings of each record, for pe-vdn-d (default: none)."),
    ] = None,
    opening_noise: Annotated[
        float | None,
        typer.Option(help="Noise of an opening in units of the message norm (default: 1)."),
    ] = None,
    colluders: Annotated[
        int | None,
        typer.Option(help="Teammates that pool what they see (default: all but one)."),
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Find the smallest noise for this ε: the noise multiplier, and for ε record the "
            "opening noise too, unless given. If all are given, find the largest batch."
        ),
    ] = None,
    observer: Annotated[
        str | None,
        typer.Option(
            "--observer",
            "--view",
            help="Observer of the target ε: record (with noised openings; the default there), "
            "team (proven) or agent.",
        ),
    ] = None,
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

    if delta == 0:
        raise UsageError("delta is 0, but must be between 0 and 1; leave it out for the default.")
    if delta is not None and episodes is not None:
        raise UsageError(
            f"--delta is {delta:g} and --episodes {episodes}, but δ follows from the episodes; "
            "leave one of them out."
        )
    if openings is not None and openings < 1:
        raise UsageError(
            f"openings is {openings}, but must be at least 1; leave it out for openings without "
            "noise."
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
        "openings": openings,
        "opening_noise": opening_noise,
        "colluders": colluders,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    if preset is not None:
        recipe = planner.Plan.of(presets.configure(None, preset=preset), agents)
        own = {} if episodes is None else {"delta": 0.0}  # derived from the episodes
        chosen = dataclasses.asdict(recipe) | own | chosen
    elif batch_size is None and buffer_size is not None:
        chosen["batch_size"] = min(32, buffer_size)
    if opening_noise is not None or colluders is not None:
        chosen["openings"] = chosen.get("openings") or 1
    plan = planner.Plan(**{**chosen, "agents": agents})
    observer = observer or plan.mechanism.observers[0]
    if target_epsilon is not None:
        held = [name for name in planner.noises_of(observer) if options[name] is not None]
        if len(held) < len(planner.noises_of(observer)):
            plan = planner.smallest_noise(plan, target_epsilon, observer, held)
        elif batch_size is None:
            plan = planner.largest_batch(plan, target_epsilon, observer)
        else:
            raise UsageError(
                "--target-epsilon, --batch-size and all noise leave nothing to find; omit a noise "
                "to find the smallest, or the batch to find the largest."
            )
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

    unsound = "; not sound for a throughput above 1" if document["theorem_1_unsound"] else ""
    claim_delta = f" at δ = {document['theorem_1_delta']:.3g}"
    opened = ""
    if "openings" in document:
        opened = f", opening noise {document['opening_noise']:g} (n = {document['openings']})"
    typer.echo(
        f"noise multiplier {document['noise_multiplier']:g}{opened}, batch "
        f"{document['batch_size']} of "
        f"{document['buffer_size']} (q = {document['sampling_rate']:.4g}), at most "
        f"{document['exposure']:,} updates per episode, δ = {document['delta']:.3g}, "
        f"{document['relation']}"
    )
    claim = f"the paper's claim for the agent observer{claim_delta}, for comparison{unsound}"
    print_table(
        ["observer", "ε (PLD)", "ε (RDP)", "holds against"],
        [
            [name, figure(f"epsilon_{name}"), figure(f"epsilon_{name}_rdp"), text]
            for name, text in _observers(document).items()
        ]
        + [
            _teammate(document),
            ["theorem-1", "–", figure("theorem_1_epsilon"), claim],
        ],
    )
    for name in ("note", "conditional"):
        if name in document:
            typer.echo(textwrap.fill(document[name], 100))
    if "search" in document:
        _show_search(document["search"])
    if "plot" in document:
        typer.echo(f"picture  {document['plot']}")


def _observers(document: dict[str, Any]) -> dict[str, str]:
    """Return whom the ε of each observer holds against, the strongest first."""
    many = f"all {document['agents']} agents" if document["agents"] > 1 else "the agent"
    agent = (
        "conditional: an outsider who sees one agent, if its teammates did not learn from the "
        "episode; otherwise no bound"
    )
    if "epsilon_record" not in document:
        team = f"an outsider who sees {many}, and therefore one who sees fewer; proven"
        return {"team": team, "agent": agent}
    t, n = document["colluders"], document["openings"]
    held = {
        name: "proven" if math.isfinite(document[f"epsilon_{name}"]) else "infinite: no bound"
        for name in ("record", "coalition")
    }
    return {
        "record": f"a coalition of t = {t} pooled with any outsider, for one agent's record of an "
        f"episode; n = {n} opening{'s' * (n > 1)} of it; {held['record']}",
        "team": f"an outsider who sees {many} but no opened sum, for a whole episode; proven",
        "agent": agent,
        "coalition": "the observers of record, for a whole episode of all agents outside the "
        f"coalition; {held['coalition']}",
    }


def _teammate(document: dict[str, Any]) -> list[str]:
    text = document["teammate"].removeprefix("none: ")
    if "epsilon_record" not in document:
        return ["teammate", "none", "none", text]
    return ["teammate", _figure(document["epsilon_record"]), "", text]


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
