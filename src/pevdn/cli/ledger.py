"""`pevdn ledger`: check the ledger of a run and print its ε."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table
from pevdn.errors import UsageError

MEANING = (
    "ε team and ε agent cover the run as configured, plus all updates lost in crashes: they hold "
    "no matter when or why it ends. Spent so far holds only if the run is not stopped because of "
    "its results."
)


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")], as_json: Json = False
) -> None:
    """Check the ledger of a private run, and print its guaranteed and spent ε."""
    from pevdn.config.experiment import fingerprint
    from pevdn.privacy import randomness
    from pevdn.privacy.accounting import TEAMMATE
    from pevdn.privacy.ledger import Ledger
    from pevdn.training.directory import Run

    config = Run(run).config
    if not config.private:
        raise UsageError(
            f"{run} was trained with {config.algorithm}, which is not differentially private and "
            "has no ledger; train pe-vdn-c."
        )
    ledger = Ledger.read(run, fingerprint(config))
    rows = [
        {
            "seed": config.seed + lane,
            **guaranteed._asdict(),
            "epsilon_agent_spent": spent.epsilon_agent,
            "epsilon_team_spent": spent.epsilon_team,
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
    if as_json:
        mechanism = ledger.mechanism._asdict()
        document = {"run": str(run), "lines": len(ledger.lines), "mechanism": mechanism}
        document |= {"randomness": source, "randomness_meaning": randomness.MEANING[source]}
        print_json({**document, "teammate": TEAMMATE, "meaning": MEANING, "seeds": rows})
        return
    typer.echo(
        f"{len(ledger.lines):,} lines, none missing or changed; δ = {ledger.mechanism.delta:.3g}, "
        f"{ledger.mechanism.relation}"
    )
    print_table(
        ["seed", "ε team", "ε agent*", "teammate", "spent so far", "exposure", "updates", "lost"],
        [
            [
                row["seed"],
                f"{row['epsilon_team']:.3f}",
                f"{row['epsilon_agent']:.3f}",
                "none",
                f"{row['epsilon_team_spent']:.3f}, {row['epsilon_agent_spent']:.3f}*",
                f"{row['exposure']:,} of {row['exposure_bound']:,}",
                f"{row['updates']:,}",
                f"{row['lost']:,}",
            ]
            for row in rows
        ],
    )
    typer.echo("* conditional; only ε team is proven (docs/privacy.md).")
    typer.echo(f"{MEANING}\n\n{randomness.MEANING[source]}")
