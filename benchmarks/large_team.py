"""The memory of 27 agents with 5,000 episodes in host memory, with real updates.

    .venv/bin/python benchmarks/large_team.py [EPISODES] [--long]

Plays so many episodes (96) of smax-sc2:27m_vs_30m with a random team, fills the other slots with
copies that take memory of their own, and then trains for a block of eight episodes and eight
updates. With --long every episode is made 180 steps long, the limit: its observations forwards
and backwards.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from pevdn import worlds
from pevdn._platform import cache_compilations, peak_memory_bytes
from pevdn.agent.packed_replay import unpack
from pevdn.agent.replay import Episode
from pevdn.config import experiment as config
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST, Settings
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation

ENV = "smax-sc2:27m_vs_30m"
MANY = jnp.int32(MOST)


def lengthen(sim: Simulation, played: int) -> None:
    """Make the played episodes as long as the world allows, to and fro in what was seen."""
    T, spec = sim.world.max_steps, sim.world.agents[0]
    for rows in sim.replay.rows.values():
        for slot in range(played):
            n = int(rows.length[slot])
            whole = Episode(
                observations=np.zeros((T + 1, spec.observation_size), np.float32),
                available=np.zeros((T + 1, spec.n_actions), bool),
                actions=np.zeros(T, np.int16),
                rewards=np.zeros(T, np.float32),
                terminal=np.zeros(T, bool),
                length=np.int32(n),
            )
            unpack(rows.rows[slot], whole)
            there = np.concatenate([np.arange(n + 1), np.arange(n - 1, 0, -1)])
            seen = there[np.arange(T + 1) % len(there)]
            rows.store(
                slot,
                whole._replace(
                    observations=whole.observations[seen],
                    available=whole.available[seen],
                    length=np.int32(T),
                ),
            )


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    played, size = (numbers or [96])[0], Settings().buffer_size
    settings = {"learning_starts": size, "exploration_end": 1.0}
    cache_compilations()
    wanted = config.make("pe-vdn-b", ENV, settings=settings)
    sim = Simulation(worlds.make(ENV), wanted, RuntimeOptions(buffer="host"))
    seeds = jnp.arange(1)
    advance = sim.compile(Lanes(1, 1, print).jit)
    state = jax.jit(sim.start)(seeds)
    state = advance(state, MANY, jnp.int32(-(-played // wanted.block_size)))
    played = int(state.episodes[0])
    if "--long" in sys.argv:
        lengthen(sim, played)
    for rows in sim.replay.rows.values():
        for slot in range(played, size):
            rows.rows[slot] = bytes(
                bytearray(rows.rows[slot % played])
            )  # not the same bytes object
            rows.length[slot] = rows.length[slot % played]
    state = state._replace(episodes=jnp.array([size], jnp.int32))
    state = jax.block_until_ready(advance(state, MANY, jnp.int32(1)))
    lengths = sim.replay.rows[0, 0, 0].length[:size]
    print(
        f"{size:,} episodes of {lengths.mean():.0f} steps on average ({played} played), "
        f"{sim.replay.nbytes / size:,.0f} bytes each, {sim.replay.nbytes / 2**30:.2f} GiB in all; "
        f"{int(state.updates[0])} updates; peak {peak_memory_bytes() / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
