"""Watch a trained team: record one greedy episode, then draw it.

>>> recording = pevdn.replay("runs/my-run", "battle.gif")  # doctest: +SKIP

Drawing depends on neither JAX nor worlds: its input is a `Recording` of plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pevdn._platform import cache_compilations
from pevdn.config.settings import MOST, number
from pevdn.errors import UsageError
from pevdn.policies.policy import as_run, load
from pevdn.training import world as environment
from pevdn.training.directory import Run
from pevdn.viewer import drawing
from pevdn.viewer.recording import Recording

__all__ = ["Recording", "record_episode", "replay"]


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
    """Play one greedy episode; draw it into `out` (.html, .gif, .mp4 or .json), if given.

    `seed` and `model` select the team as in `pevdn.load`; `episode` K is the K-th episode of
    `pevdn evaluate`; `q_values` is an agent whose Q-values to show. A run in an environment object
    needs it again, as `env`. `progress` is called with the number of images drawn and their total.
    The recording of a private run holds the team's `lane` instead of the seed, because the noise
    may follow from the seed.
    """

    path = None if out is None else drawing.checked(Path(out))
    recording = record_episode(
        run, env=env, seed=seed, model=model, episode=episode, q_values=q_values
    )
    if path is not None:
        drawing.draw(recording, path, progress or (lambda done, total: None))
    return recording


def record_episode(
    run: Run | str | Path,
    *,
    env: Any = None,
    seed: int | None = None,
    model: str = "best",
    episode: int = 0,
    q_values: int | None = None,
) -> Recording:
    """Return the recording of one greedy episode of the team that `pevdn.load` returns."""
    from pevdn.viewer import playing

    episode = number("episode", episode, int, 0, MOST)
    cache_compilations()
    run = as_run(run)
    config = run.config
    policy = load(run, seed=seed, model=model)
    if q_values is not None and not 0 <= q_values < len(policy):
        raise UsageError(
            f"q_values is {q_values}, but {config.env} has agents 0 to {len(policy) - 1}."
        )
    source = playing.source_for(environment.again(run, env), episode)
    try:
        played = playing.play(source, policy, q_values)
    finally:
        source.close()
    seed = config.seed if seed is None else seed
    return Recording(
        world=config.env,
        algorithm=config.algorithm,
        model=model,
        seed=None if config.private else seed,
        lane=seed - config.seed if config.private else None,
        episode=episode,
        actions=source.actions,
        q_values_of=q_values,
        **played,
    )
