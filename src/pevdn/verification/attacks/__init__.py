"""Attacks on a trained run, for people to see what the privacy of each algorithm is worth.

`teammate`: what an agent's private features look like in what a teammate receives.
`membership`: whether trained Q-values tell which episodes were learnt from.

An attack that fails proves nothing; docs/privacy.md has the proofs. One that succeeds shows what
is not protected.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pevdn._platform import cache_compilations
from pevdn.config.settings import number
from pevdn.training.directory import Run
from pevdn.training.progress import Observer, Silent
from pevdn.verification.attacks import membership, teammate
from pevdn.verification.attacks.target import Target


class Effort(NamedTuple):
    """How much is played and trained."""

    episodes: int  # for the curious teammate
    shadows: int  # teams trained for membership inference, for each algorithm and ε
    updates: int  # of each of them


FULL = Effort(1024, 12, 120)
QUICK = Effort(256, 6, 60)


def attack(
    run: Run | str | Path, effort: Effort = FULL, seed: int = 0, observer: Observer | None = None
) -> dict[str, Any]:
    """Every attack on the team of a run's first seed, as one document."""
    number("episodes", effort.episodes, int, 2 * membership.CANDIDATES, 1_000_000)
    number("shadows", effort.shadows, int, 4, 10_000)
    number("updates", effort.updates, int, 1, 1_000_000)
    number("seed", seed, int, 0, 2_000_000_000)
    began, show = time.monotonic(), observer or Silent()
    cache_compilations()
    run = run if isinstance(run, Run) else Run(Path(run))
    target = Target(run)
    show.note(f"playing {effort.episodes:,} episodes of {target.config.env} …")
    keys = jax.random.split(jax.random.key(seed), effort.episodes)
    private = teammate.private_features(target.simulation.world)
    record = teammate.together([teammate.record(s, private) for s in target.play(keys)])
    show.note("reading a teammate's private features …")
    readings = teammate.attack(record, target.code, seed)
    long = record.running.sum(1) > target.simulation.horizons[0]  # short ones are learnt faster
    chosen = np.argsort(long, stable=True)[: membership.CANDIDATES]
    (scene,) = target.play(keys[chosen])
    inferences = membership.attack(
        target.simulation.world,
        target.config,
        scene.episodes,
        membership.toss(effort.shadows, membership.CANDIDATES, seed),
        effort.updates,
        seed,
        show.note,
    )
    return {
        "run": str(run.path),
        "algorithm": target.config.algorithm,
        "env": target.config.env,
        "agents": len(target.simulation.team),
        "seed": seed,
        **effort._asdict(),
        "candidates": membership.CANDIDATES,
        "delta": target.config.delta,
        "features": {feature.name: feature.meaning for feature in private.features},
        "teammate": [_plain(reading) for reading in readings],
        "membership": [_plain(inference) for inference in inferences],
        "seconds": time.monotonic() - began,
    }


def _plain(row: teammate.Reading | membership.Inference) -> dict[str, Any]:
    """A row with its estimate spread out; null where the feature never varied."""
    found: Any = row.estimate or (None, None, None)
    values = {name: value for name, value in row._asdict().items() if name != "estimate"}
    return {**values, **dict(zip(("auc", "low", "high"), found, strict=True))}
