"""Claims about the ledger: a crash may over-count, never under-count, and no book is cooked."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    OPTIONS,
    PRIVATE,
    checkpoints_in,
    cli,
    content,
    metrics_of,
    python,
    train,
    train_arguments,
)

import pevdn
from pevdn.config import experiment as config
from pevdn.errors import PevdnError, UsageError
from pevdn.privacy import accounting
from pevdn.privacy import ledger as ledgers
from pevdn.privacy.accounting import Mechanism
from pevdn.privacy.ledger import FILE, HEAD, Ledger
from pevdn.privacy.planner import Plan
from pevdn.training import accountant
from pevdn.training import loop as runs
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")
MECHANISM = Mechanism(1 / 8, 1.0, 2, 1e-2)
ID = "this run"
PLANNED = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A private run that nobody disturbed."""
    return train("pe-vdn-c", tmp_path_factory.mktemp("ledger") / "whole", steps=400)


@pytest.fixture
def unfinished(whole: Run, tmp_path: Path) -> Run:
    """The same run before its summary was written, at the same place of the disk."""
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    (path / "summary.json").unlink()
    return Run(path)


def ledger_of(run: Run) -> Ledger:
    return Ledger.read(run.path, config.fingerprint(run.config))


def without_epsilon(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in x.items() if not k.startswith("epsilon")} for x in run.metrics]


# --- the book itself -------------------------------------------------------------------------


def spend(ledger: Ledger, made: int, iterations: int = 3, digest: str = "d") -> None:
    """One chunk with one update an iteration at most, for a run of one seed."""
    chunk = ledger.reserve(100, iterations, [99], 1)
    ledger.settle(chunk, [made], [ledger._exposure[0] + made], digest)


@given(
    st.lists(
        st.tuples(st.sampled_from(["settled", "crashed", "saved"]), st.integers(0, 5)), max_size=12
    )
)
def test_whatever_crashes_the_ledger_counts_every_update(tmp_path_factory, events):
    """Chunks are settled, or cut short by a crash after which the process starts over."""
    folder = tmp_path_factory.mktemp("book")
    ledger = Ledger.begin(folder, ID, MECHANISM, 1, PLANNED)
    checkpoint, applied, surviving = ledger.position, 0, []
    for what, made in events:
        if what == "saved":
            checkpoint, surviving = ledger.position, []
            continue
        chunk = ledger.reserve(100, 5, [99], 1)
        applied += made  # the machine did this much, whatever becomes of it
        if what == "settled":
            ledger.settle(chunk, [made], [made], f"digest {len(surviving)}")
            surviving.append(made)
            continue
        ledger = Ledger.read(folder, ID)
        ledger.go_on(*checkpoint)
        for number, again in enumerate(surviving):
            chunk = ledger.reserve(100, 1, [99], 1)
            assert chunk.iterations == 5  # as it was, not as it is asked for now
            applied += again
            ledger.settle(chunk, [again], [again], f"digest {number}")
    assert ledger.counted[0] >= applied
    assert Ledger.read(folder, ID).counted[0] >= applied


def test_a_crash_counts_all_that_was_reserved_for_every_episode(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    before = ledger.exposure
    ledger.reserve(100, 7, [99], 2)
    found = Ledger.read(tmp_path, ID)
    assert found.lost == [14]
    assert found.exposure == [before[0] + 14]
    assert found.spent() == [MECHANISM.spent(before[0] + 14)]


def test_a_repeated_chunk_adds_to_the_count_and_not_to_epsilon(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    start = ledger.position
    spend(ledger, made=2)
    exposure = ledger.exposure
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [2], exposure, "d")
    assert ledger.counted == [4]
    assert ledger.exposure == exposure
    assert ledger.lost == [0]


def test_a_repetition_that_comes_out_differently_is_refused(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    start = ledger.position
    spend(ledger, made=2)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    chunk = ledger.reserve(100, 9, [99], 1)
    with pytest.raises(PevdnError, match="same noise would hide two different gradients"):
        ledger.settle(chunk, [2], [2], "another digest")

    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*start)
    ledger.renew()
    nonce = ledger.take_renewal()
    assert nonce is not None and ledger.take_renewal() is None
    assert ledger.lost == [2 + 3]  # what was settled, and the reservation of the try
    spend(ledger, made=1, digest="new")
    again = Ledger.read(tmp_path, ID)
    again.go_on(*start)
    assert again.take_renewal() == nonce
    assert again.reserve(100, 9, [99], 1).digest == "new"


def test_a_position_stays_where_it_is_until_a_repetition_is_settled(tmp_path):
    """A save during repetitions must not forget those that are still to come."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    positions = [ledger.position]
    for number in range(3):
        spend(ledger, made=number + 1, digest=str(number))
        positions.append(ledger.position)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*positions[0])
    for number in range(2):
        assert ledger.position == positions[number]
        chunk = ledger.reserve(100, 9, [99], 1)
        assert ledger.position == positions[number]
        ledger.settle(chunk, [number + 1], [0], str(number))
    assert ledger.position == positions[2]
    repeats = [x["repeats"] for x in ledger.lines if x["kind"] == "settle"]
    assert repeats == [None, None, None, positions[1][0], positions[2][0]]
    ledger.renew()
    assert ledger.lost == [3] and Ledger.read(tmp_path, ID).lost == [3]


def test_a_renewal_is_applied_again_in_its_place(tmp_path):
    """Checkpoint A, chunk, checkpoint B, chunk, crash, renewal from B, chunk; then B is lost."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    a = ledger.position
    spend(ledger, made=1, digest="from A to B")
    b = ledger.position
    spend(ledger, made=2, digest="lost")
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*b)
    ledger.renew()
    nonce = ledger.take_renewal()
    spend(ledger, made=3, digest="after B")

    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(*a)
    assert ledger.take_renewal() is None
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [1], [1], "from A to B")
    assert ledger.take_renewal() == nonce
    chunk = ledger.reserve(100, 9, [99], 1)
    ledger.settle(chunk, [3], [4], "after B")
    assert ledger.lost == [2]
    ledger.go_on(*a)
    ledger.renew()  # instead of repeating
    assert ledger.lost == [1 + 2 + 3]


def test_a_second_renewal_gives_up_the_first_with_other_random_numbers(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    nonces = set()
    for life in range(3):  # a crash right after the line of the renewal
        ledger.go_on(0, "")
        ledger.renew()
        nonces.add(Ledger.read(tmp_path, ID).lineage[-1]["nonce"])
        assert len(ledger.lineage) == 1 and len(nonces) == life + 1
    nonce = ledger.take_renewal()
    spend(ledger, made=2)
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    assert ledger.take_renewal() == nonce
    assert ledger.lost == [0]


def test_a_checkpoint_of_a_state_that_was_given_up_is_refused(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    given_up = ledger.position
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    ledger.renew()
    with pytest.raises(PevdnError, match="--new-noise` gave up; delete that checkpoint"):
        Ledger.read(tmp_path, ID).go_on(*given_up)


def test_a_reservation_that_made_nothing_is_void(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.reserve(100, 1, [99], 2)
    assert ledger.lost == [2]
    ledger.void()
    assert ledger.lost == ledger.counted == Ledger.read(tmp_path, ID).lost == [0]
    assert ledger.position == (0, "")


def test_a_state_is_not_past_a_line_that_could_not_be_written_in_full(tmp_path, monkeypatch):
    """The settlement is on the disk, its head is not: who handles the error holds the old state."""
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    chunk = ledger.reserve(100, 3, [99], 1)
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "write_atomically", failing)
        with pytest.raises(OSError, match="No space"):
            ledger.settle(chunk, [2], [2], "d")
    assert ledger.position == (0, "")
    assert Ledger.read(tmp_path, ID).lost == [0]
    ledger = Ledger.read(tmp_path, ID)
    ledger.go_on(0, "")
    assert ledger.reserve(100, 9, [99], 1).digest == "d"


def failing(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- a ledger is never replaced ----------------------------------------------------------------


def test_a_ledger_with_a_reservation_is_never_begun_anew(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    ledger.reserve(100, 7, [99], 1)
    for missing in ([], [HEAD]):
        for name in missing:
            (tmp_path / name).unlink()
        before = content(tmp_path)
        with pytest.raises(PevdnError, match="no other training may begin"):
            Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
        assert content(tmp_path) == before


def test_what_a_crash_leaves_of_a_beginning_may_be_begun_anew(tmp_path):
    Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    line, head = (tmp_path / FILE).read_bytes(), (tmp_path / HEAD).read_bytes()
    for size in range(len(line) + 1):
        for vouched in (True, False):
            (tmp_path / FILE).write_bytes(line[:size])
            (tmp_path / HEAD).unlink()
            if vouched:
                (tmp_path / HEAD).write_bytes(head)
            assert not Ledger.begun(tmp_path)
            spend(Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED), made=2)
            assert Ledger.read(tmp_path, ID).counted == [2]
    (tmp_path / FILE).write_bytes(b"something else")
    assert Ledger.begun(tmp_path)


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
    """The same ledger as the version before would have written it, as far as it is read."""
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
        line["check"] = ledgers._checksum(lines[-1:], line)
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- files of a ledger that are damaged ----------------------------------------------------------


def test_a_crash_at_any_byte_of_a_line_leaves_a_ledger_that_can_be_read(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file, head = tmp_path / FILE, tmp_path / HEAD
    before, vouched, counted = file.read_bytes(), head.read_bytes(), ledger.counted
    ledger.reserve(100, 7, [99], 1)
    line = file.read_bytes()[len(before) :]
    for cut in range(len(line) + 1):  # the line is on the disk before its head is
        file.write_bytes(before + line[:cut])
        head.write_bytes(vouched)
        found = Ledger.read(tmp_path, ID)
        complete = cut == len(line)
        assert found.counted == [counted[0] + 7 * complete]
        found.go_on(0, "")
        spend(found, made=2)  # the lost chunk again
        assert Ledger.read(tmp_path, ID).counted == [counted[0] + 7 * complete + 2]


def test_any_change_to_any_byte_is_noticed(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file = tmp_path / FILE
    good = file.read_bytes()
    for place in range(0, len(good), 7):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(PevdnError, match="cannot be relied on"):
            Ledger.read(tmp_path, ID)
    file.write_bytes(good)
    assert Ledger.read(tmp_path, ID).counted == [2]


def test_a_ledger_cut_short_anywhere_is_noticed(tmp_path):
    ledger = Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED)
    spend(ledger, made=2)
    file = tmp_path / FILE
    good = file.read_bytes()
    for size in range(0, len(good), 11):
        file.write_bytes(good[:size])
        with pytest.raises(PevdnError, match="cut short"):
            Ledger.read(tmp_path, ID)


@pytest.mark.parametrize("name", [FILE, HEAD])
def test_a_missing_book_is_named(tmp_path, name):
    spend(Ledger.begin(tmp_path, ID, MECHANISM, 1, PLANNED), made=2)
    (tmp_path / name).unlink()
    with pytest.raises(PevdnError, match=f"{name} cannot be read"):
        Ledger.read(tmp_path, ID)


# --- the book of a run -----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text.replace('"made": [0]', '"made": [1]', 1), "not what was written"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-2]), "cut short"),
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: "", "cut short"),
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
    assert "does not hold what the checkpoint was saved with" in said.sentence


def test_a_run_without_its_ledger_is_refused(unfinished: Run) -> None:
    (unfinished.path / FILE).unlink()
    (unfinished.path / HEAD).unlink()
    said = cli("resume", unfinished.path)
    assert said.code == 1 and "nobody knows what this run has spent" in said.sentence


def test_the_ledger_of_another_run_is_refused(unfinished: Run, whole: Run, tmp_path: Path) -> None:
    twin = train("pe-vdn-c", tmp_path / "twin", steps=400)  # the same settings, other books
    other = train("pe-vdn-c", tmp_path / "other", steps=400, seed=9)
    for foreign, sentence in (
        (twin, "does not hold what the checkpoint was saved with"),
        (other, "belongs to a run with another configuration"),
    ):
        for name in (FILE, HEAD):
            shutil.copy(foreign.path / name, unfinished.path / name)
        said = cli("resume", unfinished.path)
        assert said.code == 1 and sentence in said.sentence


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
    assert without_epsilon(unfinished) != without_epsilon(whole)
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


@pytest.mark.parametrize("view", ["team", "agent"])
def test_training_stops_before_the_budget_is_exceeded(tmp_path: Path, view: str) -> None:
    budget = {"team": 2.0, "agent": 1.2}[view]
    run = train(
        "pe-vdn-c", tmp_path / "run", epsilon_budget=budget, budget_observer=view, steps=400
    )
    spent = run.summary[f"epsilon_{view}_spent"]
    assert spent == run.summary[f"epsilon_{view}"]  # as much as the budget affords
    assert run.summary["stopped_by_budget"] and run.summary["env_steps"] < 400
    assert all(line[f"epsilon_{view}"] <= budget for line in run.metrics)
    ledger = ledger_of(run)
    mechanism = ledger.mechanism
    assert mechanism.epsilon(ledger.exposure[0], view) == spent <= budget
    assert mechanism.epsilon(ledger.exposure[0] + 1, view) > budget  # not a moment too early
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


# --- killed for real -------------------------------------------------------------------------

# Imports once and forks a fresh training for every line it reads, before JAX has started. The
# first compiles; the others load what it compiled. Says each process's number, then how it ended.
NURSERY = """
import json, os, pickle, sys, traceback, warnings
import numpy as np
import jax, optax, orbax.checkpoint, jax_privacy.clipping, dp_accounting.pld
from jax.experimental import serialize_executable as executables
from pevdn.training import checkpoint, loop as run
from pevdn.privacy import ledger, planner
from pevdn.simulation import program as simulation
from pevdn.worlds import toy

warnings.simplefilter("ignore")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
programs, compile_now = sys.argv[1], run._Training._compile


def compiled(self):
    if not os.path.exists(programs):
        compile_now(self)
        win_rate = jax.ShapeDtypeStruct(self.seeds.shape, "float32")
        self.keep_anchor = self.keep_anchor.lower(self.state, win_rate).compile()
        names = ("advance", "evaluate", "keep_anchor")
        parts = {name: executables.serialize(getattr(self, name)) for name in names}
        with open(programs + ".new", "wb") as file:
            pickle.dump(parts, file)
        os.rename(programs + ".new", programs)
    with open(programs, "rb") as file:
        parts = pickle.load(file)
    for name, part in parts.items():
        setattr(self, name, executables.deserialize_and_load(*part))
    self.compile_seconds = 0.0
    advance = self.advance

    def counting(state, *rest):
        before = np.array(state.updates)
        after = advance(state, *rest)
        made = (np.asarray(after.updates) - before).tolist()
        os.write(out, (json.dumps(made) + "\\n").encode())  # done, and not yet in the ledger
        return after

    self.advance = counting


run._Training._compile = compiled
for line in sys.stdin:
    path, applied = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            out = os.open(applied, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            # Programs that come from the cache cannot be saved again.
            jax.config.update("jax_enable_compilation_cache", os.path.exists(programs))
            run.resume(path)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def applied_in(path: Path) -> list[int]:
    """Updates that the machine has made, by seed, in all its lives."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [sum(column) for column in zip(*map(json.loads, lines), strict=True)] or [0, 0]


def lives(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def kill_again_and_again(folder: Path, kills: int, seed: int, luck: int) -> list[Run]:
    """Train with `kills` SIGKILLs at random instants, in as many runs as that takes."""
    chance, killed, begun, programs = random.Random(luck), 0, [], folder / "programs"

    def said() -> str:
        return (folder / "stderr").read_text()

    # A pipe that nobody reads fills up with the warnings of XLA, and stops the nursery.
    with (
        (folder / "stderr").open("w+") as errors,
        python(NURSERY, programs, stdin=subprocess.PIPE, stderr=errors) as nursery,
    ):
        while killed < kills:
            run, applied = Run(folder / f"run-{len(begun)}"), folder / f"applied-{len(begun)}"
            settings = {**PRIVATE, "eval_every": 100}
            wanted = config.make("pe-vdn-c", "toy:coordination", 1000, 2, seed, settings)
            run.path.mkdir()
            (run.path / "config.yaml").write_text(config.to_text(wanted, OPTIONS))
            applied.touch()
            begun.append(run)
            while killed < kills and not run.finished:
                before = applied.stat().st_size
                nursery.stdin.write(json.dumps([str(run.path), str(applied)]) + "\n")
                nursery.stdin.flush()
                child = int(nursery.stdout.readline())
                # At any time once it trains; one in ten at any time at all.
                training = not programs.exists() or chance.random() < 0.9
                while training and applied.stat().st_size == before and lives(child):
                    time.sleep(1e-3)
                time.sleep(chance.uniform(0, 1.5))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                code = int(nursery.stdout.readline())
                assert code in (-signal.SIGKILL, 0), (nursery.kill(), said())
                killed += code != 0
                if Ledger.begun(run.path):
                    counted = ledger_of(run).counted  # readable, whenever it was
                    pairs = zip(counted, applied_in(applied), strict=True)
                    assert all(n >= made for n, made in pairs)
        nursery.stdin.close()
        nursery.wait()
        assert "Traceback" not in said()
    return begun


def test_a_killed_run_counts_at_least_what_it_did_and_ends_as_if_it_never_had_been(
    tmp_path: Path,
) -> None:
    run, *_ = kill_again_and_again(tmp_path, kills=12, seed=1, luck=1)
    pevdn.resume(run.path)
    reference = runs.begin(run.config, tmp_path / "reference", options=OPTIONS)
    assert without_epsilon(run) == without_epsilon(reference)
    pairs = list(zip(run.metrics, reference.metrics, strict=True))
    assert all(a["epsilon_team"] >= b["epsilon_team"] for a, b in pairs)


@pytest.mark.slow
def test_a_thousand_kills_never_hide_an_update(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    workers = os.cpu_count() or 1
    folders = [tmp_path / str(n) for n in range(workers)]
    for folder in folders:
        folder.mkdir()
    kills = [-(-1000 // workers)] * workers
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(kill_again_and_again, folders, kills, [7] * workers, range(workers))
        ended = [without_epsilon(run) for begun in found for run in begun if run.finished]
    # The same training again and again, killed at other instants.
    assert len(ended) > 5
    assert all(metrics == ended[0] for metrics in ended)


def test_epsilon_of_a_view_is_what_the_accountant_says(whole: Run) -> None:
    ledger = ledger_of(whole)
    q, noise, n, delta, _ = ledger.mechanism
    assert ledger.spent()[0].epsilon_team == accounting.epsilon(
        ledger.exposure[0], q, noise / n**0.5, delta
    )
