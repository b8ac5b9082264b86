"""Read the ledger and the metrics of private runs."""

from __future__ import annotations

from typing import Any

from pevdn.config import experiment as config
from pevdn.privacy.ledger import Ledger
from pevdn.training.loop import Run


def ledger_of(run: Run) -> Ledger:
    return Ledger.read(run.path, config.fingerprint(run.config))


def without_epsilon(run: Run) -> list[dict[str, Any]]:
    """The metrics without ε, which lost updates raise from the start."""
    return [{k: v for k, v in x.items() if not k.startswith("epsilon")} for x in run.metrics]
