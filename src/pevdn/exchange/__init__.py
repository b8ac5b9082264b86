"""The exchange of messages: the only code that combines numbers of different agents.

An exchange takes every agent's message (N, ...) and returns what each agent holds afterwards
(N, ...), and the largest message that it refused (0 if none).

| exchange | what crosses between agents | what each agent then holds |
|---|---|---|
| `alone` | nothing | its own m_i |
| `broadcast` | m_i in the clear | Σ m_i |
| `secret_shared` | shares of m_i, uniform by themselves | Σ m_i, rounded to 10^−PRECISION |
| `central` | everything (`central.team_gradient`, the baseline) | the gradient itself |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from jax import Array


class Opened(NamedTuple):
    """The result of one round."""

    total: Array  # (N, ...) what each agent holds
    refused: Array  # () the largest |m_i| that did not fit, 0 if all did


class Exchange(Protocol):
    def __call__(self, key: Array, messages: Array) -> Opened: ...
