"""A minibatch in parts holds every sampled episode once."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pevdn.agent import minibatch


def in_parts(slots, lengths, horizons, part, private):
    arrays = jnp.asarray(slots), jnp.asarray(lengths)
    return minibatch.in_parts(*arrays, horizons, part, private)


@given(st.integers(0, 2**31), st.floats(0.0, 1.0))
def test_a_sample_in_order_of_length_holds_every_sampled_episode_exactly_once(seed, rate):
    rng = np.random.default_rng(seed)
    slots = np.where(rng.random(40) < rate, np.arange(40), 40)
    lengths = rng.integers(0, 9, 41)  # also one for the scratch slot, which must not count
    found, parts = in_parts(slots[None], lengths[None], [9], 4, private=False)
    ordered = np.asarray(found)[0]
    assert parts == -(-np.sum(slots < 40) // 4)
    assert sorted(ordered) == sorted(slots)
    n = np.sum(slots < 40)
    assert np.all(ordered[n:] == 40)
    assert np.all(np.diff(lengths[ordered[:n]]) <= 0)


@given(
    st.integers(0, 2**31), st.integers(1, 3), st.floats(0.0, 1.0), st.sampled_from([[9], [3, 5, 9]])
)
def test_parts_by_horizon_hold_every_sampled_episode_once_and_mix_no_lengths(
    seed, lanes, rate, horizons
):
    """In all lanes a part belongs to one horizon, and nothing is laid out behind the last part."""
    rng, n = np.random.default_rng(seed), 4
    slots = np.where(rng.random((lanes, 20)) < rate, np.arange(20), 20)
    lengths = np.concatenate([rng.integers(1, 10, (lanes, 20)), np.zeros((lanes, 1), int)], axis=1)
    laid, parts = in_parts(slots, lengths, horizons, n, private=True)
    laid, parts = np.asarray(laid), int(parts)
    assert laid.shape[1] % n == 0 and np.all(laid[:, parts * n :] == 20)
    for lane in range(lanes):
        there = laid[lane][laid[lane] < 20]
        assert sorted(there) == sorted(slots[lane][slots[lane] < 20])
    for part in np.split(laid[:, : parts * n], parts, axis=1) if parts else []:
        who, where = np.nonzero(part < 20)
        needed = np.searchsorted(horizons, lengths[who, part[who, where]])
        assert len(set(needed)) == 1  # of all lanes together; no part is empty in all of them
