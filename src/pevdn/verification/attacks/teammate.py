"""What a curious teammate reads of an agent's private features from what it receives.

The victim is agent 0, the attacker agent 1. The attacker gets the numbers of one channel around a
step, and the clock, which is public. It learns from one half of the episodes, with the answers, and
is tested on the other half. There only cases of the same step are compared: the clock by itself is
worth exactly 0.5, although it would be read from any sum of enough messages. Only steps are used
whose whole surroundings were played with the victim there, so that padding tells nothing.

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
CHOICES = 8  # in large teams, so many choices of the share that is held or missing are tried
CASES = 20_000  # learnt from at most


class Feature(NamedTuple):
    """A yes-or-no question about an agent at a step."""

    name: str
    meaning: str
    answer: Callable[[Episode], Array]  # episodes (E, T, ...) to (E, T) bool


class Private(NamedTuple):
    """What the agents of a world would rather keep to themselves."""

    features: tuple[Feature, ...]
    present: Callable[[Episode], Array]  # (E, T) bool: there is somebody to ask about


def private_features(world: World) -> Private:
    """The questions that make sense in a world."""
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
    """SMAX ends an observation with the agent's own features, and the actions with the attacks."""
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


class Record(NamedTuple):
    """What the attack is about, gathered from all episodes."""

    messages: Floats  # (N, E, T)
    running: Bools  # (E, T) the episode goes on
    present: Bools  # (E, T) and the victim is there
    answers: dict[str, Bools]  # (E, T) by feature


def record(scene: Scene, private: Private) -> Record:
    """Of one block of episodes."""
    own = scene.episodes[VICTIM]
    running = np.arange(scene.messages.shape[2]) < np.asarray(scene.length)[:, None]
    return Record(
        np.asarray(scene.messages, np.float64),
        running,
        running & np.asarray(private.present(own)),
        {feature.name: np.asarray(feature.answer(own)) for feature in private.features},
    )


def together(records: list[Record]) -> Record:
    return Record(
        np.concatenate([r.messages for r in records], axis=1),
        np.concatenate([r.running for r in records]),
        np.concatenate([r.present for r in records]),
        {name: np.concatenate([r.answers[name] for r in records]) for name in records[0].answers},
    )


# ---- what the attacker gets -----------------------------------------------------------------


def around(values: Floats) -> Floats:
    """(E, T) to (E, T', D): each inner step with its neighbours."""
    return sliding_window_view(values, _width(values.shape[1]), axis=1)


def inner(values: Bools) -> Bools:
    """(E, T) to (E, T'): the steps that `around` keeps."""
    margin = _width(values.shape[1]) // 2
    return values[:, margin : values.shape[1] - margin]


def usable(present: Bools) -> Bools:
    """(E, T) to (E, T'): inner steps all of whose window is real."""
    return np.all(sliding_window_view(present, _width(present.shape[1]), axis=1), axis=-1)


def _width(steps: int) -> int:
    return max(width for width in (1, 3, 5) if width <= steps)


@partial(jax.jit, static_argnames=("n", "code"))
def shares(key: Array, message: Array, n: int, code: Code) -> Array:
    """The victim's n shares (n, E, T) of its message (E, T)."""
    return split(key, encode(message, code), n, code.modulus)


def held(some: np.ndarray, code: Code) -> Floats:
    """What a holder of some shares (k, E, T) has: each of them, and their sum modulo p."""
    numbers = np.asarray(_decoded(some, code), np.float64)
    return np.concatenate([around(x) for x in numbers], axis=-1)


@partial(jax.jit, static_argnames="code")
def _decoded(some: Array, code: Code) -> Array:
    return decode(jnp.concatenate([some, modular.total(some, code.modulus)[None]]), code)


def opened(key: Array, messages: Floats, code: Code) -> Floats:
    """The opened sum less what the attacker put in itself, (E, T), for messages (N, E, T)."""
    result = _exchanged(key, messages.astype(np.float32), code)
    if result.refused > 0:
        raise PevdnError(
            f"a message of size {float(result.refused):g} does not fit into what precision="
            f"{code.precision} and modulus={code.modulus} leave to {len(messages)} agents; the run "
            "would refuse it too, so there is no sum to attack."
        )
    return np.asarray(result.total[ATTACKER], np.float64) - messages[ATTACKER]


_exchanged = jax.jit(secret_shared, static_argnames="code")


def composed(
    messages: Floats, running: Bools, half: Bools, most: int, generator: np.random.Generator
) -> tuple[dict[int, Floats], Bools]:
    """What is left of the sum in teams of `TEAM_SIZES` (E, T', D), and where it could be made.

    To the victim's message come those of N − 2 teammates in other episodes, at the same step; the
    attacker's own is already taken off. Teammates are this run's agents in turn, the attacker last.
    Episodes lend to their own half only.
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
    """By feature, AUC on one half after learning on the other; None if the answer never varies.

    received (E, T', D); answers and where (E, T'); half (E,) is true for episodes to learn from.
    """
    learning, testing = where & half[:, None], where & ~half[:, None]
    if not (learning.any() and testing.any()):
        return dict.fromkeys(answers)
    clock = np.broadcast_to(np.arange(where.shape[1])[:, None], (*where.shape, 1))
    inputs = np.concatenate([received, clock], axis=-1)
    asked = np.stack(list(answers.values()), axis=-1)  # (E, T', F)
    model = learn(inputs[learning][:CASES], asked[learning][:CASES], seed)
    scores = model(inputs[testing])
    episode, step = np.nonzero(testing)
    found: dict[str, Estimate | None] = {}
    for number, (name, answer) in enumerate(answers.items()):
        both = (answer & testing).any(0) & (~answer & testing).any(0)  # (T',) to be compared
        varies = len(np.unique(answer[learning])) == 2 and both.any()
        found[name] = (
            estimate(scores[:, number], answer[testing], episode, step, among) if varies else None
        )
    return found


class Reading(NamedTuple):
    """One attack: what was received, what was asked, and how well it went."""

    channel: str
    agents: int
    composed: bool
    feature: str
    estimate: Estimate | None  # None: the feature never varied


def halves(episodes: int, generator: np.random.Generator) -> Bools:
    """(E,): a random half of the episodes, to learn from."""
    half = np.zeros(episodes, bool)
    half[generator.permutation(episodes)[: episodes // 2]] = True
    return half


def attack(found: Record, code: Code, seed: int) -> list[Reading]:
    """Every channel and team size, for every feature."""
    generator = np.random.default_rng(seed)
    split_key, open_key = jax.random.split(jax.random.key(seed))
    half, n = halves(found.running.shape[0], generator), len(found.messages)
    dealt = np.asarray(shares(split_key, found.messages[VICTIM].astype(np.float32), n, code))
    rest = opened(open_key, found.messages, code)
    sums, possible = composed(found.messages, found.running, half, max(TEAM_SIZES), generator)
    where = usable(found.present) & possible  # the same for all channels
    spots = np.unique(np.linspace(0, n - 1, min(n, CHOICES)).astype(int))

    answers = {name: inner(answer) for name, answer in found.answers.items()}

    def best(channel: str, received: Iterable[Floats], among: int = 1) -> list[Reading]:
        """By feature, of the attacks with one set of numbers or another."""
        tried = [read(numbers, answers, where, half, seed, among) for numbers in received]
        strongest = {
            name: max((x for one in tried if (x := one[name]) is not None), default=None)
            for name in answers
        }
        return [Reading(channel, n, False, name, x) for name, x in strongest.items()]

    among = 2 * len(spots) * len(found.answers)  # so many attacks on shares are made
    readings = [
        *best("message", [around(found.messages[VICTIM])]),
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
