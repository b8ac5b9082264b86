"""Load one agent's policy from the data of its party."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.network.compiled_agent import CompiledAgent
from pevdn.network.recovery import Journal
from pevdn.policies.policy import AgentPolicy, require_model, select_model
from pevdn.training.directory import Run
from pevdn.worlds.interface import AgentSpec


def load_agent(
    folder: Path | str, model: str = "best", spec: AgentSpec | None = None
) -> AgentPolicy:
    """Return the agent of a party from its newest snapshot; `model` is that of `pevdn.load`.

    An agent with a body of its own needs its `spec`.
    """
    return AgentPolicy(agent_parameters(Path(folder), model, spec)[0])


def agent_parameters(folder: Path, model: str, spec: AgentSpec | None) -> tuple[Any, int]:
    """Return the parameters in a party's newest snapshot, and the number of its agent."""
    snapshot = Journal(folder).snapshot()
    if snapshot is None:
        raise UsageError(f"{folder} holds no data of a party; pass the directory NAME.data.")
    arrays, facts = snapshot
    config = Run(folder).config
    require_model(model, config.settings, folder)
    agents = worlds.make(config.env).agents
    agent = CompiledAgent(config, spec or agents[facts["agent"]], len(agents), 1)
    leaves, structure = jax.tree.flatten(agent.begin(jax.random.key(0)))
    shapes = [arrays[str(i)].shape for i in range(len(leaves))]
    if shapes != [leaf.shape for leaf in leaves]:
        raise UsageError(
            f"the agent in {folder} has other observations or actions than this spec; pass the "
            "spec of its body."
        )
    learner = jax.tree.unflatten(structure, [arrays[str(i)] for i in range(len(leaves))])
    counters = facts.get("progress") or facts["course"]  # its name in earlier versions
    anchored = np.asarray(counters["anchored"], bool)
    (params,) = select_model(model, [learner], anchored, config.settings, folder)
    return params, facts["agent"]
