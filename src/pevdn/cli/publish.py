"""`pevdn publish`: copy what may be published of a private run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(
    run: Annotated[Path, typer.Argument(help="Directory of a finished private run.")],
    out: Annotated[Path, typer.Option(help="New directory for the publication.")],
    model: Annotated[str, typer.Option(help="Model: best, running, average or anchor.")] = "best",
    format: Annotated[str, typer.Option(help="File format: safetensors or onnx.")] = "safetensors",
    as_json: Json = False,
) -> None:
    """Copy what may be published of a finished private run to a new directory."""
    from pevdn.policies.publish import publish

    path, files, privacy = publish(run, out, model=model, format=format)
    sizes = {name: (path / name).stat().st_size for name in files}
    if as_json:
        print_json({"out": str(path), "files": sizes, "privacy": privacy})
        return
    print_table(["file", "bytes"], [[name, f"{size:,}"] for name, size in sizes.items()])
    epsilon, record = privacy["epsilon"], ""
    if "record" in epsilon:
        record = f", ε record {epsilon['record']:.3g} for one agent's record of it"
    typer.echo(
        f"At δ {privacy['delta']:.3g}: ε team {epsilon['team']:.3g} for one training episode"
        f"{record}. {privacy['randomness']['meaning']}\n{path}"
    )
