"""The two networks behind one set of functions: `networks.of(params).step(params, …)`.

`network` is recurrent and knows nothing of the world; `entities` is feed-forward and has the
world's symmetry. Parameters know which they belong to.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from pevdn.agent import entities
from pevdn.agent import recurrent as network
from pevdn.worlds.interface import AgentSpec

Parameters = network.Parameters | entities.Parameters


def initialise(name: str, key: Array, spec: AgentSpec, hidden_size: int) -> Parameters:
    """Fresh parameters of the network called `name`."""
    if name == "entities":
        return entities.initialise(key, spec, hidden_size)
    return network.initialise(key, spec.observation_size, spec.n_actions, hidden_size)


def of(params: Parameters) -> Any:
    """The module whose functions take these parameters."""
    return entities if isinstance(params, entities.Parameters) else network
