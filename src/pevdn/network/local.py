"""A whole team on this machine, every member a process: for trying it out and for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pevdn import worlds
from pevdn.config.experiment import Config
from pevdn.errors import Interrupted, PevdnError, UsageError
from pevdn.network import keys, status
from pevdn.network import roster as rosters
from pevdn.network.roster import WORLD, Roster
from pevdn.storage.files import make_private
from pevdn.storage.signals import stop_requests

Reports = dict[str, dict[str, Any]]


def make(out: Path, config: Config, mode: str, patience: float, rehearsal: bool) -> Roster:
    """A team in `out`, at free ports of this machine; the one that is there, if it is the same."""
    path = out / "team.toml"
    if path.exists():
        found = rosters.read(path)
        if (found.config, found.mode, found.rehearsal) != (config, mode, rehearsal):
            raise UsageError(
                f"{path} is of a team with other settings; ask for the same as before, or choose "
                "another --out."
            )
        return found
    agents = len(worlds.make(config.env).agents)
    *ports, last = _free_ports(agents + 1)
    parties = [(f"agent-{i}", f"127.0.0.1:{port}") for i, port in enumerate(ports)]
    return keys.create(out, config, parties, f"127.0.0.1:{last}", mode, patience, rehearsal)


def up(roster: Roster, show: Callable[[Reports], None], every: float = 1.0) -> Reports:
    """Start every member and wait until all are done; one that is killed is started again."""
    members = {name: _Process(roster, name) for name in roster.names}
    with ExitStack() as stack:
        for process in members.values():
            stack.callback(process.end)
        stop = stack.enter_context(stop_requests())
        for process in members.values():
            process.start()
        while any(process.running for process in members.values()):
            time.sleep(every)
            show(reports(roster))
            if stop:
                raise Interrupted(
                    f"stopped; everything is saved, and the same command goes on in "
                    f"{roster.path.parent}."
                )
            for process in members.values():
                process.look()
    return reports(roster)


def reports(roster: Roster) -> Reports:
    """What every member of the roster last said of itself, as far as it is on this machine."""
    found = {name: status.read(_data(roster, name)) for name in roster.names}
    return {name: report for name, report in found.items() if report is not None}


def _data(roster: Roster, name: str) -> Path:
    return roster.path.parent / f"{name}.data"


class _Process:
    """One member."""

    def __init__(self, roster: Roster, name: str) -> None:
        self.roster, self.name = roster, name
        self.process: subprocess.Popen[bytes] | None = None
        self.words = _data(roster, name) / "words.txt"

    def start(self) -> None:
        make_private(self.words.parent)
        which = ["world"] if self.name == WORLD else ["party", "--me", self.name]
        command = [sys.executable, "-m", "pevdn", *which, "--team", str(self.roster.path)]
        with self.words.open("ab") as words:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )

    @property
    def running(self) -> bool:
        return self.process is not None

    def look(self) -> None:
        """Whether it has ended, and how."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return
        self.process = None
        if code < 0:
            self.start()  # killed: as a service manager would
        elif code > 0:
            *_, last = ["it said nothing.", *self.words.read_text().splitlines()]
            raise PevdnError(f"{self.name} has stopped: {last.removeprefix('pevdn: ')}")

    def end(self) -> None:
        """Ask it to save and stop, and wait."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
