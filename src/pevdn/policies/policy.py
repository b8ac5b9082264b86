"""What a trained team does: load a run, and let it act anywhere.

>>> policy = pevdn.load("runs/my-run")             # doctest: +SKIP
>>> actions = policy.act(observations, available)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pevdn.errors import UsageError
from pevdn.training.directory import Run


class AgentPolicy:
    """One agent's policy: its own observation in, its own action out; it remembers the episode."""

    def __init__(self, params: Any) -> None:
        import jax

        from pevdn.agent import acting, networks

        self.params = params
        self._network = networks.of(params)
        self.observation_size, self.n_actions = self._network.sizes(params)

        def act(params: Any, memory: Any, seen: Any, last: Any, open_: Any) -> Any:
            memory, q = self._network.step(params, memory, seen, last)
            return memory, q, acting.greedy(q, open_)

        self._act = jax.jit(act)
        self.reset()

    def reset(self) -> None:
        """Forget; call it when an episode starts."""
        self._memory = self._network.initial_memory(self.params)
        self._last = -1

    def act(self, observation: Any, available: Any = None) -> int:
        """The greedy action for an observation (O,) among the available ones (A,) bool."""
        seen = np.asarray(observation, np.float32)
        if seen.shape != (self.observation_size,):
            raise UsageError(
                f"an observation of shape {seen.shape} was given to an agent that takes "
                f"({self.observation_size},)."
            )
        open_ = np.ones(self.n_actions, bool) if available is None else np.asarray(available, bool)
        if open_.shape != (self.n_actions,) or not open_.any():
            raise UsageError(
                f"available actions must be ({self.n_actions},) with at least one true, "
                f"got {open_.astype(int).tolist()}."
            )
        self._memory, self.q_values, action = self._act(
            self.params, self._memory, seen, self._last, open_
        )
        self._last = int(action)
        return self._last


class Policy:
    """A team of agent policies; `policy[i]` is agent i's alone."""

    def __init__(self, agents: Sequence[AgentPolicy]) -> None:
        self.agents = tuple(agents)

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, i: int) -> AgentPolicy:
        return self.agents[i]

    def reset(self) -> None:
        """Call it when an episode starts."""
        for agent in self.agents:
            agent.reset()

    def act(self, observations: Sequence[Any], available: Sequence[Any] | None = None) -> list[int]:
        """One greedy action per agent, each from its own observation."""
        if len(observations) != len(self):
            raise UsageError(f"{len(observations)} observations were given to {len(self)} agents.")
        masks: Sequence[Any] = [None] * len(self) if available is None else available
        if len(masks) != len(self):
            raise UsageError(f"available actions of {len(masks)} agents were given to {len(self)}.")
        pairs = zip(self.agents, observations, masks, strict=True)
        return [agent.act(seen, open_) for agent, seen, open_ in pairs]


def load(run: Run | str | Path, *, seed: int | None = None, model: str = "best") -> Policy:
    """The trained team of a run, of its first seed unless told otherwise.

    `model` is `running` (the newest parameters), `average`, `anchor`, or `best`: the anchor if
    there is one, else the average if one is kept.
    """
    params, team = team_parameters(run, model)
    run = run if isinstance(run, Run) else Run(Path(run))
    config = run.config
    seed = config.seed if seed is None else seed
    if not config.seed <= seed < config.seed + config.seeds:
        last = config.seed + config.seeds - 1
        raise UsageError(f"seed is {seed}, but {run.path} has seeds {config.seed} to {last}.")
    return Policy([AgentPolicy(own) for own in of_lane(params, team, seed - config.seed)])


def of_lane(params: tuple[Any, ...], team: Any, lane: int) -> list[Any]:
    """Every agent's own parameters, from those by kind (S, N, ...)."""
    import jax

    agents: dict[int, Any] = {}
    for kind, of_kind in zip(team.kinds, params, strict=True):
        for n, i in enumerate(kind.members):
            agents[i] = jax.tree.map(lambda x, n=n: x[lane, n], of_kind)
    return [agents[i] for i in range(len(team))]


def team_parameters(run: Run | str | Path, model: str) -> tuple[tuple[Any, ...], Any]:
    """Parameters by kind (S, N, ...) of all seeds of a run, and its team."""
    from pevdn.simulation.program import Simulation, where_lane
    from pevdn.training import world as environment
    from pevdn.training.checkpoint import Checkpoints

    run = run if isinstance(run, Run) else Run(Path(run))
    config = run.config
    if model not in ("best", "running", "average", "anchor"):
        raise UsageError(
            f"model is '{model}', but must be 'best', 'running', 'average' or 'anchor'."
        )
    kept = {"anchor": config.settings.anchor, "average": bool(config.settings.average_decay)}
    if not kept.get(model, True):
        raise UsageError(f"{run.path} was trained without an {model}; use model 'running'.")
    simulation = Simulation(environment.outline(run), config)
    checkpoints = Checkpoints(run.path, config, read_only=True)
    learners, anchored = checkpoints.restore_learners(simulation)
    checkpoints.close()
    if model == "anchor" and not anchored.all():
        raise UsageError(f"not every seed of {run.path} has reached an anchor; use model 'best'.")
    newest = "average" if kept["average"] and model != "running" else "params"
    choose = anchored & (model in ("best", "anchor"))
    params = tuple(where_lane(choose, x.anchor, getattr(x, newest)) for x in learners)
    return params, simulation.team
