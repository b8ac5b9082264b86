"""The six algorithms: points on two axes, with defaults.

The axes: how the team's sum is formed, and whether gradients are differentially private.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pevdn.errors import unknown


@dataclass(frozen=True)
class Algorithm:
    """A point on the two axes, with its own defaults."""

    name: str
    exchange: str
    private: bool
    crosses: str  # what agents send each other
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PRIVATE: dict[str, Any] = {  # learns with clipped, noised gradients
    "buffer_size": 4096,
    "expected_batch_size": 128,
    "update_every": 4,
    "parallel_episodes": 32,
    "learning_rate": 8e-3,
    "learning_rate_end": 0.1,
    "learning_rate_steps": 350_000,
    "target_rate": 0.05,
    "return_lambda": 0.3,
    "reward_cap": 2.0,
    "network": "entities",
    "hidden_size": 32,
    "noise_multiplier": 1.71,
    "clip_norm": 0.2,
    "average_decay": 0.998,
}

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("iql", "alone", False, "nothing"),
        Algorithm("vdn", "central", False, "everything (the centralised baseline)"),
        Algorithm("pe-vdn-a", "broadcast", False, "m_i in the clear"),
        Algorithm("pe-vdn-b", "secret_shared", False, "shares of m_i"),
        Algorithm(
            "pe-vdn-c",
            "secret_shared",
            True,
            "shares of m_i; gradients are clipped and noised",
            _PRIVATE,
        ),
        Algorithm(
            "pe-vdn-d",
            "noised",
            True,
            "shares of messages that are clipped and noised; so are gradients",
            {
                **_PRIVATE,
                "momentum": 0.5,
                "return_lambda": 0.6,
                "reward_cap": 5.0,
                "bootstrap_timeouts": False,
                "noise_multiplier": 1.3,
                "opening_noise": 0.885,
                "message_norm": 0.25,
                "budget_observer": "record",
            },
        ),
    )
}


def find(name: str) -> Algorithm:
    """Return the algorithm of this name."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
