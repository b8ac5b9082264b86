"""Load the policies of a trained team, and act with them.

>>> policy = pevdn.load("runs/my-run")             # doctest: +SKIP
>>> actions = policy.act(observations, available)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pevdn.errors import UsageError
from pevdn.training.directory import Run

if TYPE_CHECKING:
    from pevdn.config.settings import Settings

MODELS = ("best", "running", "average", "anchor")


class AgentPolicy:
    """One agent's greedy policy, with its memory of the current episode."""

    def __init__(self, params: Any) -> None:
        import jax

        from pevdn.agent import acting, networks

        self.params = params
        self._network = networks.of(params)
        self.observation_size, self.n_actions = self._network.sizes(params)

        def act(params: Any, memory: Any, observation: Any, last: Any, available: Any) -> Any:
            memory, q = self._network.step(params, memory, observation, last)
            return memory, q, acting.greedy(q, available)

        self._act = jax.jit(act)
        self.reset()

    def reset(self) -> None:
        """Clear the memory; call it at the start of an episode."""
        self._memory = self._network.initial_memory(self.params)
        self._last = -1

    def act(self, observation: Any, available: Any = None) -> int:
        """Return the greedy action for an observation (O,); `available` is (A,) bool or all."""
        vector = np.asarray(observation, np.float32)
        if vector.shape != (self.observation_size,):
            raise UsageError(
                f"an observation of shape {vector.shape} was given to an agent that takes "
                f"({self.observation_size},)."
            )
        mask = np.ones(self.n_actions, bool) if available is None else np.asarray(available, bool)
        if mask.shape != (self.n_actions,) or not mask.any():
            raise UsageError(
                f"available actions must be ({self.n_actions},) with at least one true, "
                f"got {mask.astype(int).tolist()}."
            )
        self._memory, self.q_values, action = self._act(
            self.params, self._memory, vector, self._last, mask
        )
        self._last = int(action)
        return self._last


class Policy:
    """The policies of a team; `policy[i]` is agent i's."""

    def __init__(self, agents: Sequence[AgentPolicy]) -> None:
        self.agents = tuple(agents)

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, i: int) -> AgentPolicy:
        return self.agents[i]

    def reset(self) -> None:
        """Clear all memories; call it at the start of an episode."""
        for agent in self.agents:
            agent.reset()

    def act(self, observations: Sequence[Any], available: Sequence[Any] | None = None) -> list[int]:
        """Return one greedy action per agent, each from its own observation."""
        if len(observations) != len(self):
            raise UsageError(f"{len(observations)} observations were given to {len(self)} agents.")
        masks: Sequence[Any] = [None] * len(self) if available is None else available
        if len(masks) != len(self):
            raise UsageError(f"available actions of {len(masks)} agents were given to {len(self)}.")
        pairs = zip(self.agents, observations, masks, strict=True)
        return [agent.act(observation, mask) for agent, observation, mask in pairs]


def as_run(run: Run | str | Path) -> Run:
    """Return the run in a directory; a `Run` is returned unchanged."""
    return run if isinstance(run, Run) else Run(Path(run))


def load(run: Run | str | Path, *, seed: int | None = None, model: str = "best") -> Policy:
    """Return the trained team of a run, by default that of its first seed.

    `model` is `running` (the newest parameters), `average`, `anchor`, or `best`: the anchor if
    there is one, else the average if it is kept, else the newest parameters.
    """
    run = as_run(run)
    params, team = team_parameters(run, model)
    config = run.config
    seed = config.seed if seed is None else seed
    if not config.seed <= seed < config.seed + config.seeds:
        last = config.seed + config.seeds - 1
        raise UsageError(f"seed is {seed}, but {run.path} has seeds {config.seed} to {last}.")
    return Policy([AgentPolicy(own) for own in of_lane(params, team, seed - config.seed)])


def of_lane(params: tuple[Any, ...], team: Any, lane: int) -> list[Any]:
    """Return each agent's parameters in one lane, given those by kind (S, N, ...)."""
    import jax

    agents: dict[int, Any] = {}
    for kind, of_kind in zip(team.kinds, params, strict=True):
        for n, i in enumerate(kind.members):
            agents[i] = jax.tree.map(lambda x, n=n: x[lane, n], of_kind)
    return [agents[i] for i in range(len(team))]


def team_parameters(run: Run | str | Path, model: str) -> tuple[tuple[Any, ...], Any]:
    """Return the parameters by kind (S, N, ...) of all seeds of a run, and its team."""
    from pevdn.simulation.program import Simulation
    from pevdn.training import world as environment
    from pevdn.training.checkpoint import Checkpoints

    run = as_run(run)
    config = run.config
    require_model(model, config.settings, run.path)
    simulation = Simulation(environment.outline(run), config)
    checkpoints = Checkpoints(run.path, config, read_only=True)
    learners, anchored = checkpoints.restore_learners(simulation)
    checkpoints.close()
    return select_model(model, learners, anchored, config.settings, run.path), simulation.team


# ---- the choice of a model ----------------------------------------------------------------------


def require_model(model: str, settings: Settings, where: Path) -> None:
    """Raise `UsageError` if `model` is unknown, or if the training in `where` does not keep it."""
    if model not in MODELS:
        raise UsageError(
            f"model is '{model}', but must be 'best', 'running', 'average' or 'anchor'."
        )
    kept = {"anchor": settings.anchor, "average": bool(settings.average_decay)}
    if not kept.get(model, True):
        raise UsageError(f"{where} was trained without an {model}; use model 'running'.")


def select_model(
    model: str, learners: Sequence[Any], anchored: Any, settings: Settings, where: Path
) -> tuple[Any, ...]:
    """Return the parameters of `model` of each learner.

    `anchored` says which lanes (S,) have an anchor; it is () for a learner without lanes.
    """
    from pevdn.simulation.state import where_lane

    if model == "anchor" and not anchored.all():
        raise UsageError(f"not every seed of {where} has reached an anchor; use model 'best'.")
    newest = "average" if settings.average_decay and model != "running" else "params"
    use_anchor = anchored & (model in ("best", "anchor"))
    return tuple(where_lane(use_anchor, x.anchor, getattr(x, newest)) for x in learners)


def describe_model(model: str, settings: Settings) -> str:
    """Return what `model` stands for in a training with these settings."""
    if model != "best":
        return model
    newest = "average" if settings.average_decay else "running"
    return f"anchor, or {newest} if there is none" if settings.anchor else newest
