"""Attack a trained run, to measure what each algorithm leaks in practice.

`teammate`: infer an agent's private features from what a teammate receives.
`noised`: the same from noised sums (pe-vdn-d), and whether a record is in them.
`membership`: infer from trained Q-values which episodes were used for training.

A failed attack proves nothing; docs/privacy.md has the proofs. A successful one shows what is not
protected.
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
from pevdn.training.progress import Reporter, Silent
from pevdn.verification.attacks import membership, noised, teammate
from pevdn.verification.attacks.target import Target


class Effort(NamedTuple):
    """How many episodes and trainings the attacks use."""

    episodes: int  # for the teammate attack
    shadows: int  # shadow teams for membership inference, per algorithm and ε
    updates: int  # per shadow team


FULL = Effort(1024, 12, 120)
QUICK = Effort(256, 6, 60)


def attack(
    run: Run | str | Path, effort: Effort = FULL, seed: int = 0, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Run every attack on the team of a run's first seed and return one document."""
    number("episodes", effort.episodes, int, 2 * membership.CANDIDATES, 1_000_000)
    number("shadows", effort.shadows, int, 4, 10_000)
    number("updates", effort.updates, int, 1, 1_000_000)
    number("seed", seed, int, 0, 2_000_000_000)
    began, show = time.monotonic(), reporter or Silent()
    cache_compilations()
    run = run if isinstance(run, Run) else Run(Path(run))
    target = Target(run)
    which = noised.ways(target.config, len(target.simulation.team))
    target.openings = [way.opening for way in which]
    show.note(f"playing {effort.episodes:,} episodes of {target.config.env} …")
    keys = jax.random.split(jax.random.key(seed), effort.episodes)
    private = teammate.private_features(target.simulation.world)
    transcript = teammate.transcribe(target.play(keys), private)
    show.note("inferring a teammate's private features …")
    readings = teammate.attack(transcript, target.code, seed)
    show.note("inferring the same, and the presence of records, from noised sums …")
    sums, records = noised.attack(transcript, which, seed)
    long = transcript.running.sum(1) > target.simulation.horizons[0]  # short ones train faster
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
        "noised_sums": [_plain(reading) for reading in sums],
        "records": [_plain(reading) for reading in records],
        "membership": [_plain(inference) for inference in inferences],
        "seconds": time.monotonic() - began,
    }


def _plain(row: teammate.Reading | noised.NoisedReading | membership.Inference) -> dict[str, Any]:
    """Return a row with its estimate flattened; null where the feature never varied."""
    estimate: Any = row.estimate or (None, None, None)
    values = {name: value for name, value in row._asdict().items() if name != "estimate"}
    return {**values, **dict(zip(("auc", "low", "high"), estimate, strict=True))}
