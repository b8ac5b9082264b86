"""Two agents with bodies of their own carry a table: there is no world server.

    python examples/own_body.py [DIRECTORY [STEPS]]

Each end of the table has a height from 0 to 4; the goal is 2. A carrier observes only its own end,
and lowers, holds or raises it. The reward, common to both, is how far the table is off.

A body is any object with `spec`, `max_steps`, `observe` and `act`. Shared memory joins the two ends
here, instead of physics. The rest works the same on two machines, where each runs `run_member` with
only its own key.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pevdn.config import experiment as config
from pevdn.network import keys
from pevdn.network.environment import ACTIVE, ENDED, TRUNCATED, WON, Observation
from pevdn.network.member import run_member
from pevdn.worlds.interface import AgentSpec

HEIGHTS, LEVEL, STEPS = 5, 2, 4
NAMES = ("alice", "bob")


class Carrier:
    """One end of the table."""

    spec = AgentSpec(observation_size=HEIGHTS, n_actions=3)  # lower, hold, raise
    max_steps = STEPS

    def __init__(self, end: int, heights: Any, together: Any) -> None:
        self.end, self.heights, self.together = end, heights, together
        self.step = 0
        self.seen: Observation | None = None  # the result of the last action

    def observe(self) -> Observation:
        """Return the result of the last action; after the end, the start of the next episode."""
        if self.seen is None:
            self.heights[self.end] = random.randrange(HEIGHTS)
            self.step = 0
            return self._now(reward=0.0, flags=ACTIVE)
        seen, self.seen = self.seen, None if self.seen.over else self.seen
        return seen

    def act(self, action: int) -> None:
        """Move this end; a step is over when both have moved."""
        moved = self.heights[self.end] + action - 1
        self.heights[self.end] = min(max(moved, 0), HEIGHTS - 1)
        self.together.wait()
        off = sum(abs(height - LEVEL) for height in self.heights)
        self.together.wait()  # before either moves again
        self.step += 1
        flags = ACTIVE
        if self.step == STEPS:
            flags |= ENDED | (TRUNCATED if off else WON)
        self.seen = self._now(reward=-off / 4, flags=flags)

    def _now(self, reward: float, flags: int) -> Observation:
        return Observation(
            observations=np.eye(HEIGHTS, dtype=np.float32)[[self.heights[self.end]]],
            available=np.ones((1, 3), bool),
            rewards=np.array([reward], np.float32),
            flags=np.array([flags], np.uint8),
            over=bool(flags & ENDED),
        )


def carry(team: Path, end: int, heights: Any, together: Any) -> None:
    """Run one party, as one machine would."""
    report = run_member(team, NAMES[end], body=Carrier(end, heights, together))
    print(
        f"{report['name']}: {report['state']} after {report['env_steps']} steps and "
        f"{report['updates']} updates; return of the last greedy episode {report['return']:.2f}"
    )


def main(folder: Path, steps: int = 600) -> None:
    """Create a team without a world server, and train it in two processes."""
    # A body plays one episode at a time, so these three are 1.
    settings = {"parallel_episodes": 1, "update_every": 1, "eval_episodes": 1}
    settings |= {"hidden_size": 16, "buffer_size": 128, "expected_batch_size": 8}
    settings |= {"eval_every": 200, "exploration_steps": 600, "learning_rate": 0.003}
    # The roster needs a world with as many agents as parties; it is not used otherwise.
    made = config.make("pe-vdn-b", "toy:two-step", steps, settings=settings)
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
    places = [
        (name, f"127.0.0.1:{s.getsockname()[1]}") for name, s in zip(NAMES, ports, strict=True)
    ]
    for port in ports:
        port.close()
    team = keys.create(folder, made, places, patience=60).path

    spawn = multiprocessing.get_context("spawn")
    heights, together = spawn.Array("i", len(NAMES)), spawn.Barrier(len(NAMES), timeout=60)
    carriers = [
        spawn.Process(target=carry, args=(team, end, heights, together))
        for end in range(len(NAMES))
    ]
    for carrier in carriers:
        carrier.start()
    for carrier in carriers:
        carrier.join()
    if any(carrier.exitcode for carrier in carriers):
        sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made) / "team")
