"""Claims about several devices: seeds are spread over them, and nothing else changes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TIMES, Said, cli, finish, metrics_of, python, saved, train, train_arguments

import pevdn
from pevdn.config.experiment import fingerprint
from pevdn.errors import Interrupted
from pevdn.privacy.ledger import FILE, Ledger
from pevdn.simulation.devices import Lanes
from pevdn.training.loop import Run, _Training
from pevdn.training.progress import Moment, Silent

SEEDS = 4
COMMUNICATION = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective|\bsend\b|\brecv\b"
CHILD = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
from test_devices import on_four_devices
print(json.dumps(on_four_devices(pathlib.Path(sys.argv[2]))))
"""
REFUSED = {
    "0": "devices is '0', but must be 'all' or a positive whole number",
    "many": "devices is 'many', but must be 'all' or a positive whole number",
    "1.5": "devices is '1.5', but must be 'all' or a positive whole number",
    "3": "seeds is 4, which 3 devices cannot share evenly; train a multiple of 3 seeds, or set "
    "devices to 2.",
    "5": "devices is 5, but JAX finds 4 here",
    "2 --buffer host": "devices is 2, but a run with buffer=host uses one",
}


# --- what happens in a process that sees four devices ----------------------------------------


class Stopped(Silent):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def moment(self, moment: Moment) -> None:
        if moment.steps > self._steps:
            self._steps = 10**6
            signal.raise_signal(signal.SIGINT)


class Kill(Silent, BaseException):
    """Ends a training in the middle, as suddenly as it gets within one process."""

    def moment(self, moment: Moment) -> None:
        if moment.steps > 90:
            raise self


def on_four_devices(folder: Path) -> dict[str, Any]:
    """Train in `folder` in all the ways that the tests ask about, and return what was seen."""
    seen: dict[str, Any] = {"lanes": {}, "talk": {}, "given away": {}}
    compile_now, finish_now, programs = _Training._compile, _Training._finish, {}

    def compile_once(self: Any) -> None:
        devices = self.lanes.devices
        if devices not in programs:
            compile_now(self)
            names = ("advance", "evaluate", "compile_seconds")
            programs[devices] = {name: getattr(self, name) for name in names}
            text = self.advance.as_text() + self.evaluate._evaluate.as_text()
            seen["talk"][devices] = re.findall(COMMUNICATION, text)
        vars(self).update(programs[devices])
        advance = self.advance

        def advance_and_look(state: Any, *rest: Any) -> Any:
            after = advance(state, *rest)
            seen["given away"][devices] = state.replays[0].length.is_deleted()
            return after

        self.advance = advance_and_look

    def finish_and_look(self: Any) -> None:
        finish_now(self)
        shards = self.state.replays[0].length.addressable_shards
        seen["lanes"][self.run.path.name] = [(x.device.id, x.data.shape[0]) for x in shards]

    _Training._compile, _Training._finish = compile_once, finish_and_look  # type: ignore

    def begin(name: str, **how: Any) -> Run:
        return train("pe-vdn-c", folder / name, seeds=SEEDS, **how)

    begin("one")
    begin("four", devices="all")
    with contextlib.suppress(Interrupted):
        begin("stopped", devices=4, reporter=Stopped(60))
    with contextlib.suppress(Interrupted):
        pevdn.resume(folder / "stopped", Stopped(130), devices=1)
    pevdn.resume(folder / "stopped", devices=4)

    path = folder / "killed"
    with contextlib.suppress(Kill):
        begin("killed", devices=4, reporter=Kill(), checkpoint_every=10**6)
    lines = (path / FILE).read_bytes()
    seen["other devices"] = cli("resume", path, "--devices", 1)
    seen["spent by trying"] = (path / FILE).read_bytes() != lines
    seen["same devices"] = cli("resume", path, "--devices", 4, "--json")

    words = train_arguments("pe-vdn-c", folder / "refused", seeds=SEEDS)
    seen["refused"] = {how: cli(*words, "--devices", *how.split()) for how in REFUSED}
    notes: list[str] = []
    seen["six seeds"] = [Lanes("all", 6, notes.append).devices, *notes]
    return seen


# --- what came of it -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    process = python(CHILD, Path(__file__).parent, folder, env={"XLA_FLAGS": flags})
    said = finish(process, timeout=400)
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def ledger_of(run: Run) -> Ledger:
    return Ledger.read(run.path, fingerprint(run.config))


def assert_same_run(run: Run, reference: Run) -> None:
    """The same lines of metrics; arrays up to the rounding of another program."""
    assert metrics_of(run.path) == metrics_of(reference.path)
    for mine, theirs in zip(saved(run)[0], saved(reference)[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_every_device_trains_its_own_seeds_and_talks_to_no_other(seen: dict[str, Any]) -> None:
    assert seen["lanes"]["one"] == [[0, 4]]
    assert seen["lanes"]["four"] == [[0, 1], [1, 1], [2, 1], [3, 1]]
    assert seen["talk"] == {"1": [], "4": []}
    assert seen["given away"] == {"1": True, "4": True}


def test_four_devices_train_what_one_trains(folder: Path, seen: dict[str, Any]) -> None:
    one, four = Run(folder / "one"), Run(folder / "four")
    assert_same_run(four, one)
    assert (one.summary["devices"], four.summary["devices"]) == (1, 4)
    same = dict.fromkeys(["devices", *TIMES])
    assert {**four.summary, **same} == {**one.summary, **same}
    assert four.config == one.config and (four.options.devices, one.options.devices) == ("all", 1)


def test_a_stopped_run_goes_on_with_more_or_fewer_devices(
    folder: Path, seen: dict[str, Any]
) -> None:
    stopped, whole = Run(folder / "stopped"), Run(folder / "one")
    assert_same_run(stopped, whole)
    mine, theirs = ledger_of(stopped), ledger_of(whole)
    used = [x["devices"] for x in mine.lines if x["kind"] == "settle"]
    assert [n for n, _ in itertools.groupby(used)] == [4, 1, 4]
    assert (mine.counted, mine.exposure) == (theirs.counted, theirs.exposure)


def test_lost_private_updates_are_repeated_on_as_many_devices_as_before(
    folder: Path, seen: dict[str, Any]
) -> None:
    refused = Said(*seen["other devices"])
    assert refused.code == 2 and not seen["spent by trying"]
    assert f"`pevdn resume {folder / 'killed'} --devices 4`" in refused.sentence
    assert Said(*seen["same devices"]).code == 0
    killed, whole = Run(folder / "killed"), Run(folder / "four")
    settled = [x for x in ledger_of(killed).lines if x["kind"] == "settle"]
    assert any(x["repeats"] for x in settled)
    assert killed.summary["epsilon_team"] == whole.summary["epsilon_team"]
    pairs = zip(saved(killed)[0], saved(whole)[0], strict=True)
    assert all(np.array_equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("devices", REFUSED)
def test_devices_that_cannot_be_used_are_refused_in_one_sentence(
    folder: Path, seen: dict[str, Any], devices: str
) -> None:
    said = Said(*seen["refused"][devices])
    assert said.code == 2 and REFUSED[devices] in said.sentence
    assert not (folder / "refused").exists()


def test_all_devices_are_as_many_as_share_the_seeds_evenly(seen: dict[str, Any]) -> None:
    note = "training on 3 of 4 devices, the most that can share the seeds (6) evenly."
    assert seen["six seeds"] == [3, note]
