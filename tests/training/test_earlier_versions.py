"""Run directories that an earlier version wrote still load, and wrong edits are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_worlds as tiny
from support import SMALL, cli

import pevdn
from pevdn.errors import PevdnError
from pevdn.training import world as environment
from pevdn.training.directory import Run
from pevdn.worlds.base import AgentSpec, EntityGroup


def test_the_world_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """world.json called entity groups `things`."""
    run = pevdn.train("pe-vdn-b", tiny.TWO_STEP, steps=20, out=tmp_path / "run", **SMALL)
    path = run.path / environment.FILE
    document = json.loads(path.read_text())
    for spec in document["agents"]:
        del spec["entities"]
        spec["things"] = [{"start": 0, "count": 1, "size": 2, "actions": None}]
    path.write_text(json.dumps(document))
    expected = AgentSpec(3, 2, (EntityGroup(0, 1, 2),))
    assert environment.outline(Run(run.path)).agents == (expected, expected)


def test_a_summary_of_an_earlier_version_names_the_observer_of_its_budget(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"budget_view": "agent"}))
    assert Run(tmp_path).summary == {"budget_observer": "agent"}


def test_a_changed_buffer_is_named_and_nothing_is_called_damaged(tmp_path: Path) -> None:
    run = pevdn.train("pe-vdn-b", "toy:two-step", steps=20, out=tmp_path / "run", **SMALL)
    (run.path / "summary.json").unlink()
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("buffer: device", "buffer: host"))
    with pytest.raises(PevdnError, match="holds replay buffers of buffer=device, but"):
        pevdn.resume(run.path)
    assert "restore the original config.yaml" in cli("resume", run.path).sentence
