"""Fake runs of a campaign, and commands that stop before training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import pevdn
from pevdn.config import experiment as config
from pevdn.config.experiment import Config
from pevdn.privacy.ledger import Ledger
from pevdn.privacy.planner import Plan
from pevdn.reproduction.campaign import Arm
from pevdn.training import loop as run


def begun(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Collect the configurations that would be trained from here on."""
    wanted: list[Config] = []

    def begin(config: Config, *_: object) -> None:
        wanted.append(config)
        raise pevdn.PevdnError("enough")

    monkeypatch.setattr(run, "begin", begin)
    return wanted


def lines_of(values: Sequence[Sequence[float | None]], every: int, name: str = "win_rate") -> Any:
    """Return metrics of seeds with these win rates; episodes of 3 steps, one update each."""
    return [
        {
            "seed": seed,
            "env_steps": k * every,
            "episodes": k * every // 3,
            "updates": k * every // 3,
            "win_rate": own[k] if name == "win_rate" else 0.1,
            name: own[k],
        }
        for k in range(len(values[0]))
        for seed, own in enumerate(values)
    ]


def pretend(arm: Arm, win_rates: Sequence[Sequence[float]], **more: float) -> None:
    """Write a finished run with every file that is read."""
    arm.path.mkdir(parents=True, exist_ok=True)
    (arm.path / "config.yaml").write_text(config.to_text(arm.config))
    if arm.config.private:
        mechanism, seeds = Plan.of(arm.config, 3).mechanism, arm.config.seeds
        ledger = Ledger.begin(arm.path, config.fingerprint(arm.config), mechanism, seeds, 100)
        chunk = ledger.reserve(1, 1, [9999] * seeds, 1)
        ledger.settle(chunk, [1] * seeds, [100] * seeds, "")
    lines = [line | more for line in lines_of(win_rates, arm.config.settings.eval_every)]
    (arm.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {"device": "cpu", "versions": dict.fromkeys(("pevdn", "jax", "python"), "1")}
    (arm.path / "summary.json").write_text(json.dumps({**made, "wall_seconds": 36.0}))
