"""Where an agent's observations come from and its actions go.

A party plays in a world that another process serves (`RemoteWorld`), or it has its own sensors and
actuators: any object with the methods of `Body`, as in examples/own_body.py.

Shapes: E episodes side by side (1 for a body), O observation, A actions.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

import numpy as np

from pevdn.network import wire_pb2 as wire
from pevdn.network.group import Group
from pevdn.network.membership import Stopped
from pevdn.network.roster import WORLD
from pevdn.worlds.interface import AgentSpec

ACTIVE, ENDED, TRUNCATED, WON = 1, 2, 4, 8  # bits of a flag


class Observation(NamedTuple):
    """One agent's part of one time step."""

    observations: np.ndarray  # (E, O) float32
    available: np.ndarray  # (E, A) bool
    rewards: np.ndarray  # (E,) float32, the team's; 0 before the first action
    flags: np.ndarray  # (E,) uint8: active before this step, ended; WON counts with ENDED only
    over: bool  # all E episodes have ended


class Body(Protocol):
    """An agent's own sensors and actuators. It plays one episode at a time: E is 1.

    The bodies of all parties must report the same episodes: equal rewards and equal ends.
    """

    spec: AgentSpec
    max_steps: int

    def observe(self) -> Observation:
        """Return the current observation; after an episode is over, the start of the next."""
        ...

    def act(self, action: int) -> None:
        """Take an action."""
        ...


# In both environments, `step` is the step of the protocol and `t` the time step.


class BodyEnvironment:
    """A body as an environment."""

    def __init__(self, body: Body) -> None:
        self.body = body

    async def begin(
        self, step: int, purpose: wire.Purpose, episodes: int, number: int
    ) -> Observation:
        return await asyncio.to_thread(self.body.observe)

    async def act(self, step: int, t: int, actions: np.ndarray) -> Observation:
        await asyncio.to_thread(self.body.act, int(actions[0]))
        return await asyncio.to_thread(self.body.observe)


class RemoteWorld:
    """A world in another process: it gets the agent's actions and returns its observations."""

    def __init__(self, group: Group, spec: AgentSpec) -> None:
        self.group, self.spec = group, spec
        self.episodes = 0

    async def begin(
        self, step: int, purpose: wire.Purpose, episodes: int, number: int
    ) -> Observation:
        self.episodes = episodes
        await self.group.send([WORLD], step, ready=wire.Ready(purpose=purpose, number=number))
        return await self._observe(step, 0)

    async def act(self, step: int, t: int, actions: np.ndarray) -> Observation:
        chosen = wire.Actions(t=t, actions=actions.astype("<u2").tobytes())
        await self.group.send([WORLD], step, actions=chosen)
        return await self._observe(step, t + 1)

    async def _observe(self, step: int, t: int) -> Observation:
        received = await self.group.collect([WORLD], step, "observation", t)
        try:
            return from_wire(received[WORLD], self.episodes, self.spec)
        except ValueError:
            raise Stopped(
                f"the world sent time step {t} of step {step} in another shape than "
                f"{self.episodes} episodes of {self.spec.observation_size} numbers and "
                f"{self.spec.n_actions} actions; start it with the same roster."
            ) from None


Environment = RemoteWorld | BodyEnvironment


def to_wire(t: int, observation: Observation) -> wire.Observation:
    return wire.Observation(
        t=t,
        observations=observation.observations.astype("<f4").tobytes(),
        available=np.packbits(observation.available).tobytes(),
        rewards=observation.rewards.astype("<f4").tobytes(),
        flags=observation.flags.astype(np.uint8).tobytes(),
        over=observation.over,
    )


def from_wire(message: wire.Observation, episodes: int, spec: AgentSpec) -> Observation:
    """Read what `to_wire` wrote; raise a ValueError if a field has another size."""
    E, O, A = episodes, spec.observation_size, spec.n_actions
    bits = np.frombuffer(message.available, np.uint8)
    if len(bits) != -(-E * A // 8):
        raise ValueError
    return Observation(
        np.frombuffer(message.observations, "<f4").reshape(E, O).astype(np.float32),
        np.unpackbits(bits, count=E * A).astype(bool).reshape(E, A),
        np.frombuffer(message.rewards, "<f4").reshape(E).astype(np.float32),
        np.frombuffer(message.flags, np.uint8).reshape(E),
        message.over,
    )
