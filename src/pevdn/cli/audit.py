"""`pevdn audit`: attack the private program and compare the measured ε with the claim."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from pevdn.cli.output import Json, print_json, print_table

CONDITIONAL = "agent (conditional)"


def main(
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            help="Choose the noise for this ε of the agent observer, with pe-vdn-d of the record; "
            "may be repeated (default: 1, 3 and 8). Claims are audited for all observers."
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="pe-vdn-c or pe-vdn-d (default: the preset's, or pe-vdn-c)."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Audit this preset; `pevdn presets` lists them.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the audited recipe; with noise_multiplier, its ε is the claim.",
        ),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A setting that replaces the recipe's in the audit."
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Trainings with the canary, and as many without.")
    ] = 2000,
    buffer_size: Annotated[
        int | None, typer.Option(help="Short for --scale buffer_size=… (default: 32).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Short for --scale expected_batch_size=… (default: 4).")
    ] = None,
    agents: Annotated[
        int | None, typer.Option(help="Agents of toy:coordination (default: 3).")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ (default: the recipe's, or buffer_size^−1.1).")
    ] = None,
    env: Annotated[str, typer.Option(help="World that defines the agents.")] = "toy:coordination",
    seed: Annotated[int, typer.Option(help="Seed of the audit.")] = 0,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a bug that the audit should find: no-noise, no-clipping, hidden-rate, "
            "no-root-n; with pe-vdn-d also no-opening-noise, small-share, no-message-clip, "
            "opened-twice, private-centre."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack the private program with canaries; exit with 1 if it leaks more than claimed."""
    from pevdn.config import presets
    from pevdn.config.settings import parse_assignments
    from pevdn.training.progress import reporter
    from pevdn.verification.audit import audit, refuted, world_for

    short = {"buffer_size": buffer_size, "expected_batch_size": batch_size}
    scaled = {name: value for name, value in short.items() if value is not None}
    recipe = {}
    if preset is not None:
        chosen = presets.configure(algorithm, preset=preset)
        recipe, algorithm = dataclasses.asdict(chosen.settings), chosen.algorithm
    document = audit(
        world_for(env, agents),
        epsilon,
        trials,
        delta,
        seed,
        plant,
        reporter(),
        {**recipe, **parse_assignments(assignments or [])},
        {**scaled, **parse_assignments(scale or [])},
        algorithm or "pe-vdn-c",
    )
    if as_json:
        print_json(document)
    else:
        _show(document)
    problem = refuted(document)
    if problem is not None:
        raise problem


def _show(document: dict[str, Any]) -> None:
    noised = document["algorithm"] == "pe-vdn-d"
    labels = {"agent": "agent*", "sums": "sums alone"} if noised else {"agent": CONDITIONAL}
    print_table(
        ["observer", "noise", "ε claimed", "ε at least", "fraction", "AUC", "verdict"],
        [
            [
                labels.get(row["observer"], row["observer"]),
                f"{row['noise_multiplier']:g}" + (f"; {row['opening_noise']:g}" if noised else ""),
                f"{row['epsilon_claimed']:.2f}",
                f"{row['epsilon_lower_bound']:.2f}",
                f"{row['epsilon_lower_bound'] / row['epsilon_claimed']:.2f}",
                f"{row['auc']:.3f}",
                "not refuted" if row["passed"] else "REFUTED",
            ]
            for row in document["rows"]
        ],
    )
    if noised:
        typer.echo(
            f"Noise of gradients; of sums. record: {document['colluders']} of the other agents pool"
            " all that they know,\nsee every opened sum and all parameters, and attack the record "
            f"of one agent. sums alone: the same\nwith {10 * document['trials']:,} trials of each "
            "kind and no updates. *: conditional."
        )
    team = "1 agent" if document["agents"] == 1 else f"{document['agents']} agents"
    typer.echo(
        f"{team}, batch {document['batch_size']} of {document['buffer_size']}, "
        f"{document['updates']} updates, δ = {document['delta']:.3g}. All bounds hold at once with "
        f"{document['confidence']:.0%} confidence;\n{document['trials']:,} trials of each kind can "
        f"show an ε of {document['largest_possible_bound']:.2f} at most, so larger claims "
        "cannot fail."
    )
    changes = [
        f"{name} {values['audited']} instead of {values['recipe']}"
        for name, values in document["scaled"].items()
    ]
    typer.echo(f"Settings scaled for the audit: {', '.join(changes) or 'none'}.")
