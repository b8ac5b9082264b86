"""`pevdn evaluate`: measure the win rate of a trained team."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    episodes: Annotated[int, typer.Option(help="Greedy episodes per seed.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the episodes.")] = 0,
    model: Annotated[str, typer.Option(help="Model: best, running, average or anchor.")] = "best",
    as_json: Json = False,
) -> None:
    """Evaluate the greedy policies of a run, finished or not."""
    from pevdn.policies.evaluate import evaluate

    rows = evaluate(run, episodes=episodes, seed=seed, model=model)
    if as_json:
        document = {"run": str(run), "episodes": episodes, "seed": seed, "model": model}
        print_json({**document, "seeds": rows})
        return
    print_table(
        ["seed", "win rate", "95 % interval", "return", "length"],
        [
            [
                row["seed"],
                f"{row['win_rate']:.3f}",
                f"{row['win_rate_low']:.3f} to {row['win_rate_high']:.3f}",
                f"{row['return']:.2f}",
                f"{row['episode_length']:.1f}",
            ]
            for row in rows
        ],
    )
