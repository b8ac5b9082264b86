"""`pevdn ledger`: what a run has spent, from its own books."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    run: Annotated[Path, typer.Argument(help="The directory of the run.")], as_json: Json = False
) -> None:
    """Check the ledger of a private run, and say what it has spent so far."""
    from pevdn.errors import UsageError
    from pevdn.experiment.config import fingerprint
    from pevdn.experiment.directory import Run
    from pevdn.privacy.accounting import TEAMMATE
    from pevdn.privacy.ledger import Ledger

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
            **spent._asdict(),
            "exposure": ledger.exposure[lane],
            "updates": ledger.counted[lane],
            "lost": ledger.lost[lane],
        }
        for lane, spent in enumerate(ledger.spent())
    ]
    if as_json:
        mechanism = ledger.mechanism._asdict()
        document = {"run": str(run), "lines": len(ledger.lines), "mechanism": mechanism}
        print_json({**document, "teammate": TEAMMATE, "seeds": rows})
        return
    typer.echo(
        f"{len(ledger.lines):,} lines, none missing or changed; δ = {ledger.mechanism.delta:.3g}, "
        f"{ledger.mechanism.relation}"
    )
    print_table(
        ["seed", "ε team", "ε agent", "ε teammate", "exposure", "updates", "lost in crashes"],
        [
            [
                row["seed"],
                f"{row['epsilon_team']:.3f}",
                f"{row['epsilon_agent']:.3f}",
                "none",
                f"{row['exposure']:,}",
                f"{row['updates']:,}",
                f"{row['lost']:,}",
            ]
            for row in rows
        ],
    )
