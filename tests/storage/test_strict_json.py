"""Strict JSON: any parser reads it, and infinities come back as numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.storage.strict_json import from_json, to_json


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_infinities_are_written_as_texts() -> None:
    text = to_json({"a": math.inf, "b": [-math.inf, (math.nan,)], "c": {"d": math.inf}})
    strict = json.loads(text, parse_constant=refuse)
    assert strict == {"a": "inf", "b": ["-inf", ["nan"]], "c": {"d": "inf"}}


def test_infinities_of_objects_are_read_as_numbers() -> None:
    document = from_json(to_json({"a": math.inf, "b": {"c": -math.inf, "d": math.nan}, "e": "x"}))
    assert document["a"] == math.inf and document["b"]["c"] == -math.inf
    assert math.isnan(document["b"]["d"]) and document["e"] == "x"


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just("text"),
    lambda inner: st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), VALUES))
def test_objects_come_back_as_they_were(document: dict[str, Any]) -> None:
    text = to_json(document)
    json.loads(text, parse_constant=refuse)
    assert from_json(text) == document


@pytest.mark.parametrize("indent", [None, 2])
def test_other_values_are_written_as_json_does(indent: int | None) -> None:
    document = {"a": [1, 2.5, True, None, "é"], "b": {}}
    assert to_json(document, indent) == json.dumps(document, indent=indent)
