"""Claims about the command line: quick answers, clean output, one sentence for a mistake."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support import Said, cli, content, finish, python, start, train_arguments

import pevdn
from pevdn import worlds
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.runtime import option_fields
from pevdn.config.settings import setting_fields
from pevdn.training.loop import Run

COMMANDS = [
    *("train", "resume", "evaluate", "export", "replay", "worlds", "check-env"),
    *("algorithms", "config"),
    *("budget", "ledger", "audit", "attack", "presets", "reproduce"),
    *("keys", "party", "world", "team"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    path = tmp_path_factory.mktemp("cli") / "run"
    return path, cli(*train_arguments("pe-vdn-b", path, steps=120), "--json")


# --- quick answers ---------------------------------------------------------------------------


def test_help_answers_within_a_second() -> None:
    times = []
    for _ in range(3):
        began = time.monotonic()
        said = finish(start("--help"))
        times.append(time.monotonic() - began)
        assert said.code == 0 and "Usage" in said.out and said.err == ""
    assert min(times) < 1.0, times


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["reproduce", "--help"],
        ["worlds"],
        ["algorithms"],
        ["config"],
    ],
)
def test_looking_around_does_not_load_jax(arguments: list[str]) -> None:
    program = """
import sys
from pevdn.cli import main
try:
    main()
finally:
    heavy = {"jax", "jaxmarl", "orbax", "matplotlib", "scipy"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""
    said = finish(python(program, *arguments))
    assert said.code == 0 and said.out
    assert said.err == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert command in cli("--help").out
    said = cli(command, "-h")
    assert said.code == 0 and f"Usage: pevdn {command}" in said.out


def test_the_version_is_the_packages() -> None:
    assert cli("--version") == Said(0, f"pevdn {pevdn.__version__}\n", "")


# --- lists -----------------------------------------------------------------------------------


def listed(*arguments: str) -> list[dict[str, Any]]:
    said = cli(*arguments, "--json")
    assert said.code == 0 and said.err == ""
    document: list[dict[str, Any]] = json.loads(said.out)
    return document


def test_worlds_lists_every_world_and_the_open_families() -> None:
    *found, pettingzoo, smac = listed("worlds")
    assert [w["id"] for w in found] == [w.id for w in worlds.available()]
    assert {"id", "agents", "episode_limit", "description"} == set(found[0]) == set(smac)
    assert (smac["id"], smac["agents"]) == ("smac:MAP", None)
    assert pettingzoo["id"] == "pettingzoo:MODULE[?argument=value]"
    text = cli("worlds").out
    assert all(w.id in text for w in worlds.available()) and "smac:MAP" in text


def test_algorithms_lists_all_six_and_what_crosses_between_agents() -> None:
    rows = {row["name"]: row for row in listed("algorithms")}
    assert list(rows) == list(ALGORITHMS)
    assert list(rows) == ["iql", "vdn", "pe-vdn-a", "pe-vdn-b", "pe-vdn-c", "pe-vdn-d"]
    private = [name for name, row in rows.items() if row["differentially_private"]]
    assert private == ["pe-vdn-c", "pe-vdn-d"]
    assert rows["iql"]["crosses"] == "nothing"
    assert "shares of m_i" in cli("algorithms").out


def test_config_lists_every_setting_with_the_defaults_of_an_algorithm() -> None:
    rows = {row["name"]: row for row in listed("config")}
    assert list(rows) == [*setting_fields(), *option_fields()]
    assert all(row["meaning"] for row in rows.values())
    assert rows["network"]["choices"] == ["recurrent", "entities"]
    private = {row["name"]: row["default"] for row in listed("config", "pe-vdn-c")}
    assert (rows["network"]["default"], private["network"]) == ("recurrent", "entities")
    assert "clip_norm" in cli("config").out


def test_config_lists_the_runtime_options_as_they_are_typed() -> None:
    kinds = {row["name"]: row["kind"] for row in listed("config")}
    assert {name for name, kind in kinds.items() if kind == "runtime option"} == {*option_fields()}
    preset = {row["name"]: row["default"] for row in listed("config", "--preset", "team-8-long")}
    assert preset["checkpoint_every"] == 400_000
    assert "--checkpoint-every" in cli("config").out


# --- training --------------------------------------------------------------------------------


def test_training_prints_one_document_and_shows_progress_on_standard_error(
    trained: tuple[Path, Said],
) -> None:
    path, said = trained
    assert said.code == 0
    document = json.loads(said.out)
    assert document == {**Run(path).summary, "run": str(path)}
    progress = said.err.splitlines()
    assert progress[0].startswith("compiling")
    assert progress[1] == "pe-vdn-b on toy:two-step: 0 of 120 steps"
    assert len(progress[2:]) == len(Run(path).metrics)
    assert "120 of 120 steps · win rate" in progress[-1]


def test_a_person_gets_the_curve_the_figures_and_where_they_are(trained: tuple[Path, Said]) -> None:
    path, _ = trained
    said = cli("resume", path)
    assert said.code == 0 and said.err == ""
    for part in ("win rate of the running model", "1.0 │", "120 steps", "environment steps/s"):
        assert part in said.out
    assert said.out.endswith(f"picture  {path / 'curve.png'}\nrun      {path}\n")


def test_evaluation_prints_one_document(trained: tuple[Path, Said]) -> None:
    path, _ = trained
    before = content(path)
    said = finish(start("evaluate", path, "--episodes", 16, "--seed", 3, "--json"))
    assert said.code == 0 and said.err == ""
    document = json.loads(said.out)
    assert {k: document[k] for k in ("run", "episodes", "seed", "model")} == {
        "run": str(path),
        "episodes": 16,
        "seed": 3,
        "model": "best",
    }
    (row,) = document["seeds"]
    assert row["win_rate_low"] <= row["win_rate"] <= row["win_rate_high"]
    assert content(path) == before
    table = cli("evaluate", path, "--episodes", 16, "--seed", 3)
    assert f"{row['win_rate']:.3f}" in table.out and f"{row['return']:.2f}" in table.out


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pe-vdn-x"], "unknown algorithm 'pe-vdn-x'; did you mean 'pe-vdn-"),
        (["vdm"], "did you mean 'vdn'?"),
        (["iql", "--env", "toy:twostep"], "did you mean 'toy:two-step'?"),
        (["iql", "--env", "smax-sc2:3mm"], "did you mean 'smax-sc2:3m'?"),
        (["iql", "--env", "smxa:3m"], "did you mean 'smax:3m'?"),
        (["iql", "--env", "chess"], "unknown world"),
        (["iql", "--set", "gama=0.9"], "unknown setting 'gama'; did you mean 'gamma'?"),
        (["iql", "--set", "gamma"], "--set got 'gamma', but takes name=value"),
        (["iql", "--set", "gamma=2"], "gamma is 2.0, but must be at most 1."),
        (["iql", "--set", "buffer_size=1e400"], "buffer_size is '1e400', but must be a whole"),
        (["iql", "--set", "optimizer=rmsprop"], "unknown value of optimizer: 'rmsprop'"),
        (["iql", "--steps", "0"], "steps is 0, but must be at least 1."),
        (["iql", "--steps", "9999999999"], "steps is 9999999999, but must be at most"),
        (["iql", "--seed", "-1"], "seed is -1, but must be at least 0."),
        (["pe-vdn-c", "--set", "sampling=uniform"], "sampling was removed, because it follows"),
        (["iql", "--set", "buffer=host"], "is a runtime option, not a setting; use --buffer, or"),
        (["iql", "--set", "envs=2"], "envs is a runtime option, not a setting; use --workers, or"),
        (["iql", "--buffer", "disk"], "unknown value of buffer: 'disk'"),
        (["iql", "--workers", "-1"], "workers is -1, but must be at least 0."),
        (["iql", "--checkpoint-every", "0"], "checkpoint_every is 0, but must be at least 1."),
        (["iql", "--devices", "none"], "devices is 'none', but must be 'all' or a positive whole"),
    ],
)
def test_a_mistake_is_named_in_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli("train", *arguments)
    assert said.code == 2 and said.out == ""
    assert said.err == said.sentence + "\n" and told in said.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["resume", "nowhere"], "is nowhere the directory of a run?"),
        (["evaluate", "nowhere"], "is nowhere the directory of a run?"),
        (["config", "pe-vdn"], "unknown algorithm 'pe-vdn'; did you mean 'pe-vdn-"),
    ],
)
def test_other_commands_name_a_mistake_the_same_way(arguments: list[str], told: str) -> None:
    said = cli(*arguments)
    assert said.code == 2 and said.out == ""
    assert told in said.sentence


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "newest"], "model is 'newest', but must be 'best', 'running', 'average' or"),
        (["--model", "anchor"], "was trained without an anchor"),
        (["--episodes", "0"], "episodes is 0, but must be at least 1."),
        (["--seed", "9999999999"], "seed is 9999999999, but must be at most"),
    ],
)
def test_evaluation_names_a_mistake_the_same_way(
    trained: tuple[Path, Said], options: list[str], told: str
) -> None:
    said = cli("evaluate", trained[0], *options)
    assert said.code == 2 and said.out == ""
    assert told in said.sentence


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "iql", "--stepz", "3"],
        ["train", "iql", "--steps", "many"],
        ["evaluate"],
        ["worlds", "--yaml"],
    ],
)
def test_what_cannot_be_parsed_is_refused_without_a_traceback(arguments: list[str]) -> None:
    said = finish(start(*arguments))
    assert said.code == 2 and said.out == ""
    assert "Error" in said.err and "Traceback" not in said.err


def test_a_reader_that_goes_away_is_no_accident() -> None:
    process = start("config", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert "Traceback" not in finish(process).err
