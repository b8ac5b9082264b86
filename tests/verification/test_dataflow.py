"""The data-flow proof: no agent's data reaches another except through the exchange."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.simulation.players import Actors
from pevdn.simulation.program import Simulation
from pevdn.verification.dataflow import PUBLIC, Source, Walk, _mark, violations, watch
from pevdn.worlds.toy import Coordination

SMALL = {
    "hidden_size": 8,
    "buffer_size": 8,
    "expected_batch_size": 4,
    "parallel_episodes": 2,
    "eval_episodes": 2,
}


def make(algorithm, world=2, kind=Simulation, **settings):
    world = Coordination(world) if isinstance(world, int) else worlds.make(world)
    return kind(world, config.make(algorithm, settings={**SMALL, **settings}))


def said(simulation):
    return [str(violation) for violation in violations(simulation)]


# ---- the algorithms -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm, world, settings",
    [
        ("iql", 2, {"optimizer": "sgd"}),
        ("iql", 3, {"return_lambda": 0.5}),
        ("pe-vdn-a", 2, {"average_decay": 0.9}),
        ("pe-vdn-a", 3, {"anchor": True}),
        ("pe-vdn-b", 2, {"optimizer": "sgd"}),
        ("pe-vdn-b", 3, {"modulus": 2**31 - 1}),
        ("pe-vdn-c", 2, {"network": "recurrent"}),
        ("pe-vdn-c", 3, {"anchor": True}),
        ("pe-vdn-b", "smax-sc2:3m", {}),
        pytest.param("iql", "smax-sc2:3m", {}, marks=pytest.mark.slow),
        pytest.param("pe-vdn-a", "smax-sc2:3m", {}, marks=pytest.mark.slow),
        ("pe-vdn-c", "smax-sc2:3m", {}),
    ],
)
def test_no_data_of_one_agent_reaches_another_but_through_the_exchange(algorithm, world, settings):
    assert said(make(algorithm, world, **settings)) == []


@pytest.mark.parametrize("agents", [2, 3])
def test_vanilla_vdn_breaks_the_policy_between_any_two_agents(agents):
    found = said(make("vdn", agents))
    for i in range(agents):
        for j in set(range(agents)) - {i}:
            for leaf in ("params.input_weight", "params.output_bias", "target.output_bias"):
                sentence = f"learner of agent {i} ({leaf}) is reached by data of agent {j}"
                assert f"advance: {sentence}" in found


# ---- planted leaks ------------------------------------------------------------------------


def replaced(pair, i, value):
    return (*pair[:i], value, *pair[i + 1 :])


class StoresAnothersObservations(Simulation):
    def append(self, state, played, next_key, active):
        ours, theirs = played.episodes
        both = theirs.observations.at[..., :5].add(ours.observations)
        episodes = (ours, theirs._replace(observations=both))
        return super().append(state, played._replace(episodes=episodes), next_key, active)


class AddsAnothersParameters(Simulation):
    def gradients(self, state, keys):
        (ours, theirs), refused = super().gradients(state, keys)
        leak = state.learners[0].params.output_bias.sum()
        return (ours, jax.tree.map(lambda g: g + leak, theirs)), refused


class MixesMemories(Actors):
    def act(self, params, memories, *rest):
        (ours, theirs), last = memories
        return super().act(params, ((ours, ours + theirs), last), *rest)


class ActsOnAnothersMemory(Simulation):
    def __init__(self, *args):
        super().__init__(*args)
        own = self.player.actors
        self.player.actors = MixesMemories(own.team, own.program, own.by_lane)


class SkipsAnUpdateForAnothersAction(Simulation):
    """Nothing of agent 0 is ever added to anything: only whether agent 1 learns depends on it."""

    def update(self, state, keys, ready):
        after = super().update(state, keys, ready)
        chosen = jax.lax.cond(
            jnp.any(state.replays[0].actions == 2),
            lambda: state.learners[1],
            lambda: after.learners[1],
        )
        return after._replace(learners=replaced(after.learners, 1, chosen))


class PlaysLongerForAnothersAction(Simulation):
    """As often as agent 0 acted, agent 1's parameters shrink: only the number of turns tells."""

    def update(self, state, keys, ready):
        after = super().update(state, keys, ready)
        bias = after.learners[1].params.output_bias
        turns = state.replays[0].actions.sum()
        bias = jax.lax.fori_loop(0, turns, lambda _, x: x * 0.9, bias)
        learner = after.learners[1]
        learner = learner._replace(params=learner.params._replace(output_bias=bias))
        return after._replace(learners=replaced(after.learners, 1, learner))


class HandsOnInALoop(Simulation):
    """Two turns of a loop, of which only the second brings agent 0's bias to agent 1."""

    def gradients(self, state, keys):
        (ours, theirs), refused = super().gradients(state, keys)
        first = (state.learners[0].params.output_bias.sum(), jnp.zeros(()), theirs.output_bias)

        def turn(carry, _):
            private, between, gradient = carry
            return (private, private, gradient + between), None

        (*_, gradient), _ = jax.lax.scan(turn, first, length=2)
        return (ours, theirs._replace(output_bias=gradient)), refused


class TellsAnothersValueInItsMessage(Simulation):
    """Agent 1's targets go into its message and nowhere else."""

    def sum_batch(self, learners, *rest):
        ours, theirs = learners
        leak = theirs.target.output_bias + ours.target.output_bias.sum()
        target = theirs.target._replace(output_bias=leak)
        return super().sum_batch((ours, theirs._replace(target=target)), *rest)


class Exchanges(Simulation):
    """Uses the exchange for something else too."""

    def sum_batch(self, learners, batches, padding, keys):
        total, refused = super().sum_batch(learners, batches, padding, keys)
        seen = [batch.observations[:, :, :-1, :, :5] for batch in batches]  # (S, 1, T, B, 5)
        return total, refused + self.heard(keys, seen)


class ExchangesObservations(Exchanges):
    def heard(self, keys, seen):
        column = jnp.concatenate([x[..., 0] for x in seen], axis=1)  # (S, N, T, B)
        return jax.vmap(self.exchange)(keys, column).total.sum((1, 2, 3))


class ExchangesWholeObservations(Exchanges):
    def heard(self, keys, seen):
        messages = jnp.stack(self.team.by_agent(seen, axis=1), axis=1)  # (S, N, T, B, 5)
        return jax.vmap(self.exchange)(keys, messages).total.sum((1, 2, 3, 4))


class ExchangesColumnByColumn(Exchanges):
    def heard(self, keys, seen):
        messages = jnp.stack(self.team.by_agent(seen, axis=1), axis=1)
        each = jax.vmap(jax.vmap(self.exchange), in_axes=(None, -1))
        return each(keys, messages).total.sum((0, 2, 3, 4))


class ExchangesTurnByTurn(Exchanges):
    def heard(self, keys, seen):
        messages = jnp.stack(self.team.by_agent(seen, axis=1), axis=1)

        def turn(total, column):
            return total + jax.vmap(self.exchange)(keys, column).total.sum((1, 2, 3)), None

        return jax.lax.scan(turn, jnp.zeros(keys.shape), jnp.moveaxis(messages, -1, 0))[0]


class SeedsWithActions(Simulation):
    def append(self, state, played, next_key, active):
        state = super().append(state, played, next_key, active)
        leak = played.episodes[0].actions.astype(jnp.uint32).sum()
        return state._replace(key=jax.vmap(lambda key: jax.random.fold_in(key, leak))(state.key))


class PaysForActions(Simulation):
    def append(self, state, played, next_key, active):
        ours, theirs = played.episodes
        theirs = theirs._replace(rewards=theirs.rewards + (theirs.actions == 2))
        return super().append(state, played._replace(episodes=(ours, theirs)), next_key, active)


class ScoresParameters(Simulation):
    def evaluate(self, params, keys):
        score = super().evaluate(params, keys)
        return score._replace(win_rate=score.win_rate + params[0].output_bias.sum())


class AnchorsByAnothersParameters(Simulation):
    def keep_anchor(self, state, win_rate):
        after = super().keep_anchor(state, win_rate)
        better = state.learners[0].params.output_bias.sum() > 0
        anchor = jax.tree.map(
            lambda new, old: jnp.where(better, new, old),
            after.learners[1].anchor,
            state.learners[1].anchor,
        )
        learner = after.learners[1]._replace(anchor=anchor)
        return after._replace(learners=replaced(after.learners, 1, learner))


class WritesElsewhere(Simulation):
    def append(self, state, played, next_key, active):
        jax.debug.callback(lambda x: None, played.episodes[0].observations)
        return super().append(state, played, next_key, active)


@pytest.mark.parametrize(
    "leak, sentence",
    [
        (
            StoresAnothersObservations,
            "advance: replay of agent 1 (observations) is reached by data of agent 0",
        ),
        (
            AddsAnothersParameters,
            "advance: learner of agent 1 (params.gates_bias) is reached by data of agent 0",
        ),
        (
            ActsOnAnothersMemory,
            "advance: replay of agent 1 (actions) is reached by data of agent 0",
        ),
        (
            SkipsAnUpdateForAnothersAction,
            "advance: learner of agent 1 (params.output_bias) is reached by data of agent 0",
        ),
        (
            PlaysLongerForAnothersAction,
            "advance: learner of agent 1 (params.output_bias) is reached by data of agent 0",
        ),
        (
            HandsOnInALoop,
            "advance: learner of agent 1 (params.output_bias) is reached by data of agent 0",
        ),
        (
            ExchangesObservations,
            "advance: the exchange is reached by data of agent 0",
        ),
        (
            ExchangesColumnByColumn,
            "advance: the exchange is reached by 12 rounds of messages for 2 updates",
        ),
        (
            ExchangesTurnByTurn,
            "advance: the exchange is reached by 12 rounds of messages for 2 updates",
        ),
        (
            ExchangesWholeObservations,
            "advance: the exchange is reached by float32(2, 3, 4, 5), "
            "not one number per agent, step and episode",
        ),
        (
            SeedsWithActions,
            "advance: public data (key) is reached by data of agent 0",
        ),
        (
            ScoresParameters,
            "evaluate: public data (win_rate) is reached by data of agent 0",
        ),
        (
            AnchorsByAnothersParameters,
            "keep_anchor: learner of agent 1 (anchor.input_bias) is reached by data of agent 0",
        ),
        (
            WritesElsewhere,
            "advance: the host is reached by a side effect (debug_callback), "
            "which cannot be followed",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_leak_is_found_and_named(leak, sentence):
    found = said(make("pe-vdn-a", kind=leak, optimizer="sgd", max_gradient_norm=0))
    assert sentence in found
    assert not any("agent 0 (" in line for line in found), "nothing leads back to agent 0"


def test_a_message_made_of_anothers_data_is_found_where_it_is_sent():
    """The exchange may tell everyone the message, so that nothing later gives the leak away."""
    found = said(make("pe-vdn-a", kind=TellsAnothersValueInItsMessage))
    assert found == ["advance: output of agent 1 is reached by data of agent 0"]


def test_what_everyone_knows_depends_on_nobody_not_even_its_holder():
    found = said(make("iql", kind=PaysForActions))
    assert "advance: public data (replays.1.rewards) is reached by data of agent 1" in found


def test_the_world_hands_each_agent_its_own_observation_and_keeps_its_state():
    world = watch(make("iql")).player.world

    def play(key, first, second):
        state, _ = world.reset(key)
        return world.step(key, state, (first, second))

    action = jnp.int32(0)
    args = (jax.random.key(0), action, action)
    traced, (state, step) = jax.make_jaxpr(play, return_shape=True)(*args)
    walk = Walk()
    sent = [frozenset([Source(f"agent {i}", sent=True)]) for i in range(2)]
    after = walk.follow(traced, [PUBLIC, *sent])
    state, step = jax.tree.unflatten(jax.tree.structure((state, step)), after)
    assert walk.flows == {}
    assert {*state} == {frozenset([Source("the world")])}
    assert step.observations == step.available
    assert step.observations == tuple(frozenset([Source(f"agent {i}")]) for i in range(2))
    assert {step.reward, step.done, step.truncated, step.won} == {PUBLIC}


# ---- the same program ---------------------------------------------------------------------


class MixesLikeAgents(Simulation):
    """A leak along the axis of like agents, which is no leak where each is a kind of its own."""

    def gradients(self, state, keys):
        gradients, refused = super().gradients(state, keys)
        return jax.tree.map(lambda g: g + 0.1 * g.mean(1, keepdims=True), gradients), refused


def apart(state):
    """A state with one kind of two agents as one with a kind for each."""

    def each(tree):
        return tuple(jax.tree.map(lambda x, i=i: np.asarray(x)[:, [i]], tree) for i in range(2))

    return state._replace(learners=each(*state.learners), replays=each(*state.replays))


@cache
def trained(kind, alone):
    """Two like agents after some updates, each a kind of its own (`alone`) or not."""
    simulation = make("pe-vdn-a", "toy:two-step", kind, optimizer="sgd", learning_rate=0.01)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(simulation.start, jnp.arange(2))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes._replace(key=()))
    unlike = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), state.learners)
    state = state._replace(learners=unlike, key=jax.random.split(jax.random.key(0), 2))
    if alone:
        simulation, state = watch(simulation), apart(state)
    limits = np.int32(1000), np.int32(5), np.full(2, 1000, np.int32)
    state = jax.jit(simulation.advance)(state, *limits)
    assert np.all(state.updates > 5)
    state = state if alone else apart(state)
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return np.concatenate([np.ravel(x).astype(float) for x in leaves])


@pytest.mark.parametrize(
    "kind, same", [(Simulation, True), pytest.param(MixesLikeAgents, False, marks=pytest.mark.slow)]
)
def test_the_program_that_is_proved_does_what_the_program_that_runs_does(kind, same):
    """Like agents travel together in the one and apart in the other, where the marks are too."""
    proved, runs = trained(Simulation, alone=True), trained(kind, alone=False)
    assert np.allclose(proved, runs, atol=1e-5) == same


# ---- following values ---------------------------------------------------------------------


def reached(f, *args):
    """For each output the letters of the inputs that reach it: a is the first."""
    traced = jax.make_jaxpr(f)(*args)
    inputs = [frozenset([Source(letter)]) for letter, _ in zip("abcdef", args, strict=False)]
    outputs = Walk().follow(traced, inputs)
    return ["".join(sorted(source.owner for source in out)) for out in outputs]


ONE = jnp.ones(())
FEW = jnp.ones(3)


def test_an_output_depends_on_the_inputs_of_its_own_equations_alone():
    assert reached(lambda a, b, c: (a + b, c * 2, jnp.ones(2)), ONE, ONE, ONE) == ["ab", "c", ""]
    assert reached(lambda a, b: (a[b.astype(int)], a), FEW, ONE) == ["ab", "a"]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp])
def test_a_call_keeps_apart_what_its_inner_program_keeps_apart(wrap):
    def inner(a, b, c):
        return a * 2, b + c, c

    f = wrap(inner)
    if wrap is jax.custom_jvp:
        f.defjvp(lambda primals, tangents: (inner(*primals), inner(*tangents)))
    if wrap is jax.custom_vjp:
        f.defvjp(lambda *args: (inner(*args), None), lambda _, bars: bars)
    assert reached(f, ONE, ONE, ONE) == ["a", "bc", "c"]


def test_a_derivative_depends_on_what_it_was_taken_at():
    @jax.custom_vjp
    def scaled(a, b):
        return a * b

    scaled.defvjp(lambda a, b: (a * b, b), lambda b, bar: (b * bar, jnp.zeros(())))
    assert reached(lambda a, b, c: (jax.grad(scaled)(a, b), c), ONE, ONE, ONE) == ["b", "c"]


def test_what_decides_a_branch_reaches_what_the_branch_returns():
    def choose(a, b, c):
        return jax.lax.cond(a > 0, lambda b, c: (b, c), lambda b, c: (b + 1, b), b, c)

    def switch(a, b, c):
        return jax.lax.switch(a.astype(int), [lambda b, c: b, lambda b, c: 2 * b], b, c), c

    assert reached(choose, ONE, ONE, ONE) == ["ab", "abc"]
    assert reached(switch, ONE, ONE, ONE) == ["ab", "c"]


def test_a_while_loop_hands_on_from_turn_to_turn():
    """a is in b after one turn and in c after two; what changes tells when the loop ended (e)."""

    def hand_on(a, b, c, d, until):
        def body(carry):
            a, b, _, d, n = carry
            return a, a, b, d + 1, n + 1

        return jax.lax.while_loop(lambda carry: carry[-1] < until, body, (a, b, c, d, 0.0))[:4]

    assert reached(hand_on, *[ONE] * 5) == ["a", "abe", "abce", "de"]


def test_what_a_loop_changes_may_end_it():
    """b reaches the counter in the first iteration, and so a's condition in the second."""

    def ends(a, b, c):
        def body(carry):
            a, b, n = carry
            return a + 1, b, n + b

        return (*jax.lax.while_loop(lambda carry: carry[2] < 5, body, (a, b, 0.0)), c)

    assert reached(ends, ONE, ONE, ONE) == ["ab", "b", "b", "c"]


@pytest.mark.parametrize("mapped", [False, True])
def test_a_scan_hands_on_from_turn_to_turn(mapped):
    def hand_on(a, b, c, d, xs, const):
        def body(carry, x):
            a, b, c, d = carry
            return (a, a, b, d * const), (c, x)

        return jax.lax.scan(body, (a, b, c, d), xs)

    args = [ONE] * 4 + [FEW, ONE]
    if mapped:
        hand_on, args = jax.vmap(hand_on), [jnp.stack([x, x]) for x in args]
    assert reached(hand_on, *args) == ["a", "ab", "abc", "df", "abc", "e"]


def test_a_program_of_an_unknown_sort_mixes_everything():
    mystery = Primitive("mystery")
    mystery.multiple_results = True
    mystery.def_abstract_eval(lambda *avals, program: program.out_avals)
    program = jax.make_jaxpr(lambda a, b: (a, b))(ONE, ONE)
    assert reached(lambda a, b: mystery.bind(a, b, program=program), ONE, ONE) == ["ab", "ab"]


def test_what_leaves_the_equations_is_reported():
    """A value that is written somewhere, or handed to Python, can come back unseen."""

    def written(a, b):
        place = jax.new_ref(a)
        place[...] = b
        return place[...]

    def handed_over(a, b):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), a), b

    for f in (written, handed_over, jax.jit(written)):
        walk = Walk()
        walk.follow(jax.make_jaxpr(f)(ONE, ONE), [PUBLIC, PUBLIC])
        assert {reached for reached, _ in walk.flows} == {"the host"}


def test_a_mark_is_seen_under_every_transformation():
    def public(x):
        return _mark("belongs to", "everyone", x)

    def looped(a, b):
        return jax.lax.scan(lambda carry, x: (carry + 1, public(x * b)), a, FEW)

    def branch(a):
        return jax.lax.cond(True, public, public, a)

    several = jnp.stack([ONE, ONE])
    assert reached(public, ONE) == [""]
    assert reached(jax.jit(jax.vmap(public)), several) == [""]
    assert reached(jax.vmap(looped), several, several) == ["a", ""]
    assert reached(branch, ONE) == [""]
    assert reached(lambda a: jax.value_and_grad(lambda x: public(x) ** 2)(a)[0], ONE) == [""]
