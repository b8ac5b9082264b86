"""Members that share no network: a namespace for each, joined by a bridge. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import SMALL

import pevdn
from pevdn.config import experiment as config
from pevdn.network import keys, local, status
from pevdn.network.roster import WORLD, Roster

MEMBERS = ["alice", "bob", WORLD]
PATIENCE = 120.0  # seconds


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Networks:
    """`hub` holds the bridge; member i is at 10.213.0.i + 1 and sees nothing but the bridge."""

    def __init__(self) -> None:
        self.prefix = f"pevdn{os.getpid()}"
        self.hub = f"{self.prefix}-hub"
        self.names = [self.hub, *(self.of(name) for name in MEMBERS)]

    def of(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def address(self, name: str) -> str:
        return f"10.213.0.{MEMBERS.index(name) + 1}"

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for name in MEMBERS:
            own = self.of(name)
            peer = ["peer", "name", "eth", "netns", own]
            ip("-n", self.hub, "link", "add", name, "type", "veth", *peer)
            ip("-n", self.hub, "link", "set", name, "master", "bridge", "up")
            ip("-n", own, "addr", "add", f"{self.address(name)}/24", "dev", "eth")
            ip("-n", own, "link", "set", "eth", "up")

    def cut(self, name: str) -> None:
        ip("-n", self.hub, "link", "set", name, "down")

    def mend(self, name: str) -> None:
        ip("-n", self.hub, "link", "set", name, "up")

    def remove(self) -> None:
        """Links go with their namespaces."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, roster: Roster, name: str) -> subprocess.Popen[str]:
        """`pevdn party` or `pevdn world`, in the namespace of the member."""
        which = ["world"] if name == WORLD else ["party", "--me", name]
        command = [sys.executable, "-m", "pevdn", *which, "--team", str(roster.path), "--json"]
        path = [str(Path(pevdn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.of(name), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )


@pytest.fixture
def networks() -> Iterator[Networks]:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("namespaces need root")
    found = Networks()
    try:
        found.make()
    except (OSError, subprocess.CalledProcessError) as problem:
        found.remove()
        pytest.skip(f"no namespaces here: {getattr(problem, 'stderr', problem)}")
    yield found
    found.remove()


@pytest.mark.slow
def test_members_in_namespaces_of_their_own_train_and_a_cut_link_is_mended(
    networks: Networks, tmp_path: Path
) -> None:
    settings = {**SMALL, "learning_starts": 4, "eval_episodes": 2}
    wanted = config.make("pe-vdn-b", "toy:two-step", 80, 1, 0, settings)
    places = {name: f"{networks.address(name)}:7700" for name in MEMBERS}
    world = places.pop(WORLD)
    team = list(places.items())
    roster = keys.create(tmp_path / "team", wanted, team, world, "shares", PATIENCE, rehearsal=True)

    running = {name: networks.start(roster, name) for name in MEMBERS}
    try:
        wait_until(roster, lambda reports: reports["bob"].get("step", 0) >= 3)
        networks.cut("bob")
        time.sleep(3.0)
        steps = {name: one.get("step") for name, one in local.reports(roster).items()}
        networks.mend("bob")
        ends = {name: process.communicate(timeout=PATIENCE) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for name, (_, err) in ends.items():
        assert running[name].returncode == 0, f"{name}: {err}"
    reports = {name: json.loads(out) for name, (out, _) in ends.items()}
    assert reports["alice"]["step"] == reports["bob"]["step"] > steps["bob"]
    assert reports["alice"]["env_steps"] >= 80
    assert {reports[name]["state"] for name in MEMBERS} == {"finished"}


def wait_until(roster: Roster, happened: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        found = {name: status.read(roster.path.parent / f"{name}.data") for name in MEMBERS}
        if all(found.values()) and happened(found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
