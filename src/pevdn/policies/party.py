"""Load one agent's policy from a party's data."""

from __future__ import annotations

from pathlib import Path

import jax

from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.network.compiled_agent import CompiledAgent
from pevdn.network.recovery import Journal
from pevdn.policies.policy import AgentPolicy
from pevdn.training.directory import Run
from pevdn.worlds.interface import AgentSpec


def load_agent(
    folder: Path | str, model: str = "best", spec: AgentSpec | None = None
) -> AgentPolicy:
    """Load a party's agent from its last snapshot; a finished party's is up to date.

    `model` is `running`, `average`, `anchor`, or `best`: the anchor if there is one, else the
    average if one is kept. An agent with its own body needs its `spec`.
    """
    folder = Path(folder)
    found = Journal(folder).snapshot()
    if found is None:
        raise UsageError(f"{folder} holds no data of a party; give the directory NAME.data.")
    arrays, facts = found
    config = Run(folder).config
    agents = worlds.make(config.env).agents
    agent = CompiledAgent(config, spec or agents[facts["agent"]], len(agents), 1)
    leaves, form = jax.tree.flatten(agent.begin(jax.random.key(0)))
    shapes = [arrays[str(i)].shape for i in range(len(leaves))]
    if shapes != [leaf.shape for leaf in leaves]:
        raise UsageError(f"the agent in {folder} has other observations or actions than this spec.")
    learner = jax.tree.unflatten(form, [arrays[str(i)] for i in range(len(leaves))])
    anchored = bool(facts["progress"]["anchored"])
    kept = {"running": True, "average": config.settings.average_decay > 0, "anchor": anchored}
    if model == "best":
        model = next(name for name in ("anchor", "average", "running") if kept[name])
    if not kept.get(model):
        have = ", ".join(name for name, there in kept.items() if there)
        raise UsageError(f"{folder} has no model '{model}'; it has: {have}.")
    return AgentPolicy(getattr(learner, "params" if model == "running" else model))
