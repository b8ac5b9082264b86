"""Play one greedy episode and record it.

Episode K is the K-th episode of `pevdn evaluate RUN` with its default seed; training never used it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pevdn.agent import keys as derive
from pevdn.policies.policy import Policy
from pevdn.viewer import styles
from pevdn.viewer.recording import Frame, PlayedStep
from pevdn.worlds.base import ExternalEnv, ExternalWorld, Step, World


class FrameSource(Protocol):
    """One episode of a world, and the frames to draw it from."""

    scene: dict[str, Any]
    actions: list[list[dict[str, Any]]]
    frames: list[Frame]  # of the last step

    def reset(self) -> Step: ...
    def step(self, actions: list[int]) -> Step: ...
    def close(self) -> None: ...


def source_for(world: World | ExternalWorld, episode: int) -> FrameSource:
    """Return the frame source of evaluation episode number `episode`."""
    key = derive.of_episodes(derive.of_evaluation(0, derive.AFTER_TRAINING), episode + 1)[episode]
    if isinstance(world, ExternalWorld):
        return ExternalSource(world, key)
    return CompiledSource(world, key)


class CompiledSource:
    """A JAX world, with the random keys of an evaluation."""

    def __init__(self, world: World, key: jax.Array) -> None:
        self._style = styles.style_for(world)
        self._key, self._first = key, derive.of_reset(key, world.max_steps)
        self._reset, self._step = jax.jit(world.reset), jax.jit(self._style.step)
        self.actions = self._style.actions()

    def reset(self) -> Step:
        self._state, step = self._reset(self._first)
        self._played = 0
        self.scene = self._style.scene(jax.device_get(self._state))
        self.frames = [self._style.frame(jax.device_get(self._state))]
        return step

    def step(self, actions: list[int]) -> Step:
        _, key = derive.of_step(self._key, self._played)
        chosen = tuple(jnp.asarray(action, jnp.int32) for action in actions)
        before, self._played = self._state, self._played + 1
        self._state, step, inside = self._step(key, before, chosen)
        self.frames = self._style.frames(*jax.device_get((before, inside, self._state)))
        return step

    def close(self) -> None: ...


class ExternalSource:
    """An external world: it renders itself, or its actions are shown as a table."""

    def __init__(self, world: ExternalWorld, key: jax.Array) -> None:
        self._seed = int(derive.world_seed(derive.of_reset(key, world.max_steps)))
        build: Callable[..., ExternalEnv] = world.build
        drawable = "drawn" in inspect.signature(build).parameters
        self._env = build(drawn=True) if drawable else build()
        self._render = getattr(self._env, "render", None)
        self.scene = {"kind": "pictures" if self._render else "table"}
        self.actions = styles.numbered_actions(world.agents)

    def reset(self) -> Step:
        return self._recorded(self._env.reset(self._seed))

    def step(self, actions: list[int]) -> Step:
        return self._recorded(self._env.step(tuple(actions)))

    def _recorded(self, step: Step) -> Step:
        self.frames = [{"png": styles.png(self._render())} if self._render else {"text": ""}]
        return step

    def close(self) -> None:
        self._env.close()


def play(source: FrameSource, policy: Policy, q_values_of: int | None) -> dict[str, Any]:
    """Play the episode; return the scene, start, steps and ending of its recording."""
    step = source.reset()
    policy.reset()
    start, steps = source.frames[0], []
    while True:
        chosen = policy.act(step.observations, step.available)
        of_agent: dict[str, Any] = {}
        if q_values_of is not None:
            values, mask = policy[q_values_of].q_values, step.available[q_values_of]
            of_agent["q_values"] = [round(float(q), 4) for q in values]
            of_agent["available"] = [bool(a) for a in mask]
        step = source.step(chosen)
        steps.append(PlayedStep(chosen, round(float(step.reward), 6), source.frames, **of_agent))
        if step.done:
            break
    ending = "won" if step.won else "time is up" if step.truncated else "lost"
    return {"scene": source.scene, "start": start, "steps": steps, "ending": ending}
