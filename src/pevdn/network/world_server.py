"""The process that hosts a simulated world.

It knows everything that happens in the world, as a world does, and nothing of what the agents
think: it gets their actions, and gives each party what its agent sees and the team's reward. It
keeps nothing, so that it can be killed at any time; a block of episodes that was under way then is
played anew.

Shapes: E episodes side by side, N agents.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pevdn import worlds
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.errors import PevdnError, UsageError, WorldFault
from pevdn.network import wire_pb2 as wire
from pevdn.network.course import block_size
from pevdn.network.environment import BY_THE_CLOCK, ENDED, GOING, WON, Seen, to_sight
from pevdn.network.group import DONE, Group, Left, Stopped, ViewChanged
from pevdn.network.randomness import Draws, Own, Rehearsal
from pevdn.network.roster import WORLD, Roster
from pevdn.network.status import Status
from pevdn.network.streams import Secret
from pevdn.simulation.hosted import episode_seed
from pevdn.storage.files import make_private
from pevdn.worlds.base import ExternalWorld, Step, World
from pevdn.worlds.external import sanitise
from pevdn.worlds.workers import RESET, STEP, Fault, WorkerPool


class Inside:
    """Episodes of a world in JAX, all in one call."""

    def __init__(self, world: World) -> None:
        T = world.max_steps

        def reset(keys: jax.Array) -> Any:
            return jax.vmap(lambda key: world.reset(jax.random.fold_in(key, T)))(keys)

        def step(keys: jax.Array, t: jax.Array, state: Any, actions: Any) -> Any:
            now = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t))[1])(keys)
            return jax.vmap(world.step)(now, state, jax.tree.map(jnp.asarray, actions))

        self.programs = jax.jit(reset), jax.jit(step)

    async def reset(self, keys: jax.Array) -> Step:
        self._keys = keys
        self._state, step = self.programs[0](keys)
        return step

    async def step(self, t: int, actions: tuple[np.ndarray, ...], going: np.ndarray) -> Step:
        self._state, step = self.programs[1](self._keys, t, self._state, actions)
        return step

    def close(self) -> None: ...


class Outside:
    """Episodes of a world outside of JAX, each in a copy of its own, in processes of their own."""

    def __init__(self, world: ExternalWorld, count: int, timeout: float) -> None:
        self._world, self._copies = world, WorkerPool(world, count, timeout)
        sizes = [(spec.observation_size, spec.n_actions) for spec in world.agents]
        self._ends = np.cumsum(sizes, axis=0)[:-1].T  # where agents end in a row of all of them

    async def reset(self, keys: jax.Array) -> Step:
        first = jax.vmap(lambda key: jax.random.fold_in(key, self._world.max_steps))(keys)
        self._rows = self._copies.rows[: len(keys)]
        self._rows["seed"] = jax.vmap(episode_seed)(first)
        self._rows["order"] = RESET
        return await self._turn(0)

    async def step(self, t: int, actions: tuple[np.ndarray, ...], going: np.ndarray) -> Step:
        self._rows["actions"] = np.stack(actions, axis=-1)
        self._rows["order"][going] = STEP
        return await self._turn(t + 1)

    async def _turn(self, t: int) -> Step:
        try:
            await asyncio.to_thread(self._copies.turn)  # the others hear from us meanwhile
        except Fault as fault:
            when = f"at step {t}" if t else "at its start"
            raise WorldFault(
                f"world '{self._world.name}' {fault.what}, {when} (reset with "
                f"{self._rows['seed'][fault.worker]})."
            ) from None
        rows = self._rows.copy()
        views: Any = [
            tuple(np.split(rows[name], ends, axis=1))
            for name, ends in zip(("observations", "available"), self._ends, strict=True)
        ]
        return Step(*views, *(rows[name] for name in ("reward", "done", "truncated", "won")))

    def close(self) -> None:
        self._copies.close()


def episodes_of(world: World | ExternalWorld, config: Config) -> Inside | Outside:
    if not isinstance(world, ExternalWorld):
        return Inside(world)
    count = max(block_size(config), config.settings.eval_episodes)
    given = sanitise(world) if config.private else world
    return Outside(given, count, RuntimeOptions().world_timeout)


class WorldServer:
    """A world for a team of strangers."""

    def __init__(self, roster: Roster, key: bytes, folder: Path, listen: str | None = None) -> None:
        if roster.world is None:
            raise UsageError(f"{roster.path} has no [world]: its parties have bodies of their own.")
        self.roster = roster
        self.parties = [party.name for party in roster.parties]
        self.world = worlds.make(roster.config.env)
        self.episodes = episodes_of(self.world, roster.config)
        make_private(folder)
        self.draws: Draws = (
            Rehearsal(roster.config.seed)
            if roster.rehearsal
            else Own(Secret.load_or_create(folder / "secret"), roster.run)
        )
        self.completed = 0
        self.group = Group(roster, WORLD, key, lambda: self.completed, listen=listen, folder=folder)
        self.status = Status(folder, self.group)

    async def run(self) -> None:
        """Play whenever all parties are ready, until they say farewell."""
        if self.group.all_done(self.parties):
            self.status.state = "finished"
            self.status.write()
            return
        await self.group.start()
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                try:
                    self.status.state = "looking for the others"
                    there = await self.group.agree()
                    self.completed = max(there[name] for name in self.parties)
                    self.status.state = "ready"
                    while await self._block():
                        pass
                    break
                except ViewChanged:
                    self.status.event("a member started anew")
                except Stopped:
                    if DONE not in self.group.left.values():
                        raise
                    break  # no more episodes will be played
            self.status.state = "finished"
            await self.group.say_farewell(DONE, 5.0)
        except Exception as problem:
            self.status.state = "stopped"
            self.status.event("stopped", reason=str(problem))
            if isinstance(problem, PevdnError) and not isinstance(problem, Left):
                await self.group.say_farewell(str(problem), 5.0)
            raise
        finally:
            beat.cancel()
            self.episodes.close()
            self.status.write()
            await self.group.stop()

    async def _block(self) -> bool:
        """One block of episodes, or one evaluation; False once all parties are done."""
        asked = await self.group.hear_any(self.parties, "ready")
        if asked is None:
            return False
        round, ready = asked
        every = await self.group.hear(self.parties, round, "ready")
        if any(body != ready for body in every.values()):
            raise PevdnError(f"the parties want different things in round {round}.")
        E, T = ready.episodes, self.world.max_steps
        draw = self.draws.world if ready.purpose == wire.TRAIN else self.draws.evaluation
        step = await self.episodes.reset(draw(ready.number, E))
        going = np.ones(E, bool)
        await self._show(round, 0, step, np.full(E, GOING, np.uint8), going)
        for t in range(T):
            choices = await self.group.hear(self.parties, round, "choice", t)
            actions = tuple(self._actions(name, choices[name], E) for name in self.parties)
            with self.status.spending("computing"):
                step = await self.episodes.step(t, actions, going)
                done, truncated, won = map(np.asarray, (step.done, step.truncated, step.won))
            flags = GOING * going + ENDED * (going & done)
            flags += BY_THE_CLOCK * (going & truncated) + WON * (going & done & won)
            before, going = going, going & ~done
            over = not going.any() or t == T - 1
            await self._show(round, t + 1, step, flags.astype(np.uint8), before, over)
            if over:
                break
        self.completed = round
        self.group.forget(round)
        self.status.rounds["play" if ready.purpose == wire.TRAIN else "evaluate"] += 1
        self.status.facts |= {"round": round}
        return True

    async def _show(
        self,
        round: int,
        t: int,
        step: Any,
        flags: np.ndarray,
        going: np.ndarray,
        over: bool = False,
    ) -> None:
        """Give each party what its own agent sees."""
        rewards = np.where(going, np.asarray(step.reward), 0).astype(np.float32)
        bodies = {}
        for i, name in enumerate(self.parties):
            own = np.asarray(step.observations[i]), np.asarray(step.available[i])
            bodies[name] = {"sight": to_sight(t, Seen(*own, rewards, flags, over))}
        await self.group.tell_each(bodies, round)

    def _actions(self, name: str, choice: wire.Choice, episodes: int) -> np.ndarray:
        actions = np.frombuffer(choice.actions, "<u2").astype(np.int32)
        most = self.world.agents[self.roster.index(name)].n_actions
        if actions.shape != (episodes,) or actions.max() >= most:
            raise PevdnError(f"{name} chose actions that do not exist.")
        return actions

    async def _beat(self) -> None:
        while True:
            self.status.write()
            await asyncio.sleep(1.0)
