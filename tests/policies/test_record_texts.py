"""Texts about teammates: they claim what ε record covers, and nothing if it is infinite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import OPTIONS, PRIVATE, cli

import pevdn
from pevdn.config import experiment as config
from pevdn.privacy.accounting import DURATION, RELATIONS, UNCOVERED
from pevdn.training import readme
from pevdn.training.directory import Run
from pevdn.training.summary import describe

pytestmark = pytest.mark.usefixtures("compiled_once")
CLAIMS = ("also against teammates", "against teammates and outsiders together", "with noise)")


def learn(out: Path, opening_noise: float) -> Run:
    settings = {**PRIVATE, "anchor": False, "noise_multiplier": 3.0}
    return pevdn.train(
        "pe-vdn-d",
        "toy:coordination",
        out=out,
        steps=80,
        checkpoint_every=OPTIONS.checkpoint_every,
        **{**settings, "opening_noise": opening_noise},
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose openings carry no noise."""
    return learn(tmp_path_factory.mktemp("bare") / "run", 0.0)


@pytest.fixture(scope="module")
def noised(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learn(tmp_path_factory.mktemp("noised") / "run", 2.0)


def published(run: Run, out: Path) -> tuple[dict, str]:
    assert cli("publish", run.path, "--out", out).code == 0
    return json.loads((out / "privacy.json").read_text()), (out / "README.md").read_text()


def test_a_publication_without_noise_in_the_sums_says_that_teammates_are_not_covered(
    bare: Run, tmp_path: Path
) -> None:
    privacy, page = published(bare, tmp_path / "out")
    assert privacy["epsilon"]["record"] == "inf"
    assert any(text.startswith("Teammates: there is no") for text in privacy["not_covered"])
    for observer in ("record", "coalition"):
        assert "proven" not in privacy["observers"][observer]
        assert "infinite" in privacy["observers"][observer]
    assert (
        "proven" in privacy["observers"]["team"] and UNCOVERED in privacy["observers"]["teammate"]
    )
    assert "too little noise" in privacy["mechanism"]["name"]
    assert UNCOVERED in privacy["guarantee"] and UNCOVERED in page
    assert "ε inf" not in page and "above all teammates" in page
    assert not [claim for claim in CLAIMS if claim in page + privacy["guarantee"]]


def test_a_run_without_noise_in_the_sums_claims_nothing_about_teammates(bare: Run) -> None:
    page, said = (bare.path / "README.md").read_text(), bare.summary["guarantee"]
    assert bare.summary["epsilon_record"] == float("inf")
    assert f"with differential privacy, but with {UNCOVERED}." in page
    assert said.startswith(f"There is {UNCOVERED}") and "holds against all its team" not in said
    assert not [claim for claim in CLAIMS if claim in page + said]
    line = describe(bare.summary)
    assert "ε record inf (no guarantee against teammates, n = 1)" in line
    assert "against t = 1" not in line
    assert f"A teammate: {UNCOVERED} at opening_noise 0" in cli("ledger", bare.path).out


@pytest.mark.parametrize(
    ("settings", "covered"),
    [
        ({"opening_noise": 1.0}, True),
        ({"opening_noise": 0.04}, False),
        ({"opening_noise": 1.0, "noise_multiplier": 0.0}, False),
        ({"opening_noise": 1.0, "colluders": 4}, True),
        ({"opening_noise": 1.0, "epsilon_budget": 20.0}, True),
    ],
)
def test_the_readme_of_a_run_follows_its_plan(settings: dict, covered: bool) -> None:
    own = {**PRIVATE, "anchor": False, **settings}
    page = readme.of_run(config.make("pe-vdn-d", "toy:coordination", 1000, settings=own))
    assert ("also against teammates" in page) is covered
    assert (UNCOVERED in page) is not covered


def test_forget_writes_what_the_run_ended_with(noised: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(noised.path, path)
    assert "also against teammates" in (path / "README.md").read_text()
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "epsilon_record": "inf"}))
    pevdn.forget(path)
    assert UNCOVERED in (path / "README.md").read_text()


def test_everything_that_states_epsilon_record_excludes_the_time_of_updates(
    noised: Run, tmp_path: Path
) -> None:
    privacy, page = published(noised, tmp_path / "out")
    facts = json.loads(
        cli("export", noised.path, "--agent", 0, "--out", tmp_path / "policy", "--json").out
    )["facts"]
    ledger = json.loads(cli("ledger", noised.path, "--json").out)
    budget = json.loads(cli("budget", "--openings", 1, "--json").out)
    texts = {
        "export": facts["privacy"],
        "ledger": ledger["teammate"],
        "ledger in text": " ".join(cli("ledger", noised.path).out.split()),
        "budget": budget["teammate"],
        "summary": noised.summary["guarantee"],
        "publication": page,
        "observers": privacy["observers"]["record"],
    }
    assert not [name for name, text in texts.items() if DURATION not in text]
    assert any(text.startswith("How long updates take") for text in privacy["not_covered"])
    assert "proven" in privacy["observers"]["record"] and UNCOVERED not in json.dumps(privacy)


def test_each_epsilon_is_published_with_its_own_relation(noised: Run, tmp_path: Path) -> None:
    privacy, _ = published(noised, tmp_path / "out")
    record, coalition, team = privacy["relation"]["meaning"].split("; ")
    assert record.startswith("for ε record, one agent's record of the episode is empty")
    assert "the records of its teammates, the rewards and the lengths stay" in record
    assert coalition.startswith("for ε coalition, the records of all agents outside")
    assert team == f"for ε team and ε agent, {RELATIONS['zero-out']}"
