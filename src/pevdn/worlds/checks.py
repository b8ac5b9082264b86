"""`check_env`: plays a world with random available actions, and says what is wrong with it."""

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
SEEDS = 8  # tried until two of them differ
LARGE = 100.0  # an observation beyond this learns badly


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    check: str
    result: str  # ok, warning or error
    sentence: str  # what was seen, and how to mend it


@dataclass(frozen=True)
class Checked:
    """A world and what was found about it."""

    env: str
    agents: tuple[AgentSpec, ...]
    max_steps: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether a team can train there: nothing is an error."""
        return all(check.result != ERROR for check in self.checks)


def check_env(env: Any, *, episodes: int = 5, seed: int = 0) -> Checked:
    """Play so many episodes, and a few more to compare with, in a world of any kind.

    `env` is what `pevdn.train` takes: an id, or an object. Episodes start from the seeds `seed`,
    `seed` + 1, …; actions are drawn evenly from the available ones.
    """
    if episodes < 1:
        raise UsageError(f"episodes is {episodes}, but must be at least 1")
    world = adopt(env)
    copy: Any = world.build() if isinstance(world, ExternalWorld) else _Stepwise(world)
    try:
        checks = tuple(_checks(world, copy, episodes, seed))
    finally:
        copy.close()
    return Checked(world.name, world.agents, world.max_steps, checks)


class _Wrong(Exception):
    """What broke an episode off."""


@dataclass
class _Episode:
    steps: list[Step] = field(default_factory=list)
    paid: list[dict[Any, float]] = field(default_factory=list)  # PettingZoo's rewards, if it is
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


def _checks(world: Any, copy: Any, episodes: int, seed: int) -> Iterator[Check]:
    yield _team(world.agents)
    if isinstance(copy, _Stepwise) and (changed := copy.changed_types()):
        yield Check("types", ERROR, changed)
        return
    try:
        played = [_play(world, copy, seed + i, seed + i, i) for i in range(episodes)]
        again = _play(world, copy, seed, seed, episodes)
        differs = any(
            not played[0].same_as(_play(world, copy, seed + i, seed, episodes + i))
            for i in range(1, SEEDS)
        )
    except _Wrong as problem:
        yield Check("steps", ERROR, str(problem))
        return
    steps = sum(episode.length for episode in played)
    yield Check("steps", OK, f"shapes, numbers, masks and flags are right in {steps} steps")
    yield _views(played)
    yield _masks(played)
    yield _repeatable(copy, played[0].same_as(again), seed)
    yield _chance(differs, seed)
    yield _reward(copy, played)
    yield _end(world, played)
    yield _leaving(played)
    yield _won(copy, played)
    timed = [*played[1:], again]  # without the first, which starts or compiles the world
    speed = sum(e.length for e in timed) / max(sum(e.seconds for e in timed), 1e-9)
    alone = "one at a time; training compiles them" if isinstance(copy, _Stepwise) else "in a copy"
    yield Check("speed", OK, f"{speed:,.0f} steps a second, {alone}")


def _play(world: Any, copy: Any, seed: int, chance: int, number: int) -> _Episode:
    """One episode from `seed`; the actions are drawn from a generator that starts at `chance`."""
    draw = np.random.default_rng(chance)
    episode, began, where = _Episode(), time.perf_counter(), f"in episode {number}"
    try:
        step = copy.reset(seed)
        _look(step, world, f"{where}, at reset")
        if step.done:
            raise _Wrong(f"reset gave an episode that is already done, {where}")
        episode.steps.append(step)
        while not step.done:
            at = f"{where}, step {episode.length + 1}"
            if episode.length >= world.max_steps:
                raise _Wrong(
                    f"an episode is not over after max_steps, {world.max_steps} {where}; end it "
                    "with done and truncated"
                )
            actions = tuple(int(draw.choice(np.flatnonzero(open_))) for open_ in step.available)
            step = copy.step(actions)
            _look(step, world, at)
            episode.steps.append(step)
            episode.paid.append(dict(getattr(copy, "paid", {})))
    except (_Wrong, PevdnError) as problem:
        raise _Wrong(str(problem)) from problem
    except Exception as problem:
        at = f"step {episode.length + 1}" if episode.steps else "at reset"
        said = (str(problem).strip().splitlines() or [""])[0]
        raise _Wrong(f"it raised {type(problem).__name__}: {said}, {where}, {at}") from problem
    episode.seconds = time.perf_counter() - began
    return episode


def _look(step: Step, world: Any, where: str) -> None:
    if found := problem_of(step, world.agents):
        raise _Wrong(f"it {found}, {where}")


# ---- one check each --------------------------------------------------------------------------


def _team(agents: tuple[AgentSpec, ...]) -> Check:
    sizes = sorted({(a.observation_size, a.n_actions) for a in agents})
    each = " and ".join(f"{o} numbers and {a} actions" for o, a in sizes)
    if len(agents) == 1:
        return Check("team", WARNING, f"there is one agent, which is no team; {each}")
    alike = "each with" if len(sizes) == 1 else "unlike, with"
    return Check("team", OK, f"{len(agents)} agents, {alike} {each}")


def _views(played: list[_Episode]) -> Check:
    views = zip(*(s.observations for e in played for s in e.steps), strict=True)  # agent by agent
    blind = [i for i, seen in enumerate(views) if all(np.array_equal(seen[0], x) for x in seen)]
    if blind:
        return Check(
            "views",
            WARNING,
            f"agent {blind[0]} saw the same numbers in every step; some environments draw their "
            "pictures only if they are made with render_mode=rgb_array",
        )
    largest = max(float(np.abs(o).max()) for e in played for s in e.steps for o in s.observations)
    if largest > LARGE:
        return Check(
            "views", WARNING, f"observations reach {largest:g}; scale them: networks learn near 1"
        )
    return Check("views", OK, f"observations reach {largest:.3g}")


def _masks(played: list[_Episode]) -> Check:
    masks = [m for e in played for s in e.steps[:-1] for m in s.available]
    if all(m.all() for m in masks):
        return Check("masks", OK, "every action is always available")
    share = np.mean([m.mean() for m in masks])
    return Check("masks", OK, f"{share:.0%} of the actions are available on average")


def _repeatable(copy: Any, same: bool, seed: int) -> Check:
    if same:
        return Check("repeatable", OK, f"seed {seed} and the same actions gave the same episode")
    why = (
        f"seed {seed} and the same actions gave two different episodes: draw everything from a "
        "generator that reset(seed) makes, and leave nothing over from the episode before"
        if copy.seeded
        else "it takes no seed when it is reset, so that no episode can be repeated"
    )
    return Check("repeatable", WARNING, f"{why}; until then no training can be repeated")


def _chance(differs: bool, seed: int) -> Check:
    if differs:
        return Check("chance", OK, "different seeds gave different episodes")
    return Check(
        "chance",
        WARNING,
        f"the seeds {seed} to {seed + SEEDS - 1} and the same actions gave the same episode: there "
        "is no chance in this world, or reset does not use its seed",
    )


def _reward(copy: Any, played: list[_Episode]) -> Check:
    rewards = np.array([s.reward for e in played for s in e.steps[1:]])
    if not rewards.any():
        return Check("reward", WARNING, "no step paid anything: a team learns from what differs")
    said = f"the team is paid {rewards.min():.3g} to {rewards.max():.3g} a step"
    paid = [pay for e in played for pay in e.paid if pay]
    if not paid:
        return Check("reward", OK, f"{said}, the same for all")
    how = copy.team_reward
    if how == "common":
        return Check("reward", OK, f"{said}, which is what every agent is paid")
    if all(len(set(pay.values())) == 1 for pay in paid):
        once = "; if it always is, team-reward=common counts it once" if how == "sum" else ""
        return Check("reward", OK, f"{said}: the {how} of what all were paid, alike{once}")
    return Check("reward", OK, f"{said}: the {how} of what the agents were paid, which differed")


def _end(world: Any, played: list[_Episode]) -> Check:
    lengths = [e.length for e in played]
    clocked = sum(bool(e.last.truncated) for e in played)
    long = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else str(lengths[0])
    return Check(
        "end",
        OK,
        f"episodes took {long} of {world.max_steps} steps; {clocked} of {len(played)} were "
        "truncated by the clock",
    )


def _leaving(played: list[_Episode]) -> Check:
    """Who sees nothing and can do one thing only, before the end."""

    def gone(seen: Any, open_: Any) -> bool:
        return not seen.any() and open_.sum() == 1

    left = sum(
        any(gone(*view) for view in zip(s.observations, s.available, strict=True))
        for e in played
        for s in e.steps[-2:-1]
    )
    if left:
        return Check("leaving", OK, f"agents had left before the end in {left} of {len(played)}")
    return Check("leaving", OK, "every agent stayed to the end")


def _won(copy: Any, played: list[_Episode]) -> Check:
    if not copy.tells_won:
        return Check(
            "won",
            WARNING,
            "nothing says whether an episode was won, so win_rate stays 0 and return is what "
            "counts; put won=True into an agent's info at the end of a won one",
        )
    won = sum(bool(e.last.won) for e in played)
    return Check("won", OK, f"{won} of {len(played)} random episodes were won")


# ---- worlds in JAX ---------------------------------------------------------------------------


class _Stepwise:
    """A world in JAX, played one step at a time."""

    seeded = tells_won = True

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
        """A loop over steps compiles only if a step gives back the types that it takes."""
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
            said = (str(problem).strip().splitlines() or [""])[0]
            return f"it does not compile: {type(problem).__name__}: {said}"
        for one, two in zip(types(before), types(after), strict=False):
            if one != two:
                return f"reset gives {one}, but a step gives {two}: both must have the same types"
        return None
