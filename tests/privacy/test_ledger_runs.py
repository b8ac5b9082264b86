"""The ledger of real runs: every update is in it, budgets hold, a damaged one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ledgers import ledger_of
from support import (
    PRIVATE,
    checkpoints_in,
    cli,
    content,
    metrics_of,
    train,
    train_arguments,
)

import pevdn
from pevdn.config import experiment as config
from pevdn.errors import UsageError
from pevdn.privacy import accounting
from pevdn.privacy.ledger import FILE, HEAD, Ledger
from pevdn.privacy.planner import Plan
from pevdn.storage import chain
from pevdn.training import accountant
from pevdn.training import loop as runs
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted private run."""
    return train("pe-vdn-c", tmp_path_factory.mktemp("ledger") / "whole", steps=400)


@pytest.fixture
def unfinished(whole: Run, tmp_path: Path) -> Run:
    """A copy of the same run before its summary was written."""
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    (path / "summary.json").unlink()
    return Run(path)


def test_every_update_of_a_run_is_in_its_ledger(whole: Run) -> None:
    ledger = ledger_of(whole)
    last = whole.metrics[-1]
    assert ledger.counted == [last["updates"]]
    assert ledger.lost == [0]
    spent, guaranteed = ledger.spent()[0], ledger.guaranteed()[0]
    assert spent.epsilon_team == last["epsilon_team"] == whole.summary["epsilon_team_spent"]
    assert guaranteed.epsilon_team == whole.summary["epsilon_team"]
    assert ledger.bound == [Plan.of(whole.config, 2).exposure]
    for reserved, settled in zip(ledger.lines[1::2], ledger.lines[2::2], strict=True):
        assert (reserved["kind"], settled["kind"]) == ("reserve", "settle")
        assert max(settled["made"]) <= reserved["updates"]


def test_a_reservation_is_on_the_disk_before_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = runs._Training._compile
    seen = []

    def watched(self: Any) -> None:
        compiled(self)
        advance = self.advance

        def looking(*arguments: Any) -> Any:
            lines = (tmp_path / "run" / FILE).read_text().splitlines()
            seen.append(json.loads(lines[-1])["kind"])
            return advance(*arguments)

        self.advance = looking

    monkeypatch.setattr(runs._Training, "_compile", watched)
    train("pe-vdn-c", tmp_path / "run", steps=100)
    assert seen and set(seen) == {"reserve"}


@pytest.mark.parametrize("throughput", [1.0, 4.0])
def test_a_run_never_spends_more_than_was_planned(tmp_path: Path, throughput: float) -> None:
    run = train("pe-vdn-c", tmp_path / "run", steps=500, seeds=3, buffer_throughput=throughput)
    plan = Plan.of(run.config, 2)
    for exposure, spent in zip(ledger_of(run).exposure, ledger_of(run).spent(), strict=True):
        assert 0 < exposure <= plan.exposure
        assert spent.epsilon_team <= plan.epsilon("team")
        assert spent.epsilon_agent <= plan.epsilon("agent")


@pytest.mark.parametrize("relation", ["add-or-remove", "replace-one"])
def test_a_run_reports_epsilon_under_its_own_relation(
    whole: Run, tmp_path: Path, relation: str
) -> None:
    run = train("pe-vdn-c", tmp_path / "run", steps=400, relation=relation)
    mechanism = ledger_of(run).mechanism
    assert mechanism.relation == relation and relation in run.summary["guarantee"]
    assert mechanism == ledger_of(whole).mechanism._replace(relation=relation)
    for name, exposure in (
        ("epsilon_team", ledger_of(whole).bound[0]),
        ("epsilon_team_spent", ledger_of(whole).exposure[0]),
    ):
        assert run.summary[name] == mechanism.epsilon(exposure, "team") > whole.summary[name]


def test_runs_without_dp_have_no_ledger(tmp_path: Path) -> None:
    run = train("pe-vdn-b", tmp_path / "run", steps=40)
    assert not (run.path / FILE).exists()
    said = cli("ledger", run.path)
    assert said.code == 2 and "not differentially private" in said.sentence
    said = cli("resume", run.path, "--new-noise")
    assert said.code == 2 and "adds no noise" in said.sentence


def test_the_ledger_command_says_what_was_spent(whole: Run) -> None:
    found = json.loads(cli("ledger", whole.path, "--json").out)
    for name in ("epsilon_team", "epsilon_agent", "epsilon_team_spent", "epsilon_agent_spent"):
        assert found["seeds"][0][name] == whole.summary[name]
    assert found["seeds"][0]["updates"] == whole.metrics[-1]["updates"]
    before = content(whole.path)
    said = cli("ledger", whole.path)
    assert said.code == 0 and "none missing or changed" in said.out
    assert "hold no matter when or why it ends" in " ".join(said.out.split())
    assert content(whole.path) == before


def test_epsilon_of_an_observer_is_what_the_accountant_says(whole: Run) -> None:
    ledger = ledger_of(whole)
    q, noise, n, delta, *_ = ledger.mechanism
    assert ledger.spent()[0].epsilon_team == accounting.epsilon(
        ledger.exposure[0], q, noise / n**0.5, delta
    )


# --- ledgers that are refused ------------------------------------------------------------------


def test_a_ledger_of_the_version_before_is_refused_with_the_reason(tmp_path, unfinished):
    for path in (unfinished.path / FILE, unfinished.path / HEAD):
        as_version_1(path)
    for command in (("resume", unfinished.path), ("ledger", unfinished.path)):
        said = cli(*command)
        assert said.code == 1
        assert "count can be too low after a kill" in said.sentence
        assert "5.3 standard deviations" in said.sentence and "train anew" in said.sentence
    said = cli("evaluate", unfinished.path, "--episodes", 4, "--json")
    assert said.code == 0, said.err


def test_a_finished_run_of_the_version_before_is_refused_with_the_reason(whole, tmp_path):
    """Its summary holds another ε under the same name."""
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    assert cli("resume", path).code == 0
    for file in (path / FILE, path / HEAD):
        as_version_1(file)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(
        json.dumps({k: v for k, v in summary.items() if not k.endswith("_spent")})
    )
    said = cli("resume", path)
    assert said.code == 1 and "5.3 standard deviations" in said.sentence


def as_version_1(path: Path) -> None:
    """Rewrite the ledger as version 1 wrote it, as far as it is read."""
    lines: list[dict[str, Any]] = []
    if path.name == HEAD:
        lines = [json.loads(x) for x in (path.parent / FILE).read_text().splitlines()]
        path.write_text(json.dumps({k: lines[-1][k] for k in ("line", "check")}))
        return
    for text in path.read_text().splitlines():
        line = json.loads(text)
        for name in ("version", "planned", "affordable"):
            line.pop(name, None)
        if "repeats" in line:
            line["repeats"] = line["repeats"] is not None
        line["check"] = chain.checksum(lines[-1]["check"] if lines else "", line)
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text.replace('"made": [0]', '"made": [1]', 1), "was changed or removed"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-2]), "is truncated"),
        (lambda text: text[: len(text) // 2], "is truncated"),
        (lambda text: "", "is truncated"),
    ],
)
def test_a_run_whose_ledger_was_tampered_with_is_refused_and_left_alone(
    unfinished: Run, damage: Callable[[str], str], sentence: str
) -> None:
    file = unfinished.path / FILE
    file.write_text(damage(file.read_text()))
    before = content(unfinished.path)
    said = cli("resume", unfinished.path)
    assert said.code == 1 and sentence in said.sentence and str(file) in said.sentence
    assert content(unfinished.path) == before
    assert cli("ledger", unfinished.path).code == 1


def test_a_ledger_cut_short_together_with_its_head_is_older_than_the_checkpoint(
    unfinished: Run,
) -> None:
    file, head = unfinished.path / FILE, unfinished.path / HEAD
    lines = file.read_text().splitlines(keepends=True)[:5]
    file.write_text("".join(lines))
    head.write_text(json.dumps({k: json.loads(lines[-1])[k] for k in ("line", "check")}))
    said = cli("resume", unfinished.path)
    assert said.code == 1
    assert "lacks the line that the checkpoint refers to" in said.sentence


def test_a_run_without_its_ledger_is_refused(unfinished: Run) -> None:
    (unfinished.path / FILE).unlink()
    (unfinished.path / HEAD).unlink()
    said = cli("resume", unfinished.path)
    assert said.code == 1 and "the ε of this run is unknown" in said.sentence


def test_the_ledger_of_another_run_is_refused(unfinished: Run, whole: Run, tmp_path: Path) -> None:
    twin = train("pe-vdn-c", tmp_path / "twin", steps=400)  # the same settings, another ledger
    other = train("pe-vdn-c", tmp_path / "other", steps=400, seed=9)
    for foreign, sentence in (
        (twin, "lacks the line that the checkpoint refers to"),
        (other, "belongs to a run with another configuration"),
    ):
        for name in (FILE, HEAD):
            shutil.copy(foreign.path / name, unfinished.path / name)
        said = cli("resume", unfinished.path)
        assert said.code == 1 and sentence in said.sentence


# --- resumed runs ------------------------------------------------------------------------------


def test_a_copy_says_that_it_spends_the_same_data_again(unfinished: Run) -> None:
    """The fixture is a copy."""
    said = cli("resume", unfinished.path)
    assert said.code == 0 and "spends privacy of the same episodes once more" in said.err
    (unfinished.path / "summary.json").unlink()
    said = cli("resume", unfinished.path)
    assert said.code == 0 and "once more" not in said.err


def test_what_an_older_checkpoint_lost_is_repeated_and_costs_nothing(
    unfinished: Run, whole: Run
) -> None:
    newest = unfinished.path / "checkpoints" / str(checkpoints_in(unfinished.path)[-1])
    shutil.rmtree(newest)
    pevdn.resume(unfinished.path)
    assert metrics_of(unfinished.path) == metrics_of(whole.path)
    ledger = ledger_of(unfinished)
    assert any(x["kind"] == "settle" and x["repeats"] for x in ledger.lines)
    assert unfinished.summary["epsilon_team"] == whole.summary["epsilon_team"]
    assert ledger.lost == [0]
    assert ledger.counted[0] > ledger_of(whole).counted[0]


def test_new_noise_is_new_and_what_was_lost_is_spent(unfinished: Run, whole: Run) -> None:
    newest = unfinished.path / "checkpoints" / str(checkpoints_in(unfinished.path)[-1])
    shutil.rmtree(newest)
    pevdn.resume(unfinished.path, new_noise=True)
    first, second = (pevdn.load(run, model="running")[0].params for run in (unfinished, whole))
    assert not all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
    ledger = ledger_of(unfinished)
    assert ledger.lost[0] > 0
    assert unfinished.summary["epsilon_team"] > whole.summary["epsilon_team"]
    assert not any(x.get("repeats") for x in ledger.lines)


def test_a_machine_that_does_not_repeat_itself_is_stopped(
    unfinished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(unfinished.path / "checkpoints" / str(checkpoints_in(unfinished.path)[-1]))
    monkeypatch.setattr(accountant, "state_digest", lambda state: "something else")
    said = cli("resume", unfinished.path)
    assert said.code == 1 and "--new-noise" in said.sentence
    assert not unfinished.finished


# --- budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ["team", "agent"])
def test_training_stops_before_the_budget_is_exceeded(tmp_path: Path, observer: str) -> None:
    budget = {"team": 2.0, "agent": 1.2}[observer]
    run = train(
        "pe-vdn-c", tmp_path / "run", epsilon_budget=budget, budget_observer=observer, steps=400
    )
    spent = run.summary[f"epsilon_{observer}_spent"]
    assert spent == run.summary[f"epsilon_{observer}"]  # as much as the budget affords
    assert run.summary["stopped_by_budget"] and run.summary["env_steps"] < 400
    assert all(line[f"epsilon_{observer}"] <= budget for line in run.metrics)
    ledger = ledger_of(run)
    mechanism = ledger.mechanism
    assert mechanism.epsilon(ledger.exposure[0], observer) == spent <= budget
    assert mechanism.epsilon(ledger.exposure[0] + 1, observer) > budget  # not a moment too early
    assert len(pevdn.load(run)) == 2  # the model is saved
    assert run.metrics[-1]["updates"] == ledger.counted[0] > 0


def test_a_budget_that_covers_the_plan_changes_nothing(whole: Run, tmp_path: Path) -> None:
    budget = whole.summary["epsilon_team"]
    run = train("pe-vdn-c", tmp_path / "run", steps=400, epsilon_budget=budget)
    assert metrics_of(run.path) == metrics_of(whole.path)
    assert not run.summary["stopped_by_budget"]


def test_each_seed_stops_by_itself(tmp_path: Path) -> None:
    run = train(
        "pe-vdn-c",
        tmp_path / "run",
        steps=600,
        seeds=3,
        epsilon_budget=1.5,
        buffer_throughput=4.0,
    )
    last = run.metrics[-3:]
    assert all(0 < line["epsilon_team"] <= 1.5 for line in last)
    assert len({line["env_steps"] for line in last}) > 1


def test_a_crash_does_not_make_room_in_the_budget(tmp_path: Path) -> None:
    """Updates that a crash may have made are taken from the budget of the rest."""
    path = tmp_path / "run"
    wanted = config.make(
        "pe-vdn-c", "toy:coordination", 400, settings={**PRIVATE, "epsilon_budget": 2.0}
    )
    mechanism = Plan.of(wanted, 2).mechanism
    affordable = mechanism.affordable(2.0, "team", 100)
    path.mkdir()
    (path / "config.yaml").write_text(config.to_text(wanted))
    plan = Plan.of(wanted, 2).exposure
    ledger = Ledger.begin(path, config.fingerprint(wanted), mechanism, 1, plan, affordable)
    ledger.reserve(40, 3, [affordable], 2)  # and then the machine died
    run = pevdn.resume(path)
    assert ledger_of(run).lost == [6]
    assert ledger_of(run)._exposure == [affordable - 6]
    assert ledger_of(run).bound == [affordable]
    assert run.summary["epsilon_team"] <= 2.0


@pytest.mark.parametrize(
    ("algorithm", "settings", "sentence"),
    [
        ("pe-vdn-c", {"epsilon_budget": 0.01}, "the first update already costs"),
        ("pe-vdn-c", {"epsilon_budget": 1.0, "noise_multiplier": 0.0}, "noise_multiplier is 0"),
        ("pe-vdn-d", {"epsilon_budget": 1.0, "opening_noise": 0.0}, "opening_noise is 0"),
        ("pe-vdn-b", {"epsilon_budget": 1.0}, "pe-vdn-b is not differentially private"),
        ("pe-vdn-c", {"epsilon_budget": -1.0}, "epsilon_budget is -1.0, but must be at least 0"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_before_anything_is_written(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        train(algorithm, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_the_budget_is_an_option_of_its_own(tmp_path: Path) -> None:
    said = cli(*train_arguments("pe-vdn-c", tmp_path / "run"), "--epsilon-budget", "2", "--json")
    found = json.loads(said.out)
    assert (
        found["stopped_by_budget"]
        and found["epsilon_team"] <= 2
        and found["budget_observer"] == "team"
    )
