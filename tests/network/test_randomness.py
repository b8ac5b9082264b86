"""What a party draws from its secret; rehearsals are compared with the simulation elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from network_team import make_team, party_of

from pevdn.config import experiment as configuration
from pevdn.network.randomness import FromSecret
from pevdn.network.streams import Secret
from pevdn.privacy import gaussian
from pevdn.privacy.mechanism import release_for

RUN = bytes(32)
CONFIG = configuration.make(
    "pe-vdn-c", "toy:two-step", settings={"buffer_size": 64, "expected_batch_size": 8}
)


def drawn_from(secret: int, run: bytes = RUN) -> FromSecret:
    return FromSecret(CONFIG, Secret(bytes([secret]) * 32), run)


def noise(random: FromSecret, step: int = 1, size: int = 4000) -> np.ndarray:
    """In standard deviations."""
    words: Any = random.noise(step, 0, 0, size)
    return np.asarray(gaussian.discrete_gaussian(words, 256) / gaussian.deviation(256))


def test_a_party_draws_its_own_noise_that_no_other_party_can_draw(tmp_path: Path) -> None:
    """Standard normal (an error rate of 1e-6), equal for a step, different for every other."""
    mine, other = drawn_from(1), drawn_from(2)
    drawn = noise(mine)
    assert scipy.stats.kstest(drawn, "norm").pvalue > 1e-6
    assert np.array_equal(drawn, noise(mine))
    for independent in (noise(mine, 2), noise(other), noise(drawn_from(1, b"r" * 32))):
        assert abs(np.corrcoef(drawn, independent)[0, 1]) < 0.08  # five standard deviations
    team = make_team(tmp_path / "team", "pe-vdn-c", "shares", rehearsal=False)
    alice = party_of(team, "alice")
    assert isinstance(alice.state.random, FromSecret)
    assert team.config.settings.randomness == "os"
    ours = alice.state.random.noise(3, 0, 0, 50)
    secret = Secret.load_or_create(alice.folder / "secret")
    assert np.array_equal(ours.ravel(), secret.stream("noise", team.run, 3, "").words(800))


def test_noise_is_added_once_by_the_mechanism_that_the_simulation_has(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-c", "shares", rehearsal=False)
    state, s = party_of(team, "alice").state, team.config.settings
    release: Any = state.agent.release
    assert release == release_for(team.config)
    summed = jax.tree.map(lambda x: jnp.asarray(1e5 * x, jnp.int32), state.learner.params)
    draw: Any = partial(state.random.noise, 3, 0, 0)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    found = flat(state.agent.mean(summed, draw)) * s.expected_batch_size / release.unit
    expected = flat(summed) + gaussian.discrete_gaussian(draw(found.size), release.spread)
    assert np.allclose(found, expected, rtol=1e-6)


def test_minibatches_follow_from_the_common_seed_and_from_nothing_of_ones_own() -> None:
    mine, other = drawn_from(1), drawn_from(2)
    for random in (mine, other):
        assert np.array_equal(random.minibatch(b"s" * 32, 4, 1), mine.minibatch(b"s" * 32, 9, 1))
        assert random.coin(b"s" * 32, 4, 1) == mine.coin(b"s" * 32, 4, 1)
    assert not np.array_equal(mine.minibatch(b"s" * 32, 4, 1), mine.minibatch(b"t" * 32, 4, 1))
    assert not np.array_equal(mine.minibatch(b"s" * 32, 4, 0), mine.minibatch(b"s" * 32, 4, 1))
    assert not np.array_equal(mine.exploration(0, 0), other.exploration(0, 0))


# --- pe-vdn-d ------------------------------------------------------------------------------------

OPENED = configuration.make(
    "pe-vdn-d", "toy:two-step", settings={"buffer_size": 64, "expected_batch_size": 8}
)


def draws(secret: int = 1, run: bytes = RUN) -> dict[str, np.ndarray]:
    """Every stream of 64 words that a party draws in two blocks of pe-vdn-d, by purpose."""
    random = FromSecret(OPENED, Secret(bytes([secret]) * 32), run)
    found = {}
    for block, step in enumerate((2, 4)):
        for n in range(2):
            found[f"sample {block} {n}"] = random.minibatch(b"s" * 32, block, n)
            found[f"noise {block} {n}"] = random.noise(step, block, n, 4)
            found[f"opening {block} {n}"] = random.opening(step, block, n, 1)
    return {name: words.ravel()[:64] for name, words in found.items()}


def test_no_two_openings_updates_or_parties_share_a_random_number() -> None:
    """Samples too are a party's own: the common seed is known to all."""
    mine = draws()
    everything = [*mine.values(), *draws(2).values(), *draws(1, b"r" * 32).values()]
    assert len(everything) == 36
    assert len(np.unique(np.concatenate(everything))) == 36 * 64
    again = draws()
    assert all(np.array_equal(mine[name], again[name]) for name in mine)


def test_the_noise_of_an_opening_covers_every_step_of_a_block() -> None:
    random = FromSecret(OPENED, Secret(bytes(32)), RUN)
    words = random.opening(2, 0, 0, 7)
    assert words.shape == (7, OPENED.block_size, *gaussian.WORDS)
    assert len(np.unique(words)) > 0.99 * words.size


def test_the_coin_of_an_update_is_public_in_pe_vdn_d_too() -> None:
    mine, other = (FromSecret(OPENED, Secret(bytes([n]) * 32), RUN) for n in (1, 2))
    assert mine.coin(b"s" * 32, 4, 1) == other.coin(b"s" * 32, 4, 1)
