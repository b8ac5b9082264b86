"""Watch a trained team: one greedy episode, recorded first and drawn after.

>>> recording = pevdn.replay("runs/my-run", "battle.gif")  # doctest: +SKIP

The drawing knows nothing of JAX or of worlds: it gets a `Recording` of plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pevdn.config.settings import MOST, number
from pevdn.errors import UsageError
from pevdn.training.directory import Run
from pevdn.viewer.recording import Recording

__all__ = ["Recording", "record", "replay"]


def replay(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    env: Any = None,
    seed: int | None = None,
    model: str = "best",
    episode: int = 0,
    q_values: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Play one greedy episode, and draw it into `out` (.html, .gif, .mp4, .json) if that is given.

    `seed` and `model` choose the team as in `pevdn.load`; `episode` K is the K-th that
    `pevdn evaluate` plays; `q_values` names an agent whose values are shown beside it all.
    `env` is a world to play in instead of the run's; `progress` hears how many frames of how many
    are drawn. The recording of a private run holds the number of the team (its `lane`) and not the
    seed, from which the noise may follow.
    """
    from pevdn.viewer import drawing

    path = None if out is None else drawing.checked(Path(out))
    recording = record(run, env=env, seed=seed, model=model, episode=episode, q_values=q_values)
    if path is not None:
        drawing.draw(recording, path, progress or (lambda done, total: None))
    return recording


def record(
    run: Run | str | Path,
    *,
    env: Any = None,
    seed: int | None = None,
    model: str = "best",
    episode: int = 0,
    q_values: int | None = None,
) -> Recording:
    """One greedy episode of the team that `pevdn.load` gives; the same every time."""
    from pevdn._platform import cache_compilations
    from pevdn.policies.policy import load
    from pevdn.training import world as environment
    from pevdn.viewer import playing

    episode = number("episode", episode, int, 0, MOST)
    cache_compilations()
    run = run if isinstance(run, Run) else Run(Path(run))
    config = run.config
    policy = load(run, seed=seed, model=model)
    if q_values is not None and not 0 <= q_values < len(policy):
        raise UsageError(
            f"q_values is {q_values}, but {config.env} has agents 0 to {len(policy) - 1}."
        )
    stage = playing.stage_for(environment.again(run, env), episode)
    try:
        played = playing.play(stage, policy, q_values)
    finally:
        stage.close()
    seed = config.seed if seed is None else seed
    return Recording(
        world=config.env,
        algorithm=config.algorithm,
        model=model,
        seed=None if config.private else seed,
        lane=seed - config.seed if config.private else None,
        episode=episode,
        actions=stage.actions,
        q_values_of=q_values,
        **played,
    )
