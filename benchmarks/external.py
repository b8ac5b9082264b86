"""A world outside of JAX, mpe2's simple_spread: how much of its own speed training leaves it.

The bare loop is the same copies in as many processes, stepped with random actions and nothing
else. It, playing, and playing with learning are timed in turns.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from pevdn.worlds.base import AgentSpec, ExternalWorld, Step

STEPS = 25


class Spread:
    """One copy."""

    def __init__(self) -> None:
        from mpe2 import simple_spread_v3

        self.env = simple_spread_v3.parallel_env(max_cycles=STEPS)
        self.names = list(self.env.possible_agents)
        self.open = tuple(np.ones(5, bool) for _ in self.names)

    def reset(self, seed: int) -> Step:
        seen, _ = self.env.reset(seed=seed)
        return self._step(seen, 0.0, False)

    def step(self, actions: tuple[int, ...]) -> Step:
        seen, rewards, *_ = self.env.step(dict(zip(self.names, actions, strict=True)))
        return self._step(seen, sum(rewards.values()), not self.env.agents)

    def close(self) -> None:
        self.env.close()

    def _step(self, seen: dict[str, Any], reward: float, done: bool) -> Step:
        views = tuple(seen[name] for name in self.names)
        return Step(views, self.open, reward, done, done, False)


WORLD = ExternalWorld("mpe2:simple_spread_v3", (AgentSpec(18, 5),) * 3, STEPS, Spread)


class Speeds(NamedTuple):
    """Environment steps a second, medians."""

    bare: float
    playing: float
    training: float
    copies: int
    processes: int


def bare(copies: int, seconds: float) -> float:
    """Steps a second of a loop over PettingZoo's own interface, in this process."""
    envs, rng, made = [Spread().env for _ in range(copies)], np.random.default_rng(0), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for env in envs:
            env.reset(seed=int(rng.integers(2**31)))
        for _ in range(STEPS):
            for env in envs:
                env.step(dict(zip(env.agents, rng.integers(5, size=3).tolist(), strict=True)))
        made += STEPS * copies
    return made / (time.perf_counter() - began)


def measure(rounds: int = 7, seconds: float = 2.0, **settings: Any) -> Speeds:
    import jax
    import jax.numpy as jnp

    from pevdn._platform import compiler_options
    from pevdn.config import experiment as config
    from pevdn.simulation.program import Simulation

    def jit(f: Any, *_: Any, donate: tuple[int, ...] = ()) -> Any:
        return jax.jit(f, donate_argnums=donate, compiler_options=compiler_options())

    sim: Any = Simulation(WORLD, config.make("pe-vdn-b", WORLD.name, settings=settings))
    advance, run = sim.compile(jit), sim.player.compile(sim, jit)
    state = jax.jit(sim.start)(jnp.arange(1))
    copies = sim.player.workers
    processes = min(copies, os.cpu_count() or 1)
    always, once, limit = jnp.int32(10**9), jnp.int32(1), jnp.full(1, 10**9, jnp.int32)
    found: dict[str, list[float]] = {"bare": [], "playing": [], "training": []}

    def timed(name: str, block: Any) -> None:
        began, made = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            made += block()
        found[name].append(made / (time.perf_counter() - began))

    def play() -> int:
        return int(run(state, jnp.ones(1, bool))[0].length.sum())

    def learn() -> int:
        nonlocal state
        before = int(state.env_steps[0])
        state = advance(state, always, once, limit)
        return int(state.env_steps[0]) - before

    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        shares = [copies // processes] * processes
        list(pool.map(bare, shares, [0.1] * processes))
        while learn() and int(state.updates[0]) == 0:
            pass
        for _ in range(rounds):
            found["bare"].append(sum(pool.map(bare, shares, [seconds] * processes)))
            timed("playing", play)
            timed("training", learn)
    sim.close()
    medians = {name: float(np.median(speeds)) for name, speeds in found.items()}
    return Speeds(**medians, copies=copies, processes=processes)


def main() -> None:
    found = measure()
    print(found)
    print(f"playing {found.playing / found.bare:.2f}, training {found.training / found.bare:.2f}")


if __name__ == "__main__":
    main()
