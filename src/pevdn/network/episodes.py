"""Episodes of a world, stepped side by side: compiled, or in worker processes.

Shapes: E episodes side by side, N agents.
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pevdn.agent import keys
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import WorldFault
from pevdn.worlds.base import ExternalWorld, Step, World
from pevdn.worlds.external import sanitise
from pevdn.worlds.workers import RESET, STEP, Fault, WorkerPool

WORLD_TIMEOUT: float = RuntimeOptions.world_timeout


class CompiledEpisodes:
    """Episodes of a world in JAX, all in one call."""

    def __init__(self, world: World) -> None:
        T = world.max_steps

        def reset(episodes: jax.Array) -> Any:
            return jax.vmap(lambda key: world.reset(keys.of_reset(key, T)))(episodes)

        def step(episodes: jax.Array, t: jax.Array, state: Any, actions: Any) -> Any:
            now = jax.vmap(lambda key: keys.of_step(key, t)[1])(episodes)
            return jax.vmap(world.step)(now, state, jax.tree.map(jnp.asarray, actions))

        self.programs = jax.jit(reset), jax.jit(step)

    async def reset(self, episodes: jax.Array) -> Step:
        self._episodes = episodes
        self._state, step = self.programs[0](episodes)
        return step

    async def step(self, t: int, actions: tuple[np.ndarray, ...], active: np.ndarray) -> Step:
        self._state, step = self.programs[1](self._episodes, t, self._state, actions)
        return step

    def close(self) -> None: ...


class ExternalEpisodes:
    """Episodes of an external world, each in its own copy, in worker processes."""

    def __init__(self, world: ExternalWorld, count: int, timeout: float) -> None:
        self._world, self._pool = world, WorkerPool(world, count, timeout)
        sizes = [(spec.observation_size, spec.n_actions) for spec in world.agents]
        self._ends = np.cumsum(sizes, axis=0)[:-1].T  # where each agent's part of a row ends

    async def reset(self, episodes: jax.Array) -> Step:
        T = self._world.max_steps
        self._rows = self._pool.rows[: len(episodes)]
        self._rows["seed"] = jax.vmap(lambda key: keys.world_seed(keys.of_reset(key, T)))(episodes)
        self._rows["order"] = RESET
        return await self._turn(0)

    async def step(self, t: int, actions: tuple[np.ndarray, ...], active: np.ndarray) -> Step:
        self._rows["actions"] = np.stack(actions, axis=-1)
        self._rows["order"][active] = STEP
        return await self._turn(t + 1)

    async def _turn(self, t: int) -> Step:
        try:
            await asyncio.to_thread(self._pool.turn)  # so that members are answered meanwhile
        except Fault as fault:
            when = f"at step {t}" if t else "at its start"
            raise WorldFault(
                f"world '{self._world.name}' {fault.what}, {when} (reset with "
                f"{self._rows['seed'][fault.worker]})."
            ) from None
        rows = self._rows.copy()
        by_agent: Any = [
            tuple(np.split(rows[name], ends, axis=1))
            for name, ends in zip(("observations", "available"), self._ends, strict=True)
        ]
        return Step(*by_agent, *(rows[name] for name in ("reward", "done", "truncated", "won")))

    def close(self) -> None:
        self._pool.close()


def episodes_of(
    world: World | ExternalWorld, config: Config, timeout: float = WORLD_TIMEOUT
) -> CompiledEpisodes | ExternalEpisodes:
    if not isinstance(world, ExternalWorld):
        return CompiledEpisodes(world)
    count = max(config.block_size, config.settings.eval_episodes)
    return ExternalEpisodes(sanitise(world) if config.private else world, count, timeout)
