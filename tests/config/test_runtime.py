"""Claims about runtime options: each has a meaning and a range, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest

from pevdn.config.presets import PRESETS, options_of
from pevdn.config.runtime import RuntimeOptions, option_fields
from pevdn.config.settings import setting_fields
from pevdn.errors import UsageError


def test_no_option_is_also_a_setting_and_each_says_what_it_means() -> None:
    assert not set(option_fields()) & set(setting_fields())
    for field in option_fields().values():
        assert len(field.metadata["meaning"].split()) >= 2, field.name


def test_what_is_not_given_stays_as_it_was() -> None:
    had = RuntimeOptions("host", 2, 5.0, 10, "all")
    assert had.replace(dict.fromkeys(option_fields())) == had
    assert had.replace({"workers": "4", "devices": "2"}) == RuntimeOptions("host", 4, 5.0, 10, 2)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("buffer", "disk", "unknown value of buffer: 'disk'"),
        ("workers", 2000, "workers is 2000, but must be at most 1024."),
        ("workers", "few", "workers is 'few', but must be a whole number."),
        ("world_timeout", 0, "world_timeout is 0.0, but must be at least 0.01."),
        ("checkpoint_every", 0, "checkpoint_every is 0, but must be at least 1."),
        ("devices", 0, "devices is '0', but must be 'all' or a positive whole number."),
        ("devices", "-1", "devices is '-1', but must be"),
        ("wokers", 1, "unknown runtime option 'wokers'; did you mean 'workers'?"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        RuntimeOptions().replace({name: value})
    assert told in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_the_options_of_every_preset_are_accepted(name: str) -> None:
    expected = 400_000 if name.endswith("-long") else RuntimeOptions().checkpoint_every
    assert options_of(name).checkpoint_every == expected
