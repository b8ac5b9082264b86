"""Parameters of one small recurrent agent."""

import pytest
from one_agent import KEY, A, H, O

from pevdn.agent import recurrent


@pytest.fixture(scope="session")
def params():
    return recurrent.initialise(KEY, O, A, H)
