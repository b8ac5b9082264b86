"""Policies that travel: one agent's greedy policy, in a file that needs neither pevdn nor JAX.

A file holds one agent's own parameters and some facts about them. Nothing of its teammates is in
it, no optimiser state, no episode, and no seed or path of where it was trained. docs/export.md has
names, shapes and facts; examples/play_exported.py plays files of both formats. Of a private run
the file may be published; the run's directory may not, and `pevdn publish` copies what may.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pevdn
from pevdn.config.experiment import Config, fingerprint
from pevdn.errors import PevdnError, UsageError, unknown
from pevdn.storage.files import write_atomically
from pevdn.training.directory import Run

VERSION = "1"  # of the names of arrays and facts

NOTHING = (
    "Trained without differential privacy: these parameters promise nothing about the episodes "
    "that they were learnt from."
)
PROMISE = (
    "One training episode, neighbours by {relation}, has (epsilon_team, delta)-differential "
    "privacy towards whoever sees this policy, any models of the whole team up to this one, or "
    "what they do, and does not know the random numbers of the training. It holds no matter when "
    "or why the training ended. epsilon_agent counts one "
    "agent's own gradients alone and is no bound. Not covered are teammates, who saw the opened "
    "sums, and evaluation episodes{anchor}."
)
ANCHOR = ", whose results chose anchors in this training"
MAY = (
    "This file may be published under the ε in it, as long as the random numbers of the training "
    "stay secret. The directory of the run may not: it holds raw training episodes and random "
    "keys. `pevdn publish RUN --out DIR` copies what may be handed out."
)
MAY_NOT = (
    "Publish this file only if the training episodes are nobody's secret: it promises nothing "
    "about them. The directory of the run holds the episodes themselves."
)


class Exported(NamedTuple):
    path: Path
    facts: dict[str, str]  # as the file has them


def export(
    run: Run | str | Path,
    agent: int | None = None,
    *,
    format: str = "safetensors",
    seed: int | None = None,
    model: str = "best",
    out: str | Path | None = None,
    force: bool = False,
    spec: Any = None,
) -> Exported:
    """Write one agent's greedy policy to a file, `agent-I.FORMAT` in the run unless told where.

    `seed` and `model` are those of `pevdn.load`. The directory NAME.data of a party has one agent
    only, which needs no number, and its `spec` if it has a body of its own.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    write = FORMATS[format]()
    run = run if isinstance(run, Run) else Run(Path(run))
    config = run.config
    if (run.path / "checkpoints").exists() or not any(run.path.glob("snapshot-*")):
        params, agent, lane = _of_run(run, agent, seed, model)
    else:
        params, agent, lane = _of_party(run.path, agent, seed, model, spec)
    path = Path(out) if out is not None else run.path / f"agent-{agent}.{format}"
    if path.exists() and not force:
        raise UsageError(f"{path} exists; choose another --out, or replace it with --force.")
    facts = facts_of(config, agent, model, params, promise(run, lane))
    _write(path, write(params, facts))
    return Exported(path, facts)


def _of_run(run: Run, agent: int | None, seed: int | None, model: str) -> tuple[Any, int, int]:
    from pevdn.policies.policy import load

    if agent is None:
        raise UsageError(f"{run.path} holds a team; say whose policy it is to be with --agent.")
    if not (run.path / "checkpoints").exists():
        raise UsageError(f"{run.path} has no checkpoint yet; export once it has been saved.")
    team = load(run, seed=seed, model=model)
    if not 0 <= agent < len(team):
        raise UsageError(f"agent is {agent}, but {run.path} has agents 0 to {len(team) - 1}.")
    return team[agent].params, agent, 0 if seed is None else seed - run.config.seed


def _of_party(
    folder: Path, agent: int | None, seed: int | None, model: str, spec: Any
) -> tuple[Any, int, int]:
    from pevdn.network.recovery import Journal
    from pevdn.policies.party import load_agent

    policy = load_agent(folder, model, spec)
    found = Journal(folder).snapshot()
    assert found is not None  # it has just been loaded
    own = found[1]["agent"]
    if agent not in (None, own):
        raise UsageError(f"agent is {agent}, but {folder} has agent {own} alone.")
    if seed is not None:
        raise UsageError(f"seed is {seed}, but {folder} is of one training; leave --seed out.")
    return policy.params, own, 0


def _named(config: Config, model: str) -> str:
    """What `best` stands for."""
    if model != "best":
        return model
    newest = "average" if config.settings.average_decay else "running"
    return f"anchor, or {newest} if there is none" if config.settings.anchor else newest


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as problem:
        raise PevdnError(f"cannot write {path}: {problem.strerror or problem}.") from None


def public_world(env: str) -> str:
    """The id of a world, without arguments that may name data, a place or a seed.

    Those of a world outside of JAX stay if they are numbers or truth values and speak of no seed.
    """
    name, mark, arguments = env.partition("?")
    if name.startswith(("smax", "jaxmarl:", "toy:")):  # their arguments are names of the library
        return f"{name}?…" if any(sign in arguments for sign in "/\\~") else env

    def harmless(argument: str) -> bool:
        key, _, value = argument.partition("=")
        plain = re.fullmatch(r"-?\d+(\.\d+)?|true|false", value, re.IGNORECASE)
        return plain is not None and "seed" not in key.lower()

    return env if not mark or all(map(harmless, arguments.split("&"))) else f"{name}?…"


# ---- facts --------------------------------------------------------------------------------------


def facts_of(
    config: Config, agent: int, model: str, params: Any, promised: dict[str, str]
) -> dict[str, str]:
    """All facts about a policy that its file holds."""
    return {
        "pevdn_format": VERSION,
        "pevdn_version": pevdn.__version__,
        "algorithm": config.algorithm,
        "world": public_world(config.env),
        "agent": str(agent),
        "model": _named(config, model),
        **about(params),
        **promised,
    }


def about(params: Any) -> dict[str, str]:
    """Which network these parameters are of, and its sizes: enough to play them."""
    from pevdn.agent import entities, networks

    network = networks.of(params)
    has_things = network is entities
    observation_size, n_actions = network.sizes(params)
    facts = {
        "network": "entities" if has_things else "recurrent",
        "observation_size": observation_size,
        "n_actions": n_actions,
        "hidden_size": (params.core.bias if has_things else params.candidate_bias).shape[-1],
        "memory_size": network.initial_memory(params).shape[-1],
    }
    if has_things:
        facts["entities"] = json.dumps(
            [dataclasses.asdict(group) for group in params.spec.entities]
        )
    return {name: str(fact) for name, fact in facts.items()}


def promise(run: Run, lane: int) -> dict[str, str]:
    """What the policy says about its training episodes, from the run's ledger."""
    from pevdn.privacy import randomness
    from pevdn.privacy.ledger import Ledger

    config = run.config
    if not config.private:
        return {"privacy": NOTHING}
    ledger = Ledger.read(run.path, fingerprint(config))
    guaranteed = ledger.mechanism.spent(ledger.bound[lane])
    if guaranteed.epsilon_team == float("inf"):
        return {"privacy": NOTHING}
    words = PROMISE.format(
        relation=ledger.mechanism.relation, anchor=ANCHOR if config.settings.anchor else ""
    )
    source = randomness.source(config)
    return {
        **{name: str(x) for name, x in guaranteed._asdict().items()},
        "randomness": source,
        "privacy": f"{words} {randomness.MEANING[source]}",
    }


def advice(facts: dict[str, str]) -> str:
    """Whether a policy with these facts, and the run that it comes from, may be published."""
    return MAY if "epsilon_team" in facts else MAY_NOT


# ---- formats ------------------------------------------------------------------------------------


def arrays(params: Any) -> dict[str, np.ndarray]:
    """The parameters by name, as in `scorers.0.output.weight`."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.ascontiguousarray(x, np.float32)
        for path, x in leaves
    }


def to_safetensors(params: Any, facts: dict[str, str]) -> bytes:
    """The arrays, with the facts as metadata.

    `safetensors` writes these in another order every time. Sorted, equal policies are equal files.
    """
    from safetensors.numpy import save

    content = save(arrays(params), facts)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:start]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # the arrays stay aligned
    return len(header).to_bytes(8, "little") + header + content[start:]


def _onnx() -> Callable[[Any, dict[str, str]], bytes]:
    try:
        from pevdn.policies.onnx_graph import to_onnx
    except ImportError:
        raise UsageError(
            "ONNX files are written with the package onnx, which is missing; "
            "pip install 'pevdn[onnx]'."
        ) from None
    return to_onnx


FORMATS = {"safetensors": lambda: to_safetensors, "onnx": _onnx}  # imported when asked for
