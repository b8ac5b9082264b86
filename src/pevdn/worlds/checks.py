"""`check_env`: play a world with random available actions and report its problems."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pevdn.errors import PevdnError, UsageError
from pevdn.worlds import adopt
from pevdn.worlds.base import AgentSpec, ExternalWorld, Step, World
from pevdn.worlds.external import problem_of

OK, WARNING, ERROR = "ok", "warning", "error"
SEEDS = 8  # compared, until two give different episodes
LARGE = 100.0  # learning from larger observations is poor


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    check: str
    result: str  # ok, warning or error
    sentence: str  # the finding, and the fix


@dataclass(frozen=True)
class Checked:
    """A world and the results of its checks."""

    env: str
    agents: tuple[AgentSpec, ...]
    max_steps: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Return whether a team can train in it: no check is an error."""
        return all(check.result != ERROR for check in self.checks)


def check_env(env: Any, *, episodes: int = 5, seed: int = 0) -> Checked:
    """Play `episodes` episodes, and a few more for comparison, and return the checks.

    `env` is an id or an object, as for `pevdn.train`. The episodes have the seeds `seed`,
    `seed` + 1, …; actions are uniform among the available ones.
    """
    if episodes < 1:
        raise UsageError(f"episodes is {episodes}, but must be at least 1")
    world = adopt(env)
    instance: Any = world.build() if isinstance(world, ExternalWorld) else _JaxEnvironment(world)
    try:
        checks = tuple(_checks(world, instance, episodes, seed))
    finally:
        instance.close()
    return Checked(world.name, world.agents, world.max_steps, checks)


class _Failed(Exception):
    """The reason why an episode could not be completed."""


@dataclass
class _Episode:
    steps: list[Step] = field(default_factory=list)
    rewards: list[dict[Any, float]] = field(default_factory=list)  # by agent, of PettingZoo worlds
    seconds: float = 0.0

    @property
    def length(self) -> int:
        return len(self.steps) - 1

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def same_as(self, other: _Episode) -> bool:
        def flat(episode: _Episode) -> Iterator[Any]:
            for step in episode.steps:
                yield from (*step.observations, *step.available, *step[2:])

        return self.length == other.length and all(
            np.array_equal(a, b) for a, b in zip(flat(self), flat(other), strict=True)
        )


def _checks(world: Any, env: Any, episodes: int, seed: int) -> Iterator[Check]:
    yield _team(world.agents)
    in_jax = isinstance(env, _JaxEnvironment)
    if in_jax and (changed := env.changed_types()):
        yield Check("types", ERROR, changed)
        return
    try:
        played = [_play(world, env, seed + i, seed + i, i) for i in range(episodes)]
        again = _play(world, env, seed, seed, episodes)
        differs = any(
            not played[0].same_as(_play(world, env, seed + i, seed, episodes + i))
            for i in range(1, SEEDS)
        )
    except _Failed as problem:
        yield Check("steps", ERROR, str(problem))
        return
    steps = sum(episode.length for episode in played)
    yield Check("steps", OK, f"shapes, numbers, masks and flags are valid in {steps} steps")
    yield _observations(played)
    yield _masks(played)
    yield _repeatable(env, played[0].same_as(again), seed)
    yield _chance(differs, seed)
    yield _reward(env, played)
    yield _end(world, played)
    yield _leaving(played)
    yield _won(env, played)
    timed = [*played[1:], again]  # without the first, which starts or compiles the world
    speed = sum(e.length for e in timed) / max(sum(e.seconds for e in timed), 1e-9)
    how = "one at a time; training compiles whole episodes" if in_jax else "by one worker"
    yield Check("speed", OK, f"{speed:,.0f} steps per second, {how}")


def _play(world: Any, env: Any, seed: int, action_seed: int, number: int) -> _Episode:
    """Play one episode from `seed`, with actions from a generator seeded with `action_seed`."""
    generator = np.random.default_rng(action_seed)
    episode, began, where = _Episode(), time.perf_counter(), f"in episode {number}"
    try:
        step = env.reset(seed)
        _require_valid(step, world, f"{where}, at reset")
        if step.done:
            raise _Failed(f"reset returned an episode that is already done, {where}")
        episode.steps.append(step)
        while not step.done:
            at = f"{where}, step {episode.length + 1}"
            if episode.length >= world.max_steps:
                raise _Failed(
                    f"the episode is not over after max_steps={world.max_steps}, {where}; end it "
                    "with done and truncated"
                )
            actions = tuple(int(generator.choice(np.flatnonzero(mask))) for mask in step.available)
            step = env.step(actions)
            _require_valid(step, world, at)
            episode.steps.append(step)
            episode.rewards.append(dict(getattr(env, "rewards", {})))
    except (_Failed, PevdnError) as problem:
        raise _Failed(str(problem)) from problem
    except Exception as problem:
        at = f"step {episode.length + 1}" if episode.steps else "at reset"
        raise _Failed(f"it raised {_short(problem)}, {where}, {at}") from problem
    episode.seconds = time.perf_counter() - began
    return episode


def _require_valid(step: Step, world: Any, where: str) -> None:
    if problem := problem_of(step, world.agents):
        raise _Failed(f"it {problem}, {where}")


def _short(problem: Exception) -> str:
    """Return the type and the first line of an exception."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0]}"


# ---- one check each --------------------------------------------------------------------------


def _team(agents: tuple[AgentSpec, ...]) -> Check:
    sizes = sorted({(a.observation_size, a.n_actions) for a in agents})
    each = " and ".join(f"{o} numbers and {a} actions" for o, a in sizes)
    if len(agents) == 1:
        return Check("team", WARNING, f"there is only one agent, with {each}; a team needs two")
    kind = "each with" if len(sizes) == 1 else "of different sizes, with"
    return Check("team", OK, f"{len(agents)} agents, {kind} {each}")


def _observations(played: list[_Episode]) -> Check:
    by_agent = zip(*(s.observations for e in played for s in e.steps), strict=True)
    constant = [i for i, own in enumerate(by_agent) if all(np.array_equal(own[0], x) for x in own)]
    if constant:
        return Check(
            "observations",
            WARNING,
            f"agent {constant[0]} observed the same numbers in every step; some environments "
            "render image observations only with render_mode=rgb_array",
        )
    largest = max(float(np.abs(o).max()) for e in played for s in e.steps for o in s.observations)
    if largest > LARGE:
        return Check(
            "observations", WARNING, f"observations reach {largest:g}; scale them to about 1"
        )
    return Check("observations", OK, f"observations reach {largest:.3g}")


def _masks(played: list[_Episode]) -> Check:
    masks = [m for e in played for s in e.steps[:-1] for m in s.available]
    if all(m.all() for m in masks):
        return Check("masks", OK, "every action is always available")
    share = np.mean([m.mean() for m in masks])
    return Check("masks", OK, f"{share:.0%} of the actions are available on average")


def _repeatable(env: Any, same: bool, seed: int) -> Check:
    if same:
        return Check("repeatable", OK, f"seed {seed} and the same actions gave the same episode")
    why = (
        f"seed {seed} and the same actions gave two different episodes: draw all random numbers "
        "from a generator seeded in reset(seed), and keep no state from the previous episode"
        if env.seeded
        else "reset takes no seed, so no episode can be repeated"
    )
    return Check("repeatable", WARNING, f"{why}; training is not reproducible")


def _chance(differs: bool, seed: int) -> Check:
    if differs:
        return Check("chance", OK, "different seeds gave different episodes")
    return Check(
        "chance",
        WARNING,
        f"the seeds {seed} to {seed + SEEDS - 1} and the same actions gave the same episode: the "
        "world is deterministic, or reset does not use its seed",
    )


def _reward(env: Any, played: list[_Episode]) -> Check:
    rewards = np.array([s.reward for e in played for s in e.steps[1:]])
    if not rewards.any():
        return Check("reward", WARNING, "every reward was 0: there is nothing to learn from")
    reach = f"the team's reward is {rewards.min():.3g} to {rewards.max():.3g} per step"
    by_agent = [own for e in played for own in e.rewards if own]
    if not by_agent:
        return Check("reward", OK, reach)
    how = env.team_reward
    if how == "common":
        return Check("reward", OK, f"{reach}, common to all agents")
    if all(len(set(own.values())) == 1 for own in by_agent):
        hint = "; if they always are, team-reward=common counts them once" if how == "sum" else ""
        return Check("reward", OK, f"{reach}: the {how} of the agents' rewards, all equal{hint}")
    return Check("reward", OK, f"{reach}: the {how} of the agents' rewards, which differed")


def _end(world: Any, played: list[_Episode]) -> Check:
    lengths = [e.length for e in played]
    truncated = sum(bool(e.last.truncated) for e in played)
    span = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else str(lengths[0])
    return Check(
        "end",
        OK,
        f"episodes took {span} of {world.max_steps} steps; {truncated} of {len(played)} were "
        "truncated",
    )


def _leaving(played: list[_Episode]) -> Check:
    """Count episodes that an agent left early: it observes zeros and has one action."""

    def gone(observation: Any, mask: Any) -> bool:
        return not observation.any() and mask.sum() == 1

    left = sum(
        any(gone(*own) for own in zip(s.observations, s.available, strict=True))
        for e in played
        for s in e.steps[-2:-1]
    )
    if left:
        return Check("leaving", OK, f"agents left before the end in {left} of {len(played)}")
    return Check("leaving", OK, "every agent stayed to the end")


def _won(env: Any, played: list[_Episode]) -> Check:
    if not env.reports_won:
        return Check(
            "won",
            WARNING,
            "the world does not report victories, so win_rate stays 0 and only return is "
            "meaningful; set won=True in an agent's info at the end of a won episode",
        )
    won = sum(bool(e.last.won) for e in played)
    return Check("won", OK, f"{won} of {len(played)} random episodes were won")


# ---- worlds in JAX ---------------------------------------------------------------------------


class _JaxEnvironment:
    """A JAX world as an `ExternalEnv`, played one step at a time."""

    seeded = reports_won = True

    def __init__(self, world: World) -> None:
        import jax

        self.world = world
        self._reset, self._step = jax.jit(world.reset), jax.jit(world.step)

    def reset(self, seed: int) -> Step:
        import jax

        self._key, key = jax.random.split(jax.random.key(seed))
        self._state, step = self._reset(key)
        return jax.device_get(step)

    def step(self, actions: tuple[int, ...]) -> Step:
        import jax

        self._key, key = jax.random.split(self._key)
        self._state, step = self._step(key, self._state, tuple(map(np.int32, actions)))
        return jax.device_get(step)

    def close(self) -> None:
        pass

    def changed_types(self) -> str | None:
        """Return how the types of `reset` and `step` differ: a compiled loop needs equal ones."""
        import jax

        def types(tree: Any) -> list[str]:
            paths, _ = jax.tree_util.tree_flatten_with_path(tree)
            return [
                f"{'weak ' if leaf.weak_type else ''}{leaf.dtype} {leaf.shape} at "
                f"{jax.tree_util.keystr(where)}"
                for where, leaf in paths
            ]

        key, actions = jax.random.key(0), tuple(np.int32(0) for _ in self.world.agents)
        try:
            before = jax.eval_shape(self.world.reset, key)
            after = jax.eval_shape(self.world.step, key, before[0], actions)
        except Exception as problem:
            return f"it does not compile: {_short(problem)}"
        for one, two in zip(types(before), types(after), strict=False):
            if one != two:
                return f"reset returns {one}, but step returns {two}; their types must be equal"
        return None
