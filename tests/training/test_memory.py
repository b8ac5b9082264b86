"""Claims about memory: what does not fit is refused in one sentence, and nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest
from support import (
    Failing,
    assert_same_ending,
    cli,
    train,
    train_arguments,
)

from pevdn.training import loop as run
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_a_buffer_larger_than_the_machine_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda _: 2**15)  # pages, and bytes of a page: 1 GiB
    said = cli(*train_arguments("pe-vdn-b", tmp_path / "run", buffer_size=2_000_000_000))
    assert said.code == 2
    assert "buffer_size=2000000000" in said.sentence and "set buffer_size to" in said.sentence
    assert not (tmp_path / "run").exists()


def test_a_full_gpu_is_one_sentence_and_the_run_goes_on(tmp_path, monkeypatch):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    fails = Failing(run._Training._advance, 2, full)
    monkeypatch.setattr(run._Training, "_advance", lambda *args: fails(*args))
    said = cli(*train_arguments("pe-vdn-b", tmp_path / "run"))
    assert said.code == 1 and "Traceback" not in said.err
    assert "memory of the device is full" in said.err and f"pevdn resume {tmp_path}" in said.err
    fails.freed = True
    assert cli("resume", tmp_path / "run").code == 0
    assert_same_ending(Run(tmp_path / "run"), train("pe-vdn-b", tmp_path / "undisturbed"))
