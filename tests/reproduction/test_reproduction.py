"""The whole experiment: one document, a table, a figure and conclusions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from campaigns import pretend
from support import SMALL, cli

from pevdn.config import presets
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import UsageError
from pevdn.privacy.planner import Plan
from pevdn.reproduction import (
    campaign,
    figure1,
    measure,
    reproduce,
    study_agents,
    study_precision,
    study_privacy,
)
from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.experiment import Request

pytestmark = pytest.mark.usefixtures("compiled_once")


LEVEL = {
    "iql": 0.5,
    "vdn": 0.8,
    "vdn-ours": 0.75,
    "pe-vdn-a": 0.8,
    "pe-vdn-b": 0.8,
    "paper-c": 0.2,
}


def pretend_figure1(out: Path, quick: bool = False) -> list[Arm]:
    """Two seeds a tenth apart; ours has a model of averaged parameters that wins 0.7."""
    arms = figure1.arms(Request(out, 2, 400_000, quick))
    for arm in arms:
        level = LEVEL.get(arm.name, 0.6)
        more = {"win_rate_anchor": 0.4} if arm.name == "paper-c" else {}
        more |= {"win_rate_average": 0.7} if arm.name == "team-8" else {}
        pretend(arm, [[level - 0.05] * 81, [level + 0.05] * 81], **more)
    return arms


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("figure1")
    pretend_figure1(out)
    said = cli("reproduce", "--seeds=2", "--out", out, "--json")
    assert said.code == 0 and said.err == "7 of 7 arms are already finished.\n"
    return out, json.loads(said.out)


def rows_of(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["arm"], row["model"]): row for row in document["rows"]}


def test_one_document_holds_what_is_in_the_directory(figure: tuple[Path, dict[str, Any]]) -> None:
    out, document = figure
    assert document == json.loads((out / "results.json").read_text())
    files = [Path(file).name for file in document["files"]]
    assert files == ["figure1.png", "figure1.pdf", "table.md", "results.json"]
    assert (out / "figure1.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "figure1.pdf").read_bytes().startswith(b"%PDF")
    assert min((out / name).stat().st_size for name in files[:2]) > 15_000
    assert document["command"] == f"pevdn reproduce --seeds 2 --steps 400000 --out {out}"


def test_the_table_is_what_one_computes_by_hand(figure: tuple[Path, dict[str, Any]]) -> None:
    rows = rows_of(figure[1])
    assert len(rows) == 9
    iql, ours = rows["iql", "running"], rows["team-8", "average"]
    assert iql["win_rate"] == pytest.approx(0.5) and iql["share_of_vdn"] == pytest.approx(0.625)
    assert iql["win_rate_low"] == pytest.approx(0.45)
    assert iql["share_of_vdn_low"] == pytest.approx(0.45 / 0.85)
    assert iql["paper"]["share_of_vdn"] == pytest.approx(0.847 / 0.936, abs=1e-3)
    assert rows["vdn", "running"]["steps_to_80"] is None
    assert rows["vdn", "running"]["seeds_at_80"] == 1
    assert ours["released"] and not rows["team-8", "running"]["released"]
    assert ours["share_of_vdn"] == pytest.approx(0.7 / 0.8) and "paper" not in ours
    assert ours["baseline"] == "vdn"  # the better of two
    assert rows["vdn-ours", "running"]["share_of_vdn"] == pytest.approx(0.75 / 0.8)
    assert rows["paper-c", "anchor"]["paper"]["win_rate"] == pytest.approx(0.755, abs=1e-3)
    spent = Plan.of(presets.configure(None, preset="team-8"), 3).mechanism.spent(100)
    assert (ours["epsilon_agent"], ours["epsilon_team"]) == (
        spent.epsilon_agent,
        spent.epsilon_team,
    )
    assert ours["theorem_1_epsilon"] > spent.epsilon_agent  # it is about a whole buffer
    assert rows["iql", "running"]["bytes_per_agent"] == 0


def test_the_words_follow_from_the_figures(figure: tuple[Path, dict[str, Any]]) -> None:
    out, document = figure
    words = " ".join(document["words"])
    assert "pe-vdn-a keeps 100% of vdn" in words and "no significant difference" in words
    assert "iql, running model: 0.500; the paper's run has 0.847, above all our seeds" in words
    assert "with its average model, more than the 81% that the paper's anchor keeps" in words
    assert "paper-c, the paper's optimiser, buffer and anchor, keeps 50%" in words
    assert "not results" not in words
    assert "team-8 has ε team" in words and "ε agent, conditional: " in words
    assert (
        "claims ε 2.90 at δ 0.00049 for the agent observer, by its Theorem 1, which is not" in words
    )
    assert "have ε agent 4.5 to 6.5 if all updates that happen are counted, and that" in words
    table = (out / "table.md").read_text()
    assert "| arm | ε team | δ | ε agent (conditional) | Theorem 1 would claim |" in table
    assert "| vdn | running | 0.800 [0.750, 0.850] | 0.936 | 100% [100%, 100%] |" in table
    assert all(sentence in table for sentence in document["words"])


def test_one_seed_compares_with_nobody(tmp_path: Path) -> None:
    """The first seeds of these runs: 0.70 of 0.75, which is more than the paper's 81 %."""
    pretend_figure1(tmp_path)
    words = " ".join(reproduce(seeds=1, out=tmp_path)["words"])
    assert "one seed cannot show whether this is more or less than the 81% that" in words
    assert "more than the 81%" not in words


def test_a_person_reads_the_table_and_the_words(figure: tuple[Path, dict[str, Any]]) -> None:
    out, _ = figure
    said = cli("reproduce", "--seeds=2", "--out", out)
    assert "0.80 [0.75, 0.85]" in said.out and "- The paper's curves are one run each" in said.out
    assert "ε team   ε agent*" in said.out and "* conditional; only ε team" in said.out
    assert said.out.endswith(f"{out / 'results.json'}\n")


def test_a_run_with_more_seeds_counts_with_its_first_ones(tmp_path: Path) -> None:
    """A different checkpoint_every is accepted."""
    [wanted] = [a for a in figure1.arms(Request(tmp_path, 2, 400_000)) if a.name == "team-8"]
    made = presets.configure(None, seeds=3, preset=wanted.name)
    other = RuntimeOptions(checkpoint_every=7_777)
    pretend(Arm(wanted.name, made, wanted.path, other), [[0.1] * 81, [0.3] * 81, [0.9] * 81])
    wanted.check()
    [row] = measure.table([wanted], lambda *_: None, lambda _: ())
    assert row["win_rate"] == pytest.approx(0.2) and row["epsilon_team"] > 0
    fewer = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, seeds=4))
    with pytest.raises(UsageError, match=r"holds a run with seeds=3 \(requested: 4\)"):
        fewer.check()


def test_another_number_of_steps_in_the_same_directory_is_refused(
    figure: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = figure
    said = cli("reproduce", "--seeds=2", "--steps=30000", "--out", out)
    assert said.code == 2
    assert "holds a run with steps=400000 (requested: 30000); repeat the command" in said.sentence
    file = out / "table.md"
    assert "table.md is a file; choose another" in cli("reproduce", "--out", file).sentence


def test_what_is_quick_says_what_it_left_out_and_that_it_is_no_result(tmp_path: Path) -> None:
    pretend_figure1(tmp_path, quick=True)
    said = cli("reproduce", "--quick", "--seeds=2", "--steps=400000", "--out", tmp_path)
    assert "quick: 2 seeds instead of 8; pe-vdn-a" in said.err
    assert "- These are not results:" in said.out
    assert "**These are not results.**" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("study", "module", "told"),
    [
        ("privacy", study_privacy, "The smallest ε team at which an arm kept 80 % of VDN"),
        ("precision", study_precision, "Precision 2: 0.700"),
        ("agents", study_agents, "toy:coordination, 2 agents: 0.700, 100% of VDN"),
    ],
)
def test_a_study_is_a_table_a_picture_and_words(
    tmp_path: Path, study: str, module: Any, told: str
) -> None:
    settings = {**SMALL, "eval_every": 5000}
    arms = module.arms(Request(tmp_path, 2, 20_000, True, "toy:coordination", settings))
    for arm in arms:
        pretend(arm, [[0.6] * 5, [0.8] * 5])
    if study == "precision":
        (arms[-1].path / "summary.json").unlink()
        (arms[-1].path / campaign.REFUSED).write_text("a message did not fit.")
    document = reproduce(
        study=study,
        seeds=2,
        steps=20_000,
        quick=True,
        out=tmp_path,
        env="toy:coordination",
        **settings,
    )
    assert told in " ".join(document["words"])
    assert document["refused"] == (
        {"precision-7": "a message did not fit."} if study == "precision" else {}
    )
    assert (tmp_path / f"{study}.png").stat().st_size > 10_000
    assert (tmp_path / f"{study}.pdf").exists() and document["left_out"]


def test_vdn_is_also_trained_with_the_network_of_our_recipe(tmp_path: Path) -> None:
    ours = presets.configure(None, preset="team-8").settings
    arms = {arm.name: arm.config for arm in figure1.arms(Request(tmp_path, 8, 400_000))}
    like = arms["vdn-ours"]
    assert (like.algorithm, like.settings.hidden_size) == ("vdn", ours.hidden_size)
    assert like.settings.network == ours.network
    same = Request(tmp_path, 8, 400_000, settings={"network": "recurrent", "hidden_size": 64})
    assert [arm.name for arm in same.vdn_arms("smax-sc2:3m", "team-8")] == ["vdn"]


def test_without_quick_the_studies_are_what_the_paper_announces(tmp_path: Path) -> None:
    wanted = Request(tmp_path, 8, 400_000)
    assert [a.config.settings.precision for a in study_precision.arms(wanted)[1:]] == list(range(8))
    assert {a.config.env for a in study_agents.arms(wanted)} == {
        f"smax-sc2:{name}" for name in ("3m", "8m", "25m")
    }


def test_the_privacy_study_spends_what_each_arm_is_named_after(tmp_path: Path) -> None:
    """For the team observer, whatever the number of agents."""
    for agents, env in ((3, None), (8, "smax-sc2:8m")):
        arms = study_privacy.arms(Request(tmp_path, 8, 400_000, env=env))[2:]
        assert [arm.name for arm in arms] == [f"team-{e}" for e in (1, 2, 4, 8, 16)]
        for arm in arms:
            epsilon = float(arm.name.removeprefix("team-"))
            assert 0.97 * epsilon < Plan.of(arm.config, agents).epsilon("team") <= epsilon


def test_in_another_team_a_recipe_of_the_figure_keeps_its_epsilon(tmp_path: Path) -> None:
    for arm in figure1.arms(Request(tmp_path, 2, 400_000, env="toy:coordination"))[-2:]:
        epsilon = presets.PRESETS[arm.name].epsilon
        assert 0.98 * epsilon < Plan.of(arm.config, 2).epsilon("team") <= epsilon


@pytest.mark.slow
def test_the_whole_experiment_trains_measures_and_draws(tmp_path: Path) -> None:
    settings = {**SMALL, "anchor_threshold": 0.0}
    document = reproduce(seeds=2, steps=200, out=tmp_path, env="toy:coordination", **settings)
    wanted = {arm.name for arm in figure1.arms(Request(tmp_path, 2, 200))}
    assert {row["arm"] for row in document["rows"]} == wanted
    assert all(Path(file).stat().st_size > 500 for file in document["files"])
