"""What a party has learnt: one agent's policy, from the data that it keeps."""

from __future__ import annotations

from pathlib import Path

import jax

from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.network.mind import Mind
from pevdn.network.recovery import Journal
from pevdn.policies.policy import AgentPolicy
from pevdn.training.directory import Run
from pevdn.worlds.interface import AgentSpec


def load_agent(
    folder: Path | str, model: str = "best", spec: AgentSpec | None = None
) -> AgentPolicy:
    """The agent of a party, as its last snapshot has it; a finished party's is its last round.

    `model` is `running`, `average`, `anchor`, or `best`: the anchor if there is one, else the
    average if one is kept. An agent with a body of its own needs its `spec`.
    """
    folder = Path(folder)
    found = Journal(folder).snapshot()
    if found is None:
        raise UsageError(f"{folder} holds no data of a party; give the directory NAME.data.")
    arrays, facts = found
    config = Run(folder).config
    agents = worlds.make(config.env).agents
    mind = Mind(config, spec or agents[facts["agent"]], len(agents), 1)
    leaves, form = jax.tree.flatten(mind.begin(jax.random.key(0)))
    shapes = [arrays[str(i)].shape for i in range(len(leaves))]
    if shapes != [leaf.shape for leaf in leaves]:
        raise UsageError(f"the agent in {folder} sees and does other things than this spec says.")
    learner = jax.tree.unflatten(form, [arrays[str(i)] for i in range(len(leaves))])
    anchored = bool(facts["course"]["anchored"])
    kept = {"running": True, "average": config.settings.average_decay > 0, "anchor": anchored}
    if model == "best":
        model = next(name for name in ("anchor", "average", "running") if kept[name])
    if not kept.get(model):
        have = ", ".join(name for name, there in kept.items() if there)
        raise UsageError(f"{folder} has no model '{model}'; it has: {have}.")
    return AgentPolicy(getattr(learner, "params" if model == "running" else model))
