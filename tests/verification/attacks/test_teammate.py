"""A curious teammate: messages and sums reveal private features, shares do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attacked import generator, memorable
from support import SMALL

import pevdn
from pevdn import worlds
from pevdn.agent import learning, replay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import make
from pevdn.exchange.secret_shared import Code
from pevdn.simulation.program import Simulation
from pevdn.verification.attacks import teammate
from pevdn.verification.attacks.statistics import Estimate
from pevdn.verification.attacks.target import Target, messages

FEATURES = ["cue", "action"]


@pytest.fixture(scope="module")
def readings(transcript: teammate.Transcript) -> dict[tuple[str, int, bool, str], Estimate]:
    found = {}
    for x in teammate.attack(transcript, Code(), seed=0):
        assert x.estimate is not None
        found[x.channel, x.agents, x.composed, x.feature] = x.estimate
    return found


Readings = dict[tuple[str, int, bool, str], Estimate]


def reader(transcript: teammate.Transcript, feature: str) -> Callable[..., Estimate | None]:
    half = teammate.halves(len(transcript.running), generator())
    answers = {feature: teammate.inner(transcript.answers[feature])}
    where = teammate.usable(transcript.present)
    return lambda received, among=1: teammate.read(received, answers, where, half, 0, among)[
        feature
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_private_feature_is_read_from_a_message_in_the_clear(
    readings: Readings, feature: str
) -> None:
    found = readings["message", 2, False, feature]
    assert found.auc > 0.8 and found.low > 0.7


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_one_share_and_any_n_minus_1_shares_tell_nothing(
    transcript: teammate.Transcript, n: int, feature: str
) -> None:
    dealt = teammate.shares(jax.random.key(n), transcript.messages[0].astype(np.float32), n, Code())
    sets = [[i] for i in range(n)] + [[j for j in range(n) if j != i] for i in range(n)]
    for some in sets:
        held = teammate.held(dealt[np.array(some)], Code())
        found = reader(transcript, feature)(held, among=len(sets))
        assert found is not None and found.contains_chance, (some, found)
        assert found.high - found.low < 0.4


@pytest.mark.parametrize("modulus", [2**32, 2**31 - 1])
def test_all_n_shares_tell_what_the_message_tells(
    transcript: teammate.Transcript, modulus: int
) -> None:
    code = Code(modulus=modulus)
    dealt = teammate.shares(jax.random.key(1), transcript.messages[0].astype(np.float32), 3, code)
    everything = reader(transcript, "cue")(teammate.held(dealt, code))
    message = reader(transcript, "cue")(teammate.around(transcript.messages[0]))
    assert everything is not None and message is not None
    assert everything.auc > 0.8 and abs(everything.auc - message.auc) < 0.1


def test_every_attack_on_shares_of_a_run_is_at_chance(readings: Readings) -> None:
    of_shares = [x for (channel, *_), x in readings.items() if "share" in channel]
    assert len(of_shares) == 2 * len(FEATURES)
    assert all(x.contains_chance for x in of_shares)


@pytest.mark.parametrize("feature", FEATURES)
def test_with_two_agents_the_opened_sum_is_the_message(
    readings: Readings, transcript: teammate.Transcript, feature: str
) -> None:
    message = readings["message", 2, False, feature]
    assert readings["opened sum", 2, True, feature] == message
    assert readings["opened sum", 2, False, feature].auc == pytest.approx(message.auc, abs=0.02)
    rest = teammate.opened(jax.random.key(0), transcript.messages, Code())
    assert np.abs(rest - transcript.messages[0]).max() < 3e-5


@pytest.mark.parametrize("feature", FEATURES)
def test_more_teammates_hide_better(readings: Readings, feature: str) -> None:
    found = [readings["opened sum", n, True, feature] for n in teammate.TEAM_SIZES]
    assert teammate.TEAM_SIZES == (2, 3, 5, 8)
    for fewer, more in itertools.pairwise(found):
        assert more.auc < fewer.high  # within the error of measurement
    assert found[-1].high < found[0].low


def test_the_clock_alone_is_worth_nothing(transcript: teammate.Transcript) -> None:
    nothing = np.zeros((*teammate.inner(transcript.running).shape, 1))
    found = reader(transcript, "cue")(nothing)
    assert found is not None and found.auc == pytest.approx(0.5)


def some_transcript(seed: int = 0, episodes: int = 60, steps: int = 12) -> teammate.Transcript:
    """Random messages of three agents, the first of which betrays the answer."""
    random = generator(seed)
    length = random.integers(4, steps + 1, episodes)
    running = np.arange(steps) < length[:, None]
    answer = random.random((episodes, steps)) < 0.5
    messages = random.normal(size=(3, episodes, steps))
    messages[0] += 2 * answer
    gone = random.integers(3, steps + 1, episodes)  # the victim dies
    present = running & (np.arange(steps) < gone[:, None])
    return teammate.Transcript(messages * running, running, present, {"answer": answer & running})


def test_padding_and_a_dead_victim_leave_no_trace() -> None:
    honest = some_transcript()
    noise = generator(1).normal(size=honest.messages.shape)
    padded = honest._replace(
        messages=np.where(honest.running, honest.messages, 100 * noise),
        answers={"answer": np.where(honest.present, honest.answers["answer"], noise[0] > 0)},
    )
    assert teammate.attack(honest, Code(), 0) == teammate.attack(padded, Code(), 0)
    used = teammate.usable(honest.running)
    assert used.sum() == np.maximum(0, honest.running.sum(1) - 4).sum()


def test_the_halves_to_learn_from_and_to_test_on_are_disjoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = some_transcript()
    learnt, tested = set(), set()

    def spy(inputs: np.ndarray, target: np.ndarray, seed: int) -> Any:
        learnt.update(inputs[:, 0])

        def scores(inputs: np.ndarray) -> np.ndarray:
            tested.update(inputs[:, 0])
            return inputs[:, :1]

        return scores

    monkeypatch.setattr(teammate, "learn", spy)
    half = teammate.halves(60, generator())
    episode = np.broadcast_to(np.arange(60.0)[:, None, None], (60, 8, 1))
    answers = {"answer": teammate.inner(found.answers["answer"])}
    teammate.read(episode, answers, teammate.usable(found.running), half, seed=0)
    assert learnt and tested and not learnt & tested
    assert half.sum() == 30


def test_composed_teams_borrow_from_other_episodes_of_the_same_half_and_step() -> None:
    running = np.ones((40, 9), bool)
    episode, step = np.meshgrid(np.arange(40.0), np.arange(9.0), indexing="ij")
    messages = np.stack([0 * episode, 10_000 * (step + 1) + episode, 0 * episode])
    half = teammate.halves(40, generator())
    messages[0] = 0.0
    sums, possible = teammate.composed(messages, running, half, 8, generator(1))
    assert possible.all() and list(sums) == [2, 3, 5, 8]
    assert not sums[2].any()  # no teammate is added
    assert not sums[3].any()  # agent 2, whose messages are nought
    borrowed = sums[5]  # agents 2, 1, 2
    steps, lenders = np.divmod(borrowed, 10_000)
    assert np.array_equal(steps, np.broadcast_to(teammate.around(step + 1), steps.shape))
    assert np.all(lenders == lenders[..., :1])  # the whole window is from one episode
    lender = lenders[..., 0].astype(int)
    assert np.all(lender != episode[:, :5])
    assert np.all(half[lender] == half[:, None])


def test_a_message_that_no_run_would_send_is_refused_in_one_sentence() -> None:
    with pytest.raises(pevdn.PevdnError, match="the run would refuse it too"):
        teammate.opened(jax.random.key(0), np.full((2, 3, 4), 1e6), Code())


def test_features_of_smax_are_read_from_the_agents_own_record() -> None:
    world: Any = worlds.make("smax-sc2:3m")
    state, _ = jax.jit(world.reset)(jax.random.key(0))
    units, seen = state.state, jax.jit(world._result)

    def asked(**changes: Any) -> tuple[list[bool], bool]:
        changed = state.replace(state=units.replace(**changes))
        step = seen(changed, jnp.zeros(()), jnp.zeros((), bool))
        own = Episode(
            observations=np.stack([step.observations[0]] * 2)[None],
            available=np.stack([step.available[0]] * 2)[None],
            actions=np.array([[5]]),
            rewards=np.zeros((1, 1)),
            terminal=np.zeros((1, 1), bool),
            length=np.ones(1, int),
        )
        private = teammate.private_features(world)
        assert [feature.name for feature in private.features] == ["health", "in range", "action"]
        answers = [bool(feature.answer(own)[0, 0]) for feature in private.features]
        return answers, bool(private.present(own)[0, 0])

    assert asked() == ([False, False, True], True)
    assert asked(unit_health=units.unit_health.at[0].add(-1)) == ([True, False, True], True)
    assert asked(unit_health=units.unit_health.at[1:].add(-1)) == ([False, False, True], True)
    near = units.unit_positions.at[3].set(units.unit_positions[0] + 1)
    assert asked(unit_positions=near) == ([False, True, True], True)
    assert asked(unit_alive=units.unit_alive.at[0].set(False))[1] is False


@pytest.mark.slow
def test_in_a_battle_messages_tell_and_shares_do_not(tmp_path: Path) -> None:
    settings = {**SMALL, "hidden_size": 16, "eval_every": 4000}
    run = pevdn.train("pe-vdn-b", "smax-sc2:3m", steps=4000, out=tmp_path / "run", **settings)
    target = Target(run)
    private = teammate.private_features(target.simulation.world)
    keys = jax.random.split(jax.random.key(0), 512)
    transcript = teammate.transcribe(target.play(keys), private)
    found = {
        (x.channel, x.agents, x.composed, x.feature): x.estimate
        for x in teammate.attack(transcript, target.code, seed=0)
    }
    for feature in ("health", "in range", "action"):
        message, opened = (found[c, 3, False, feature] for c in ("message", "opened sum"))
        assert message is not None and message.low > 0.55
        assert opened is not None and 0.5 < opened.auc < message.high
        for channel in ("one share", "all shares but one"):
            share = found[channel, 3, False, feature]
            assert share is not None and share.contains_chance and share.high - share.low < 0.2
        alone, crowd = found["opened sum", 2, True, feature], found["opened sum", 8, True, feature]
        assert alone is not None and crowd is not None and crowd.high < alone.low


@pytest.mark.parametrize("algorithm", ["vdn", "pe-vdn-b", "pe-vdn-c"])
def test_messages_are_those_of_the_agents(target: Target, algorithm: str) -> None:
    """As each agent computes its own, whatever the algorithm makes of them."""
    config = make(algorithm, target.config.env, settings={"hidden_size": 8})
    simulation = Simulation(target.simulation.world, config)
    learners, episodes = jax.jit(simulation.start)(jnp.arange(1)).learners, memorable(6)
    by_kind = tuple(jax.tree.map(lambda x: jnp.asarray(x)[None, None], e) for e in episodes)
    found = jax.jit(partial(messages, simulation))(learners, by_kind)
    assert found.shape == (1, 2, 6, 3)
    s = config.settings
    for i, own in enumerate(episodes):
        params, past = jax.tree.map(lambda x: x[0, 0], (learners[i].params, learners[i].target))
        how = (s.gamma, s.double_q, s.return_lambda)
        known, _ = learning.message(params, past, replay.time_first(own), *how)
        assert np.allclose(found[0, i], known.T, atol=1e-5)
