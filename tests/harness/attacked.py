"""Episodes for shadow teams."""

from __future__ import annotations

import numpy as np

from pevdn.agent.replay import Episode


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def memorable(episodes: int, seed: int = 0) -> tuple[Episode, ...]:
    """Episodes of two agents in the shape of a toy, to be learnt by heart or not at all."""
    random = generator(seed)
    length = np.full(episodes, 3, np.int32)
    rewards = random.normal(size=(episodes, 3)).astype(np.float32)
    terminal = np.broadcast_to(np.arange(3) == 2, (episodes, 3))
    return tuple(
        Episode(
            observations=random.normal(size=(episodes, 4, o)).astype(np.float32),
            available=np.ones((episodes, 4, a), bool),
            actions=random.integers(0, a, (episodes, 3)).astype(np.int16),
            rewards=rewards,
            terminal=terminal,
            length=length,
        )
        for o, a in ((5, 3), (6, 4))
    )
