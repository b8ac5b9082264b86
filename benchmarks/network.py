"""The cost of the deployed runtime: the secure sum over mutual TLS, and a whole team.

    sums    rounds of the secure sum per second, for teams of 2 to 27 on this machine, with both
            modes, and its bytes relative to the minimum of the mode: 4 per word of each message.
            All parties in one process and, up to 5, each in its own process.
    team    3 agents on 3m and their world as four processes: seconds of talking and of computing
            per update.

Prints tables, or one document with --json. Bytes are those of the envelopes. The loopback device
also counts TLS, HTTP/2 and TCP, and all other traffic; measure in a network namespace to exclude
that (`unshare -n sh -c 'ip link set lo up; …'`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.network import keys, local, roster_file, secure_sum
from pevdn.network.group import Group
from pevdn.network.protocol import Protocol
from pevdn.network.roster import WORLD, Roster
from pevdn.network.status import Status
from pevdn.network.streams import Secret

TEAMS = (2, 3, 5, 10, 27)
MODES = ("shares", "pairwise-masks")
APART = 5  # parties, at most, that get a process each
WORDS = 32 * 25  # a minibatch of typical episodes of 3m
WARM = 3  # rounds before the clock starts
MESSAGES = {"shares": 2, "pairwise-masks": 1}  # vectors from each party to each other one
PATIENCE = 120.0


# ---- the sum alone ------------------------------------------------------------------------------


class Summand:
    """A party that only forms sums: no world, no agent, nothing on disk but its secret."""

    def __init__(self, roster: Roster, me: str, folder: Path) -> None:
        key = roster_file.private_key(roster.path.parent / f"{me}.key", roster.member(me))
        self.index, self.agents, self.step = roster.index(me), len(roster.parties), 0
        folder.mkdir(exist_ok=True)
        secret = Secret.load_or_create(folder / "secret")
        mask_key = secret.mask_key().public_key().public_bytes_raw()
        self.group = Group(roster, me, key, lambda: self.step, mask_key)
        self.protocol = Protocol(roster, me, secret, self.group, Status(folder, self.group))

    async def meet(self) -> None:
        await self.group.start()
        await self.group.agree()
        self.protocol.start_view()

    async def sum_up(self, rounds: int) -> np.ndarray:
        words = vector(self.index)
        total = words
        for _ in range(rounds):
            total = await self.protocol.open_sum(self.step + 1, words)
            self.step += 1
            self.group.discard(self.step)
        return total

    @property
    def sent(self) -> int:
        return sum(peer.bytes_sent for peer in self.group.transport.counters.peers.values())


def vector(index: int) -> np.ndarray:
    """Return the words of one party."""
    return np.random.default_rng(index).integers(0, 2**32, WORDS, np.uint32)


def check(total: np.ndarray, parties: int) -> None:
    wanted = secure_sum.add_up([vector(index) for index in range(parties)], 2**32)
    if not np.array_equal(total, wanted):
        sys.exit("a sum is wrong")


def make_team(out: Path, parties: int, mode: str) -> Roster:
    env = next(world.id for world in worlds.available() if world.agents == parties)
    wanted = config.make("pe-vdn-b", env, settings={"modulus": 2**32})
    places = [(f"agent-{i}", f"127.0.0.1:{port}") for i, port in enumerate(_ports(parties))]
    return keys.create(out, wanted, places, None, mode, PATIENCE)


def _ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Sums(NamedTuple):
    """One line of the first table."""

    parties: int
    mode: str
    processes: int
    rounds: int
    rounds_per_second: float
    least_bytes: int  # of a round, for the whole team
    bytes: float
    device_bytes: float  # of everything that passed through the loopback device


def _row(parties: int, mode: str, processes: int, rounds: int, taken: float, *sizes: int) -> Sums:
    least = MESSAGES[mode] * parties * (parties - 1) * 4 * WORDS
    sent, passed = (size / rounds for size in sizes)
    return Sums(parties, mode, processes, rounds, rounds / taken, least, sent, passed)


def together(parties: int, mode: str, seconds: float) -> Sums:
    """All parties in this process."""
    with tempfile.TemporaryDirectory() as place:
        roster = make_team(Path(place), parties, mode)
        names = [party.name for party in roster.parties]

        async def measure() -> Sums:
            team = [Summand(roster, name, Path(place) / f"{name}.data") for name in names]
            await asyncio.gather(*(one.meet() for one in team))
            try:
                taken = await _timed(team, WARM)
                rounds = max(WARM, round(seconds * WARM / await _timed(team, WARM)))
                sent, passed = sum(one.sent for one in team), _through_loopback()
                taken = await _timed(team, rounds)
                sizes = sum(one.sent for one in team) - sent, _through_loopback() - passed
                return _row(parties, mode, 1, rounds, taken, *sizes)
            finally:
                await asyncio.gather(*(one.group.stop() for one in team))

        return asyncio.run(measure())


async def _timed(team: list[Summand], rounds: int) -> float:
    began = time.perf_counter()
    totals = await asyncio.gather(*(one.sum_up(rounds) for one in team))
    taken = time.perf_counter() - began
    for total in totals:
        check(total, team[0].agents)
    return taken


def apart(parties: int, mode: str, rounds: int) -> Sums:
    """Every party in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        roster = make_team(Path(place), parties, mode)
        path = os.pathsep.join(filter(None, sys.path))
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--member", str(roster.path), party.name, str(rounds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            for party in roster.parties
        ]
        try:
            said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [json.loads(text) for text in said]
        taken = max(one["seconds"] for one in found)
        sizes = sum(one["sent"] for one in found), max(one["passed"] for one in found)
        return _row(parties, mode, parties, rounds, taken, *sizes)


async def member(team: Path, me: str, rounds: int) -> dict[str, float]:
    roster = roster_file.read(team)
    one = Summand(roster, me, team.parent / f"{me}.data")
    await one.meet()
    await one.sum_up(WARM)
    sent, passed, began = one.sent, _through_loopback(), time.perf_counter()
    total = await one.sum_up(rounds)
    taken = time.perf_counter() - began
    found = {"seconds": taken, "sent": one.sent - sent, "passed": _through_loopback() - passed}
    check(total, one.agents)
    await one.group.leave()
    await one.group.stop()
    return found


def _through_loopback() -> int:
    """Bytes that the loopback device has taken so far; 0 where that is not to be found out."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    fields = next((line.split() for line in lines if line.strip().startswith("lo:")), ["0"] * 17)
    return int(fields[9])


# ---- a whole team -------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Of one update, in seconds: the mean over updates and parties."""

    mode: str
    updates: int
    computing: float
    talking: float
    waiting: float  # for shares of parties that still compute
    bytes: float  # that one party sent to the others

    @property
    def ratio(self) -> float:
        return self.talking / self.computing


def train(mode: str = "shares", updates: int = 60, warm: int = 20) -> Spent:
    """pe-vdn-b on 3m as four processes; the first `warm` updates, with their compilations, are
    left out.
    """
    wanted = config.make(
        "pe-vdn-b",
        "smax-sc2:3m",
        steps=1_000_000,
        settings={"buffer_size": 512, "learning_starts": 32, "eval_episodes": 8},
    )
    first: local.Reports = {}
    last: local.Reports = {}

    def watch(reports: local.Reports) -> None:
        parties = {name: one for name, one in reports.items() if "updates" in one}
        made = [one["updates"] for one in parties.values()]
        if len(parties) == 3 and min(made) >= warm and not first:
            first.update(parties)
        if first and min(made) >= warm + updates:
            last.update(parties)
            raise _Enough

    with tempfile.TemporaryDirectory() as place:
        roster = local.make(Path(place) / "team", wanted, mode, PATIENCE, rehearsal=False)
        with contextlib.suppress(_Enough):
            local.up(roster, watch, 0.2)
    gone = [
        {
            **{k: last[n]["seconds"][k] - first[n]["seconds"].get(k, 0.0) for k in SECONDS},
            "updates": last[n]["updates"] - first[n]["updates"],
            "bytes": _to_peers(last[n]) - _to_peers(first[n]),
        }
        for n in last
    ]
    each = {
        k: float(np.mean([one[k] / one["updates"] for one in gone])) for k in (*SECONDS, "bytes")
    }
    made = min(one["updates"] for one in gone)
    return Spent(mode, made, **each)


SECONDS = ("computing", "talking", "waiting")


class _Enough(Exception):
    """All that is needed was seen."""


def _to_peers(report: dict[str, Any]) -> int:
    peers = report["peers"].items()
    return sum(traffic["bytes_sent"] for name, traffic in peers if name != WORLD)


# ---- all of it ----------------------------------------------------------------------------------


def measure_sums(seconds: float) -> list[Sums]:
    rows = []
    for parties in TEAMS:
        for mode in MODES:
            rows.append(together(parties, mode, seconds))
            if parties <= APART:
                rows.append(apart(parties, mode, rows[-1].rounds))
    return rows


def show(rows: list[Sums], teams: list[Spent]) -> str:
    head = f"{'parties':>7}  {'mode':14} {'processes':>9} {'rounds/s':>9} {'bytes':>11} "
    lines = [f"{head} {'over least':>10} {'at the device':>13}"]
    for row in rows:
        over, device = row.bytes / row.least_bytes, row.device_bytes / row.least_bytes
        lines.append(
            f"{row.parties:7}  {row.mode:14} {row.processes:9} {row.rounds_per_second:9.1f} "
            f"{row.bytes:11,.0f} {over:11.3f} {device:13.3f}"
        )
    for team in teams:
        lines.append(
            f"3m, {team.mode}: {team.talking * 1e3:.1f} ms talking, {team.computing * 1e3:.1f} ms "
            f"computing, {team.waiting * 1e3:.1f} ms waiting for each of {team.updates} updates: "
            f"talking over computing {team.ratio:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", choices=["sums", "team"], help="one of the two parts")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of sums")
    parser.add_argument(
        "--member", nargs=3, metavar=("TEAM", "ME", "ROUNDS"), help="used by itself"
    )
    chosen = parser.parse_args()
    if chosen.member:
        team, me, rounds = chosen.member
        sys.stdout.write(json.dumps(asyncio.run(member(Path(team), me, int(rounds)))))
        return
    rows = measure_sums(chosen.seconds) if chosen.only != "team" else []
    teams = [train(mode) for mode in MODES] if chosen.only != "sums" else []
    if chosen.json:
        document = {
            "sums": [row._asdict() for row in rows],
            "team": [{**team._asdict(), "ratio": team.ratio} for team in teams],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(show(rows, teams) + "\n")


if __name__ == "__main__":
    main()
