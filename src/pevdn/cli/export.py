"""`pevdn export`: write a policy to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or NAME.data of a party.")],
    agent: Annotated[
        int | None, typer.Option(help="Index of the agent, from 0; not needed for a party.")
    ] = None,
    format: Annotated[str, typer.Option(help="File format: safetensors or onnx.")] = "safetensors",
    seed: Annotated[
        int | None, typer.Option(help="Seed of the team (default: the first of the run).")
    ] = None,
    model: Annotated[str, typer.Option(help="Model: best, running, average or anchor.")] = "best",
    out: Annotated[
        Path | None, typer.Option(help="Output file (default: RUN/agent-I.FORMAT).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write one agent's greedy policy to a file that needs neither pevdn nor JAX."""
    from pevdn.policies.export import advice, export

    path, facts = export(run, agent, format=format, seed=seed, model=model, out=out, force=force)
    if as_json:
        document = {"file": str(path), "bytes": path.stat().st_size, "facts": facts}
        print_json({**document, "publish": advice(facts)})
        return
    typer.echo(f"{path}, {path.stat().st_size:,} bytes")
    print_table(["fact", "value"], list(facts.items()))
    typer.echo(advice(facts))
