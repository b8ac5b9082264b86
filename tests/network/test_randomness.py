"""Claims about what a party draws in earnest; the rehearsal is compared with the simulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from test_party import make_team, party_of

from pevdn.network.randomness import Own
from pevdn.network.streams import Secret
from pevdn.privacy import gaussian
from pevdn.simulation.program import release_for

RUN = bytes(32)


def noise(own: Own, round: int = 1, size: int = 4000) -> np.ndarray:
    """In standard deviations."""
    words = own.noise(round, 0, 0, 1, 0, 3, size)
    return gaussian.discrete_gaussian(words, 256) / gaussian.deviation(256)


def test_a_party_in_earnest_adds_noise_of_its_own_that_nobody_else_can_draw(tmp_path: Path) -> None:
    """Standard normal (an error rate of 1e-6), the same for a round, another for every other."""
    mine, other = (Own(Secret(bytes([n]) * 32), RUN) for n in (1, 2))
    drawn = noise(mine)
    assert scipy.stats.kstest(drawn, "norm").pvalue > 1e-6
    assert np.array_equal(drawn, noise(mine))
    for independent in (
        noise(mine, 2),
        noise(other),
        noise(Own(Secret(bytes([1]) * 32), b"r" * 32)),
    ):
        assert abs(np.corrcoef(drawn, independent)[0, 1]) < 0.08  # five standard deviations
    team = make_team(tmp_path / "team", "pe-vdn-c", "shares", rehearsal=False)
    alice = party_of(team, "alice")
    assert isinstance(alice.draws, Own)
    assert team.config.settings.randomness == "os"
    ours = alice.draws.noise(3, 0, 0, 1, 0, 2, 50)
    assert np.array_equal(ours.ravel(), alice.secret.stream("noise", team.run, 3).words(800))


def test_noise_is_added_once_by_the_mechanism_that_the_simulation_has(tmp_path: Path) -> None:
    team = make_team(tmp_path / "team", "pe-vdn-c", "shares", rehearsal=False)
    alice, s = party_of(team, "alice"), team.config.settings
    release = alice.mind.mechanism
    assert release == release_for(team.config)
    summed = jax.tree.map(lambda x: jnp.asarray(1e5 * x, jnp.int32), alice.learner.params)
    draw = partial(alice.draws.noise, 3, 0, 0, 1, 0, 2)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    found = flat(alice.mind.release(summed, draw)) * s.expected_batch_size / release.unit
    expected = flat(summed) + gaussian.discrete_gaussian(draw(found.size), release.spread)
    assert np.allclose(found, expected, rtol=1e-6)


def test_minibatches_follow_from_the_common_seed_and_from_nothing_of_ones_own() -> None:
    mine, other = (Own(Secret(bytes([n]) * 32), RUN) for n in (1, 2))
    for draws in (mine, other):
        assert np.array_equal(
            draws.tickets(b"s" * 32, 4, 1, 2, 64), mine.tickets(b"s" * 32, 9, 1, 2, 64)
        )
        assert draws.coin(b"s" * 32, 4, 1, 2) == mine.coin(b"s" * 32, 4, 1, 2)
    assert not np.array_equal(
        mine.tickets(b"s" * 32, 4, 1, 2, 64), mine.tickets(b"t" * 32, 4, 1, 2, 64)
    )
    assert not np.array_equal(
        mine.tickets(b"s" * 32, 4, 0, 2, 64), mine.tickets(b"s" * 32, 4, 1, 2, 64)
    )
    explored = [d.chance(0, 0, 0, 3, 8) for d in (mine, other)]
    assert not np.array_equal(*explored)
