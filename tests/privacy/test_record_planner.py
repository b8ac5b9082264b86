"""Planning for ε record: from settings to ε and back, and `pevdn budget`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from support import cli

import pevdn
from pevdn.cli import main
from pevdn.config import experiment as config
from pevdn.config import presets
from pevdn.config.presets import Preset
from pevdn.errors import UsageError
from pevdn.privacy import planner
from pevdn.privacy.planner import STEP, Plan
from pevdn.training.progress import Silent

SMALL = Plan(64, 8, 1.0, 1.0, 1e-3, 3, openings=1, opening_noise=1.2)
FLAGS = ("--buffer-size", 64, "--batch-size", 8, "--delta", 1e-3)
NOISED = {"openings", "opening_noise", "colluders", "epsilon_record", "epsilon_coalition"}


def budget(*arguments: object) -> dict:
    said = cli("budget", *FLAGS, *arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_the_flags_of_openings_turn_epsilon_record_on() -> None:
    assert not NOISED & set(budget())
    found = budget("--noise-multiplier", 1.0, "--opening-noise", 1.2)
    assert set(found) >= NOISED and next(iter(found)) == "epsilon_record"
    assert (found["openings"], found["opening_noise"], found["colluders"]) == (1, 1.2, 2)
    for observer in ("record", "team", "agent", "coalition"):
        assert found[f"epsilon_{observer}"] == SMALL.epsilon(observer)
        assert found[f"epsilon_{observer}_rdp"] > found[f"epsilon_{observer}"]
    assert found["epsilon_teammate"] == found["epsilon_record"]
    assert "none" not in found["teammate"] and "t = 2" in found["teammate"]
    assert budget("--openings", 2)["opening_noise"] == 1.0
    one = budget("--colluders", 1, "--opening-noise", 1.2)
    assert one["colluders"] == 1 and one["epsilon_record"] == found["epsilon_record"]


def test_the_table_begins_with_epsilon_record_and_names_t_and_n() -> None:
    shown = cli("budget", *FLAGS, "--openings", 3, "--colluders", 1).out
    observers = re.findall(r"^ (\w+) +\d+\.\d\d ", shown, re.MULTILINE)
    assert observers == ["record", "team", "agent", "coalition", "teammate"]
    text = " ".join(shown.split())
    assert "a coalition of t = 1 pooled with any outsider" in text and "n = 3 openings" in text
    teammate = text[text.index(" teammate ") :]
    assert "none" not in teammate and "ε record" in teammate
    bare = " ".join(cli("budget", *FLAGS, "--opening-noise", 0).out.split())
    assert "record inf" in bare and "ε record is infinite at opening_noise 0" in bare
    assert "of it; infinite: no bound" in bare and "coalition; infinite: no bound" in bare


@pytest.mark.parametrize("target", [1.0, 8.0])
@pytest.mark.parametrize("held", [(), ("noise_multiplier",), ("opening_noise",)])
def test_a_target_finds_the_noise_that_is_not_given(target: float, held: tuple[str, ...]) -> None:
    given = {1.0: {"noise_multiplier": 4.0, "opening_noise": 6.0}, 8.0: {}}[target]
    plan = dataclasses.replace(SMALL, **given)
    found = planner.smallest_noise(plan, target, "record", held)
    assert 0.97 * target < found.epsilon("record") <= target
    for name in held:
        assert getattr(found, name) == getattr(plan, name)
    for name in {"noise_multiplier", "opening_noise"} - set(held):
        less = dataclasses.replace(found, **{name: getattr(found, name) - 3 * STEP})
        assert less.epsilon("record") > found.epsilon("record")
        assert not held or less.epsilon("record") > target


def test_noise_found_for_both_leaves_neither_part_idle() -> None:
    found = planner.smallest_noise(SMALL, 4.0, "record")
    opened = found.mechanism.epsilon(0, "record")
    learnt = found.epsilon("agent")
    assert 0.6 < opened / learnt < 1.6 and max(opened, learnt) < 4.0 < opened + learnt


def test_a_round_trip_through_the_command_line() -> None:
    found = budget("--openings", 2, "--target-epsilon", 5)
    assert found["epsilon_record"] <= 5
    noises = ("--noise-multiplier", found["noise_multiplier"])
    noises += ("--opening-noise", found["opening_noise"])
    again = budget("--openings", 2, *noises)
    assert again["epsilon_record"] == found["epsilon_record"]
    held = budget("--openings", 2, *noises[:2], "--target-epsilon", 5)
    assert held["opening_noise"] <= found["opening_noise"]
    assert held["noise_multiplier"] == found["noise_multiplier"]
    team = budget("--openings", 2, "--target-epsilon", 5, "--observer", "team")
    assert team["epsilon_team"] <= 5 and team["opening_noise"] == 1.0


def test_all_noise_given_finds_the_largest_batch() -> None:
    arguments = ("--noise-multiplier", 2, "--opening-noise", 3, "--target-epsilon", 3)
    said = cli("budget", "--buffer-size", 64, "--delta", 1e-3, *arguments, "--json")
    found = json.loads(said.out)
    assert found["epsilon_record"] <= 3
    more = dataclasses.replace(
        SMALL, noise_multiplier=2.0, opening_noise=3.0, batch_size=found["batch_size"] + 1
    )
    assert more.epsilon("record") > 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--openings", 0], "openings is 0, but must be at least 1"),
        (["--openings", 9], "is in the buffer for 8 blocks of 8 episodes and is opened at most"),
        (["--openings", 65], "openings is 65, but must be at most 64"),
        (["--opening-noise", -1], "opening_noise is -1, but must be at least 0 and at most 1e+09"),
        (["--opening-noise", 1e300], "opening_noise is 1e+300, but must be at least 0 and at most"),
        (["--colluders", 3], "colluders is 3, but at most 2 of 3 agents"),
        (["--openings", 1, "--relation", "replace-one"], "accounted for with 'zero-out' only"),
        (["--target-epsilon", 1, "--observer", "record"], "No ε holds for a teammate without"),
        (["--target-epsilon", 1, "--opening-noise", 0.5], "opening_noise=0.5 alone costs ε record"),
        (
            ["--openings", 1, "--target-epsilon", 1, "--noise-multiplier", 0.7],
            "noise_multiplier=0.7 alone costs ε record",
        ),
        (
            ["--target-epsilon", 9, "--opening-noise", 2, "--noise-multiplier", 2],
            "leave nothing to find",
        ),
    ],
)
def test_bad_input_gets_a_sentence(arguments: list[object], sentence: str) -> None:
    said = cli("budget", *FLAGS, *arguments)
    assert said.code == 2 and sentence in said.sentence and said.out == ""


def test_a_run_too_short_to_learn_pays_for_its_openings_alone() -> None:
    short = dataclasses.replace(SMALL, steps=8)
    assert short.exposure == 0 and short.epsilon("team") == 0
    assert short.epsilon("record") == SMALL.mechanism.epsilon(0, "record") > 0
    found = planner.smallest_noise(short, 2.0, "record")
    assert found.noise_multiplier == 0.0 and 1.9 < found.epsilon("record") <= 2.0


def test_a_search_and_a_picture_cover_epsilon_record(tmp_path: Path) -> None:
    found = budget("--openings", 1, "--runs", 2, "--plot", tmp_path / "curve.png")
    rows = {row["observer"]: row for row in found["search"]}
    assert list(rows) == ["record", "team", "agent"]
    assert found["epsilon_record"] == rows["record"]["fresh"] < rows["record"]["all"]
    assert rows["record"]["logarithmic"] > rows["record"]["fresh"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_preset_may_be_named_after_epsilon_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ε is the same in every team, so it is refused in none; a team's is, as ever."""
    settings = {"noise_multiplier": 1.3, "opening_noise": 0.9, "delta": 1e-4}
    own = Preset("record-8", "pe-vdn-d", 8.0, 4000, settings, "For ε record 8.", observer="record")
    monkeypatch.setitem(presets.PRESETS, own.name, own)
    wanted = presets.configure(None, "smax-sc2:3m", preset=own.name)
    for agents in (2, 3, 9):
        planner.check_preset(own.name, {}, wanted, agents)
        plan = Plan.of(wanted, agents)
        assert plan.epsilon("record") == Plan.of(wanted, 3).epsilon("record")
    with pytest.raises(UsageError, match="gives ε team"):
        planner.check_preset("team-8", {}, presets.configure(None, preset="team-8"), 5)
    rows = {row["name"]: row for row in json.loads(cli("presets", "--json").out)}
    assert rows["record-8"]["observer"] == "record" and rows["record-8"]["epsilon_record"] < 8
    assert rows["team-8"]["observer"] == "team" and "epsilon_record" not in rows["team-8"]
    plan = json.loads(cli("budget", "--preset", own.name, "--json").out)
    assert plan["epsilon_record"] == rows["record-8"]["epsilon_record"]
    assert plan["opening_noise"] == 0.9


def test_a_budget_that_the_openings_alone_exceed_is_refused() -> None:
    own = {"epsilon_budget": 0.5, "opening_noise": 1.0, "delta": 1e-3}
    with pytest.raises(UsageError, match="with 1 opening of each record, already costs"):
        planner.affordable(config.make("pe-vdn-d", settings=own), 3)
    larger = config.make("pe-vdn-d", settings={**own, "epsilon_budget": 9.0})
    allowed = planner.affordable(larger, 3)
    mechanism = Plan.of(larger, 3).mechanism
    assert mechanism.epsilon(allowed, "record") <= 9.0 < mechanism.epsilon(allowed + 1, "record")


def test_a_preset_for_epsilon_record_in_another_team_gets_a_note() -> None:
    wanted = presets.configure(None, "toy:coordination", preset="record-8")
    note = planner.other_team("record-8", {}, wanted)
    assert note == planner.other_team("record-8", {}, wanted, 2) is not None
    assert "is for 3 agents, but toy:coordination has 2" in note
    here, there = Plan.of(wanted, 2), Plan.of(wanted, 3)
    assert f"ε record stays {there.epsilon('record'):.2f}, but" in note
    for observer in ("team", "coalition"):
        both = f"{here.epsilon(observer):.2f} instead of {there.epsilon(observer):.2f}"
        assert here.epsilon(observer) < there.epsilon(observer)
        assert f"ε {observer} is {both}" in note
    more = presets.configure(None, preset="record-8", settings={"colluders": 5})
    assert "has 8: ε record stays" in (planner.other_team("record-8", {}, more, 8) or "")
    for silent in (("record-8", {}, 3), ("record-8", {"noise_multiplier": 2.0}, 2), (None, {}, 2)):
        assert planner.other_team(silent[0], silent[1], wanted, silent[2]) is None
    assert planner.other_team("team-8", {}, presets.configure(None, preset="team-8"), 5) is None


@pytest.mark.parametrize("agents", [2, 3])
def test_those_who_train_with_a_preset_in_another_team_are_told(
    agents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Began(Exception): ...

    def begin(*_: object, **__: object) -> None:
        raise Began

    monkeypatch.setattr("pevdn.training.loop.begin", begin)
    monkeypatch.setattr("pevdn.worlds.team_size", lambda env: agents)
    err = io.StringIO()
    with pytest.raises(Began), contextlib.redirect_stderr(err):
        main(["train", "pe-vdn-d", "--env", "toy:coordination", "--preset", "record-8"])
    assert ("ε coalition is" in err.getvalue()) is (agents == 2)
    notes: list[str] = []
    told = Silent()
    monkeypatch.setattr(told, "note", notes.append)
    with pytest.raises(Began):
        pevdn.train("pe-vdn-d", "toy:coordination", preset="record-8", reporter=told)
    assert len(notes) == (agents == 2)
    parties = [f"--party={name}=127.0.0.1:{7700 + i}" for i, name in enumerate("abc"[:agents])]
    env = "toy:coordination" if agents == 2 else "smax-sc2:3m"
    where = ("--env", env, "--world", "127.0.0.1:7709", "--out", tmp_path / "team")
    said = cli("keys", "pe-vdn-d", *parties, *where, "--preset", "record-8")
    assert said.code == 0 and ("ε coalition is" in said.err) is (agents == 2), said.err
