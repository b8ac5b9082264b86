"""The search for the private recipe, as it was made: six sweeps on `smax-sc2:3m`.

    .venv/bin/python benchmarks/search.py run SWEEP JOB --out LOG
    .venv/bin/python benchmarks/search.py show LOG...

A sweep is a few jobs, a job one program: settings × seeds are the lanes of it, so that many train
at the price of one on a GPU. The jobs of a sweep ran side by side on one H200 under NVIDIA MPS
(docs/research-log.md has what came of them). This is a program of its own, because the lanes of
the package's runs are seeds and never settings. Two more things are not as in the package:

- a Poisson sample that is larger than its padded batch is cut (the package never does);
- replay keeps observations in float16.

So it is good for comparing settings, and not for any claim about privacy. What stands in
docs/results.md is measured with the package.

Shapes: N agents, E episodes side by side, B slots of the buffer, M the padded batch, T steps, O
observation, A actions, H hidden.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pevdn import worlds
from pevdn.worlds.interface import AgentSpec

ENV = "smax-sc2:3m"
EVALUATION = 32  # greedy episodes
EPISODE = 23  # steps of an episode, roughly: how often to evaluate
NEVER = -1e9  # the value of an action that is not available
TINY = 1e-12
OUTPUTS = ("move", "attack")  # the last layers of every network here


class Settings(NamedTuple):
    """What may differ from lane to lane; named as in docs/settings.md where that has it."""

    learning_rate: float = 3e-3
    learning_rate_end: float = 1.0  # as a share of the first
    learning_rate_steps: float = 400e3
    clip_norm: float = 0.5
    clip_norm_end: float = 0.0  # geometric, over learning_rate_steps; 0: it stays as it is
    noise_multiplier: float = 1.344
    expected_batch_size: float = 128
    gamma: float = 0.99
    return_lambda: float = 0.5
    reward_scale: float = 1.0
    reward_cap: float = 0.0  # a step's reward counts for this much at most; 0: for all that it is
    output_gain: float = 1.0  # of the last layers at the start, times their own
    huber: float = 0.0  # the team error is cut at ± this; 0: never
    target_rate: float = 0.005
    average_decay: float = 0.998
    act_with_average: float = 0.0  # 1: episodes are played by the averaged model
    beta1: float = 0.9
    beta2: float = 0.999
    noise_correction: float = 0.0  # 1: the noise's variance is taken off Adam's second moment
    exploration_steps: float = 50e3
    exploration_end: float = 0.05
    learning_starts: float = 1024  # episodes


class Job(NamedTuple):
    """Lanes of one shape."""

    settings: tuple[Settings, ...]
    network: str = "entities"  # or: availability, bilinear, dueling
    hidden_size: int = 16
    buffer_size: int = 4096
    largest_batch: int = 165  # M; a larger sample is cut
    update_every: int = 4  # episodes
    parallel_episodes: int = 32
    seeds: int = 4
    first_seed: int = 0
    steps: int = 400_000
    eval_every: int = 12_000


# ---- the six sweeps ---------------------------------------------------------------------------


def vary(base: Settings, *changes: dict[str, float]) -> tuple[Settings, ...]:
    return tuple(base._replace(**change) for change in changes)


def sweep_1() -> dict[str, Job]:
    """Clip norm, optimiser and returns; width, form of the network, a larger buffer."""
    base = Settings(clip_norm=0.1)
    larger = base._replace(expected_batch_size=256, noise_multiplier=1.76)
    few = (
        {"clip_norm": 0.2},
        {},
        {"clip_norm": 0.05},
        {"learning_rate": 1e-3},
    )
    faster = {"learning_rate": 1e-2}
    wide = vary(
        base,
        {"clip_norm": 0.5},
        {"clip_norm": 0.2},
        {},
        {"clip_norm": 0.05},
        {"learning_rate": 1e-3},
        {"learning_rate": 1e-2},
        {"return_lambda": 0.0},
        {"return_lambda": 0.8},
        {"gamma": 0.95},
        {"gamma": 0.9},
        {"target_rate": 0.02},
        {"average_decay": 0.995, "act_with_average": 1.0},
        {"learning_rate_end": 0.1},
        {"noise_correction": 1.0},
        {"noise_multiplier": 0.0},
        {"clip_norm": 0.05, "learning_rate": 1e-3},
        {"exploration_steps": 20e3},
        {"huber": 1.0},
        {"beta2": 0.99},
        {"clip_norm": 0.02},
    )
    return {
        "a": Job(wide),
        "b": Job(vary(larger, *few, faster), buffer_size=8192, largest_batch=310),
        "c": Job(vary(base, *few, faster), hidden_size=8),
        "d": Job(vary(base, *few), network="bilinear"),
        "e": Job(vary(base, *few), network="dueling"),
    }


def sweep_2() -> dict[str, Job]:
    """Target rate, scale of rewards, large clip norms, update interval, and what VDN reaches."""
    base = Settings(clip_norm=0.2, target_rate=0.02)
    smaller = base._replace(expected_batch_size=64, noise_multiplier=1.054)
    larger = base._replace(expected_batch_size=256, noise_multiplier=1.76)
    vdn = base._replace(
        expected_batch_size=32,
        noise_multiplier=0.0,
        clip_norm=1e6,
        target_rate=0.005,
        average_decay=0.9995,
    )
    wide = vary(
        base,
        {"target_rate": 0.05},
        {"target_rate": 0.1},
        {"target_rate": 0.2},
        {"clip_norm": 2.0},
        {"clip_norm": 5.0},
        {"clip_norm": 20.0},
        {"reward_scale": 0.3},
        {"reward_scale": 0.1},
        {"reward_scale": 0.3, "learning_rate": 1e-3},
        {"reward_scale": 0.1, "learning_rate": 1e-3},
        {"reward_scale": 0.03, "learning_rate": 1e-3},
        {"reward_scale": 0.1, "target_rate": 0.1},
        {"noise_multiplier": 0.0, "target_rate": 0.05},
        {"noise_multiplier": 0.0, "clip_norm": 5.0},
        {"noise_multiplier": 0.0, "clip_norm": 1e4},
        {"noise_multiplier": 0.0, "reward_scale": 0.1},
        {"target_rate": 0.05, "return_lambda": 0.2},
        {"target_rate": 0.05, "return_lambda": 0.7},
        {"target_rate": 0.05, "learning_rate": 5e-3, "learning_rate_end": 0.1},
        {"exploration_end": 0.02},
        {"average_decay": 0.999},
        {"clip_norm": 5.0, "reward_scale": 0.1},
    )
    h32 = vary(
        base,
        {},
        {"target_rate": 0.1},
        {"learning_rate": 1e-3},
        {"reward_scale": 0.1},
        {"reward_scale": 0.1, "learning_rate": 1e-3},
        {"noise_multiplier": 0.0},
    )
    every_2 = vary(
        smaller,
        {},
        {"target_rate": 0.05},
        {"learning_rate": 1.5e-3},
        {"reward_scale": 0.1, "learning_rate": 1.5e-3},
    )
    large = vary(
        larger,
        {},
        {"target_rate": 0.05},
        {"target_rate": 0.1},
        {"reward_scale": 0.1},
        {"reward_scale": 0.1, "learning_rate": 1e-3},
    )
    vdn_16 = vary(
        vdn,
        {"learning_rate": 5e-4},
        {"learning_rate": 1e-3},
        {"learning_rate": 3e-3},
        {"learning_rate": 1e-3, "target_rate": 0.02},
        {"learning_rate": 1e-3, "reward_scale": 0.1},
    )
    vdn_64 = vary(vdn, {"learning_rate": 5e-4}, {"learning_rate": 1e-3})
    return {
        "a": Job(wide),
        "b": Job(h32, hidden_size=32),
        "c": Job(every_2, largest_batch=95, update_every=2),
        "d": Job(large, buffer_size=8192, largest_batch=310),
        "e": Job(vdn_16, largest_batch=55, update_every=1),
        "f": Job(vdn_64, hidden_size=64, largest_batch=55, update_every=1),
    }


DECAYING = Settings(
    clip_norm=0.2,
    target_rate=0.05,
    learning_rate=5e-3,
    learning_rate_end=0.1,
    learning_rate_steps=350e3,
    return_lambda=0.3,
    average_decay=0.999,
    expected_batch_size=64,
    noise_multiplier=1.054,
)


def sweep_3() -> dict[str, Job]:
    """Round a decaying learning rate: width, update interval and buffer, more noise."""
    base = DECAYING
    larger = base._replace(expected_batch_size=128, noise_multiplier=1.331)
    every_4 = base._replace(expected_batch_size=128, noise_multiplier=1.344, average_decay=0.998)
    wide = vary(
        base,
        {},
        {"learning_rate": 3e-3},
        {"learning_rate": 8e-3},
        {"target_rate": 0.1},
        {"reward_scale": 3.0},
        {"reward_scale": 10.0},
        {"huber": 1.0},
        {"learning_rate_end": 0.02, "learning_rate_steps": 300e3},
        {"average_decay": 0.9995},
        {"return_lambda": 0.0},
        {"beta1": 0.5},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": 1.825, "learning_rate": 3e-3},
        {"noise_multiplier": 1.825},
    )
    large = vary(
        larger,
        {},
        {"learning_rate": 3e-3},
        {"reward_scale": 3.0},
        {"target_rate": 0.1},
        {"noise_multiplier": 2.304},
        {"noise_multiplier": 2.304, "learning_rate": 3e-3},
    )
    availability = vary(base, {}, {"reward_scale": 3.0})
    h64 = vary(base, {"learning_rate": 3e-3}, {})
    every_2 = Job((), hidden_size=32, largest_batch=95, update_every=2)
    return {
        "a": every_2._replace(settings=wide),
        "b": every_2._replace(settings=availability, network="availability"),
        "c": every_2._replace(settings=h64, hidden_size=64),
        "e": every_2._replace(settings=large, buffer_size=8192, largest_batch=165),
        "f": Job(vary(every_4, {}, {"learning_rate": 8e-3}), hidden_size=32),
    }


def sweep_4() -> dict[str, Job]:
    """Round β1 0.5, with fresh seeds: clip schedule, start, smaller budgets, a longer pilot."""
    base = DECAYING._replace(beta1=0.5)
    every_4 = base._replace(expected_batch_size=128, noise_multiplier=1.344, average_decay=0.998)
    every_8 = base._replace(expected_batch_size=256, noise_multiplier=1.777, average_decay=0.996)
    pilot = base._replace(
        expected_batch_size=256,
        learning_rate=3e-3,
        learning_rate_steps=2e6,
        exploration_steps=100e3,
        learning_starts=2048,
    )
    wide = vary(
        base,
        {},
        {"beta1": 0.0},
        {"learning_starts": 256},
        {"exploration_end": 0.02},
        {"clip_norm_end": 2.0},
        {"clip_norm_end": 10.0},
        {"learning_rate": 6e-3, "learning_rate_end": 0.05, "learning_rate_steps": 400e3},
        {"gamma": 0.995},
        {"beta2": 0.99},
        {"target_rate": 0.03},
        {"return_lambda": 0.2},
        {"noise_multiplier": 1.825},
        {"noise_multiplier": 1.825, "learning_rate": 4e-3},
        {"noise_multiplier": 2.106},
        {"noise_multiplier": 2.106, "learning_rate": 4e-3},
    )
    fours = vary(
        every_4,
        {"learning_rate": 8e-3},
        {"learning_rate": 8e-3, "noise_multiplier": 2.328},
        {"noise_multiplier": 2.328},
        {"noise_multiplier": 2.895},
    )
    eights = vary(every_8, {"learning_rate": 0.012}, {"learning_rate": 0.012, "beta1": 0.0})
    longer = Job(
        vary(pilot, {}, {"clip_norm": 2.0}, {"clip_norm_end": 10.0}),
        hidden_size=32,
        buffer_size=16_384,
        largest_batch=310,
        update_every=8,
        parallel_episodes=128,
        seeds=2,
        first_seed=100,
        steps=2_000_000,
        eval_every=48_000,
    )
    every_2 = Job((), hidden_size=32, largest_batch=95, update_every=2, first_seed=100)
    return {
        "a": every_2._replace(settings=wide),
        "b": every_2._replace(settings=vary(base, {}, {"clip_norm_end": 2.0}), hidden_size=64),
        "c": Job(fours, hidden_size=32, first_seed=100),
        "d": Job(eights, hidden_size=32, largest_batch=310, update_every=8, first_seed=100),
        "l": longer,
    }


def sweep_5() -> dict[str, Job]:
    """Round the recipe, with eight fresh seeds: caps on the reward, and what the gap is made of."""
    base = DECAYING._replace(
        learning_rate=8e-3,
        beta1=0.5,
        expected_batch_size=128,
        noise_multiplier=1.344,
        average_decay=0.998,
    )
    capped = base._replace(reward_cap=2.0)
    unclipped = {"noise_multiplier": 0.0, "clip_norm": 1e4, "learning_rate": 2e-3}
    job = Job((), hidden_size=32, seeds=8, first_seed=200)
    larger = vary(capped, {"expected_batch_size": 256, "noise_multiplier": 2.391})
    return {
        "a": job._replace(
            settings=vary(base, {}, {"beta1": 0.9}, {"reward_cap": 1.0}, {"reward_cap": 2.0})
        ),
        "b": job._replace(
            settings=(
                *vary(base, {"reward_cap": 4.0}, {"reward_cap": 2.0, "beta1": 0.9}),
                *vary(base, {"noise_multiplier": 0.0}),
                *vary(capped, {"noise_multiplier": 0.0}),
            )
        ),
        "c": job._replace(
            settings=vary(
                capped,
                {"clip_norm": 1.0},
                {"clip_norm": 3.0},
                {"return_lambda": 0.6},
                {"target_rate": 0.02, "return_lambda": 0.5},
            )
        ),
        "d": job._replace(
            settings=(
                *vary(base, {"reward_cap": 0.5}, unclipped),
                *vary(capped, unclipped),
                *vary(base, {"reward_cap": 1.0, "clip_norm": 1.0}),
            )
        ),
        "e": job._replace(
            settings=(
                *vary(base, {"output_gain": 0.1}),
                *vary(
                    capped, {"output_gain": 0.1}, {"clip_norm_end": 3.0}, {"learning_rate": 5e-3}
                ),
            )
        ),
        "f": job._replace(settings=larger, largest_batch=310),
        "g": job._replace(settings=vary(capped, {"learning_rate": 6e-3}), hidden_size=64),
    }


def sweep_6() -> dict[str, Job]:
    """The long preset, shortened: a clip norm that grows, and what the gap is made of."""
    base = DECAYING._replace(
        learning_rate=3e-3,
        learning_rate_steps=1.45e6,
        clip_norm=0.5,
        noise_multiplier=0.867,
        expected_batch_size=256,
        reward_cap=2.0,
        average_decay=0.9995,
        exploration_steps=100e3,
    )
    job = Job(
        (),
        hidden_size=32,
        buffer_size=32_768,
        largest_batch=310,
        update_every=8,
        parallel_episodes=256,
        seeds=5,
        first_seed=300,
        steps=1_600_000,
        eval_every=48_000,
    )
    growing = base._replace(clip_norm_end=5.0)
    unclipped = {"clip_norm": 1e6, "learning_rate": 1e-3, "reward_cap": 0.0}
    return {
        "a": job._replace(settings=vary(base, {}, {"clip_norm": 2.0}, {"clip_norm": 5.0})),
        "b": job._replace(
            settings=vary(growing, {}, {"clip_norm_end": 20.0}, {"learning_rate": 5e-3})
        ),
        "c": job._replace(
            settings=vary(
                base,
                {"reward_cap": 0.0, "clip_norm_end": 20.0},
                {"reward_cap": 4.0, "clip_norm_end": 10.0},
            )
        ),
        "d": job._replace(
            settings=vary(base._replace(noise_multiplier=0.0), {}, unclipped), seeds=3
        ),
        "e": job._replace(settings=(growing,), hidden_size=64),
    }


SWEEPS = {
    "1": sweep_1(),
    "2": sweep_2(),
    "3": sweep_3(),
    "4": sweep_4(),
    "5": sweep_5(),
    "6": sweep_6(),
}


# ---- the networks -----------------------------------------------------------------------------


def dense(key: Array, inputs: int, outputs: int, gain: float = 1.0) -> dict[str, Array]:
    make = jax.nn.initializers.orthogonal(gain)
    return {"weight": make(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def linear(layer: dict[str, Array], x: Array) -> Array:
    return x @ layer["weight"] + layer["bias"]


class Network(NamedTuple):
    """The entities network of the package, and three variants of it.

    `availability`: an enemy's encoder is also told whether it can be attacked. `bilinear`: an
    attack is scored by a product of core and enemy. `dueling`: one value is added to all actions.
    """

    kind: str
    hidden_size: int
    spec: AgentSpec

    def initialise(self, key: Array) -> dict[str, Any]:
        H, keys = self.hidden_size, jax.random.split(key, 8)
        allies, enemies = self.spec.entities
        own = self.spec.observation_size - sum(g.count * g.size for g in self.spec.entities)
        more = int(self.kind == "availability")
        assert enemies.actions is not None
        params = {
            "ally": dense(keys[0], allies.size, H),
            "enemy": dense(keys[1], enemies.size + more, H),
            "own": dense(keys[2], own, H),
            "core": dense(keys[3], 3 * H, H),
            "move": dense(keys[4], H, enemies.actions, 0.5),
            "attack": dense(keys[6], H, 1, 0.5),
        }
        if self.kind == "bilinear":
            params["mix"] = dense(keys[5], H, H, 0.5)
        else:
            params["score"] = dense(keys[5], 2 * H, H)
        if self.kind == "dueling":
            params["value"] = dense(keys[7], H, 1, 0.5)
        return params

    def values(self, params: dict[str, Any], seen: Array, available: Array) -> Array:
        """Q-values (..., A) of observations (..., O) and available actions (..., A)."""
        allies, enemies = (
            seen[..., g.start : g.start + g.count * g.size].reshape(
                *seen.shape[:-1], g.count, g.size
            )
            for g in self.spec.entities
        )
        group = self.spec.entities[1]
        own = seen[..., group.start + group.count * group.size :]
        if self.kind == "availability":
            enemies = jnp.concatenate([enemies, available[..., group.actions :, None]], -1)
        ally = _embed(params["ally"], allies)
        enemy = _embed(params["enemy"], enemies)
        own = jax.nn.relu(linear(params["own"], own))
        core = jnp.concatenate([enemy.sum(-2), ally.sum(-2), own], -1)
        core = jax.nn.relu(linear(params["core"], core))
        beside = jnp.broadcast_to(core[..., None, :], enemy.shape)
        if self.kind == "bilinear":
            product = jnp.sum(linear(params["mix"], beside) * enemy, -1)
            attack = linear(params["attack"], beside)[..., 0] + product
        else:
            both = jnp.concatenate([beside, enemy], -1)
            attack = linear(params["attack"], jax.nn.relu(linear(params["score"], both)))[..., 0]
        values = jnp.concatenate([linear(params["move"], core), attack], -1)
        return values + linear(params["value"], core) if self.kind == "dueling" else values


def _embed(layer: dict[str, Array], things: Array) -> Array:
    """(..., n, H), zero for a thing that is not seen."""
    return jax.nn.relu(linear(layer, things)) * jnp.any(things != 0, -1, keepdims=True)


# ---- training ---------------------------------------------------------------------------------


class Episodes(NamedTuple):
    """Whole episodes of a team, or the buffer of them: E or B first."""

    seen: Array  # (E, N, T + 1, O) float16
    available: Array  # (E, N, T + 1, A)
    actions: Array  # (E, N, T)
    rewards: Array  # (E, T)
    terminal: Array  # (E, T)
    length: Array  # (E,)


class Learner(NamedTuple):
    """What an update changes; parameters with the agents first."""

    params: Any
    target: Any
    average: Any
    moment1: Any
    moment2: Any
    updates: Array


class State(NamedTuple):
    learner: Learner
    buffer: Episodes
    episodes: Array
    steps: Array
    key: Array


class Search:
    """The program of one job. Its functions are of one lane, but for `advance` and `evaluate`."""

    def __init__(self, job: Job) -> None:
        self.job, self.world = job, worlds.make(ENV)
        spec = self.world.agents[0]
        self.agents, self.limit = len(self.world.agents), self.world.max_steps
        self.network = Network(job.network, job.hidden_size, spec)
        self.values = jax.vmap(self.network.values)  # over agents
        some = self.network.initialise(jax.random.key(0))
        self.parameters = sum(x.size for x in jax.tree.leaves(some))

    def start(self, seed: Array, output_gain: Array) -> State:
        B, N, T = self.job.buffer_size, self.agents, self.limit
        spec = self.world.agents[0]
        key, *keys = jax.random.split(jax.random.key(seed), N + 1)
        params = jax.vmap(self.network.initialise)(jnp.stack(keys))
        last = {name: jax.tree.map(lambda x: output_gain * x, params[name]) for name in OUTPUTS}
        params = {**params, **last}
        zeros = jax.tree.map(jnp.zeros_like, params)
        buffer = Episodes(
            seen=jnp.zeros((B, N, T + 1, spec.observation_size), jnp.float16),
            available=jnp.zeros((B, N, T + 1, spec.n_actions), bool),
            actions=jnp.zeros((B, N, T), jnp.int8),
            rewards=jnp.zeros((B, T)),
            terminal=jnp.zeros((B, T), bool),
            length=jnp.zeros(B, jnp.int32),
        )
        learner = Learner(params, params, params, zeros, zeros, jnp.int32(0))
        return State(learner, buffer, jnp.int32(0), jnp.int32(0), key)

    def play(
        self, params: Any, key: Array, exploration: Array | float, count: int
    ) -> tuple[Episodes, Array]:
        """`count` episodes, each to its end, and which of them were won."""
        N, A, T = self.agents, self.world.agents[0].n_actions, self.limit
        keys = jax.vmap(lambda k: jax.random.split(k, T + 1))(jax.random.split(key, count))
        state, step = jax.vmap(self.world.reset)(keys[:, T])

        def one_step(carry: Any, t: Array) -> tuple[Any, Any]:
            state, seen, available, alive = carry  # (N, E, ...); alive (E,)
            key = jax.vmap(partial(jax.random.split, num=2))(keys[:, t])
            greedy = jnp.where(available, self.values(params, seen, available), NEVER).argmax(-1)
            draw = partial(jax.random.uniform, shape=(N, 1 + A))
            dice = jax.vmap(draw, out_axes=1)(key[:, 0])  # (N, E, 1 + A)
            explored = jnp.where(available, dice[..., 1:], -1.0).argmax(-1)
            action = jnp.where(dice[..., 0] < exploration, explored, greedy).astype(jnp.int32)
            state, step = jax.vmap(self.world.step)(key[:, 1], state, tuple(action))
            done = step.done & alive
            record = (
                seen.astype(jnp.float16),
                available,
                action.astype(jnp.int8),
                jnp.where(alive, step.reward, 0.0),
                done & ~step.truncated,
                alive,
                done & step.won,
            )
            now = jnp.stack(step.observations), jnp.stack(step.available)
            return (state, *now, alive & ~step.done), record

        begin = jnp.stack(step.observations), jnp.stack(step.available)
        carry = (state, *begin, jnp.ones(count, bool))
        (_, seen_last, available_last, _), record = jax.lax.scan(one_step, carry, jnp.arange(T))
        seen, available, actions, rewards, terminal, alive, won = record
        seen = jnp.concatenate([seen, seen_last[None].astype(seen.dtype)])
        available = jnp.concatenate([available, available_last[None]])
        episodes = Episodes(
            *(jnp.moveaxis(x, (2, 1), (0, 1)) for x in (seen, available, actions)),
            rewards.T,
            terminal.T,
            alive.sum(0),
        )
        return episodes, won.any(0)

    def team_error(self, learner: Learner, batch: Episodes, settings: Settings) -> Array:
        """By episode and step (M, T): double Q-learning, λ-returns by a sum over later steps."""
        T = self.limit
        by_agent = [jnp.moveaxis(x, 1, 0) for x in (batch.seen, batch.available, batch.actions)]
        seen, available, actions = by_agent
        values = self.values(learner.params, seen, available)
        best = jnp.where(available, values, NEVER).argmax(-1)
        target = self.values(learner.target, seen, available)
        target = jnp.take_along_axis(target, best[..., None], -1)[..., 0]  # (N, M, T + 1)
        taken = jnp.take_along_axis(values[:, :, :-1], actions[..., None], -1)[..., 0]
        valid = (jnp.arange(T) < batch.length[:, None]).astype(jnp.float32)
        bootstrapped = settings.gamma * target[..., 1:] * (1.0 - batch.terminal) * valid
        ahead = jnp.arange(T) - jnp.arange(T)[:, None]
        decay = settings.gamma * settings.return_lambda
        later = jnp.where(ahead > 0, decay ** jnp.maximum(ahead, 0), 0.0)  # (T, T)
        message = bootstrapped - taken + ((bootstrapped - target[..., :-1]) * valid) @ later.T
        capped = jnp.minimum(batch.rewards, settings.reward_cap)
        kept = jnp.where(settings.reward_cap > 0, capped, batch.rewards)
        rewards = settings.reward_scale * kept
        error = (rewards + rewards @ later.T + message.sum(0)) * valid
        cut = jnp.clip(error, -settings.huber, settings.huber)
        return jnp.where(settings.huber > 0, cut, error)

    def gradient(
        self, params: Any, batch: Episodes, sampled: Array, error: Array, clip_norm: Array
    ) -> tuple[Any, Array]:
        """The sum of each agent's clipped gradients, and the mean norm before clipping (N,)."""
        q_bar = -2.0 * error / jnp.maximum(batch.length, 1)[:, None]  # (M, T)

        def of_episode(
            params: Any, seen: Array, available: Array, actions: Array, q_bar: Array, real: Array
        ) -> tuple[Any, Array]:
            def weighted(params: Any) -> Array:
                values = self.network.values(params, seen[:-1], available[:-1])
                return jnp.sum(jnp.take_along_axis(values, actions[:, None], -1)[:, 0] * q_bar)

            found = jax.grad(weighted)(params)
            norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(found)))
            scale = jnp.where(real, jnp.minimum(1.0, clip_norm / jnp.maximum(norm, TINY)), 0.0)
            return jax.tree.map(lambda x: x * scale, found), norm

        def of_agent(params: Any, *own: Array) -> tuple[Any, Array]:
            episodes = jax.vmap(of_episode, in_axes=(None, 0, 0, 0, 0, 0))
            clipped, norms = episodes(params, *own, q_bar, sampled)
            mean = jnp.sum(norms * sampled) / jnp.maximum(sampled.sum(), 1)
            return jax.tree.map(lambda x: x.sum(0), clipped), mean

        own = (batch.seen, batch.available, batch.actions)
        return jax.vmap(of_agent, in_axes=(0, 1, 1, 1))(params, *own)

    def update(self, state: State, key: Array, settings: Settings) -> tuple[Learner, Array]:
        """One update, if it is time to learn; and the mean norm of the gradients."""
        B, old = self.job.buffer_size, state.learner
        key_sample, key_noise = jax.random.split(key)
        gone = jnp.clip(state.steps / settings.learning_rate_steps, 0.0, 1.0)
        growth = jnp.maximum(settings.clip_norm_end, 1e-9) / settings.clip_norm
        clip_norm = settings.clip_norm * jnp.where(settings.clip_norm_end > 0, growth**gone, 1.0)

        dice = jax.random.uniform(key_sample, (B,))
        chosen = dice < settings.expected_batch_size / B
        chosen &= jnp.arange(B) < jnp.minimum(state.episodes, B)
        _, slots = jax.lax.top_k(-jnp.where(chosen, dice, 2.0), self.job.largest_batch)
        sampled = chosen[slots]
        batch = jax.tree.map(lambda x: x[slots], state.buffer)
        batch = batch._replace(
            seen=batch.seen.astype(jnp.float32), actions=batch.actions.astype(jnp.int32)
        )
        error = self.team_error(old, batch, settings)
        summed, norms = self.gradient(old.params, batch, sampled, error, clip_norm)
        leaves, tree = jax.tree.flatten(summed)
        deviation = settings.noise_multiplier * clip_norm
        noised = [
            (x + deviation * jax.random.normal(k, x.shape)) / settings.expected_batch_size
            for x, k in zip(leaves, jax.random.split(key_noise, len(leaves)), strict=True)
        ]
        noise_variance = (deviation / settings.expected_batch_size) ** 2
        rate = settings.learning_rate * (1.0 - (1.0 - settings.learning_rate_end) * gone)
        new = improve(old, jax.tree.unflatten(tree, noised), rate, noise_variance, settings)
        begun = state.episodes >= settings.learning_starts
        return jax.tree.map(partial(jnp.where, begun), new, old), norms.mean()

    def iteration(self, state: State, settings: Settings) -> tuple[State, Array]:
        """Episodes side by side, then the updates that they call for."""
        count, learner = self.job.parallel_episodes, state.learner
        key, key_play, key_update = jax.random.split(state.key, 3)
        end = settings.exploration_end
        exploration = 1.0 - (1.0 - end) * state.steps / settings.exploration_steps
        actor = jax.tree.map(
            partial(jnp.where, settings.act_with_average > 0), learner.average, learner.params
        )
        played, _ = self.play(actor, key_play, jnp.maximum(end, exploration), count)
        slots = (state.episodes + jnp.arange(count)) % self.job.buffer_size
        state = State(
            learner,
            jax.tree.map(lambda b, x: b.at[slots].set(x.astype(b.dtype)), state.buffer, played),
            state.episodes + count,
            state.steps + played.length.sum(),
            key,
        )

        def one_update(state: State, key: Array) -> tuple[State, Array]:
            learner, norm = self.update(state, key, settings)
            return state._replace(learner=learner), norm

        updates = jax.random.split(key_update, count // self.job.update_every)
        state, norms = jax.lax.scan(one_update, state, updates)
        return state, norms.mean()

    @partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def advance(self, states: State, settings: Settings, iterations: int) -> tuple[State, Array]:
        """All lanes; with each lane's mean gradient norm."""

        def one(states: State, _: None) -> tuple[State, Array]:
            return jax.vmap(self.iteration)(states, settings)

        states, norms = jax.lax.scan(one, states, None, length=iterations)
        return states, norms.mean(0)

    @partial(jax.jit, static_argnums=0)
    def evaluate(self, states: State, key: Array) -> tuple[Array, Array]:
        """Win rates of all lanes' running and averaged models, in the same greedy episodes."""

        def win_rate(params: Any, key: Array) -> Array:
            return self.play(params, key, 0.0, EVALUATION)[1].mean()

        keys = jax.random.split(key, states.steps.shape[0])
        learner = states.learner
        return jax.vmap(win_rate)(learner.params, keys), jax.vmap(win_rate)(learner.average, keys)


def improve(
    old: Learner, gradient: Any, rate: Array, noise_variance: Array, settings: Settings
) -> Learner:
    """Adam, and the target and the average that follow it."""
    n, beta1, beta2 = old.updates + 1, settings.beta1, settings.beta2
    moment1 = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, old.moment1, gradient)
    moment2 = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, old.moment2, gradient)
    known = settings.noise_correction * noise_variance

    def adam(param: Array, m: Array, v: Array) -> Array:
        v = jnp.maximum(v / (1 - beta2**n) - known, 0.1 * known)
        return param - rate * m / (1 - beta1**n) / (jnp.sqrt(v) + 1e-8)

    params = jax.tree.map(adam, old.params, moment1, moment2)
    target = jax.tree.map(lambda t, p: t + settings.target_rate * (p - t), old.target, params)
    decay = jnp.minimum(settings.average_decay, (1.0 + n) / (10.0 + n))
    average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, old.average, params)
    return Learner(params, target, average, moment1, moment2, n)


# ---- logs -------------------------------------------------------------------------------------


def changed(settings: Settings) -> dict[str, float]:
    """What is not as by default."""
    default = Settings()._asdict()
    return {name: x for name, x in settings._asdict().items() if x != default[name]}


def run(job: Job, out: Path) -> None:
    """Train until every lane has made its steps; one line of `out` for every evaluation."""
    search = Search(job)
    lanes = [(x, job.first_seed + i) for x in job.settings for i in range(job.seeds)]
    columns = zip(*(settings for settings, _ in lanes), strict=True)
    settings = Settings(*(jnp.array(column, jnp.float32) for column in columns))
    seeds = jnp.array([seed for _, seed in lanes])
    states = jax.jit(jax.vmap(search.start))(seeds, settings.output_gain)
    iterations = max(1, job.eval_every // (EPISODE * job.parallel_episodes))
    head = {
        **job._asdict(),
        "settings": [changed(x) for x in job.settings],
        "parameters": search.parameters,
    }
    began, evaluations, steps = time.perf_counter(), 0, np.zeros(1)
    with out.open("w") as log:
        print(json.dumps(head), file=log, flush=True)
        while steps.min() < job.steps:
            states, norms = search.advance(states, settings, iterations)
            evaluations += 1
            running, averaged = search.evaluate(states, jax.random.key(10**6 + evaluations))
            steps = np.array(states.steps)
            line = {
                "seconds": time.perf_counter() - began,
                "steps": steps.tolist(),
                "running": running.tolist(),
                "averaged": averaged.tolist(),
                "gradient_norm": float(norms.mean()),
                "updates": int(states.learner.updates[0]),
                "episodes": int(states.episodes[0]),
            }
            print(json.dumps(line), file=log, flush=True)
            said = f"{out.name}: {steps.mean():,.0f} steps, {line['seconds']:.0f} s"
            print(said, file=sys.stderr, flush=True)


WINDOWS = ((0.35, 0.4), (0.5, 0.55), (0.65, 0.75), (0.75, 1.0))  # shares of all steps


def show(path: Path) -> None:
    """Win rates, running (averaged), in windows of the training, the last over all seeds."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if not lines:
        print(f"{path}: no evaluation yet")
        return
    last = lines[-1]
    shape = {name: x for name, x in head.items() if name != "settings"}
    print(path, json.dumps(shape))
    print(
        f"{last['updates']} updates, {last['episodes']} episodes, {last['seconds']:.0f} s, "
        f"gradient norm {last['gradient_norm']:.1f}"
    )
    count = len(head["settings"])
    steps, running, averaged = (
        np.array([line[name] for line in lines]).reshape(len(lines), count, -1)
        for name in ("steps", "running", "averaged")
    )

    def mean(wins: np.ndarray, window: tuple[float, float]) -> np.ndarray:
        """By setting and seed; not a number where no evaluation falls into the window."""
        low, high = (share * head["steps"] for share in window)
        inside = (steps > low) & (steps <= high)
        number = inside.sum(0)
        return np.where(number > 0, (wins * inside).sum(0) / np.maximum(number, 1), np.nan)

    table = [(mean(running, window), mean(averaged, window)) for window in WINDOWS]
    for i, settings in enumerate(head["settings"]):
        parts = " ".join(f"{r[i].mean():.2f} ({a[i].mean():.2f})" for r, a in table)
        ran, final = (x[i] for x in table[-1])
        both = " running ".join(
            f"{x.mean():.3f} ± {x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else 0:.3f}"
            for x in (final, ran)
        )
        print(f"{parts} | averaged {both} lowest {final.min():.2f} | {json.dumps(settings)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The search for the private recipe.")
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run", help="train the lanes of one job")
    running.add_argument("sweep", choices=SWEEPS)
    running.add_argument("job", help=", ".join(f"{n}: {' '.join(s)}" for n, s in SWEEPS.items()))
    running.add_argument("--out", type=Path, required=True, help="the log to write")
    showing = commands.add_parser("show", help="print what came of it")
    showing.add_argument("logs", type=Path, nargs="+")
    wanted = parser.parse_args()
    if wanted.command == "show":
        for path in wanted.logs:
            show(path)
        return
    jobs = SWEEPS[wanted.sweep]
    if wanted.job not in jobs:
        parser.error(f"sweep {wanted.sweep} has the jobs {', '.join(jobs)}")
    run(jobs[wanted.job], wanted.out)
    show(wanted.out)


if __name__ == "__main__":
    main()
