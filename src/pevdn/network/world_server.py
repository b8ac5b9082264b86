"""The process that serves a simulated world to the parties.

It sees the state of the world and all actions, but no messages between parties. Each party gets its
own agent's observation and the team's reward. The server keeps no state: it can be killed at any
time, and the block of episodes under way is then played again.

Shapes: E episodes side by side, N agents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pevdn import worlds
from pevdn.errors import PevdnError, UsageError
from pevdn.network import wire_pb2 as wire
from pevdn.network.environment import ACTIVE, ENDED, TRUNCATED, WON, Observation, to_wire
from pevdn.network.episodes import WORLD_TIMEOUT, episodes_of
from pevdn.network.group import Group
from pevdn.network.lifecycle import FAREWELL, connected
from pevdn.network.membership import FINISHED, Stopped, ViewChanged
from pevdn.network.progress import EVALUATE, PLAY
from pevdn.network.randomness import FromSecret, FromSeed, Randomness
from pevdn.network.roster import WORLD, Roster
from pevdn.network.status import Status
from pevdn.network.streams import Secret
from pevdn.storage.files import make_private


class WorldServer:
    """A world that a team of parties plays in."""

    def __init__(
        self,
        roster: Roster,
        key: bytes,
        folder: Path,
        listen: str | None = None,
        world_timeout: float = WORLD_TIMEOUT,
    ) -> None:
        if roster.world is None:
            raise UsageError(f"{roster.path} has no [world]: its parties have their own bodies.")
        self.roster, config = roster, roster.config
        self.parties = [party.name for party in roster.parties]
        self.world = worlds.make(config.env)
        self.episodes = episodes_of(self.world, config, world_timeout)
        make_private(folder)
        self.random: Randomness = (
            FromSeed(config, len(self.parties))
            if roster.rehearsal
            else FromSecret(config, Secret.load_or_create(folder / "secret"), roster.run)
        )
        self.completed = 0
        self.group = Group(roster, WORLD, key, lambda: self.completed, listen=listen, folder=folder)
        self.status = Status(folder, self.group)

    async def run(self) -> None:
        """Play whenever all parties are ready, until they have finished."""
        members, status = self.group.members, self.status
        if not members.unfinished(self.parties):
            status.state = "finished"
            status.write()
            return
        try:
            async with connected(self.group, status):
                while True:
                    try:
                        await self._serve()
                        break
                    except ViewChanged:
                        status.event("view changed")
                    except Stopped:
                        if FINISHED not in members.farewells.values():
                            raise
                        break  # a party has finished, so no more episodes will be played
                status.state = "finished"
                await self.group.say_farewell(FINISHED, FAREWELL)
        finally:
            self.episodes.close()

    async def _serve(self) -> None:
        """Agree on a view, and play until all parties have finished."""
        self.status.state = "looking for the others"
        completed = await self.group.agree()
        self.completed = max(completed[name] for name in self.parties)
        self.status.state = "ready"
        while request := await self.group.next_request(self.parties, "ready"):
            await self._play(*request)

    async def _play(self, step: int, ready: wire.Ready) -> None:
        """Play one block of episodes, or one evaluation."""
        requests = await self.group.collect(self.parties, step, "ready")
        if any(body != ready for body in requests.values()):
            raise PevdnError(f"the parties request different episodes in step {step}.")
        training, T = ready.purpose == wire.TRAIN, self.world.max_steps
        draw = self.random.episodes if training else self.random.evaluation
        episodes = draw(ready.number)
        E, active = len(episodes), np.ones(len(episodes), bool)
        state = await self.episodes.reset(episodes)
        await self._show(step, 0, state, np.full(E, ACTIVE, np.uint8), active)
        for t in range(T):
            chosen = await self.group.collect(self.parties, step, "actions", t)
            actions = tuple(self._actions(name, chosen[name], E) for name in self.parties)
            with self.status.spending("computing"):
                state = await self.episodes.step(t, actions, active)
                done, truncated, won = map(np.asarray, (state.done, state.truncated, state.won))
            flags = ACTIVE * active + ENDED * (active & done)
            flags += TRUNCATED * (active & truncated) + WON * (active & done & won)
            before, active = active, active & ~done
            over = not active.any() or t == T - 1
            await self._show(step, t + 1, state, flags.astype(np.uint8), before, over)
            if over:
                break
        self.completed = step
        self.group.discard(step)
        self.status.steps[PLAY if training else EVALUATE] += 1
        self.status.facts |= {"step": step}

    async def _show(
        self,
        step: int,
        t: int,
        state: Any,
        flags: np.ndarray,
        active: np.ndarray,
        over: bool = False,
    ) -> None:
        """Send each party its own agent's observation."""
        rewards = np.where(active, np.asarray(state.reward), 0).astype(np.float32)
        bodies = {}
        for i, name in enumerate(self.parties):
            own = np.asarray(state.observations[i]), np.asarray(state.available[i])
            bodies[name] = {"observation": to_wire(t, Observation(*own, rewards, flags, over))}
        await self.group.send_each(bodies, step)

    def _actions(self, name: str, chosen: wire.Actions, episodes: int) -> np.ndarray:
        actions = np.frombuffer(chosen.actions, "<u2").astype(np.int32)
        n_actions = self.world.agents[self.roster.index(name)].n_actions
        if actions.shape != (episodes,) or actions.max() >= n_actions:
            raise PevdnError(
                f"{name} sent {len(actions)} actions of at most {actions.max(initial=0)}, but the "
                f"world expects {episodes} below {n_actions}."
            )
        return actions
