"""Presets: named after the ε that is proven, and refused where it would not hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from campaigns import begun
from support import cli

import pevdn
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.config import presets
from pevdn.errors import UsageError
from pevdn.privacy.planner import Plan


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_named_after_the_epsilon_that_is_proven_for_it(name: str) -> None:
    """Within 1 % of it, and below it by more than the accounting of the noise's error costs."""
    preset = presets.PRESETS[name]
    plan = Plan.of(presets.configure(None, preset=name), preset.agents)
    assert preset.agents == 3 and plan.steps == preset.steps
    assert 0.99 * preset.epsilon < plan.epsilon(preset.observer) < (1 - 1e-4) * preset.epsilon
    if name == "paper-c":
        assert f"ε team {plan.epsilon('team'):.2f}" in preset.about
    else:
        assert name.startswith(f"{preset.observer}-{preset.epsilon:g}")
        assert plan.delta <= 1 / (10 * preset.steps)


OLD = {
    "private-2.9": ("team-8", {"noise_multiplier": 1.344}),
    "private-1": ("team-4", {"noise_multiplier": 2.895}),
    "private-team-2.9": ("team-4", {"noise_multiplier": 2.328}),
    "private-2.9-long": ("team-8-long", {"noise_multiplier": 0.867, "anchor": "false"}),
    "private-team-2.9-long": ("team-4-long", {"noise_multiplier": 1.502}),
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_says_what_to_use_instead_and_how_to_train_as_before(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    begun(monkeypatch)
    new, settings = OLD[name]
    with pytest.raises(UsageError) as refused:
        pevdn.train("pe-vdn-c", preset=name)
    said = str(refused.value)
    assert f"preset '{name}' was named after ε" in said and f"use '{new}' (ε team" in said
    for setting, value in {**settings, "delta": "4.88e-4"}.items():
        assert f"{setting}={value}" in said
    assert ("not proven" in said) == ("team" not in name)
    presets.configure(None, settings=settings, preset=new)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "pe-vdn-c"],
        ["config"],
        ["budget"],
        ["audit"],
        ["keys", "pe-vdn-c", "--party=a=h:1", "--party=b=h:2", "--out=team"],
        ["team", "up", "pe-vdn-c"],
    ],
)
def test_every_command_that_takes_a_preset_knows_the_old_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    begun(monkeypatch)
    monkeypatch.chdir(tmp_path)
    said = cli(*arguments, "--preset=private-2.9")
    assert said.code == 2 and said.out == "" and list(tmp_path.iterdir()) == []
    assert "use 'team-8' (ε team 8 at δ 2.5e-07)" in said.sentence


def test_the_defaults_are_those_of_the_first_preset() -> None:
    """But for δ, which follows the steps of a run and not those of the preset."""
    assert presets.configure(None, preset="team-8").settings == dataclasses.replace(
        config.make("pe-vdn-c").settings, delta=2.5e-7
    )
    assert config.make("pe-vdn-c").delta == 2.5e-7


@pytest.mark.parametrize("name", ["team-8", "paper-c"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "pe-vdn-c"],
        ["keys", "pe-vdn-c", "--party=a=h:1", "--party=b=h:2", "--out=team"],
        ["team", "up", "pe-vdn-c", "--out=team"],
    ],
)
def test_a_preset_is_refused_in_a_team_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    begun(monkeypatch)
    monkeypatch.chdir(tmp_path)
    said = cli(*arguments, f"--preset={name}", "--env=toy:coordination")
    assert said.code == 2 and list(tmp_path.iterdir()) == []
    plan = Plan.of(presets.configure(None, preset=name), 2)
    epsilon = presets.PRESETS[name].epsilon
    assert f"'{name}' is for 3 agents, but toy:coordination has 2" in said.sentence
    assert f"gives ε team {plan.epsilon('team'):.2f} instead of {epsilon:g};" in said.sentence
    command = f"pevdn budget --preset {name} --agents 2 --target-epsilon {epsilon:g}"
    assert f"`{command}`" in said.sentence and "--set noise_multiplier=…" in said.sentence
    found = json.loads(cli(*command.split()[1:], "--json").out)  # the fix that it names
    assert 0.99 * epsilon < found["epsilon_team"] <= epsilon and found["agents"] == 2


def test_a_preset_with_noise_of_ones_own_trains_in_any_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = begun(monkeypatch)
    cli("train", "pe-vdn-c", "--preset=team-8", "--env=smax-sc2:8m", "--set=noise_multiplier=2.8")
    with pytest.raises(UsageError, match=r"is for 3 agents, but toy:two-step has 2, for which"):
        pevdn.train("pe-vdn-c", "toy:two-step", preset="team-8")
    with pytest.raises(UsageError, match=r"is for 3 agents, but .* has 2, for which its noise"):
        pevdn.train("pe-vdn-c", worlds.make("toy:coordination"), preset="team-8")
    assert [c.settings.noise_multiplier for c in wanted] == [2.8]


def test_what_is_given_wins_over_the_preset() -> None:
    plain = presets.configure("pe-vdn-c", preset="paper-c")
    assert (plain.steps, plain.settings.optimizer) == (400_000, "sgd")
    changed = presets.configure(
        "pe-vdn-c", steps=10, settings={"optimizer": "adam"}, preset="paper-c"
    )
    assert (changed.steps, changed.settings.optimizer) == (10, "adam")
    assert changed.settings.buffer_size == plain.settings.buffer_size
    assert presets.configure("vdn") == config.make("vdn")


def test_the_command_and_python_take_a_preset_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = begun(monkeypatch)
    with pytest.raises(pevdn.PevdnError):
        pevdn.train("pe-vdn-c", preset="team-4", steps=500, clip_norm=2)
    cli("train", "pe-vdn-c", "--preset=team-4", "--steps=500", "--set", "clip_norm=2")
    own = {"clip_norm": 2.0}
    assert wanted == [presets.configure("pe-vdn-c", "smax-sc2:3m", 500, 1, 0, own, "team-4")] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "vdn", "--preset", "paper-c"], "'paper-c' is for pe-vdn-c, not for vdn;"),
        (["train", "vdm", "--preset", "paper-c"], "unknown algorithm 'vdm'"),
        (["train", "pe-vdn-c", "--preset", "team"], "unknown preset 'team'; did you mean 'team-"),
        (["config", "--preset", "paper"], "did you mean 'paper-c'?"),
        (["budget", "--preset", "paper"], "did you mean 'paper-c'?"),
        (["reproduce", "--study", "precison"], "did you mean 'precision'?"),
        (["reproduce", "--seeds", "0"], "seeds is 0, but must be at least 1."),
        (["reproduce", "--jobs", "0"], "jobs is 0, but must be at least 1."),
    ],
)
def test_a_mistake_is_named_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli(*arguments)
    assert said.code == 2 and said.out == ""
    assert told in said.sentence
    assert list(tmp_path.iterdir()) == []


def test_presets_are_listed_with_what_they_cost_and_shown_in_full() -> None:
    rows = {row["name"]: row for row in json.loads(cli("presets", "--json").out)}
    assert list(rows) == list(presets.PRESETS)
    assert all(row["about"].endswith(".") for row in rows.values())
    assert rows["team-8"]["epsilon_team"] == pytest.approx(8, rel=0.01)
    table = " ".join(cli("presets").out.split())
    assert "preset ε record ε team δ steps description" in table
    assert "ε record holds against teammates too, in teams of any size" in table
    shown = {
        r["name"]: r["default"]
        for r in json.loads(cli("config", "--preset=paper-c", "--json").out)
        if r["kind"] == "setting"
    }
    chosen = presets.configure(None, preset="paper-c").settings
    assert shown == {name: getattr(chosen, name) for name in shown}
    budget = json.loads(cli("budget", "--preset=paper-c", "--json").out)
    assert budget["epsilon_team"] == rows["paper-c"]["epsilon_team"]
    wider = json.loads(cli("budget", "--preset=paper-c", "--buffer-size=2048", "--json").out)
    assert (wider["buffer_size"], wider["delta"]) == (2048, budget["delta"])
    assert "paper-c" in cli("presets").out
