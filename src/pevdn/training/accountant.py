"""The privacy accounting of a run: every chunk of updates is booked before and after it runs.

One call of the compiled program is a chunk. `reserve` writes it to the ledger, with the
updates that it may make and the openings of a record; `compute` runs and settles it. A chunk lost
in a crash is repeated with the same random numbers and must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pevdn.config.experiment import Config, fingerprint
from pevdn.config.settings import MOST
from pevdn.errors import WorldFault
from pevdn.privacy import planner, randomness
from pevdn.privacy.accounting import Spent
from pevdn.privacy.ledger import FILE, Chunk, Ledger, digest
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State

RENEWAL = 0x72656E65  # a branch of a key that training, which splits it in three, never takes


class Accountant:
    """The ledger of a private run, and the exposure that its budget allows."""

    def __init__(self, path: Path, config: Config, simulation: Simulation, devices: int) -> None:
        self.path, self.config, self.devices = path, config, devices
        self._simulation = simulation
        planner.affordable(config, len(simulation.team))  # refuses a budget that allows nothing
        self._to_renew = False  # before the first chunk that is not a repetition

    # ---- begin and continue ---------------------------------------------------------------

    def open(self, fresh: bool) -> None:
        """Read the ledger of the run; begin one only in a `fresh` run that never reserved."""
        if not fresh or Ledger.begun(self.path):
            self.ledger = Ledger.read(self.path, fingerprint(self.config))
            return
        sim = self._simulation
        facts = (self.config, sim.release, len(sim.team), sim.parameters, sim.world.max_steps)
        self.ledger = planner.begin_ledger(self.path, *facts)

    def go_on(self, line: int, check: str, new_noise: bool, note: Callable[[str], None]) -> None:
        """Continue at the position of the restored state; `new_noise` gives up lost updates."""
        ledger, source = self.ledger, randomness.source(self.config)
        ledger.go_on(line, check)
        if ledger.note_copy():
            advice = (
                " Train only one of the two, or resume one with --new-noise, so that both do not "
                "use the same noise."
            )
            note(
                f"this is a copy of a run ({self.path / FILE} began as another file): training it "
                "spends privacy of the same episodes once more, and the original's ledger does not "
                f"count that.{advice if source == 'seed' else ''}"
            )
        if new_noise:
            ledger.renew()
        # A copy, backup or disk snapshot that is trained further plays other episodes. With the
        # same noise their difference would show, so new chunks get new random numbers. (With a
        # seed a run can be repeated, and its noise promises nothing about real episodes.)
        begun = len(ledger.lines) > 1
        self._to_renew = begun and not new_noise and source == "os"

    # ---- one chunk ------------------------------------------------------------------------

    def renew_keys(self, state: State) -> State:
        """Derive new keys wherever the ledger has a renewal, for the first time or repeated."""
        if self._to_renew and self.ledger.up_to_date:
            self.ledger.renew()
            self._to_renew = False
        while (nonce := self.ledger.take_renewal()) is not None:
            state = state._replace(key=renewed(state.key, nonce))
        return state

    def reserve(self, until: int, iterations: int) -> Chunk:
        """Book a chunk before it runs; a lost chunk comes back as it was."""
        limit = [MOST] * self.config.seeds
        if (affordable := self.ledger.affordable) is not None:
            limit = [affordable - lost for lost in self.ledger.lost]
        facts = (self.config.updates_due, self.devices, int(self.config.noised))
        return self.ledger.reserve(until, iterations, limit, *facts)

    def compute(self, chunk: Chunk, state: State, program: Callable[..., State]) -> State:
        """Run a reserved chunk and book what it did before anything uses the result."""
        before = np.array(state.updates)  # a copy: the program takes over the state's memory
        try:
            state = program(state, chunk.until, chunk.iterations, chunk.limit)
        except WorldFault:
            if chunk.iterations <= 1:  # the world failed before the update: nothing is spent
                self.ledger.void()
            raise
        made, exposure = np.asarray(state.updates) - before, np.asarray(state.exposure)
        self.ledger.settle(chunk, made.tolist(), exposure.tolist(), self.digest(state))
        return state

    def digest(self, state: State) -> str:
        """Return a digest of the state, also over what is opened of the stored episodes.

        Openings are repeated with the same noise. If the episodes differ then, as they may in an
        external world, the noise would hide two different sums: the ledger refuses that.
        """
        found = state_digest(state)
        if not self.config.noised:
            return found
        opened = self._simulation.replay.checksum(state)
        return digest([np.frombuffer(found.encode() + opened, np.uint8)])

    # ---- figures --------------------------------------------------------------------------

    @property
    def nonce(self) -> str:
        return self.ledger.nonce

    @property
    def position(self) -> tuple[int, str]:
        return self.ledger.position

    def spent(self) -> list[Spent]:
        """Return ε of the updates made so far, by seed."""
        return self.ledger.spent()


def state_digest(state: State) -> str:
    """Return a digest of parameters, random keys and counters."""
    counters = (state.env_steps, state.episodes, state.updates, state.exposure)
    return digest(jax.tree.leaves((state.params, jax.random.key_data(state.key), counters)))


def renewed(keys: Any, nonce: str) -> Any:
    """Return new keys (S,) for everything after a renewal, from the old ones and its nonce.

    The salt keeps them apart from the keys that training derives: `fold_in(key, n)` equals
    `split(key, 3)[n]`, so folding in a small number would repeat keys of the lost block.
    """
    words = np.frombuffer(bytes.fromhex(nonce), ">u4").astype(np.uint32)

    def one(key: Any) -> Any:
        for word in (RENEWAL, *words):
            key = jax.random.fold_in(key, word)
        return key

    return jax.vmap(one)(keys)
