"""Where an agent's observations come from and its actions go to.

A party takes part in a simulated world that another process hosts (`RemoteWorld`), or it has a
body of its own: any object with `observe` and `act` (`Body`), as in examples/.

Shapes: E episodes side by side (1 for a body), O observation, A actions.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

import numpy as np

from pevdn.network import wire_pb2 as wire
from pevdn.network.group import Group, Stopped
from pevdn.network.roster import WORLD
from pevdn.worlds.interface import AgentSpec

GOING, ENDED, BY_THE_CLOCK, WON = 1, 2, 4, 8  # bits of a flag


class Seen(NamedTuple):
    """What one agent gets of one step."""

    observations: np.ndarray  # (E, O) float32
    available: np.ndarray  # (E, A) bool
    rewards: np.ndarray  # (E,) float32, the team's; 0 before the first action
    flags: np.ndarray  # (E,) uint8: was it going on before this step, has it ended, how
    over: bool  # all E episodes have ended


class Body(Protocol):
    """An agent's own sensors and motors. One episode at a time: E is 1.

    Every party's body has to tell of the same episodes: same rewards, same ends.
    """

    spec: AgentSpec
    max_steps: int

    def observe(self) -> Seen:
        """What is seen now. After an episode is over, the beginning of the next one."""
        ...

    def act(self, action: int) -> None:
        """Do it."""
        ...


class Stage(Protocol):
    """What a party plays on."""

    async def begin(self, round: int, purpose: int, episodes: int, number: int) -> Seen: ...
    async def act(self, round: int, step: int, actions: np.ndarray) -> Seen: ...


class OwnBody:
    """A body, played on as on any stage."""

    def __init__(self, body: Body) -> None:
        self.body = body

    async def begin(self, round: int, purpose: int, episodes: int, number: int) -> Seen:
        return await asyncio.to_thread(self.body.observe)

    async def act(self, round: int, step: int, actions: np.ndarray) -> Seen:
        await asyncio.to_thread(self.body.act, int(actions[0]))
        return await asyncio.to_thread(self.body.observe)


class RemoteWorld:
    """A world in another process: it gets the agent's actions, and gives what this agent sees."""

    def __init__(self, group: Group, spec: AgentSpec) -> None:
        self.group, self.spec = group, spec
        self.episodes = 0

    async def begin(self, round: int, purpose: int, episodes: int, number: int) -> Seen:
        self.episodes = episodes
        ready: Any = wire.Ready(purpose=purpose, episodes=episodes, number=number)  # type: ignore[arg-type]
        await self.group.tell([WORLD], round, ready=ready)
        return await self._sight(round, 0)

    async def act(self, round: int, step: int, actions: np.ndarray) -> Seen:
        choice = wire.Choice(step=step, actions=actions.astype("<u2").tobytes())
        await self.group.tell([WORLD], round, choice=choice)
        return await self._sight(round, step + 1)

    async def _sight(self, round: int, step: int) -> Seen:
        heard = await self.group.hear([WORLD], round, "sight", step)
        try:
            return read_sight(heard[WORLD], self.episodes, self.spec)
        except ValueError:
            raise Stopped(
                f"the world sent step {step} of round {round} in another shape than that of "
                f"{self.episodes} episodes of {self.spec.observation_size} numbers and "
                f"{self.spec.n_actions} actions; start it with the same roster."
            ) from None


def to_sight(step: int, seen: Seen) -> wire.Sight:
    return wire.Sight(
        step=step,
        observations=seen.observations.astype("<f4").tobytes(),
        available=np.packbits(seen.available).tobytes(),
        rewards=seen.rewards.astype("<f4").tobytes(),
        flags=seen.flags.astype(np.uint8).tobytes(),
        over=seen.over,
    )


def read_sight(sight: wire.Sight, episodes: int, spec: AgentSpec) -> Seen:
    """The way back; a ValueError if anything has another size."""
    E, O, A = episodes, spec.observation_size, spec.n_actions
    bits = np.frombuffer(sight.available, np.uint8)
    if len(bits) != -(-E * A // 8):
        raise ValueError
    return Seen(
        np.frombuffer(sight.observations, "<f4").reshape(E, O).astype(np.float32),
        np.unpackbits(bits, count=E * A).astype(bool).reshape(E, A),
        np.frombuffer(sight.rewards, "<f4").reshape(E).astype(np.float32),
        np.frombuffer(sight.flags, np.uint8).reshape(E),
        sight.over,
    )
