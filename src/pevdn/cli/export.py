"""`pevdn export`: a policy that travels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    run: Annotated[Path, typer.Argument(help="The directory of the run, or NAME.data of a party.")],
    agent: Annotated[
        int | None, typer.Option(help="Whose policy, from 0 on; a party has its own alone.")
    ] = None,
    format: Annotated[str, typer.Option(help="safetensors or onnx.")] = "safetensors",
    seed: Annotated[int | None, typer.Option(help="Which seed of the run; the first one.")] = None,
    model: Annotated[str, typer.Option(help="best, running, average or anchor.")] = "best",
    out: Annotated[
        Path | None, typer.Option(help="The file; RUN/agent-I.FORMAT unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
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
