"""Dispatch between the two networks: `networks.of(params).step(params, …)`.

`recurrent` has memory and assumes nothing about the world. `entities` is feed-forward and uses the
world's symmetry. The type of the parameters identifies the network.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from pevdn.agent import entities, recurrent
from pevdn.worlds.interface import AgentSpec

Parameters = recurrent.Parameters | entities.Parameters


def initialise(name: str, key: Array, spec: AgentSpec, hidden_size: int) -> Parameters:
    """Return new parameters of the network called `name`."""
    if name == "entities":
        return entities.initialise(key, spec, hidden_size)
    return recurrent.initialise(key, spec.observation_size, spec.n_actions, hidden_size)


def of(params: Parameters) -> Any:
    """Return the module whose functions take these parameters."""
    return entities if isinstance(params, entities.Parameters) else recurrent
