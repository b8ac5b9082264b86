"""One attacked run for all attacks."""

from __future__ import annotations

import jax
import pytest
from support import SMALL

import pevdn
from pevdn.training.directory import Run
from pevdn.verification.attacks import teammate
from pevdn.verification.attacks.target import Target


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("attacks") / "run"
    return pevdn.train("pe-vdn-b", "toy:coordination", steps=240, out=out, **SMALL)


@pytest.fixture(scope="session")
def target(run: Run) -> Target:
    return Target(run)


@pytest.fixture(scope="session")
def transcript(target: Target) -> teammate.Transcript:
    private = teammate.private_features(target.simulation.world)
    keys = jax.random.split(jax.random.key(0), 1024)
    return teammate.transcribe(target.play(keys), private)
