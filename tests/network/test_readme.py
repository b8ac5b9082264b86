"""The README.md of a party's directory."""

from __future__ import annotations

import pytest

from pevdn.config import experiment as config
from pevdn.network import readme
from pevdn.privacy.accounting import UNCOVERED


@pytest.mark.parametrize(("opening_noise", "covered"), [(1.0, True), (0.0, False)])
def test_opened_sums_are_called_noised_only_if_the_noise_hides_a_record(
    opening_noise: float, covered: bool
) -> None:
    own = {"opening_noise": opening_noise}
    page = readme.text(config.make("pe-vdn-d", "toy:coordination", 1000, settings=own), False)
    assert ("opened sums, which are noised," in page) is covered
    assert (f"with differential privacy, but with {UNCOVERED}." in page) is not covered
