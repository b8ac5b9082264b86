"""Claims about training: what a run writes, that it repeats, and where it may go."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import (
    PRIVATE,
    SMALL,
    WORLD,
    checkpoints_in,
    cli,
    content,
    metrics_of,
    refused_resume,
    saved,
    strict,
    train,
    train_arguments,
)

import pevdn
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import accounting
from pevdn.training import loop as run
from pevdn.training import summary as report
from pevdn.training.loop import Run
from pevdn.training.progress import Silent

pytestmark = pytest.mark.usefixtures("compiled_once")
ALGORITHMS = ["pe-vdn-b", "pe-vdn-c"]
CONTRACT = {"seed", "env_steps", "episodes", "updates", "win_rate", "return"}
PRIVACY = {"epsilon_agent", "epsilon_team", "delta"}


# --- the run directory -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_a_directory_with_everything_about_it(finished: dict[str, Run], name: str) -> None:
    path = finished[name].path
    books = {"ledger.jsonl", "ledger.head"} if name == "pe-vdn-c" else set()
    assert {p.name for p in path.iterdir()} - {".lock"} == books | {
        "README.md",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
        "curve.png",
    }
    config = finished[name].config
    assert (config.algorithm, config.env, config.steps) == (name, WORLD[name], 200)
    assert config.settings.hidden_size == SMALL["hidden_size"]
    assert (path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_line_of_the_metrics_keeps_the_contract(finished: dict[str, Run], name: str) -> None:
    text = (finished[name].path / "metrics.jsonl").read_text()
    lines = [strict(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(lines) == 1 + 200 // SMALL["eval_every"]
    for line in lines:
        assert set(line) >= CONTRACT | (PRIVACY if name == "pe-vdn-c" else set())
        assert 0 <= line["win_rate"] <= 1
    assert (PRIVACY & set(lines[0])) == (PRIVACY if name == "pe-vdn-c" else set())


@pytest.mark.parametrize(("name", "length"), [("pe-vdn-b", 2), ("pe-vdn-c", 3)])
def test_environment_steps_are_steps_that_were_really_played(
    finished: dict[str, Run], name: str, length: int
) -> None:
    lines = finished[name].metrics
    assert (lines[0]["env_steps"], lines[0]["episodes"], lines[0]["updates"]) == (0, 0, 0)
    for due, line in zip(range(0, 201, SMALL["eval_every"]), lines, strict=True):
        assert line["env_steps"] == length * line["episodes"]
        assert due <= line["env_steps"] < due + length * SMALL["parallel_episodes"]
        assert line["episode_length"] == length


def test_learning_starts_when_it_is_told_to_and_then_follows_every_episode(
    finished: dict[str, Run],
) -> None:
    starts, together = SMALL["learning_starts"], SMALL["parallel_episodes"]
    for line in finished["pe-vdn-b"].metrics[1:]:
        assert line["updates"] == line["episodes"] - starts + together


def test_privacy_is_spent_and_never_given_back(long: Callable[[str], Run]) -> None:
    lines = long("pe-vdn-c").metrics
    for figure in ("epsilon_agent", "epsilon_team"):
        values = [line[figure] for line in lines]
        assert values[0] == 0 < values[-1] < math.inf
        assert values == sorted(values)
    assert all(line["epsilon_team"] >= line["epsilon_agent"] for line in lines)
    assert {line["delta"] for line in lines} == {PRIVATE["delta"]}


def test_a_delta_too_large_for_the_stream_is_noted_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(run._Training, "go", lambda self: None)
    monkeypatch.setattr(Silent, "note", lambda self, text: notes.append(text))
    train("pe-vdn-c", tmp_path / "small", steps=40, delta=1 / 400)
    assert [text for text in notes if "delta" in text] == []
    train("pe-vdn-c", tmp_path / "large", steps=40, delta=1e-2)
    (note,) = [text for text in notes if "delta" in text]
    assert "delta is 0.01, but should be at most a tenth of one over" in note
    assert "which can be 40 here: 0.0025 would do" in note


def test_an_infinite_epsilon_leaves_the_files_valid_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_composed", lambda *_: math.inf)
    noiseless = train("pe-vdn-c", tmp_path / "run", steps=40)
    assert noiseless.metrics[-1]["epsilon_team"] == noiseless.summary["epsilon_team"] == math.inf
    for file in ("metrics.jsonl", "summary.json"):
        text = (noiseless.path / file).read_text()
        assert '"epsilon_team": "inf"' in text
        for document in text.splitlines() if file == "metrics.jsonl" else [text]:
            strict(document)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_summary_repeats_the_end_of_the_metrics(finished: dict[str, Run], name: str) -> None:
    summary, last = finished[name].summary, finished[name].metrics[-1]
    for figure in {"win_rate", "return", "episodes", "updates"} | (PRIVACY & set(last)):
        assert summary[figure] == last[figure]
    assert summary["algorithm"] == name and summary["env"] == WORLD[name]
    assert summary["seeds"] == [0]
    assert summary["env_steps_per_second"] > 0
    assert 0 < summary["training_seconds"] < summary["wall_seconds"]
    assert 2**20 < summary["peak_memory_bytes"] < 2**40
    assert ("guarantee" in summary) == (name == "pe-vdn-c")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_there_is_one_line_for_each_seed_and_evaluation(three: dict[str, Run], name: str) -> None:
    seeds = [line["seed"] for line in three[name].metrics]
    assert seeds == [5, 6, 7] * (1 + 200 // SMALL["eval_every"])
    assert three[name].summary["seeds"] == [5, 6, 7]
    assert three[name].summary["late_win_rate_half_width_95"] is not None


# --- the same again --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_seed_gives_the_same_run_to_the_last_bit(
    finished: dict[str, Run], tmp_path: Path, name: str
) -> None:
    again = train(name, tmp_path / "again", checkpoint_every=10**6)
    assert metrics_of(again.path) == metrics_of(finished[name].path)
    assert all(
        np.array_equal(a, b) for a, b in zip(saved(again)[0], saved(finished[name])[0], strict=True)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_seed_learns_the_same_beside_others_as_alone(
    three: dict[str, Run], tmp_path: Path, name: str
) -> None:
    alone = train(name, tmp_path / "alone", seed=6)
    beside = [line for line in three[name].metrics if line["seed"] == 6]
    assert alone.metrics == beside
    for mine, theirs in zip(pevdn.load(alone), pevdn.load(three[name], seed=6), strict=True):
        for a, b in zip(mine.params, theirs.params, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_another_seed_gives_another_run(three: dict[str, Run]) -> None:
    runs = [pevdn.load(three["pe-vdn-b"], seed=seed)[0].params for seed in (5, 6, 7)]
    assert not np.allclose(runs[0].output_weight, runs[1].output_weight)
    assert not np.allclose(runs[1].output_weight, runs[2].output_weight)
    lines = report.by_seed(three["pe-vdn-c"].metrics)
    assert [x["return"] for x in lines[5]] != [x["return"] for x in lines[6]]


# --- where a new run may go ------------------------------------------------------------------


def test_a_new_run_never_touches_what_is_there(finished: dict[str, Run], tmp_path: Path) -> None:
    taken = finished["pe-vdn-b"].path
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for out, why in ((taken, "holds another run"), (file, "is a file"), (full, "is not empty")):
        before = content(out if out.is_dir() else out.parent)
        said = cli(*train_arguments("pe-vdn-b", out))
        assert said.code == 2 and why in said.sentence and str(out) in said.sentence
        assert content(out if out.is_dir() else out.parent) == before
    said = cli(*train_arguments("pe-vdn-b", file / "below"))
    assert said.code == 1 and f"cannot write to {file / 'below'}" in said.sentence


def test_without_a_directory_a_run_finds_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run._Training, "go", lambda self: None)
    made = [pevdn.train("pe-vdn-b", "toy:two-step", steps=10).path for _ in range(3)]
    assert len(set(made)) == 3
    assert all(
        path.parent == Path("runs") and "pe-vdn-b-toy-two-step" in path.name for path in made
    )


# --- messages that do not fit ----------------------------------------------------------------


def test_a_message_out_of_range_stops_the_run_and_names_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = cli(*train_arguments("pe-vdn-b", path, precision=7, modulus="2**20"))
    assert said.code == 1
    limit = Code(7, 2**20).limit(2)
    for part in ("a message of size ", f"±{limit:g}", "precision=7", f"modulus={2**20}"):
        assert part in said.sentence
    assert checkpoints_in(path)
    assert Run(path).metrics[-1]["updates"] == 0
    assert refused_resume(path, 1) == said.sentence


def test_with_dp_no_message_stops_training_or_changes_what_is_said_about_it(
    tmp_path: Path,
) -> None:
    """No message fits into this range; in the neighbouring stream, of empty episodes, all do."""
    said = cli(*train_arguments("pe-vdn-c", tmp_path / "run", precision=7, modulus="2**20"))
    assert said.code == 0 and "message" not in said.err
    assert Run(tmp_path / "run").metrics[-1]["updates"] > 0
