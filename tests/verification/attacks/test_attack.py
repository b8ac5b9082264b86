"""`pevdn attack`: one document, five tables, one picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import cli, content

from pevdn.exchange.secret_shared import Code
from pevdn.training.directory import Run
from pevdn.verification import attacks
from pevdn.verification.attacks import membership, noised, teammate
from pevdn.verification.attacks.target import Target

LITTLE = ["--episodes", 64, "--shadows", 4, "--updates", 2]


@pytest.fixture(scope="module")
def document(run: Run) -> dict[str, Any]:
    before = content(run.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "EPSILONS", (math.inf,))
        patch.setattr(noised, "EPSILONS", (math.inf, 8.0))
        said = cli("attack", run.path, "--json", *LITTLE)
    assert said.code == 0, said.err
    after = content(run.path)
    assert set(after) - set(before) == {"attack.png"}
    assert {name: after[name] for name in before} == before
    progress = said.err.splitlines()
    assert "playing 64 episodes" in progress[0] and "(2/2)" in progress[-1]
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_the_command_prints_one_document_and_adds_nothing_but_a_picture(
    run: Run, document: dict[str, Any]
) -> None:
    assert document["picture"] == str(run.path / "attack.png")
    assert (run.path / "attack.png").read_bytes().startswith(b"\x89PNG")
    assert {k: document[k] for k in ("algorithm", "env", "agents", "seed", "episodes")} == {
        "algorithm": "pe-vdn-b",
        "env": "toy:coordination",
        "agents": 2,
        "seed": 0,
        "episodes": 64,
    }
    rows = document["teammate"]
    assert {row["channel"] for row in rows} == {
        "message",
        "one share",
        "all shares but one",
        "opened sum",
    }
    assert sorted({row["agents"] for row in rows if row["composed"]}) == [2, 3, 5, 8]
    assert [(row["algorithm"], row["epsilon_agent"]) for row in document["membership"][::2]] == [
        ("pe-vdn-b", None),
        ("pe-vdn-c", "inf"),
    ]
    sums, records = document["noised_sums"], document["records"]
    assert {(row["agents"], row["epsilon"]) for row in sums} == {
        (n, e) for n in (2, 3, 5, 8) for e in ("inf", 8.0)
    }
    assert {row["feature"] for row in sums} == set(document["features"])
    assert [row["agents"] for row in records] == [2, 2, 3, 3, 5, 5, 8, 8]
    for row in rows + document["membership"] + sums + records:
        assert row["auc"] is None or row["low"] <= row["auc"] <= row["high"]


def test_the_same_seed_gives_the_same_readings(target: Target, document: dict[str, Any]) -> None:
    private = teammate.private_features(target.simulation.world)
    keys = jax.random.split(jax.random.key(0), 64)
    again = teammate.transcribe(target.play(keys), private)
    rows = [attacks._plain(reading) for reading in teammate.attack(again, target.code, 0)]
    assert rows == document["teammate"]


def test_a_person_gets_five_tables_and_what_they_say(
    run: Run, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def ready(path: Path, effort: attacks.Effort, seed: int, observer: Any) -> dict[str, Any]:
        asked.append((effort, seed))
        found = json.loads(json.dumps(document))
        for row in found["membership"]:
            if row["epsilon_agent"] == "inf":
                row["epsilon_agent"] = row["epsilon_team"] = math.inf
        for row in found["noised_sums"] + found["records"]:
            row["epsilon"] = float(row["epsilon"])
        return found

    monkeypatch.setattr(attacks, "attack", ready)
    said = cli(
        "attack", run.path, "--quick", "--updates", 9, "--seed", 5, "--out", tmp_path / "a.svg"
    )
    assert said.code == 0, said.err
    assert asked == [(attacks.QUICK._replace(updates=9), 5)]
    assert said.err == "quick: episodes 256 instead of 1024, shadows 6 instead of 12\n"
    for part in (
        "What agent 1 infers about agent 0",
        "2, this run's",
        "8, composed",
        "8, pe-vdn-b",
        "8, ε 8.00",
        "Whether an agent's record is in the sum",
        "Above chance:",
    ):
        assert part in said.out
    row = document["teammate"][0]
    assert f"{row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}]" in said.out
    assert max(map(len, said.out.splitlines())) <= 100
    assert (tmp_path / "a.svg").exists()


def test_a_feature_that_never_varies_is_said_to_and_the_rest_goes_on(
    transcript: teammate.Transcript,
) -> None:
    constant = transcript._replace(answers={"cue": np.ones_like(transcript.answers["cue"])})
    found = teammate.attack(constant, Code(), 0)
    assert {x.estimate for x in found} == {None}
    assert attacks._plain(found[0])["auc"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--episodes", 8], "episodes is 8, but must be at least 64."),
        (["--shadows", 2], "shadows is 2, but must be at least 4."),
        (["--updates", 0], "updates is 0, but must be at least 1."),
        (["--seed", -1], "seed is -1, but must be at least 0."),
        (["--out", "nowhere/a.png"], "must be a file in a directory that exists."),
        (["--out", "a.txt"], "must end in .png, .pdf, .svg."),
    ],
)
def test_a_mistake_is_named_in_one_sentence(run: Run, options: list[Any], told: str) -> None:
    said = cli("attack", run.path, *options)
    assert said.code == 2 and said.out == ""
    assert told in said.sentence


def test_a_run_that_does_not_exist_or_has_no_checkpoint_is_named_in_one_sentence(
    run: Run, tmp_path: Path
) -> None:
    said = cli("attack", "nowhere")
    assert said.code == 2 and "is nowhere the directory of a run?" in said.sentence
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    said = cli("attack", tmp_path)
    assert said.code == 1 and "holds no complete checkpoint" in said.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
