"""Plays one greedy episode and records it.

Episode K is the K-th that `pevdn evaluate RUN` plays with its own default seed: fresh, never one
that a team was trained on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pevdn.agent import keys as derive
from pevdn.policies.policy import Policy
from pevdn.viewer import styles as looks
from pevdn.viewer.recording import PlayedStep, View
from pevdn.worlds.base import ExternalEnv, ExternalWorld, Step, World


class Stage(Protocol):
    """A world on which one episode is played before an observer."""

    scene: dict[str, Any]
    actions: list[list[dict[str, Any]]]
    views: list[View]  # what there was to see since the last step

    def reset(self) -> Step: ...
    def step(self, actions: list[int]) -> Step: ...
    def close(self) -> None: ...


def stage_for(world: World | ExternalWorld, episode: int) -> Stage:
    key = jax.random.split(derive.of_evaluation(0, 2**31 - 1), episode + 1)[episode]
    if isinstance(world, ExternalWorld):
        return HostStage(world, key)
    return CompiledStage(world, key)


class CompiledStage:
    """A world in JAX, with the random numbers of an evaluation."""

    def __init__(self, world: World, key: jax.Array) -> None:
        self._look = looks.of(world)
        self._key, self._first = key, derive.of_reset(key, world.max_steps)
        self._reset, self._step = jax.jit(world.reset), jax.jit(self._look.step)
        self.actions = self._look.actions()

    def reset(self) -> Step:
        self._state, step = self._reset(self._first)
        self._played = 0
        self.scene = self._look.scene(jax.device_get(self._state))
        self.views = [self._look.view(jax.device_get(self._state))]
        return step

    def step(self, actions: list[int]) -> Step:
        _, key = derive.of_step(self._key, self._played)
        chosen = tuple(jnp.asarray(action, jnp.int32) for action in actions)
        before, self._played = self._state, self._played + 1
        self._state, step, inside = self._step(key, before, chosen)
        self.views = self._look.views(*jax.device_get((before, inside, self._state)))
        return step

    def close(self) -> None: ...


class HostStage:
    """A world outside of JAX: it draws itself, or its actions are shown as a table."""

    def __init__(self, world: ExternalWorld, key: jax.Array) -> None:
        self._seed = int(derive.world_seed(derive.of_reset(key, world.max_steps)))
        build: Callable[..., ExternalEnv] = world.build
        drawable = "drawn" in inspect.signature(build).parameters
        self._copy = build(drawn=True) if drawable else build()
        self._draw = getattr(self._copy, "render", None)
        self.scene = {"kind": "pictures" if self._draw else "table"}
        self.actions = looks.numbered(world.agents)

    def reset(self) -> Step:
        return self._seen(self._copy.reset(self._seed))

    def step(self, actions: list[int]) -> Step:
        return self._seen(self._copy.step(tuple(actions)))

    def _seen(self, step: Step) -> Step:
        self.views = [{"png": looks.png(self._draw())} if self._draw else {"text": ""}]
        return step

    def close(self) -> None:
        self._copy.close()


def play(stage: Stage, policy: Policy, q_values_of: int | None) -> dict[str, Any]:
    """The parts of a recording that playing gives: scene, start, steps and ending."""
    step = stage.reset()
    policy.reset()
    start, steps = stage.views[0], []
    while True:
        chosen = policy.act(step.observations, step.available)
        asked: dict[str, Any] = {}
        if q_values_of is not None:
            values, open_ = policy[q_values_of].q_values, step.available[q_values_of]
            asked["q_values"] = [round(float(q), 4) for q in values]
            asked["available"] = [bool(a) for a in open_]
        step = stage.step(chosen)
        steps.append(PlayedStep(chosen, round(float(step.reward), 6), stage.views, **asked))
        if step.done:
            break
    ending = "won" if step.won else "time is up" if step.truncated else "lost"
    return {"scene": stage.scene, "start": start, "steps": steps, "ending": ending}
