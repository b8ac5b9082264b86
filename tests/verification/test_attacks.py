"""Claims about the attacks: what they find is there, what they must not find they do not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm
from support import SMALL, cli, content

import pevdn
from pevdn import worlds
from pevdn.agent import learning, replay
from pevdn.agent.replay import Episode
from pevdn.config.experiment import make
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import accounting, planner
from pevdn.simulation.program import Simulation
from pevdn.training.directory import Run
from pevdn.verification import attacks
from pevdn.verification.attacks import membership, statistics, teammate
from pevdn.verification.attacks.statistics import Estimate, estimate, largest_auc
from pevdn.verification.attacks.target import Target, messages

FEATURES = ["cue", "action"]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- how well an attack does -------------------------------------------------------------------


def test_the_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    scores, positive = np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, True, False, True])
    assert estimate(scores, positive, np.arange(4)).auc == pytest.approx((1 + 0.5 + 1 + 1) / 4)


def test_the_auc_agrees_with_another_implementation() -> None:
    scores = generator().normal(size=200).round(1)  # with ties
    positive = generator(1).random(200) < 0.3
    wins = mannwhitneyu(scores[positive], scores[~positive]).statistic
    pairs = positive.sum() * (~positive).sum()
    assert estimate(scores, positive, np.arange(200)).auc == pytest.approx(wins / pairs)


def dependent_cases(seed: int, effect: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """40 episodes of 15 steps; what an episode has in common moves scores and answers."""
    random = generator(seed)
    common = random.normal(size=(40, 1))
    positive = random.random((40, 15)) < 1 / (1 + np.exp(-2 * common))
    scores = random.normal(size=(40, 1)) + random.normal(size=(40, 15)) + effect * positive
    return scores.ravel(), positive.ravel(), np.repeat(np.arange(40), 15)


@pytest.mark.parametrize("effect", [0.0, 1.5])
def test_the_interval_covers_the_truth_although_steps_of_an_episode_depend(effect: float) -> None:
    truth = norm.cdf(effect / 2)  # two scores differ with variance 4
    found = [estimate(*dependent_cases(seed, effect)) for seed in range(400)]
    covered = np.mean([x.low <= truth <= x.high for x in found])
    assert 0.92 < covered < 0.98
    naive = []
    for seed in range(100):
        scores, positive, _ = dependent_cases(seed, effect)
        x = estimate(scores, positive, np.arange(len(scores)))
        naive.append(x.low <= truth <= x.high)
    assert np.mean(naive) < 0.85  # taking steps for independent would be too sure


def test_intervals_that_hold_at_once_are_wider() -> None:
    cases = dependent_cases(0, 0.0)
    alone, many = estimate(*cases), estimate(*cases, among=18)
    assert alone.auc == many.auc
    assert many.low < alone.low < alone.high < many.high


def test_only_cases_of_the_same_stratum_are_compared() -> None:
    random = generator()
    step = random.integers(0, 10, 500)
    positive = random.random(500) < step / 10
    assert estimate(1.0 * step, positive, np.arange(500)).auc > 0.7
    assert estimate(1.0 * step, positive, np.arange(500), step).auc == 0.5
    scores = random.normal(size=500) + 2 * positive
    pairs = [
        (scores[i] > scores[j], True)
        for i in np.nonzero(positive)[0]
        for j in np.nonzero(~positive & (step == step[i]))[0]
    ]
    known = np.mean([won for won, _ in pairs])
    assert estimate(scores, positive, np.arange(500), step).auc == pytest.approx(known)


def test_differential_privacy_bounds_the_auc() -> None:
    assert largest_auc([(0.0, 0.0)]) == pytest.approx(0.5, abs=2e-4)
    assert largest_auc([]) == largest_auc([(math.inf, 1e-5)]) == 1.0
    for epsilon, delta in ((1.0, 0.0), (1.0, 0.01), (3.0, 1e-5), (0.2, 0.3)):
        kite = (1 - delta) ** 2 / (1 + math.exp(epsilon))  # what the best ROC curve leaves
        assert 1 - kite <= largest_auc([(epsilon, delta)]) < 1 - kite + 1e-3


def test_many_guarantees_bound_the_auc_of_a_gaussian_tightly() -> None:
    mu = 0.5  # two normal distributions so far apart have an AUC of Φ(μ/√2)
    deltas = [
        (e, norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu))
        for e in np.linspace(0, 3, 31)
    ]
    truth = norm.cdf(mu / math.sqrt(2))
    assert truth <= largest_auc(deltas) < truth + 2e-3


def test_the_attackers_model_combines_inputs() -> None:
    x = generator().normal(size=(4000, 2)) * [1.0, 1e6]
    target = (x[:, 0] > 0) ^ (x[:, 1] > 0)
    scores = statistics.learn(x[:2000], target[:2000, None], seed=0)(x[2000:])
    assert estimate(scores[:, 0], target[2000:], np.arange(2000)).auc > 0.95


# --- a curious teammate --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("attacks") / "run"
    return pevdn.train("pe-vdn-b", "toy:coordination", steps=240, out=out, **SMALL)


@pytest.fixture(scope="module")
def target(run: Run) -> Target:
    return Target(run)


@pytest.fixture(scope="module")
def record(target: Target) -> teammate.Record:
    private = teammate.private_features(target.simulation.world)
    keys = jax.random.split(jax.random.key(0), 1024)
    return teammate.together([teammate.record(scene, private) for scene in target.play(keys)])


@pytest.fixture(scope="module")
def readings(record: teammate.Record) -> dict[tuple[str, int, bool, str], Estimate]:
    found = {}
    for x in teammate.attack(record, Code(), seed=0):
        assert x.estimate is not None
        found[x.channel, x.agents, x.composed, x.feature] = x.estimate
    return found


Readings = dict[tuple[str, int, bool, str], Estimate]


def reader(record: teammate.Record, feature: str) -> Callable[..., Estimate | None]:
    half = teammate.halves(len(record.running), generator())
    answers = {feature: teammate.inner(record.answers[feature])}
    where = teammate.usable(record.present)
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
    record: teammate.Record, n: int, feature: str
) -> None:
    dealt = teammate.shares(jax.random.key(n), record.messages[0].astype(np.float32), n, Code())
    sets = [[i] for i in range(n)] + [[j for j in range(n) if j != i] for i in range(n)]
    for some in sets:
        held = teammate.held(dealt[np.array(some)], Code())
        found = reader(record, feature)(held, among=len(sets))
        assert found is not None and found.contains_chance, (some, found)
        assert found.high - found.low < 0.4


@pytest.mark.parametrize("modulus", [2**32, 2**31 - 1])
def test_all_n_shares_tell_what_the_message_tells(record: teammate.Record, modulus: int) -> None:
    code = Code(modulus=modulus)
    dealt = teammate.shares(jax.random.key(1), record.messages[0].astype(np.float32), 3, code)
    everything = reader(record, "cue")(teammate.held(dealt, code))
    message = reader(record, "cue")(teammate.around(record.messages[0]))
    assert everything is not None and message is not None
    assert everything.auc > 0.8 and abs(everything.auc - message.auc) < 0.1


def test_every_attack_on_shares_of_a_run_is_at_chance(readings: Readings) -> None:
    of_shares = [x for (channel, *_), x in readings.items() if "share" in channel]
    assert len(of_shares) == 2 * len(FEATURES)
    assert all(x.contains_chance for x in of_shares)


@pytest.mark.parametrize("feature", FEATURES)
def test_with_two_agents_the_opened_sum_is_the_message(
    readings: Readings, record: teammate.Record, feature: str
) -> None:
    message = readings["message", 2, False, feature]
    assert readings["opened sum", 2, True, feature] == message
    assert readings["opened sum", 2, False, feature].auc == pytest.approx(message.auc, abs=0.02)
    rest = teammate.opened(jax.random.key(0), record.messages, Code())
    assert np.abs(rest - record.messages[0]).max() < 3e-5


@pytest.mark.parametrize("feature", FEATURES)
def test_more_teammates_hide_better(readings: Readings, feature: str) -> None:
    found = [readings["opened sum", n, True, feature] for n in teammate.TEAM_SIZES]
    assert teammate.TEAM_SIZES == (2, 3, 5, 8)
    for fewer, more in itertools.pairwise(found):
        assert more.auc < fewer.high  # within the error of measurement
    assert found[-1].high < found[0].low


def test_the_clock_alone_is_worth_nothing(record: teammate.Record) -> None:
    nothing = np.zeros((*teammate.inner(record.running).shape, 1))
    found = reader(record, "cue")(nothing)
    assert found is not None and found.auc == pytest.approx(0.5)


def some_record(seed: int = 0, episodes: int = 60, steps: int = 12) -> teammate.Record:
    """Random messages of three agents, the first of which betrays the answer."""
    random = generator(seed)
    length = random.integers(4, steps + 1, episodes)
    running = np.arange(steps) < length[:, None]
    answer = random.random((episodes, steps)) < 0.5
    messages = random.normal(size=(3, episodes, steps))
    messages[0] += 2 * answer
    gone = random.integers(3, steps + 1, episodes)  # the victim dies
    present = running & (np.arange(steps) < gone[:, None])
    return teammate.Record(messages * running, running, present, {"answer": answer & running})


def test_padding_and_a_dead_victim_leave_no_trace() -> None:
    honest = some_record()
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
    found = some_record()
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
    assert not sums[2].any()  # nobody is added
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
    units, seen = state.state, jax.jit(world._seen)

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
    record = teammate.together([teammate.record(scene, private) for scene in target.play(keys)])
    found = {
        (x.channel, x.agents, x.composed, x.feature): x.estimate
        for x in teammate.attack(record, target.code, seed=0)
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


# --- membership ----------------------------------------------------------------------------------


def memorable(episodes: int, seed: int = 0) -> tuple[Episode, ...]:
    """Episodes of two agents in the shape of a toy, to be learnt by heart or not at all."""
    random = generator(seed)
    length = np.full(episodes, 3, np.int32)
    rewards = random.normal(size=(episodes, 3)).astype(np.float32)
    terminal = np.broadcast_to(np.arange(3) == 2, (episodes, 3))
    return tuple(
        Episode(
            observations=random.normal(size=(episodes, 4, o)).astype(np.float32),
            available=np.ones((episodes, 4, a), bool),
            actions=random.integers(0, a, (episodes, 3)).astype(np.int16),
            rewards=rewards,
            terminal=terminal,
            length=length,
        )
        for o, a in ((5, 3), (6, 4))
    )


CONFIG = make(
    "pe-vdn-b",
    "toy:coordination",
    settings={"hidden_size": 16, "learning_rate": 0.01, "delta": 1e-3, "gamma": 0.5},
)
UPDATES = 60
Inferences = dict[tuple[float | None, str], membership.Inference]


def infer(teams: int, *epsilons: float) -> Inferences:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "EPSILONS", epsilons)
        found = membership.attack(
            worlds.make(CONFIG.env),
            CONFIG,
            memorable(32),
            membership.toss(teams, 32, seed=0),
            UPDATES,
            seed=0,
            note=lambda text: None,
        )
    goals = [goal for goal in (None, *epsilons) for _ in range(2)]
    return {(goal, x.observer): x for goal, x in zip(goals, found, strict=True)}


@pytest.fixture(scope="module")
def inferences() -> Inferences:
    return infer(12, 1.0)


@pytest.mark.parametrize("observer", ["agent", "team"])
def test_without_noise_membership_shows(inferences: Inferences, observer: str) -> None:
    found = inferences[None, observer]
    assert found.algorithm == "pe-vdn-b"
    assert found.estimate.low > 0.7 and found.largest_auc == 1.0


def test_the_whole_team_betrays_more_than_one_agent(inferences: Inferences) -> None:
    assert inferences[None, "team"].estimate.low > inferences[None, "agent"].estimate.high


@pytest.mark.parametrize("observer", ["agent", "team"])
def test_at_epsilon_1_membership_shows_no_more_than_is_allowed(
    inferences: Inferences, observer: str
) -> None:
    found = inferences[1.0, observer]
    assert found.epsilon_agent is not None and 0.9 < found.epsilon_agent <= 1.0
    assert found.estimate.auc <= found.largest_auc < inferences[None, observer].estimate.low
    assert found.estimate.contains_chance


@pytest.mark.slow
def test_membership_shows_less_the_smaller_epsilon_is_and_never_more_than_is_allowed() -> None:
    found = infer(24, math.inf, 8.0, 1.0, 0.1)
    for observer in ("agent", "team"):
        clipped, large, _, small = (found[e, observer] for e in (math.inf, 8.0, 1.0, 0.1))
        assert clipped.estimate.low > 0.7  # clipping alone protects nobody
        assert clipped.estimate.low > large.estimate.high > large.estimate.low > 0.5
        assert large.estimate.low > small.estimate.high
        assert small.estimate.contains_chance
    assert all(x.estimate.low <= x.largest_auc for x in found.values())


def test_epsilon_is_that_of_the_updates_made(inferences: Inferences) -> None:
    found = inferences[1.0, "team"]
    assert found.noise_multiplier is not None and found.epsilon_team is not None
    seen = found.noise_multiplier / math.sqrt(2)
    q = membership.BATCH / membership.CANDIDATES
    assert found.epsilon_team == accounting.epsilon(UPDATES, q, seen, 1e-3)
    assert found.largest_auc < largest_auc([(found.epsilon_team, 1e-3)])


OWN = {  # a recipe unlike the defaults
    "optimizer": "sgd",
    "learning_rate": 0.03,
    "clip_norm": 0.2,
    "hidden_size": 7,
    "gamma": 0.9,
    "double_q": False,
    "noise_multiplier": 1.2,
    "buffer_size": 512,
    "buffer_throughput": 2.0,
    "update_every": 4,
    "relation": "replace-one",
}
RECIPE = make("pe-vdn-c", "toy:coordination", steps=9_000, settings=OWN)


@pytest.mark.parametrize("private", [False, True])
def test_shadow_teams_are_trained_with_the_settings_of_the_run(private: bool) -> None:
    shadow = membership.shadow_config(RECIPE, private, 0.7, 32)
    own, used = dataclasses.asdict(RECIPE.settings), dataclasses.asdict(shadow.settings)
    assert shadow.algorithm == ("pe-vdn-c" if private else "pe-vdn-b")
    assert (shadow.steps, shadow.delta) == (RECIPE.steps, RECIPE.delta)
    replay = {"buffer_size", "expected_batch_size", "update_every", "parallel_episodes"}
    privacy = {"noise_multiplier", "delta", "relation", "anchor"}
    changed = {name for name in own if own[name] != used[name]}
    assert changed <= replay | privacy
    assert not changed & {"optimizer", "learning_rate", "clip_norm", "hidden_size", "gamma"}


def test_a_private_run_is_compared_with_its_own_noise_and_its_own_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []

    def errors(world: Any, shadow: Any, episodes: Any, member: np.ndarray, *_: int) -> Any:
        trained.append(shadow.settings)
        random = generator(len(trained)).random((3, *member.shape))
        return membership.Errors(np.swapaxes(random[:2], 0, 1), random[2])

    monkeypatch.setattr(membership, "EPSILONS", (8.0,))
    monkeypatch.setattr(membership, "train", errors)
    said: list[str] = []
    asked = (memorable(32), membership.toss(4, 32, 0), UPDATES, 0, said.append)
    world = worlds.make(RECIPE.env)
    rows = membership.attack(world, RECIPE, *asked)[::2]
    assert [row.own for row in rows] == [None, None, "noise", "ε"]
    assert [s.noise_multiplier for s in trained[2:]] == [r.noise_multiplier for r in rows[2:]]
    assert rows[2].noise_multiplier == 1.2 and {s.clip_norm for s in trained} == {0.2}
    wanted = planner.Plan.of(RECIPE, 2).epsilon("agent")
    assert rows[3].epsilon_agent == pytest.approx(wanted, rel=0.01)
    assert "this run's noise" in said[2] and "(4/4)" in said[3]
    for other in (CONFIG, make("pe-vdn-c", RECIPE.env, settings={"noise_multiplier": 0})):
        assert [way.own for way in membership.trainings(other, 2, 10, 0.25)] == [None, None]


def test_noise_is_just_enough() -> None:
    assert membership.noise_for(math.inf, 10, 0.25, 1e-4) == 0.0
    for epsilon in (1.0, 30.0):
        noise = membership.noise_for(epsilon, 10, 0.25, 1e-4)
        assert accounting.epsilon(10, 0.25, noise, 1e-4) <= epsilon
        assert accounting.epsilon(10, 0.25, noise / 1.02, 1e-4) > epsilon


def test_a_team_never_learns_of_an_episode_that_it_was_not_given() -> None:
    episodes = memorable(8)
    changed = tuple(
        e._replace(rewards=e.rewards + 5 * (np.arange(8) == 3)[:, None]) for e in episodes
    )
    member = membership.toss(6, 8, seed=1)
    assert 0 < member[:, 3].sum() < 6
    world, config = worlds.make(CONFIG.env), membership.shadow_config(CONFIG, False, 0.0, 8)
    before, after = (
        np.delete(membership.train(world, config, given, member, 20, seed=0).agent, 3, axis=-1)
        for given in (episodes, changed)
    )
    assert np.array_equal((before == after).all((1, 2)), ~member[:, 3])


def test_guessing_has_an_auc_of_one_half() -> None:
    found = []
    for seed in range(200):
        errors, member = np.exp(generator(seed).normal(size=(6, 32))), membership.toss(6, 32, seed)
        found.append(membership.infer(errors[:, None], member))
    middle, deviation = np.mean([x.auc for x in found]), np.std([x.auc for x in found])
    assert abs(middle - 0.5) < 3 * deviation / math.sqrt(200)
    assert np.mean([x.contains_chance for x in found]) > 0.9


# --- the command ---------------------------------------------------------------------------------


LITTLE = ["--episodes", 64, "--shadows", 4, "--updates", 2]


@pytest.fixture(scope="module")
def document(run: Run) -> dict[str, Any]:
    before = content(run.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "EPSILONS", (math.inf,))
        said = cli("attack", run.path, "--json", *LITTLE)
    assert said.code == 0, said.err
    after = content(run.path)
    assert set(after) - set(before) == {"attack.png"}
    assert {name: after[name] for name in before} == before
    progress = said.err.splitlines()
    assert "playing 64 episodes" in progress[0] and "(2/2)" in progress[-1]
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_the_command_prints_one_document_and_adds_nothing_but_a_picture(
    run: Run, document: dict[str, Any]
) -> None:
    assert document["picture"] == str(run.path / "attack.png")
    assert (run.path / "attack.png").read_bytes().startswith(b"\x89PNG")
    assert {k: document[k] for k in ("algorithm", "env", "agents", "seed", "episodes")} == {
        "algorithm": "pe-vdn-b",
        "env": "toy:coordination",
        "agents": 2,
        "seed": 0,
        "episodes": 64,
    }
    rows = document["teammate"]
    assert {row["channel"] for row in rows} == {
        "message",
        "one share",
        "all shares but one",
        "opened sum",
    }
    assert sorted({row["agents"] for row in rows if row["composed"]}) == [2, 3, 5, 8]
    assert [(row["algorithm"], row["epsilon_agent"]) for row in document["membership"][::2]] == [
        ("pe-vdn-b", None),
        ("pe-vdn-c", "inf"),
    ]
    for row in rows + document["membership"]:
        assert row["auc"] is None or row["low"] <= row["auc"] <= row["high"]


def test_the_same_seed_gives_the_same_readings(target: Target, document: dict[str, Any]) -> None:
    private = teammate.private_features(target.simulation.world)
    keys = jax.random.split(jax.random.key(0), 64)
    again = teammate.together([teammate.record(scene, private) for scene in target.play(keys)])
    rows = [attacks._plain(reading) for reading in teammate.attack(again, target.code, 0)]
    assert rows == document["teammate"]


def test_a_person_gets_three_tables_and_what_they_say(
    run: Run, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def ready(path: Path, effort: attacks.Effort, seed: int, observer: Any) -> dict[str, Any]:
        asked.append((effort, seed))
        found = json.loads(json.dumps(document))
        for row in found["membership"]:
            if row["epsilon_agent"] == "inf":
                row["epsilon_agent"] = row["epsilon_team"] = math.inf
        return found

    monkeypatch.setattr(attacks, "attack", ready)
    said = cli(
        "attack", run.path, "--quick", "--updates", 9, "--seed", 5, "--out", tmp_path / "a.svg"
    )
    assert said.code == 0, said.err
    assert asked == [(attacks.QUICK._replace(updates=9), 5)]
    assert said.err == "quick: episodes 256 instead of 1024, shadows 6 instead of 12\n"
    for part in (
        "What agent 1 infers about agent 0",
        "2, this run's",
        "8, composed",
        "Above chance:",
    ):
        assert part in said.out
    row = document["teammate"][0]
    assert f"{row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}]" in said.out
    assert max(map(len, said.out.splitlines())) <= 100
    assert (tmp_path / "a.svg").exists()


def test_a_feature_that_never_varies_is_said_to_and_the_rest_goes_on(
    record: teammate.Record,
) -> None:
    constant = record._replace(answers={"cue": np.ones_like(record.answers["cue"])})
    found = teammate.attack(constant, Code(), 0)
    assert {x.estimate for x in found} == {None}
    assert attacks._plain(found[0])["auc"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--episodes", 8], "episodes is 8, but must be at least 64."),
        (["--shadows", 2], "shadows is 2, but must be at least 4."),
        (["--updates", 0], "updates is 0, but must be at least 1."),
        (["--seed", -1], "seed is -1, but must be at least 0."),
        (["--out", "nowhere/a.png"], "must be a file in a directory that exists."),
        (["--out", "a.txt"], "must end in .png, .pdf, .svg."),
    ],
)
def test_a_mistake_is_named_in_one_sentence(run: Run, options: list[Any], told: str) -> None:
    said = cli("attack", run.path, *options)
    assert said.code == 2 and said.out == ""
    assert told in said.sentence


def test_a_run_that_does_not_exist_or_has_no_checkpoint_is_named_in_one_sentence(
    run: Run, tmp_path: Path
) -> None:
    said = cli("attack", "nowhere")
    assert said.code == 2 and "is nowhere the directory of a run?" in said.sentence
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    said = cli("attack", tmp_path)
    assert said.code == 1 and "holds no complete checkpoint" in said.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
