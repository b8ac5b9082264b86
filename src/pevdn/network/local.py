"""Run a whole team on this machine, each member a process: for trials and tests."""

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
from pevdn.network import keys, roster_file, status
from pevdn.network.episodes import WORLD_TIMEOUT
from pevdn.network.member import data_of
from pevdn.network.roster import WORLD, Roster
from pevdn.storage.files import make_private
from pevdn.storage.signals import stop_requests

Reports = dict[str, dict[str, Any]]


def make(out: Path, config: Config, mode: str, patience: float, rehearsal: bool) -> Roster:
    """Create a team in `out` at free local ports; return an existing one if it is the same."""
    path = out / "team.toml"
    if path.exists():
        found = roster_file.read(path)
        if (found.config, found.mode, found.rehearsal) != (config, mode, rehearsal):
            raise UsageError(
                f"{path} has other settings; use the same as before, or choose another --out."
            )
        return found
    agents = len(worlds.make(config.env).agents)
    *ports, last = _free_ports(agents + 1)
    parties = [(f"agent-{i}", f"127.0.0.1:{port}") for i, port in enumerate(ports)]
    return keys.create(out, config, parties, f"127.0.0.1:{last}", mode, patience, rehearsal)


def up(
    roster: Roster,
    show: Callable[[Reports], None],
    every: float = 1.0,
    world_timeout: float = WORLD_TIMEOUT,
) -> Reports:
    """Start every member and wait until all have finished; restart members that are killed."""
    members = {name: _Process(roster, name, world_timeout) for name in roster.names}
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
                    f"stopped; everything is saved, and the same command continues in "
                    f"{roster.path.parent}."
                )
            for process in members.values():
                process.check()
    return reports(roster)


def reports(roster: Roster) -> Reports:
    """Return the last report of every member that has run on this machine."""
    found = {name: status.read(data_of(roster.path, name)) for name in roster.names}
    return {name: report for name, report in found.items() if report is not None}


class _Process:
    """One member as a child process."""

    def __init__(self, roster: Roster, name: str, world_timeout: float) -> None:
        self.roster, self.name, self.world_timeout = roster, name, world_timeout
        self.process: subprocess.Popen[bytes] | None = None
        self.output = data_of(roster.path, name) / "output.txt"

    def start(self) -> None:
        make_private(self.output.parent)
        which = ["party", "--me", self.name]
        if self.name == WORLD:
            which = ["world", "--world-timeout", str(self.world_timeout)]
        command = [sys.executable, "-m", "pevdn", *which, "--team", str(self.roster.path)]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )

    @property
    def running(self) -> bool:
        return self.process is not None

    def check(self) -> None:
        """Restart it if it was killed; raise if it has failed."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return
        self.process = None
        if code < 0:
            self.start()  # as a service manager would
        elif code > 0:
            *_, last = ["it gave no reason.", *self.output.read_text().splitlines()]
            raise PevdnError(f"{self.name} has stopped: {last.removeprefix('pevdn: ')}")

    def end(self) -> None:
        """Ask it to save and stop; wait for it."""
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
