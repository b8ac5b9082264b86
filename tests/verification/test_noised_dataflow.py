"""The data-flow proof of pe-vdn-d: nothing but a clipped message plus noise leaves an agent."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pevdn import worlds
from pevdn.agent.program import AgentProgram
from pevdn.config import experiment as config
from pevdn.privacy.mechanism import NoisedOpening
from pevdn.simulation.program import Simulation
from pevdn.verification.dataflow import violations
from pevdn.worlds.toy import Coordination

SMALL = {
    "hidden_size": 8,
    "buffer_size": 8,
    "expected_batch_size": 4,
    "parallel_episodes": 4,
    "eval_episodes": 2,
    "network": "recurrent",
}


def make(kind=Simulation, world=2, **settings):
    world = Coordination(world) if isinstance(world, int) else worlds.make(world)
    return kind(world, config.make("pe-vdn-d", settings={**SMALL, **settings}))


def said(simulation):
    return [str(violation) for violation in violations(simulation)]


@pytest.mark.parametrize(
    "world, settings",
    [
        (2, {}),
        (3, {"colluders": 1, "openings": 2, "anchor": True}),
        (3, {"modulus": 2**31 - 1, "return_lambda": 0.5, "bootstrap_timeouts": False}),
        ("smax-sc2:3m", {"network": "entities"}),
    ],
)
def test_nothing_of_one_agent_reaches_another_but_the_noised_sum(world, settings):
    assert said(make(world=world, **settings)) == []


# ---- planted leaks in one agent's program --------------------------------------------------


def with_opening(opening):
    """A simulation whose openings are of another class."""

    class Changed(Simulation):
        def __init__(self, *args):
            super().__init__(*args)
            self.opening = opening(**vars(self.opening))
            self.program = dataclasses.replace(self.program, opening=self.opening)

    return Changed


def with_program(program):
    """A simulation whose agents run another program."""

    class Changed(Simulation):
        def __init__(self, *args):
            super().__init__(*args)
            own = self.program
            self.program = program(own.settings, own.release, own.opening)

    return Changed


class ForgetsTheNoise(AgentProgram):
    def offer(self, params, target, batch, words):
        own = jax.vmap(self.opening.clip, 1, 1)(self.share_of_error(params, target, batch))
        return own, own


class MultipliesByTheNoise(AgentProgram):
    """What it sends depends on noise, but noise that is not added hides nothing."""

    def offer(self, params, target, batch, words):
        own = jax.vmap(self.opening.clip, 1, 1)(self.share_of_error(params, target, batch))
        return own * self.opening.noise(words), own


class ForgetsToClip(AgentProgram):
    def offer(self, params, target, batch, words):
        shares = self.share_of_error(params, target, batch)
        own = jnp.trunc(shares / self.opening.unit).astype(jnp.int32)
        return own + self.opening.noise(words), own


class CentresWithItsOwnReward(AgentProgram):
    """Centres after the clip, which would be harmless if what it adds were public."""

    def offer(self, params, target, batch, words):
        offered, own = super().offer(params, target, batch, words)
        private = batch.observations[:-1, ..., 0].astype(jnp.int32)
        return offered + private, own


class TakesTheNoiseOffAgain(AgentProgram):
    def offer(self, params, target, batch, words):
        offered, own = super().offer(params, target, batch, words)
        return offered - self.opening.noise(words), own


class DrawsNoiseFromItsData(AgentProgram):
    """Noise must be independent of what it hides."""

    def offer(self, params, target, batch, words):
        return super().offer(params, target, batch, words ^ batch.actions[0, 0].astype(jnp.uint32))


@pytest.mark.parametrize(
    "program, sentence",
    [
        (ForgetsTheNoise, "the opening is reached by clipped output of agent 0"),
        (MultipliesByTheNoise, "the opening is reached by clipped output of agent 0"),
        (ForgetsToClip, "the opening is reached by output of agent 0"),
        (CentresWithItsOwnReward, "the opening is reached by output of agent 0"),
        (TakesTheNoiseOffAgain, "output of agent 0 is reached by data of the noise"),
        (DrawsNoiseFromItsData, "the noise is reached by data of agent 0"),
    ],
)
def test_what_an_agent_sends_without_clip_or_noise_is_named(program, sentence):
    assert f"advance: {sentence}" in said(make(with_program(program)))


class SaysNoNoise(NoisedOpening):
    def noise(self, words):
        return jnp.zeros(words.shape[:-2], jnp.int32)


def test_the_proof_does_not_see_how_large_the_noise_is():
    """It follows where noise goes; tests/simulation/test_noised_openings.py measures it."""
    assert said(make(with_opening(SaysNoNoise))) == []


# ---- planted leaks between agents ------------------------------------------------------------


def replaced(pair, i, value):
    return (*pair[:i], value, *pair[i + 1 :])


class HandsOnTheClippedPart(Simulation):
    """Agent 1 stores agent 0's clipped part beside what was opened."""

    def opened(self, learners, batches, share_keys, noise_keys):
        found = super().opened(learners, batches, share_keys, noise_keys)
        learner, batch = (jax.tree.map(lambda x: x[:, 0], x[0]) for x in (learners, batches))
        shares = jax.vmap(self.program.share_of_error)(learner.params, learner.target, batch)
        own = jax.vmap(jax.vmap(self.program.opening.clip, 1, 1))(shares)
        return replaced(found, 1, found[1] + own[:, None])


class SamplesByAnothersActions(Simulation):
    """A common sample of the episodes in which agent 0 took its last action."""

    def sample(self, state, keys):
        slots, size = super().sample(state, keys), self.settings.buffer_size
        taken = (state.replays[0].actions == 1).any(-1)[:, 0]  # (S, buffer_size + 1)
        chosen = jax.vmap(lambda slots, taken: taken[slots])(slots, taken)
        return jnp.where(chosen, slots, size)


class LearnsFromTheSumOfMessages(Simulation):
    """Opens the messages of every update too, as pe-vdn-b does."""

    def __init__(self, *args):
        super().__init__(*args)
        b = config.make("pe-vdn-b", settings=SMALL)
        self.exchange = Simulation(self.world, b).exchange


class OpensEveryUpdate(Simulation):
    def update(self, state, keys, ready):
        slots = self.slots_of_age(state.episodes, 0, ready)
        return super().update(self.open(state, slots, (keys[:, 2], keys[:, 3])), keys, ready)


@pytest.mark.parametrize(
    "leak, sentence",
    [
        (
            HandsOnTheClippedPart,
            "replay of agent 1 (opened) is reached by clipped data of agent 0",
        ),
        (
            SamplesByAnothersActions,
            "learner of agent 1 (params.output_bias) is reached by data of agent 0",
        ),
        (
            LearnsFromTheSumOfMessages,
            "the exchange is reached by 2 rounds of messages for 1 openings",
        ),
        (OpensEveryUpdate, "the exchange is reached by 2 rounds of messages for 1 openings"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_leak_between_agents_is_found_and_named(leak, sentence):
    found = said(make(leak))
    assert f"advance: {sentence}" in found
    assert not any("agent 0 (" in line for line in found), "nothing leads back to agent 0"
