"""Runs of pe-vdn-d: ε record with its t and n stands in everything that a run reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ledgers import ledger_of
from support import OPTIONS, PRIVATE, cli, train

import pevdn
from pevdn import worlds
from pevdn.agent.evaluation import Score, metrics_line
from pevdn.config import experiment as config
from pevdn.config.runtime import RuntimeOptions
from pevdn.privacy.planner import Plan
from pevdn.simulation.program import Simulation
from pevdn.training.accountant import Accountant
from pevdn.training.loop import Run
from pevdn.training.progress import Moment, Plain
from pevdn.training.summary import describe

pytestmark = pytest.mark.usefixtures("compiled_once")
SETTINGS: dict[str, Any] = {**PRIVATE, "anchor": False, "openings": 2, "opening_noise": 2.0}


def learn(out: Path, **changes: Any) -> Run:
    own = {**SETTINGS, "checkpoint_every": OPTIONS.checkpoint_every, "steps": 240, **changes}
    return pevdn.train("pe-vdn-d", "toy:coordination", out=out, **own)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learn(tmp_path_factory.mktemp("record") / "whole")


def test_the_metrics_carry_what_a_record_has_spent(whole: Run) -> None:
    mechanism = Plan.of(whole.config, 2).mechanism
    assert (mechanism.openings, mechanism.opening_noise, mechanism.colluders) == (2, 2.0, 1)
    found = [line["epsilon_record"] for line in whole.metrics]
    assert found[0] == 0.0 and found == sorted(found)
    ledger, last = ledger_of(whole), whole.metrics[-1]
    assert ledger.mechanism == mechanism and ledger.openings == ledger.openings_bound == 2
    spent = mechanism.spent(ledger.exposure[0])
    assert spent.known == {name: last[name] for name in spent.known}
    assert last["epsilon_record"] > last["epsilon_agent"] > 0


def test_the_metrics_of_other_algorithms_carry_none(tmp_path: Path) -> None:
    score = Score(*[0.5] * len(Score._fields))
    spent = {"epsilon_team": 1.0, "epsilon_record": None}
    counters = {"env_steps": 1, "episodes": 1, "updates": 1}
    line = metrics_line(0, counters, {"params": score}, spent)
    assert line["epsilon_team"] == 1.0 and "epsilon_record" not in line
    other = train("pe-vdn-c", tmp_path / "c", steps=40)
    assert not [name for name in (*other.summary, *other.metrics[-1]) if "record" in name]
    assert "teammate none" in describe(other.summary)


def test_a_noise_that_has_no_effect_is_noted(tmp_path: Path) -> None:
    small = ("--env", "toy:two-step", "--steps", 20, "--out", tmp_path / "run")
    for settings, told in ((("opening_noise=2", "colluders=1"), True), (("gamma=0.9",), False)):
        sets = [word for setting in settings for word in ("--set", setting)]
        parties = ("--party", "a=127.0.0.1:1", "--party", "b=127.0.0.1:2")
        where = ("--world", "127.0.0.1:3", "--out", tmp_path / settings[0])
        said = cli("keys", "pe-vdn-c", "--env", "toy:two-step", *parties, *where, *sets)
        assert said.code == 0
        assert ("opening_noise and colluders have no effect: pe-vdn-c adds" in said.err) is told
    said = cli("train", "pe-vdn-b", *small, "--set", "opening_noise=2")
    assert said.code == 0 and "opening_noise has no effect: pe-vdn-b adds no noise" in said.err


def test_the_summary_leads_with_epsilon_record_and_never_says_none(whole: Run) -> None:
    summary, ledger = whole.summary, ledger_of(whole)
    (guaranteed,), (spent,) = ledger.guaranteed(), ledger.spent()
    for name in ("epsilon_record", "epsilon_team", "epsilon_agent"):
        assert summary[name] == getattr(guaranteed, name)
        assert summary[f"{name}_spent"] == getattr(spent, name)
    assert summary["epsilon_coalition"] == ledger.coalition()[0]
    assert summary["epsilon_teammate"] == summary["epsilon_record"]
    assert (summary["openings"], summary["colluders"]) == (2, 1)
    said = describe(summary)
    assert f"privacy  ε record {summary['epsilon_record']:.2f} (against t = 1" in said
    assert "n = 2" in said and "teammate none" not in said
    assert "no differential privacy against teammates" not in summary["guarantee"]
    assert "holds against all its teammates, pooled with any outsider" in summary["guarantee"]


def test_progress_shows_epsilon_record(whole: Run, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Plain()
    reporter.start("a run", 100, 0)
    reporter.moment(Moment(50, 1.0, whole.metrics[-1]))
    shown = capsys.readouterr().err
    assert f"ε record {whole.metrics[-1]['epsilon_record']:.2f} so far" in shown


def test_the_ledger_is_printed_with_t_and_n(whole: Run) -> None:
    document = json.loads(cli("ledger", whole.path, "--json").out)
    (row,) = document["seeds"]
    assert row["epsilon_record"] == whole.summary["epsilon_record"]
    assert row["epsilon_record_spent"] == whole.summary["epsilon_record_spent"]
    assert row["epsilon_coalition"] == whole.summary["epsilon_coalition"]
    assert document["mechanism"]["colluders"] == 1 and document["openings"] == 2
    assert document["lost_openings"] == 0 and "none" not in document["teammate"]
    text = " ".join(cli("ledger", whole.path).out.split())
    assert "t = 1; openings of a record: n = 2 planned, 2 so far, 0 of them lost" in text
    assert "Spent so far" in text and f"{row['epsilon_record_spent']:.3f}" in text
    assert "A teammate: ε record" in text and " none " not in text.replace("none missing", "")


def test_an_exported_policy_says_what_holds_against_teammates(whole: Run, tmp_path: Path) -> None:
    said = cli("export", whole.path, "--agent", 0, "--out", tmp_path / "policy", "--json")
    facts = json.loads(said.out)["facts"]
    for name in ("epsilon_record", "epsilon_team", "epsilon_coalition", "openings", "colluders"):
        assert float(facts[name]) == whole.summary[name]
    assert "has (epsilon_record, delta)-differential privacy against up to 1 of" in facts["privacy"]
    assert "Teammates, who saw the opened sums" not in facts["privacy"]


def test_a_publication_says_what_holds_against_teammates(whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "public"
    assert cli("publish", whole.path, "--out", out).code == 0
    privacy = json.loads((out / "privacy.json").read_text())
    assert privacy["epsilon"]["record"] == whole.summary["epsilon_record"]
    assert privacy["epsilon"]["coalition"] == whole.summary["epsilon_coalition"]
    assert not [text for text in privacy["not_covered"] if text.startswith("Teammates")]
    page = (out / "README.md").read_text()
    assert f"ε {whole.summary['epsilon_record']:.3g}, against teammates and outsiders" in page
    assert "also against teammates" in (whole.path / "README.md").read_text()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epsilon_record_spent"] == whole.metrics[-1]["epsilon_record"]


def test_a_budget_is_for_epsilon_record_and_stops_the_run(whole: Run, tmp_path: Path) -> None:
    first, last = (whole.metrics[i]["epsilon_record"] for i in (1, -1))
    budget = (first + last) / 2
    run = learn(tmp_path / "run", epsilon_budget=budget)
    summary = run.summary
    assert summary["stopped_by_budget"] and summary["budget_observer"] == "record"
    assert summary["env_steps"] < whole.summary["env_steps"]
    assert 0.8 * budget < summary["epsilon_record_spent"] <= summary["epsilon_record"] <= budget
    assert f"ε record above {budget:g}" in describe(summary)
    assert ledger_of(run).lines[0]["budget"] == [budget, "record"]


def test_openings_of_lost_chunks_count_for_every_record(whole: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    (path / "summary.json").unlink()
    newest = max((path / "checkpoints").iterdir(), key=lambda x: int(x.name) if x.is_dir() else 0)
    shutil.rmtree(newest)
    run = pevdn.resume(path, new_noise=True)
    ledger = ledger_of(run)
    assert ledger.lost_openings == 1 and ledger.openings == 3 == run.summary["openings"]
    wanted = ledger.mechanism.spent(ledger.bound[0], 3).epsilon_record
    assert run.summary["epsilon_record"] == wanted > whole.summary["epsilon_record"]
    assert cli("publish", run.path, "--out", tmp_path / "out").code == 0
    privacy = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert privacy["mechanism"]["openings"] == 3
    for text in (run.summary["guarantee"], privacy["guarantee"], privacy["observers"]["teammate"]):
        assert "n = 3" in text


@pytest.mark.parametrize("buffer", ["device", "host"])
def test_a_chunk_that_opens_other_sums_is_not_a_repetition(tmp_path: Path, buffer: str) -> None:
    """Before the first update the parameters cannot tell: noise used twice shows the difference."""
    wanted = config.make("pe-vdn-d", "toy:coordination", 200, settings=SETTINGS)
    world, options = worlds.make(wanted.env), RuntimeOptions(buffer=buffer)
    simulation = Simulation(world, wanted, options)
    digest = Accountant(tmp_path, wanted, simulation, 1).digest
    advance = simulation.compile(lambda f, *_, **__: jax.jit(f))
    state = simulation.start(jnp.arange(1))
    state = advance(state, jnp.int32(200), jnp.int32(1), jnp.full(1, 99))
    assert int(state.updates[0]) == 0
    before = digest(state)
    assert digest(state) == before
    if buffer == "host":
        rows = simulation.replay.rows[0, 0, 0]
        rows.rows[1] = rows.rows[1][:-4] + bytes(4)
    else:
        own = state.replays[0]
        state = state._replace(
            replays=(own._replace(opened=own.opened.at[0, 0, 1, 0].add(1e-3)), *state.replays[1:])
        )
    assert digest(state) != before
