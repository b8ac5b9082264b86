"""A search trains every variant as if it were alone, in one program."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import PRIVATE, SMALL, train

import pevdn
from pevdn.errors import UsageError
from pevdn.storage.strict_json import from_json
from pevdn.training.search import FILE, table

STEPS = 160


def test_a_variant_scores_as_a_training_with_its_settings(tmp_path: Path) -> None:
    variants = [{}, {"learning_rate": 0.05, "gamma": 0.5}]
    lines = pevdn.search(
        "pe-vdn-b", variants, "toy:two-step", steps=STEPS, seeds=2, out=tmp_path / "out", **SMALL
    )
    assert [from_json(x) for x in (tmp_path / "out" / FILE).read_text().splitlines()] == lines
    for number, variant in enumerate(variants):
        run = train("pe-vdn-b", tmp_path / str(number), steps=STEPS, seeds=2, **variant)
        own = [x for x in lines if x["variant"] == number]
        assert len(own) == len(run.metrics)
        for ours, theirs in zip(own, run.metrics, strict=True):
            assert ours["changes"] == variant
            for name in ("seed", "env_steps", "episodes", "updates"):
                assert ours[name] == theirs[name]
    first, second = (own["return"] for own in lines[-4::2])
    assert first != second or lines[-4]["updates"] > 0


def test_the_table_has_the_best_variant_first_and_the_plan_of_a_private_one() -> None:
    variants = [{"noise_multiplier": 1.0}, {"noise_multiplier": 4.0}]
    lines = pevdn.search("pe-vdn-c", variants, "toy:two-step", steps=40, seeds=2, **PRIVATE)
    rows = table(lines)
    assert len(rows) == 2 and rows[0]["win_rate"] >= rows[1]["win_rate"]
    spent = {row["changes"]["noise_multiplier"]: row["epsilon_team"] for row in rows}
    assert spent[4.0] < spent[1.0]
    assert all(len(row["by_seed"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("variants", "sentence"),
    [
        ([], "variants is empty"),
        ([{"hidden_size": 8}], "may differ within a search: 'hidden_size'"),
        ([{"learning_rat": 8}], "did you mean 'learning_rate'"),
        ([{"gamma": 2.0}], "gamma is 2.0, but must be at most 1"),
    ],
)
def test_a_variant_that_cannot_be_a_lane_is_refused(variants: list, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        pevdn.search("pe-vdn-b", variants, "toy:two-step", steps=40)


def test_a_search_keeps_no_budget_and_says_so() -> None:
    with pytest.raises(UsageError, match="epsilon_budget is 2, but a search keeps no ledger"):
        pevdn.search("pe-vdn-c", [{}], "toy:two-step", steps=40, epsilon_budget=2)
