"""Search for a sequence of faults after which the ledger counts too few updates.

The training is the real one, in this process. A wrapper around the compiled program records the
ground truth: every distinct transition from one state to another, and its updates. A repeated
transition releases nothing new and counts once. After any faults, the updates in the run and those
that its ledger calls lost must cover the ground truth.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as search
from support import OPTIONS, PRIVATE, checkpoints_in, content

import pevdn
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.errors import Interrupted, PevdnError, UsageError
from pevdn.privacy.accounting import Mechanism, Spent
from pevdn.privacy.ledger import FILE, HEAD, Ledger
from pevdn.privacy.planner import Plan
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation
from pevdn.training import accountant, checkpoint, figures, memory
from pevdn.training import loop as runs
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")
SEEDS = 2
WANTED = config.make(
    "pe-vdn-c", "toy:coordination", 300, SEEDS, 3, {**PRIVATE, "learning_starts": 2}
)


class Killed(BaseException):
    """Ends a training within one process; no error handler catches it."""


@dataclass
class Fault:
    """A fault and when it strikes: at its n-th opportunity."""

    kind: str = "none"
    when: int = 0

    def strikes(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        self.when -= 1
        return self.when < 0


@dataclass
class Truth:
    """What really happened in a run."""

    transitions: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    applied: Counter[int] = field(default_factory=Counter)  # updates by lane, repeated ones too
    saved: dict[int, list[int]] = field(default_factory=dict)  # updates of checkpoints by number
    keys: dict[bytes, str] = field(default_factory=dict)  # the state that a random key was used in

    @property
    def distinct(self) -> list[int]:
        return total(self.transitions.values())

    def copy(self) -> Truth:
        return copy.deepcopy(self)


def total(rows: Any) -> list[int]:
    return [sum(row[lane] for row in rows) for lane in range(SEEDS)]


class Laboratory:
    """Injects faults into trainings, one run at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.fault = Fault()
        self.truth = Truth()
        self.fsync = os.fsync
        patch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: 0.0))  # same chunks always
        patch.setattr(figures, "draw_curve", lambda run, guaranteed: None)
        patch.setattr(Mechanism, "spent", lambda self, n, _: Spent(n, n, self.delta))  # quick
        patch.setattr(memory, "check_device_buffers", lambda *_: None)
        patch.setattr(Lanes, "jit", self._once(Lanes.jit))
        patch.setattr(runs._Training, "_compile", self._watched(runs._Training._compile))
        patch.setattr(Checkpoints, "save", self._saving(Checkpoints.save))
        patch.setattr(checkpoint, "_seal", self._sealing(checkpoint._seal))
        patch.setattr(os, "fsync", self._fsync)
        patch.setattr(runs._Training, "_check_host_memory", lambda _: self._settled())

    def fresh(self, **changes: Any) -> Run:
        """Return a configured run that has not started."""
        run = self.place()
        run.path.mkdir()
        (run.path / "config.yaml").write_text(config.to_text(WANTED, OPTIONS.replace(changes)))
        self.truth = Truth()
        return run

    def place(self) -> Run:
        self.number += 1
        return Run(self.folder / f"run-{self.number}")

    def resume(self, run: Run, kind: str = "none", when: int = 0, new_noise: bool = False) -> None:
        """Train until the run is finished or the fault strikes."""
        self.fault = Fault(kind, when)
        try:
            pevdn.resume(run.path, new_noise=new_noise)
        except Killed:
            assert kind in ("SIGKILL", "SIGKILL after chunks", "power cut")
        except Interrupted:
            assert kind in ("SIGTERM", "SIGINT")
        except PevdnError as problem:
            assert kind == "disk full" and "no space left" in str(problem), problem
        finally:
            self.fault = Fault()

    # ---- where it goes wrong ------------------------------------------------------------------

    def _point(self) -> None:
        """A place where a SIGKILL makes a difference."""
        if self.fault.strikes("SIGKILL"):
            raise Killed

    def _settled(self) -> None:
        if self.fault.strikes("SIGKILL after chunks"):
            raise Killed

    def _once(self, jit: Any) -> Any:
        """Compile by name: all runs here have the same settings."""
        found: dict[str, Any] = {}

        def once(lanes: Lanes, f: Any, *like: Any, **how: Any) -> Any:
            return found.setdefault(f.__name__, jit(lanes, f, *like, **how))

        return once

    def _watched(self, compiled: Any) -> Any:
        def compile_and_watch(training: Any) -> None:
            compiled(training)
            advance = training.advance

            def watching(state: Any, *rest: Any) -> Any:
                self._point()
                before, updates = accountant.state_digest(state), np.array(state.updates)
                key = np.asarray(jax.random.key_data(state.key)).tobytes()
                assert self.truth.keys.setdefault(key, before) == before, "noise is used twice"
                state = advance(state, *rest)
                made = (np.asarray(state.updates) - updates).tolist()
                self.truth.transitions[before, accountant.state_digest(state)] = made
                self.truth.applied.update(dict(enumerate(made)))
                self._point()
                for name in ("SIGTERM", "SIGINT"):
                    if self.fault.strikes(name):
                        self.fault = Fault()
                        os.kill(os.getpid(), getattr(signal, name))
                return state

            training.advance = watching

        return compile_and_watch

    def _saving(self, save: Any) -> Any:
        def saving(checkpoints: Checkpoints, state: Any, progress: Any, simulation: Any) -> None:
            number = int(np.sum(np.asarray(state.env_steps))) + progress.evaluations
            self._point()
            if self.fault.strikes("SIGKILL"):  # in the middle: orbax writes elsewhere, and renames
                half = checkpoints.directory / f"{number}.orbax-checkpoint-tmp"
                half.mkdir()
                (half / "progress").write_text('{"evaluat')
                raise Killed
            if number != checkpoints.latest:
                self.truth.saved[number] = np.asarray(state.updates).tolist()
            save(checkpoints, state, progress, simulation)
            self._point()

        return saving

    def _sealing(self, seal: Any) -> Any:
        def sealing(folder: Path) -> None:
            self._point()
            seal(folder)

        return sealing

    def _fsync(self, number: int) -> None:
        path = Path(f"/proc/self/fd/{number}").readlink()
        self._point()
        if path.name == FILE:
            for kind in ("power cut", "disk full"):
                if self.fault.strikes(kind):
                    text = path.read_bytes()
                    last = text.rfind(b"\n", 0, -1) + 1
                    os.truncate(path, last + (len(text) - last) // 2)
                    if kind == "power cut":
                        raise Killed
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.fsync(number)
        self._point()


def ledger_of(run: Run) -> Ledger:
    return Ledger.read(run.path, config.fingerprint(run.config))


def at_least(found: list[int], wanted: list[int]) -> bool:
    return all(a >= b for a, b in zip(found, wanted, strict=True))


def plus(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def made_in(lineage: list[dict[str, Any]]) -> list[int]:
    return total([entry["made"] for entry in lineage if entry["kind"] == "settle"])


def check(run: Run, truth: Truth) -> None:
    """The ledger can be read, and covers what happened."""
    if not Ledger.begun(run.path):
        assert not truth.transitions
        return
    ledger = ledger_of(run)
    assert at_least(ledger.counted, [truth.applied[lane] for lane in range(SEEDS)])
    lineage = ledger.lineage
    assert at_least(plus(made_in(lineage), ledger.lost), truth.distinct)
    assert at_least(ledger.bound, ledger.exposure)
    for number in checkpoints_in(run.path):
        facts = run.path / "checkpoints" / str(number) / "progress" / "metadata"
        line = json.loads(facts.read_text())["ledger_line"]
        assert line == 0 or line in [entry["line"] for entry in lineage]
        assert truth.saved[number] == made_in([x for x in lineage if x["line"] <= line])


def check_end(run: Run, truth: Truth) -> None:
    """The same of a finished run, by what it consists of."""
    final = [line["updates"] for line in run.metrics[-SEEDS:]]
    assert at_least(plus(final, ledger_of(run).lost), truth.distinct)


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Laboratory]:
    with pytest.MonkeyPatch.context() as patch:
        yield Laboratory(patch, tmp_path)


@pytest.fixture
def undisturbed(laboratory: Laboratory) -> list[dict[str, Any]]:
    run = laboratory.fresh()
    laboratory.resume(run)
    return without_epsilon(run)


def without_epsilon(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in x.items() if not k.startswith("epsilon")} for x in run.metrics]


FAULTS = st.one_of(
    st.tuples(st.just("SIGKILL"), st.integers(0, 120)),
    st.tuples(st.sampled_from(["SIGTERM", "SIGINT"]), st.integers(0, 8)),
    st.tuples(st.sampled_from(["power cut", "disk full"]), st.integers(0, 20)),
)


def machine(laboratory: Laboratory, undisturbed: list[dict[str, Any]]) -> type:
    class Operator(RuleBasedStateMachine):
        """A user whose training fails again and again."""

        def __init__(self) -> None:
            super().__init__()
            self.run, self.renewed = laboratory.fresh(), False

        @rule(
            fault=FAULTS,
            new_noise=st.sampled_from([False, False, True]),
            lose_newest=st.sampled_from([False, False, True]),
            in_a_copy=st.sampled_from([False, False, False, True]),
        )
        def train(
            self, fault: tuple[str, int], new_noise: bool, lose_newest: bool, in_a_copy: bool
        ) -> None:
            """Train until something goes wrong, perhaps after other things went wrong."""
            if self.run.finished:
                return
            if in_a_copy:
                twin = laboratory.place()
                shutil.copytree(self.run.path, twin.path)
                laboratory.truth, self.run = laboratory.truth.copy(), twin
            if lose_newest and (numbers := checkpoints_in(self.run.path)):
                shutil.rmtree(self.run.path / "checkpoints" / str(numbers[-1]))
            self.renewed |= new_noise
            laboratory.resume(self.run, *fault, new_noise)

        @invariant()
        def nothing_is_missing(self) -> None:
            check(self.run, laboratory.truth)

        def teardown(self) -> None:
            laboratory.resume(self.run)
            check(self.run, laboratory.truth)
            check_end(self.run, laboratory.truth)
            if not self.renewed:
                assert without_epsilon(self.run) == undisturbed

    return Operator


def test_no_sequence_of_faults_hides_an_update(
    laboratory: Laboratory, undisturbed: list[dict[str, Any]]
) -> None:
    """Within 15 examples it finds an under-count in the ledger of 2026-11-15."""
    search(
        lambda: machine(laboratory, undisturbed)(),
        settings=settings(max_examples=15, stateful_step_count=6),
    )


@pytest.mark.slow
def test_no_long_sequence_of_faults_hides_an_update(
    laboratory: Laboratory, undisturbed: list[dict[str, Any]]
) -> None:
    search(
        lambda: machine(laboratory, undisturbed)(),
        settings=settings(max_examples=100, stateful_step_count=12),
    )


# --- faults that were found ----------------------------------------------------------------------


def settled(run: Run) -> list[dict[str, Any]]:
    return [x for x in ledger_of(run).lines if x["kind"] == "settle"]


def test_a_stop_while_lost_chunks_are_repeated_forgets_none_of_them(
    laboratory: Laboratory,
) -> None:
    """SIGKILL after 9 chunks, SIGTERM after 3 of them were repeated, then new noise."""
    run = laboratory.fresh(checkpoint_every=10**6)
    laboratory.resume(run, "SIGKILL after chunks", 8)
    lost = made_in(settled(run))
    assert len(settled(run)) == 9 and min(lost) > 0
    laboratory.resume(run, "SIGTERM", 2)
    assert [x["repeats"] is not None for x in settled(run)] == [False] * 9 + [True] * 3
    laboratory.resume(run, "SIGTERM", 0, new_noise=True)
    repeated = made_in(settled(run)[:3])  # these are part of the run again
    assert ledger_of(run).lost == [n - kept for n, kept in zip(lost, repeated, strict=True)]
    laboratory.resume(run)
    check(run, laboratory.truth)
    check_end(run, laboratory.truth)


def test_all_lost_chunks_count_if_the_checkpoint_of_the_repeated_ones_is_lost_too(
    laboratory: Laboratory,
) -> None:
    run = laboratory.fresh(checkpoint_every=10**6)
    laboratory.resume(run, "SIGKILL after chunks", 8)
    lost = made_in(settled(run))
    laboratory.resume(run, "SIGTERM", 2)
    shutil.rmtree(run.path / "checkpoints")
    laboratory.resume(run, "SIGTERM", 0, new_noise=True)
    assert ledger_of(run).lost == lost
    laboratory.resume(run)
    check_end(run, laboratory.truth)


def test_a_run_falls_back_behind_a_renewal(
    laboratory: Laboratory, undisturbed: list[dict[str, Any]]
) -> None:
    """Checkpoints A and B, chunks, SIGKILL, new noise from B, chunks; then B is lost."""
    run = laboratory.fresh(checkpoint_every=10**6)
    laboratory.resume(run, "SIGTERM", 3)  # A
    laboratory.resume(run, "SIGTERM", 2)  # B
    a, b = checkpoints_in(run.path)
    laboratory.resume(run, "SIGKILL after chunks", 1)
    given_up = made_in(settled(run)[-2:])
    laboratory.resume(run, "SIGKILL after chunks", 2, new_noise=True)
    check(run, laboratory.truth)
    assert ledger_of(run).lost == given_up and min(given_up) > 0
    before = list(laboratory.truth.transitions)
    shutil.rmtree(run.path / "checkpoints" / str(b))
    assert checkpoints_in(run.path) == [a]

    laboratory.resume(run, "SIGTERM", 5)  # three chunks to B, three after the renewal
    assert list(laboratory.truth.transitions) == before  # bit for bit
    assert ledger_of(run).lost == given_up
    laboratory.resume(run)
    check(run, laboratory.truth)
    check_end(run, laboratory.truth)
    assert without_epsilon(run) != undisturbed


def test_lost_chunks_of_several_device_counts_can_all_be_repeated(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused with others than it was made with, and those before it stay repeated."""
    reserve, devices = Ledger.reserve, 2

    def reserved(ledger: Ledger, *args: Any) -> Any:
        return reserve(ledger, *args[:4], devices)

    monkeypatch.setattr(Ledger, "reserve", reserved)
    run = laboratory.fresh(checkpoint_every=10**6)
    laboratory.resume(run, "SIGTERM", 2)
    devices = 1
    laboratory.resume(run, "SIGTERM", 2)
    shutil.rmtree(run.path / "checkpoints")
    lines = len(ledger_of(run).lines)
    with pytest.raises(UsageError, match="--devices 2"):
        pevdn.resume(run.path)
    assert len(ledger_of(run).lines) == lines
    devices = 2
    with pytest.raises(UsageError, match="--devices 1"):
        pevdn.resume(run.path)
    devices = 1
    laboratory.resume(run)
    assert ledger_of(run).lost == [0, 0]
    check_end(run, laboratory.truth)


@pytest.mark.parametrize("missing", [["checkpoints"], ["checkpoints", "metrics.jsonl"]])
def test_without_checkpoints_everything_is_repeated_or_lost(
    laboratory: Laboratory, missing: list[str]
) -> None:
    run = laboratory.fresh()
    laboratory.resume(run, "SIGTERM", 6)
    lost = made_in(settled(run))
    for name in missing:
        path = run.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    twin = laboratory.place()
    shutil.copytree(run.path, twin.path)
    laboratory.resume(run, "SIGTERM", 6)
    assert ledger_of(run).lost == [0, 0]
    laboratory.truth = laboratory.truth.copy()
    laboratory.resume(twin, "SIGTERM", 0, new_noise=True)
    assert ledger_of(twin).lost == lost


@pytest.mark.parametrize("name", [FILE, HEAD])
def test_no_ledger_is_begun_over_one_whose_files_are_gone(
    laboratory: Laboratory, name: str
) -> None:
    run = laboratory.fresh()
    laboratory.resume(run, "SIGTERM", 6)
    shutil.rmtree(run.path / "checkpoints")
    if name == HEAD:
        (run.path / "metrics.jsonl").unlink()
    (run.path / name).unlink()
    before = content(run.path)
    with pytest.raises(
        PevdnError, match=f"{name} cannot be read, and without it the ε of this run is unknown"
    ):
        pevdn.resume(run.path)
    assert content(run.path) == before


# --- random numbers of a renewal -----------------------------------------------------------------


def test_a_renewal_uses_no_key_of_the_block_that_it_gives_up() -> None:
    """`fold_in(key, n)` is `split(key, 3)[n]`: without a salt the keys of the block come again."""
    simulation = Simulation(worlds.make(WANTED.env), WANTED)
    state = jax.jit(simulation.start)(jax.numpy.arange(SEEDS))

    def drawn(keys: Any) -> set[bytes]:
        """All keys that training derives for the next blocks, and those that it starts from."""
        found, start = [keys], keys
        for _ in range(3):
            start, *more, _ = simulation.draw(start, state.env_steps)
            found += [start, *more]
        rows = [np.asarray(jax.random.key_data(x)).reshape(-1, 2) for x in found]
        return {row.tobytes() for row in np.concatenate(rows)}

    lost = drawn(state.key)
    for nonce in (f"{n:032x}" for n in (0, 1, 2, 3, 2**64, 2**128 - 1)):
        assert not drawn(accountant.renewed(state.key, nonce)) & lost
    for number in (1, 2):  # as it was
        old = jax.vmap(lambda key, n=number: jax.random.fold_in(key, n))(state.key)
        assert drawn(old) & lost


def test_every_renewal_and_every_seed_has_keys_of_its_own() -> None:
    keys = jax.vmap(jax.random.key)(jax.numpy.arange(4))
    nonces = (f"{n:032x}" for n in (0, 1, 2**32, 2**96))
    found = [jax.random.key_data(accountant.renewed(keys, nonce)) for nonce in nonces]
    assert len({np.asarray(row).tobytes() for row in np.concatenate(found)}) == 16


# --- what the ledger guarantees ------------------------------------------------------------------


def test_the_guarantee_does_not_depend_on_when_somebody_stops(laboratory: Laboratory) -> None:
    """What was spent grows with every look; the bound is the same from the first line on."""
    run, bounds, spent = laboratory.fresh(), [], []
    for _ in range(3):
        laboratory.resume(run, "SIGTERM", 3)
        bounds.append(ledger_of(run).bound)
        spent.append(ledger_of(run).exposure)
    planned = Plan.of(run.config, 2).exposure
    assert bounds == [[planned] * SEEDS] * 3
    assert spent[0] < spent[1] < spent[2] <= bounds[0]
    laboratory.resume(run, "SIGKILL after chunks", 1)
    given_up = made_in(settled(run)[-2:])
    laboratory.resume(run, "SIGTERM", 0, new_noise=True)
    assert ledger_of(run).bound == [planned + n for n in given_up]
