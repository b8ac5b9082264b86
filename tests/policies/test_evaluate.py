"""Claims about `pevdn evaluate`: it repeats, and its intervals are Wilson's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from support import (
    cli,
    strict,
)

from pevdn.errors import UsageError
from pevdn.policies import evaluate
from pevdn.training import evaluator
from pevdn.training.loop import Run

pytestmark = pytest.mark.usefixtures("compiled_once")


# --- evaluation ------------------------------------------------------------------------------


def test_an_evaluation_repeats_with_its_seed(finished: dict[str, Run]) -> None:
    path = finished["pe-vdn-c"].path
    first, again, other = (
        cli("evaluate", path, "--episodes", 16, "--seed", seed, "--json") for seed in (3, 3, 4)
    )
    assert first.code == 0 and first == again
    row, other_row = (strict(said.out)["seeds"][0] for said in (first, other))
    assert row["seed"] == 0
    assert row["win_rate_low"] <= row["win_rate"] <= row["win_rate_high"]
    assert row != other_row


def test_every_evaluation_of_every_seed_plays_episodes_of_its_own() -> None:
    def keys(number: int) -> list[Any]:
        return jax.random.key_data(evaluator.evaluation_keys(jnp.arange(3), number)).tolist()

    all_of_them = [tuple(key) for number in range(4) for key in keys(number)]
    assert len(set(all_of_them)) == 12
    training = {tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in range(3)}
    assert not training & set(all_of_them)
    assert keys(1) == keys(1)


def test_every_seed_of_a_run_is_evaluated(three: dict[str, Run]) -> None:
    rows = evaluate.evaluate(three["pe-vdn-b"], episodes=16)
    assert [row["seed"] for row in rows] == [5, 6, 7]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"episodes": 0}, "episodes is 0, but must be at least 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seed": 2**40}, "seed is 1099511627776, but must be at most"),
    ],
)
def test_an_evaluation_out_of_range_is_refused(
    finished: dict[str, Run], what: dict[str, int], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        evaluate.evaluate(finished["pe-vdn-b"], **what)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_win_rate_is_wilsons(drawn: tuple[int, int]) -> None:
    won, played = drawn
    low, high = evaluate.wilson(won, played)
    exact = scipy.stats.binomtest(won, played).proportion_ci(0.95, method="wilson")
    assert low == pytest.approx(exact.low, abs=1e-6)
    assert high == pytest.approx(exact.high, abs=1e-6)
    assert 0 <= low <= won / played + 1e-12 and won / played <= high + 1e-12 <= 1 + 1e-12
