"""Claims about reproducing the paper: presets, statistics, measures, and a campaign of runs."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from support import SMALL, assert_same_ending, cli, content, train

import pevdn
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.config import presets
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import UsageError
from pevdn.privacy.ledger import Ledger
from pevdn.privacy.planner import Plan
from pevdn.reproduction import (
    campaign,
    figure1,
    measure,
    paper,
    reproduce,
    statistics,
    study_agents,
    study_precision,
    study_privacy,
)
from pevdn.reproduction.campaign import Arm, train_all
from pevdn.reproduction.measure import Curves
from pevdn.reproduction.targets import Wanted
from pevdn.training import loop as run
from pevdn.training.progress import Moment, Silent

pytestmark = pytest.mark.usefixtures("compiled_once")


# --- presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_named_after_the_epsilon_that_is_proven_for_it(name: str) -> None:
    """Within 1 % of it, and below it by more than the accounting of the noise's error costs."""
    preset = presets.PRESETS[name]
    plan = Plan.of(presets.configure(None, preset=name), preset.agents)
    assert preset.agents == 3 and plan.steps == preset.steps
    assert 0.99 * preset.epsilon < plan.epsilon("team") < (1 - 1e-4) * preset.epsilon
    if name == "paper-c":
        assert f"ε team {plan.epsilon('team'):.2f}" in preset.about
    else:
        assert name.startswith(f"team-{preset.epsilon:g}")
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


def begun(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that would be trained from here on."""
    wanted: list[Config] = []

    def begin(config: Config, *_: object) -> None:
        wanted.append(config)
        raise pevdn.PevdnError("enough")

    monkeypatch.setattr(run, "begin", begin)
    return wanted


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
    assert "preset ε team δ (conditional) steps" in table  # under "ε agent"
    assert "ε team is proven, ε agent is not" in table
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


# --- statistics ------------------------------------------------------------------------------

RATES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(st.floats(0, 1), st.integers(1, 12))
def test_of_equal_seeds_every_statistic_is_that_value(value: float, count: int) -> None:
    values = [value] * count
    assert statistics.iqm(values) == pytest.approx(value)
    bounds = statistics.interval(values)
    assert (bounds is None) == (count == 1)
    assert bounds is None or bounds == pytest.approx((value, value))


@given(RATES, st.randoms())
def test_the_order_of_seeds_does_not_matter(values: list[float], random: Any) -> None:
    mixed = list(values)
    random.shuffle(mixed)
    assert statistics.iqm(mixed) == pytest.approx(statistics.iqm(values))
    assert statistics.interval(mixed) == statistics.interval(values)


@given(RATES)
def test_an_interval_lies_within_the_seeds(values: list[float]) -> None:
    bounds = statistics.interval(values)
    assert bounds is not None
    low, high = bounds
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


@given(RATES, st.floats(0.1, 10))
def test_a_share_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    below = [0.5, 0.6, 0.9]
    plain = statistics.ratio_interval(values, below)
    scaled = statistics.ratio_interval([v * unit for v in values], [v * unit for v in below])
    assert scaled == pytest.approx(plain)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert statistics.iqm([9, 1, 2, 3, 4, 5, 6, -70]) == 3.5
    assert statistics.iqm([[0, 8], [1, 9], [5, 5], [9, 1]]) == pytest.approx([3, 6.5])


def test_a_share_of_nothing_has_no_interval() -> None:
    assert statistics.ratio_interval([0.1, 0.2], [0.0, 0.0]) is None


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Nominal 95 %, for 16 seeds between 90 and 97 %; fails twice in a million if that is true."""
    draws = np.random.default_rng(0).normal(size=(400, 16))
    intervals = [statistics.interval(values) for values in draws]
    covered = sum(low <= 0 <= high for low, high in filter(None, intervals))
    assert (
        scipy.stats.binom.ppf(1e-6, 400, 0.90) <= covered <= scipy.stats.binom.isf(1e-6, 400, 0.97)
    )


# --- measures --------------------------------------------------------------------------------


def test_the_papers_curves_have_their_published_means() -> None:
    ours = {name: f"{measure.published(name).final[0]:.3f}" for name in ("iql", "vdn", "pe-vdn-b")}
    assert ours == {"iql": "0.847", "vdn": "0.936", "pe-vdn-b": "0.991"}
    assert f"{measure.published('pe-vdn-c-anchor').final[0]:.3f}" == "0.755"
    assert {len(curve.steps) for p in "ab" for curve in paper.curves(p).values()} == {81}
    assert paper.curve("qmix") is None


def test_final_area_and_steps_to_80_by_hand() -> None:
    steps = np.arange(9) * 50_000  # the last 100,000 are the last two evaluations
    rising = [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1]
    curves = Curves(steps, np.array([rising, [0.5] * 9]))
    assert curves.final.tolist() == [1, 0.5]
    # trapezia: half of the ends and all between
    assert curves.area.tolist() == pytest.approx([(0.5 + 5) / 8, 0.5])
    # means of five: …, (0.4+0.6+0.8+1+1)/5 = 0.76, (0.6+0.8+1+1+1)/5 = 0.88
    assert curves.reached.tolist() == [350_000, math.inf]
    row = measure.learning(curves, None)
    assert (row["win_rate"], row["steps_to_80"], row["seeds_at_80"]) == (0.75, None, 1)
    assert (row["win_rate_low"], row["win_rate_high"]) == (0.5, 1)


def test_a_short_run_is_measured_over_its_last_quarter() -> None:
    curves = Curves(np.arange(5) * 100, np.array([[0, 0, 0, 1, 0.5]]))
    assert curves.final.tolist() == [0.5]


def lines_of(values: Sequence[Sequence[float | None]], every: int, name: str = "win_rate") -> Any:
    """What seeds with these win rates write down; episodes of 3 steps, an update each."""
    return [
        {
            "seed": seed,
            "env_steps": k * every,
            "episodes": k * every // 3,
            "updates": k * every // 3,
            "win_rate": own[k] if name == "win_rate" else 0.1,
            name: own[k],
        }
        for k in range(len(values[0]))
        for seed, own in enumerate(values)
    ]


def test_a_model_that_is_not_there_yet_wins_nothing() -> None:
    lines = lines_of([[None, None, 0.5], [None, 1, 1]], 30, "win_rate_anchor")
    models = measure.curves_of(config.make("pe-vdn-c", settings={"eval_every": 30}), lines)
    assert list(models) == ["running", "anchor"]
    assert models["anchor"].values.tolist() == [[0, 0, 0.5], [0, 1, 1]]
    assert measure.released(models) == "anchor"
    assert measure.released(["running", "anchor", "average"]) == "anchor"


@pytest.mark.parametrize(
    ("algorithm", "messages", "size"),
    # Two agents, 100 updates of 4 episodes of 3 steps. The central node gets 300 steps of an
    # observation of 5 or 6 numbers, a byte of available actions and two of the action.
    [
        ("iql", 0, 4),
        ("vdn", 300, 4 * 5.5 + 3),
        ("pe-vdn-a", 1200, 4),
        ("pe-vdn-b", 2400, 4),
    ],
)
def test_what_an_agent_sends_by_hand(algorithm: str, messages: float, size: float) -> None:
    settings = {"expected_batch_size": 4, "eval_every": 30}
    wanted = config.make(algorithm, "toy:coordination", 300, settings=settings)
    found = measure.traffic(wanted, lines_of([[0.0] * 11], 30))
    assert found["messages_per_agent"] == pytest.approx(messages)
    assert found["bytes_per_agent"] == pytest.approx(messages * size)


def test_a_poisson_sample_is_as_large_as_the_buffer_is_full() -> None:
    settings = {"buffer_size": 50, "expected_batch_size": 5, "eval_every": 30}
    wanted = config.make("pe-vdn-c", "toy:coordination", 300, settings=settings)
    # q = 0.1; ten episodes, and updates, from one line to the next: 5, 15, 25, 35, 45 are stored
    # in the middle of the first five, then all 50.
    stored = 5 + 15 + 25 + 35 + 45 + 5 * 50
    found = measure.sampled_steps(wanted, lines_of([[0.0] * 11], 30))
    assert found == pytest.approx(0.1 * stored * 10 * 3)


# --- a campaign ------------------------------------------------------------------------------


class Impatient(Silent):
    """Presses Ctrl-C once, as soon as something holds."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self.enough, self.pressed, self.notes = enough, False, list[str]()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, title: str, steps: int, done: int) -> None:
        self.notes.append(title)

    def moment(self, moment: Moment) -> None:
        self.said.append(moment.overall)
        if not self.pressed and self.enough():
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def patient() -> Impatient:
    return Impatient(lambda: False)


def small_arms(folder: Path) -> list[Arm]:
    """Two that share one compiled program."""
    return [
        Arm(
            f"seed-{seed}",
            config.make("pe-vdn-b", "toy:two-step", 200, 1, seed, SMALL),
            folder / f"seed-{seed}",
        )
        for seed in (0, 5)
    ]


def test_a_campaign_that_was_stopped_goes_on_and_ends_as_if_it_never_had_been(
    tmp_path: Path,
) -> None:
    first, second = arms = small_arms(tmp_path)
    stop = Impatient(lambda: first.over and second.steps >= 80)
    with pytest.raises(
        run.Interrupted, match=r"in seed-5, arm 2 of 2; .* the same command goes on"
    ):
        train_all(arms, stop)
    assert first.over and second.begun and not second.over
    assert any(title.startswith("arm 2 of 2, seed-5: pe-vdn-b on toy") for title in stop.notes)
    assert any(told.startswith("all of it: about ") for told in stop.said)
    before, watcher = content(first.path), patient()
    train_all(arms, watcher)
    assert content(first.path) == before
    assert watcher.notes[0] == "1 of 2 arms are finished already."
    assert_same_ending(second.run, train("pe-vdn-b", tmp_path / "undisturbed", seed=5))
    before = content(tmp_path)
    train_all(arms, patient())
    assert content(tmp_path) == before


def test_a_directory_with_another_run_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    first, second = small_arms(tmp_path)
    pretend(second, [[0.5] * 6])
    other = Arm(second.name, config.make("iql", "toy:two-step", 300, 1, 5, SMALL), second.path)
    with pytest.raises(
        UsageError, match=r"seed-5 holds a run with algorithm=pe-vdn-b \(wanted: iql"
    ):
        train_all([first, other], patient())
    (first.path / "other").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not empty; choose another --out"):
        train_all([first, second], patient())
    assert not first.begun


def test_a_refusal_is_a_result_only_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = small_arms(tmp_path)

    def refuse(arm: Arm, *_: object) -> None:
        arm.path.mkdir(exist_ok=True)
        (arm.path / "config.yaml").write_text(config.to_text(arm.config))
        raise run.MessageRefused("a message of size 9 does not fit.")

    monkeypatch.setattr(Arm, "train", refuse)
    with pytest.raises(run.MessageRefused):
        train_all(arms, patient())
    train_all(arms, patient(), may_refuse=True)
    assert [arm.refused for arm in arms] == ["a message of size 9 does not fit."] * 2
    monkeypatch.setattr(Arm, "train", None)  # it is not tried again
    train_all(arms, patient(), may_refuse=True)


# Side by side: processes that do as a training does, without its weight.

FINISHES = "import sys, pathlib; pathlib.Path(sys.argv[1], 'summary.json').write_text('{}')"
WAITS = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], 'saved').write_text('')
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], 'ready').write_text('')
time.sleep(60)
"""


def stand_in(program: str) -> Callable[..., list[str]]:
    def command(arm: Arm, devices: int | str) -> list[str]:
        arm.path.mkdir(exist_ok=True)
        (arm.path / "config.yaml").write_text(config.to_text(arm.config))
        return [sys.executable, "-c", program, str(arm.path)]

    return command


def test_arms_train_side_by_side_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in(FINISHES))
    arms, watcher = small_arms(tmp_path), patient()
    train_all(arms, watcher, jobs=2)
    assert all(arm.run.finished for arm in arms)
    assert watcher.notes == ["2 arms, 2 at a time"]


def test_ctrl_c_asks_all_processes_to_save_and_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in(WAITS))
    arms = small_arms(tmp_path)
    stop = Impatient(lambda: all((arm.path / "ready").exists() for arm in arms))
    with pytest.raises(run.Interrupted, match=r"stopped in seed-0, seed-5; everything is saved"):
        train_all(arms, stop, jobs=2)
    assert all((arm.path / "saved").exists() for arm in arms)


def test_an_arm_that_failed_beside_others_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "command", stand_in("raise SystemExit(1)"))
    alone: list[str] = []
    monkeypatch.setattr(Arm, "train", lambda arm, *_: alone.append(arm.name))
    train_all(small_arms(tmp_path), patient(), jobs=2)
    assert alone == ["seed-0", "seed-5"]


def test_the_command_of_an_arm_trains_what_the_arm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = begun(monkeypatch)
    arms = figure1.arms(Wanted(tmp_path, 4, 1000))
    for arm in arms:
        cli(*arm.command("1")[3:])
    assert wanted == [arm.config for arm in arms]
    pretend(arms[0], [[0.5] * 3] * 4)
    assert arms[0].command("all")[3:] == ["resume", str(arms[0].path), "--devices=all"]


# --- all of it -------------------------------------------------------------------------------


def pretend(arm: Arm, win_rates: Sequence[Sequence[float]], **more: float) -> None:
    """A finished run, with everything in it that is read."""
    arm.path.mkdir(parents=True, exist_ok=True)
    (arm.path / "config.yaml").write_text(config.to_text(arm.config))
    if arm.config.private:
        mechanism, seeds = Plan.of(arm.config, 3).mechanism, arm.config.seeds
        ledger = Ledger.begin(arm.path, config.fingerprint(arm.config), mechanism, seeds, 100)
        chunk = ledger.reserve(1, 1, [9999] * seeds, 1)
        ledger.settle(chunk, [1] * seeds, [100] * seeds, "")
    lines = [line | more for line in lines_of(win_rates, arm.config.settings.eval_every)]
    (arm.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {"device": "cpu", "versions": dict.fromkeys(("pevdn", "jax", "python"), "1")}
    (arm.path / "summary.json").write_text(json.dumps({**made, "wall_seconds": 36.0}))


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
    arms = figure1.arms(Wanted(out, 2, 400_000, quick))
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
    assert said.code == 0 and said.err == "7 of 7 arms are finished already.\n"
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
    assert "pe-vdn-a keeps 100% of vdn" in words and "do not tell them apart" in words
    assert "iql, running model: 0.500 where the paper's run has 0.847, above all our seeds" in words
    assert "with its average model, more than the 81% that the paper's anchor keeps" in words
    assert "paper-c, the paper's optimiser, buffer and anchor, keeps 50%" in words
    assert "no results" not in words
    assert "team-8 has ε team" in words and "ε agent, conditional: " in words
    assert "claims ε 2.90 at δ 0.00049 for the agent view, by its Theorem 1, which is not" in words
    assert "have ε agent 4.5 to 6.5 if all updates that happen are counted, and that" in words
    table = (out / "table.md").read_text()
    assert "| arm | ε team | δ | ε agent (conditional) | Theorem 1 would claim |" in table
    assert "| vdn | running | 0.800 [0.750, 0.850] | 0.936 | 100% [100%, 100%] |" in table
    assert all(sentence in table for sentence in document["words"])


def test_one_seed_compares_with_nobody(tmp_path: Path) -> None:
    """The first seeds of these runs: 0.70 of 0.75, which is more than the paper's 81 %."""
    pretend_figure1(tmp_path)
    words = " ".join(reproduce(seeds=1, out=tmp_path)["words"])
    assert "one seed cannot tell whether this is more or less than the 81% that" in words
    assert "more than the 81%" not in words


def test_a_person_reads_the_table_and_the_words(figure: tuple[Path, dict[str, Any]]) -> None:
    out, _ = figure
    said = cli("reproduce", "--seeds=2", "--out", out)
    assert "0.80 [0.75, 0.85]" in said.out and "- The paper's curves are one run each" in said.out
    assert "ε team   ε agent*" in said.out and "* conditional; only ε team" in said.out
    assert said.out.endswith(f"{out / 'results.json'}\n")


def test_a_run_with_more_seeds_counts_with_its_first_ones(tmp_path: Path) -> None:
    """And one that was saved at other times counts as it is."""
    [wanted] = [a for a in figure1.arms(Wanted(tmp_path, 2, 400_000)) if a.name == "team-8"]
    made = presets.configure(None, seeds=3, preset=wanted.name)
    other = RuntimeOptions(checkpoint_every=7_777)
    pretend(Arm(wanted.name, made, wanted.path, other), [[0.1] * 81, [0.3] * 81, [0.9] * 81])
    wanted.check()
    [row] = measure.table([wanted], lambda *_: None, lambda _: ())
    assert row["win_rate"] == pytest.approx(0.2) and row["epsilon_team"] > 0
    fewer = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, seeds=4))
    with pytest.raises(UsageError, match=r"holds a run with seeds=3 \(wanted: 4\)"):
        fewer.check()


def test_another_number_of_steps_in_the_same_directory_is_refused(
    figure: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = figure
    said = cli("reproduce", "--seeds=2", "--steps=30000", "--out", out)
    assert said.code == 2
    assert "holds a run with steps=400000 (wanted: 30000); ask for the same" in said.sentence
    file = out / "table.md"
    assert "table.md is a file; choose another" in cli("reproduce", "--out", file).sentence


def test_what_is_quick_says_what_it_left_out_and_that_it_is_no_result(tmp_path: Path) -> None:
    pretend_figure1(tmp_path, quick=True)
    said = cli("reproduce", "--quick", "--seeds=2", "--steps=400000", "--out", tmp_path)
    assert "quick: 2 seeds instead of 8; pe-vdn-a" in said.err
    assert "- These are no results:" in said.out
    assert "**These are no results.**" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("study", "module", "told"),
    [
        ("privacy", study_privacy, "The smallest ε in the team view at which 80 % of VDN"),
        ("precision", study_precision, "Precision 2: 0.700"),
        ("agents", study_agents, "toy:coordination, 2 agents: 0.700, 100% of VDN"),
    ],
)
def test_a_study_is_a_table_a_picture_and_words(
    tmp_path: Path, study: str, module: Any, told: str
) -> None:
    settings = {**SMALL, "eval_every": 5000}
    arms = module.arms(Wanted(tmp_path, 2, 20_000, True, "toy:coordination", settings))
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
    arms = {arm.name: arm.config for arm in figure1.arms(Wanted(tmp_path, 8, 400_000))}
    like = arms["vdn-ours"]
    assert (like.algorithm, like.settings.hidden_size) == ("vdn", ours.hidden_size)
    assert like.settings.network == ours.network
    same = Wanted(tmp_path, 8, 400_000, settings={"network": "recurrent", "hidden_size": 64})
    assert [arm.name for arm in same.vdns("smax-sc2:3m", "team-8")] == ["vdn"]


def test_without_quick_the_studies_are_what_the_paper_announces(tmp_path: Path) -> None:
    wanted = Wanted(tmp_path, 8, 400_000)
    assert [a.config.settings.precision for a in study_precision.arms(wanted)[1:]] == list(range(8))
    assert {a.config.env for a in study_agents.arms(wanted)} == {
        f"smax-sc2:{name}" for name in ("3m", "8m", "25m")
    }


def test_the_privacy_study_spends_what_each_arm_is_named_after(tmp_path: Path) -> None:
    """In the view that is proven, whatever the number of agents."""
    for agents, env in ((3, None), (8, "smax-sc2:8m")):
        arms = study_privacy.arms(Wanted(tmp_path, 8, 400_000, env=env))[2:]
        assert [arm.name for arm in arms] == [f"team-{e}" for e in (1, 2, 4, 8, 16)]
        for arm in arms:
            epsilon = float(arm.name.removeprefix("team-"))
            assert 0.97 * epsilon < Plan.of(arm.config, agents).epsilon("team") <= epsilon


def test_in_another_team_a_recipe_of_the_figure_keeps_its_epsilon(tmp_path: Path) -> None:
    for arm in figure1.arms(Wanted(tmp_path, 2, 400_000, env="toy:coordination"))[-2:]:
        epsilon = presets.PRESETS[arm.name].epsilon
        assert 0.98 * epsilon < Plan.of(arm.config, 2).epsilon("team") <= epsilon


@pytest.mark.slow
def test_the_whole_experiment_trains_measures_and_draws(tmp_path: Path) -> None:
    settings = {**SMALL, "anchor_threshold": 0.0}
    document = reproduce(seeds=2, steps=200, out=tmp_path, env="toy:coordination", **settings)
    wanted = {arm.name for arm in figure1.arms(Wanted(tmp_path, 2, 200))}
    assert {row["arm"] for row in document["rows"]} == wanted
    assert all(Path(file).stat().st_size > 500 for file in document["files"])
