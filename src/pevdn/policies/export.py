"""Export one agent's greedy policy to a file that needs neither pevdn nor JAX.

The file holds the agent's own parameters and facts about them: no data of its teammates, optimiser
state, episodes, seeds or paths. docs/export.md lists names, shapes and facts;
examples/play_exported.py plays both formats. The file of a private run may be published; the run's
directory may not (`pevdn publish` copies the publishable parts).
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
from pevdn.policies.policy import as_run, describe_model, load
from pevdn.privacy import randomness
from pevdn.privacy.accounting import DURATION, covers_teammates
from pevdn.privacy.ledger import Ledger
from pevdn.storage.files import write_atomically
from pevdn.training.directory import Run

VERSION = "1"  # of the names of arrays and facts

NOTHING = (
    "Trained without differential privacy: these parameters carry no guarantee for the training "
    "episodes."
)
PROMISE = (
    "One training episode, neighbours by {relation}, has (epsilon_team, delta)-differential "
    "privacy against any observer of this policy, of all models of the whole team up to this one, "
    "or of their actions, who does not know the random numbers of the training. The guarantee "
    "holds no matter when or why the training ended. epsilon_agent covers one agent's own "
    "gradients alone and is no bound. Teammates, who saw the opened sums, and evaluation "
    "episodes{anchor} are not covered."
)
RECORD = (
    "What one agent stored of one training episode has (epsilon_record, delta)-differential "
    "privacy against up to {colluders} of its teammates, pooled with any observer of all models "
    "of the whole team, of their actions and of all opened sums ({openings} of each record). One "
    "training episode of the whole team, neighbours by {relation}, has (epsilon_team, "
    "delta)-differential privacy against observers who did not see the opened sums; "
    "epsilon_coalition covers such an episode of all agents outside a coalition against the "
    "coalition. This holds for observers who do not know the random numbers of the training, or "
    "only those of the coalition, no matter when or why the training ended. epsilon_agent covers "
    "one agent's own gradients alone and is no bound. What others observed themselves during an "
    f"episode, {DURATION}, and evaluation episodes{{anchor}} are not covered."
)
ANCHOR = ", whose results selected anchors in this training,"
MAY = (
    "This file may be published under the ε in it, as long as the random numbers of the training "
    "stay secret. The run's directory may not: it holds raw training episodes and random keys. "
    "`pevdn publish RUN --out DIR` copies the publishable parts."
)
MAY_NOT = (
    "Publish this file only if the training episodes are not secret: it carries no guarantee for "
    "them. The run's directory holds the episodes themselves."
)


class Exported(NamedTuple):
    path: Path
    facts: dict[str, str]  # in the file


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
    """Write one agent's greedy policy to `out`, by default `agent-I.FORMAT` in the run.

    `seed` and `model` are those of `pevdn.load`. A party's directory NAME.data has one agent, so
    `agent` may be omitted; an agent with a body of its own needs its `spec`.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    write = FORMATS[format]()
    run = as_run(run)
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
    if agent is None:
        raise UsageError(f"{run.path} holds a team; select one agent with --agent.")
    if not (run.path / "checkpoints").exists():
        raise UsageError(f"{run.path} has no checkpoint yet; export once it has been saved.")
    team = load(run, seed=seed, model=model)
    if not 0 <= agent < len(team):
        raise UsageError(f"agent is {agent}, but {run.path} has agents 0 to {len(team) - 1}.")
    return team[agent].params, agent, 0 if seed is None else seed - run.config.seed


def _of_party(
    folder: Path, agent: int | None, seed: int | None, model: str, spec: Any
) -> tuple[Any, int, int]:
    from pevdn.policies.party import agent_parameters

    params, own = agent_parameters(folder, model, spec)
    if agent not in (None, own):
        raise UsageError(f"agent is {agent}, but {folder} has only agent {own}.")
    if seed is not None:
        raise UsageError(f"seed is {seed}, but {folder} holds one training; omit --seed.")
    return params, own, 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as problem:
        raise PevdnError(f"cannot write {path}: {problem.strerror or problem}.") from None


def public_world(env: str) -> str:
    """Return the id of a world without arguments that may name data, a path or a seed.

    Arguments of an external world stay if they are numbers or booleans and name no seed.
    """
    name, mark, arguments = env.partition("?")
    if name.startswith(("smax", "jaxmarl:", "toy:")):  # their arguments are public names
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
    """Return all facts that the file of a policy holds."""
    return {
        "pevdn_format": VERSION,
        "pevdn_version": pevdn.__version__,
        "algorithm": config.algorithm,
        "world": public_world(config.env),
        "agent": str(agent),
        "model": describe_model(model, config.settings),
        **about(params),
        **promised,
    }


def about(params: Any) -> dict[str, str]:
    """Return the network of these parameters and its sizes: all that is needed to act."""
    from pevdn.agent import entities, networks

    network = networks.of(params)
    has_entities = network is entities
    observation_size, n_actions = network.sizes(params)
    facts = {
        "network": "entities" if has_entities else "recurrent",
        "observation_size": observation_size,
        "n_actions": n_actions,
        "hidden_size": (params.core.bias if has_entities else params.candidate_bias).shape[-1],
        "memory_size": network.initial_memory(params).shape[-1],
    }
    if has_entities:
        facts["entities"] = json.dumps(
            [dataclasses.asdict(group) for group in params.spec.entities]
        )
    return {name: str(fact) for name, fact in facts.items()}


def promise(run: Run, lane: int) -> dict[str, str]:
    """Return the guarantee for the training episodes, from the run's ledger."""

    config = run.config
    if not config.private:
        return {"privacy": NOTHING}
    ledger = Ledger.read(run.path, fingerprint(config))
    guaranteed, mechanism = ledger.guaranteed()[lane], ledger.mechanism
    if guaranteed.epsilon_team == float("inf"):
        return {"privacy": NOTHING}
    numbers: dict[str, float] = guaranteed.known
    if mechanism.noised:
        numbers["epsilon_coalition"] = ledger.coalition()[lane]
        numbers |= {"openings": ledger.openings_bound, "colluders": mechanism.colluders}
    covered = covers_teammates(guaranteed.epsilon_record)
    statement = (RECORD if covered else PROMISE).format(
        relation=mechanism.relation, anchor=ANCHOR if config.settings.anchor else "", **numbers
    )
    source = randomness.source(config)
    return {
        **{name: str(x) for name, x in numbers.items()},
        "randomness": source,
        "privacy": f"{statement} {randomness.MEANING[source]}",
    }


def advice(facts: dict[str, str]) -> str:
    """Return whether a policy with these facts, and its run, may be published."""
    return MAY if "epsilon_team" in facts else MAY_NOT


# ---- formats ------------------------------------------------------------------------------------


def arrays(params: Any) -> dict[str, np.ndarray]:
    """Return the parameters by name, such as `scorers.0.output.weight`."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.ascontiguousarray(x, np.float32)
        for path, x in leaves
    }


def to_safetensors(params: Any, facts: dict[str, str]) -> bytes:
    """Return the file: the arrays, with the facts as metadata.

    `safetensors` writes metadata in varying order; sorting it makes equal policies equal files.
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
            "format 'onnx' needs the Python package onnx, which is not installed; run pip install "
            "'pevdn[onnx]'."
        ) from None
    return to_onnx


FORMATS = {"safetensors": lambda: to_safetensors, "onnx": _onnx}  # imported when needed
