"""`pevdn ledger`: check the ledger of a run and print its ε."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.errors import UsageError

MEANING = (
    "All ε cover the run as configured, plus all that was lost in crashes: they hold no matter "
    "when or why it ends. Spent so far holds only if the run is not stopped because of its results."
)


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")], as_json: Json = False
) -> None:
    """Check the ledger of a private run, and print its guaranteed and spent ε."""
    from pevdn.config.experiment import fingerprint
    from pevdn.privacy import randomness
    from pevdn.privacy.accounting import teammate
    from pevdn.privacy.ledger import Ledger
    from pevdn.training.directory import Run

    config = Run(run).config
    if not config.private:
        raise UsageError(
            f"{run} was trained with {config.algorithm}, which is not differentially private and "
            "has no ledger; train pe-vdn-c or pe-vdn-d."
        )
    ledger = Ledger.read(run, fingerprint(config))
    mechanism, coalition = ledger.mechanism, ledger.coalition()
    rows = [
        {
            "seed": config.seed + lane,
            **guaranteed.known,
            **{f"{k}_spent": v for k, v in spent.known.items() if k != "delta"},
            **({"epsilon_coalition": coalition[lane]} if mechanism.noised else {}),
            "exposure_bound": ledger.bound[lane],
            "exposure": ledger.exposure[lane],
            "updates": ledger.counted[lane],
            "lost": ledger.lost[lane],
        }
        for lane, (guaranteed, spent) in enumerate(
            zip(ledger.guaranteed(), ledger.spent(), strict=True)
        )
    ]
    source = randomness.source(config)
    worst = max((row["epsilon_record"] for row in rows if mechanism.noised), default=None)
    promise = teammate(mechanism._replace(openings=ledger.openings_bound), worst)
    if as_json:
        document = {"run": str(run), "lines": len(ledger.lines), "mechanism": mechanism._asdict()}
        document |= {"randomness": source, "randomness_meaning": randomness.MEANING[source]}
        if mechanism.noised:
            names = ("openings", "openings_bound", "lost_openings")
            document |= {name: getattr(ledger, name) for name in names}
        print_json({**document, "teammate": promise, "meaning": MEANING, "seeds": rows})
        return
    typer.echo(
        f"{len(ledger.lines):,} lines, none missing or changed; δ = {mechanism.delta:.3g}, "
        f"{mechanism.relation}"
    )
    if mechanism.noised:
        typer.echo(
            f"t = {mechanism.colluders}; openings of a record: n = {mechanism.openings} planned, "
            f"{ledger.openings} so far, {ledger.lost_openings} of them lost in crashes"
        )
    marked = {name: f"ε {name}{'*' if name == 'agent' else ''}" for name in mechanism.observers}
    print_table(
        ["seed", *marked.values(), "ε coalition" if mechanism.noised else "teammate"],
        [
            [
                row["seed"],
                *(f"{row[f'epsilon_{name}']:.3f}" for name in marked),
                f"{row['epsilon_coalition']:.3f}" if mechanism.noised else "none",
            ]
            for row in rows
        ],
    )
    typer.echo("Spent so far:")
    print_table(
        ["seed", *marked.values(), "exposure", "updates", "lost"],
        [
            [
                row["seed"],
                *(f"{row[f'epsilon_{name}_spent']:.3f}" for name in marked),
                f"{row['exposure']:,} of {row['exposure_bound']:,}",
                f"{row['updates']:,}",
                f"{row['lost']:,}",
            ]
            for row in rows
        ],
    )
    typer.echo("* conditional; the other ε are proven (docs/privacy.md).")
    if mechanism.noised:
        typer.echo(f"A teammate: {promise}.")
    typer.echo(f"{MEANING}\n\n{randomness.MEANING[source]}")
