"""Infer an agent's private features from what an honest-but-curious teammate receives.

The victim is agent 0, the attacker agent 1. The attacker gets the numbers of one channel in a
window around a step, and the step number, which is public. It trains on one half of the episodes,
with the answers, and is tested on the other half. The test compares only cases of the same step, so
the step number alone has an AUC of exactly 0.5, although any sum of enough messages reveals it. A
step is used only if the victim is present throughout its window, so padding reveals nothing.

Shapes: E episodes, T steps, N agents, D numbers received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.lib.stride_tricks import sliding_window_view

from pevdn.agent.replay import Episode
from pevdn.errors import PevdnError
from pevdn.exchange import modular
from pevdn.exchange.secret_shared import Code, decode, encode, secret_shared, split
from pevdn.verification.attacks.statistics import Bools, Estimate, Floats, estimate, learn
from pevdn.verification.attacks.target import Scene
from pevdn.worlds.base import World
from pevdn.worlds.smax import SmaxWorld
from pevdn.worlds.toy import Coordination

VICTIM, ATTACKER = 0, 1
TEAM_SIZES = (2, 3, 5, 8)
CHOICES = 8  # largest number of choices tried for the share that is held or missing
CASES = 20_000  # largest number of training cases


class Feature(NamedTuple):
    """A yes-or-no question about an agent at a step."""

    name: str
    meaning: str
    answer: Callable[[Episode], Array]  # episodes (E, T, ...) to (E, T) bool


class Private(NamedTuple):
    """The private features of a world's agents."""

    features: tuple[Feature, ...]
    present: Callable[[Episode], Array]  # (E, T) bool: the agent is alive


def private_features(world: World) -> Private:
    """Return the private features that are defined in a world."""
    if isinstance(world, SmaxWorld):
        return _of_smax(world)
    if isinstance(world, Coordination):
        cue = Feature(
            "cue", "was shown cue 0", lambda e: _all_along(e, e.observations[:, 0, 0] == 1)
        )
        answer = Feature("action", "answers cue 0", lambda e: _all_along(e, e.actions[:, -1] == 1))
        return Private((cue, answer), lambda e: e.actions >= 0)
    later = Feature(
        "action",
        "one of the later half of the actions",
        lambda e: e.actions >= e.available.shape[-1] // 2,
    )
    return Private((later,), lambda e: e.actions >= 0)


def _of_smax(world: SmaxWorld) -> Private:
    """In SMAX, own features come last in an observation, and attacks last among the actions."""
    env = world._env
    own_health = env.own_features.index("health") - len(env.own_features)
    attack = env.num_movement_actions

    def health(episodes: Episode) -> Array:
        return episodes.observations[:, :-1, own_health]  # as a share of full health

    return Private(
        (
            Feature("health", "has lost some", lambda e: health(e) < 1),
            Feature("in range", "can attack", lambda e: e.available[:, :-1, attack:].any(-1)),
            Feature("action", "attacks", lambda e: e.actions >= attack),
        ),
        lambda e: health(e) > 0,
    )


def _all_along(episodes: Episode, answer: Array) -> Array:
    return answer[:, None] & (episodes.actions >= 0)


class Transcript(NamedTuple):
    """Messages and the victim's private features in E episodes."""

    messages: Floats  # (N, E, T)
    running: Bools  # (E, T) the episode has not ended
    present: Bools  # (E, T) and the victim is alive
    answers: dict[str, Bools]  # (E, T) by feature
    offers: tuple[Floats, ...] = ()  # (N, E, T) what agents would enter into noised openings


def transcribe(scenes: Iterable[Scene], private: Private) -> Transcript:
    """Return the transcript of all blocks of episodes."""
    blocks = [_transcribe_block(scene, private) for scene in scenes]
    return Transcript(
        np.concatenate([block.messages for block in blocks], axis=1),
        np.concatenate([block.running for block in blocks]),
        np.concatenate([block.present for block in blocks]),
        {name: np.concatenate([x.answers[name] for x in blocks]) for name in blocks[0].answers},
        tuple(
            np.concatenate(parts, axis=1) for parts in zip(*(x.offers for x in blocks), strict=True)
        ),
    )


def _transcribe_block(scene: Scene, private: Private) -> Transcript:
    own = scene.episodes[VICTIM]
    running = np.arange(scene.messages.shape[2]) < np.asarray(scene.length)[:, None]
    return Transcript(
        np.asarray(scene.messages, np.float64),
        running,
        running & np.asarray(private.present(own)),
        {feature.name: np.asarray(feature.answer(own)) for feature in private.features},
        tuple(np.asarray(entered, np.float64) for entered in scene.offers),
    )


# ---- channels: what the attacker receives ---------------------------------------------------


def around(values: Floats) -> Floats:
    """Return the window around each inner step: (E, T) to (E, T', D)."""
    return sliding_window_view(values, _width(values.shape[1]), axis=1)


def inner(values: Bools) -> Bools:
    """Return the steps that `around` keeps: (E, T) to (E, T')."""
    margin = _width(values.shape[1]) // 2
    return values[:, margin : values.shape[1] - margin]


def usable(present: Bools) -> Bools:
    """Return the inner steps whose whole window is present: (E, T) to (E, T')."""
    return np.all(sliding_window_view(present, _width(present.shape[1]), axis=1), axis=-1)


def _width(steps: int) -> int:
    return max(width for width in (1, 3, 5) if width <= steps)


@partial(jax.jit, static_argnames=("n", "code"))
def shares(key: Array, message: Array, n: int, code: Code) -> Array:
    """Return the victim's n shares (n, E, T) of its message (E, T)."""
    return split(key, encode(message, code), n, code.modulus)


def held(some: np.ndarray, code: Code) -> Floats:
    """Return what a holder of k shares (k, E, T) has: each share, and their sum modulo p."""
    numbers = np.asarray(_decoded(some, code), np.float64)
    return np.concatenate([around(x) for x in numbers], axis=-1)


@partial(jax.jit, static_argnames="code")
def _decoded(some: Array, code: Code) -> Array:
    return decode(jnp.concatenate([some, modular.total(some, code.modulus)[None]]), code)


def opened(key: Array, messages: Floats, code: Code) -> Floats:
    """Return the opened sum minus the attacker's own message, (E, T), for messages (N, E, T)."""
    result = _exchanged(key, messages.astype(np.float32), code)
    if result.refused > 0:
        what = f"a message of size {float(result.refused):g}"
        raise PevdnError(
            f"{code.misfit(len(messages), what)}, and the run would refuse it too; attack a run "
            "with a lower precision."
        )
    return np.asarray(result.total[ATTACKER], np.float64) - messages[ATTACKER]


_exchanged = jax.jit(secret_shared, static_argnames="code")


def composed(
    messages: Floats, running: Bools, half: Bools, most: int, generator: np.random.Generator
) -> tuple[dict[int, Floats], Bools]:
    """Return the sum minus the attacker's message in teams of `TEAM_SIZES`, and where it exists.

    Each sum (E, T', D) adds to the victim's message those of N − 2 teammates in other episodes at
    the same step. Teammates are this run's agents in turn, the attacker last. Episodes are combined
    within the same half only.
    """
    teammates = [*range(2, len(messages)), ATTACKER]
    windows = [around(m) for m in messages]
    going = usable(running)
    total, possible = windows[VICTIM].copy(), np.zeros(going.shape, bool)
    lent = np.zeros((most - 2, *total.shape))
    for side in (half, ~half):
        for step in range(going.shape[1]):
            (there,) = np.nonzero(going[:, step] & side)
            if len(there) < most:
                continue
            possible[there, step] = True
            shuffled = generator.permutation(there)
            for k in range(most - 2):
                lender = windows[teammates[k % len(teammates)]]
                lent[k, shuffled, step] = lender[np.roll(shuffled, k + 1), step]
    return {n: total + lent[: n - 2].sum(0) for n in TEAM_SIZES if n <= most}, possible


# ---- the attack -----------------------------------------------------------------------------


def read(
    received: Floats,
    answers: dict[str, Bools],
    where: Bools,
    half: Bools,
    seed: int,
    among: int = 1,
) -> dict[str, Estimate | None]:
    """Return the test AUC by feature; None if the answer never varies.

    received (E, T', D); answers and where (E, T'); half (E,) marks the training episodes.
    """
    training, testing = where & half[:, None], where & ~half[:, None]
    if not (training.any() and testing.any()):
        return dict.fromkeys(answers)
    clock = np.broadcast_to(np.arange(where.shape[1])[:, None], (*where.shape, 1))
    inputs = np.concatenate([received, clock], axis=-1)
    targets = np.stack(list(answers.values()), axis=-1)  # (E, T', F)
    model = learn(inputs[training][:CASES], targets[training][:CASES], seed)
    scores = model(inputs[testing])
    episode, step = np.nonzero(testing)
    estimates: dict[str, Estimate | None] = {}
    for number, (name, answer) in enumerate(answers.items()):
        both = (answer & testing).any(0) & (~answer & testing).any(
            0
        )  # (T',) steps with both answers
        varies = len(np.unique(answer[training])) == 2 and both.any()
        estimates[name] = (
            estimate(scores[:, number], answer[testing], episode, step, among) if varies else None
        )
    return estimates


class Reading(NamedTuple):
    """The result of one attack: channel, team size, feature and AUC."""

    channel: str
    agents: int
    composed: bool
    feature: str
    estimate: Estimate | None  # None: the feature never varied


def halves(episodes: int, generator: np.random.Generator) -> Bools:
    """Mark a random half of the episodes for training, (E,)."""
    half = np.zeros(episodes, bool)
    half[generator.permutation(episodes)[: episodes // 2]] = True
    return half


def attack(transcript: Transcript, code: Code, seed: int) -> list[Reading]:
    """Attack every channel and team size, for every feature."""
    generator = np.random.default_rng(seed)
    split_key, open_key = jax.random.split(jax.random.key(seed))
    half, n = halves(transcript.running.shape[0], generator), len(transcript.messages)
    dealt = np.asarray(shares(split_key, transcript.messages[VICTIM].astype(np.float32), n, code))
    rest = opened(open_key, transcript.messages, code)
    sums, possible = composed(
        transcript.messages, transcript.running, half, max(TEAM_SIZES), generator
    )
    where = usable(transcript.present) & possible  # the same for all channels
    spots = np.unique(np.linspace(0, n - 1, min(n, CHOICES)).astype(int))

    answers = {name: inner(answer) for name, answer in transcript.answers.items()}

    def best(channel: str, received: Iterable[Floats], among: int = 1) -> list[Reading]:
        """Return the strongest attack for each feature among these sets of numbers."""
        tried = [read(numbers, answers, where, half, seed, among) for numbers in received]
        strongest = {
            name: max((x for one in tried if (x := one[name]) is not None), default=None)
            for name in answers
        }
        return [Reading(channel, n, False, name, x) for name, x in strongest.items()]

    among = 2 * len(spots) * len(transcript.answers)  # number of attacks on shares
    readings = [
        *best("message", [around(transcript.messages[VICTIM])]),
        *best("one share", (held(dealt[i : i + 1], code) for i in spots), among),
        *best(
            "all shares but one",
            (held(np.delete(dealt, i, axis=0), code) for i in spots),
            among,
        ),
        *best("opened sum", [around(rest)]),
    ]
    for size, received in sums.items():
        for reading in best("opened sum", [received]):
            readings.append(reading._replace(agents=size, composed=True))
    return readings
