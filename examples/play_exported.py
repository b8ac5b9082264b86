"""Play an exported team in a PettingZoo world, with neither pevdn nor JAX installed.

    pevdn export RUN --agent 0    # and 1, 2: RUN/agent-0.safetensors …
    python play_exported.py mpe2.simple_spread_v3 RUN/agent-{0,1,2}.safetensors --episodes 100

Pass one file per agent, in the order of the world's `possible_agents`. `.safetensors` needs only
numpy, `.onnx` needs onnxruntime. Arguments of the world follow its module, as in
`'mpe2.simple_spread_v3?N=2'`. Action spaces must be Discrete.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


class NumpyPolicy:
    """One agent's greedy policy from a .safetensors file, with its memory of the episode."""

    def __init__(self, file: str | Path) -> None:
        content = Path(file).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        self.facts: dict[str, str] = header.pop("__metadata__")
        self.arrays: Arrays = {
            name: np.frombuffer(
                content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], "<f4"
            ).reshape(entry["shape"])
            for name, entry in header.items()
        }
        self.reset()

    def reset(self) -> None:
        """Clear the memory; call it at the start of an episode."""
        self.memory = np.zeros(int(self.facts["memory_size"]), np.float32)
        self.last_action = -1

    def act(self, observation: np.ndarray, available: np.ndarray | None = None) -> int:
        """Return the best available action for an observation (O,); `available` is (A,) bool."""
        if self.facts["network"] == "recurrent":
            self.memory, self.q_values = recurrent(
                self.arrays, self.memory, observation, self.last_action
            )
        else:
            groups = json.loads(self.facts.get("entities") or self.facts["things"])  # its old name
            self.q_values = entities(self.arrays, groups, observation)
        values = self.q_values
        if available is not None:
            values = np.where(available, values, -1e9)
        self.last_action = int(np.argmax(values))
        return self.last_action


def recurrent(
    p: Arrays, memory: np.ndarray, observation: np.ndarray, last_action: int
) -> tuple[np.ndarray, np.ndarray]:
    """Linear, ReLU, GRU, linear, over an observation and the last action, one-hot."""
    one_hot = np.arange(len(p["output_bias"])) == last_action
    inputs = np.concatenate([observation, one_hot]).astype(np.float32)
    features = relu(inputs @ p["input_weight"] + p["input_bias"])
    gates = np.split(features @ p["gates_weight"] + p["gates_bias"], 3)
    remembered = np.split(memory @ p["recurrent_weight"], 3)
    reset, update = sigmoid(gates[0] + remembered[0]), sigmoid(gates[1] + remembered[1])
    candidate = np.tanh(gates[2] + reset * (remembered[2] + p["candidate_bias"]))
    memory = (1 - update) * candidate + update * memory
    return memory, memory @ p["output_weight"] + p["output_bias"]


def entities(p: Arrays, groups: list[dict[str, Any]], observation: np.ndarray) -> np.ndarray:
    """One encoder per entity group; an action that targets an entity is scored from it."""
    rest = np.ones(len(observation), bool)
    embeddings = []
    for g, group in enumerate(groups):
        where = slice(group["start"], group["start"] + group["count"] * group["size"])
        rest[where] = False
        each = observation[where].reshape(group["count"], group["size"])
        embedded = relu(each @ p[f"encoders.{g}.weight"] + p[f"encoders.{g}.bias"])
        embeddings.append(embedded * np.any(each != 0, axis=-1, keepdims=True))
    own = relu(observation[rest] @ p["own.weight"] + p["own.bias"])
    inputs = np.concatenate([own, *(of_group.sum(0) for of_group in embeddings)])
    core = relu(inputs @ p["core.weight"] + p["core.bias"])

    scores = {}
    targets = [g for g, group in enumerate(groups) if group["actions"] is not None]
    for s, g in enumerate(targets):
        scorer = f"scorers.{s}."
        from_core = core @ p[scorer + "core_weight"] + p[scorer + "bias"]
        hidden = relu(from_core + embeddings[g] @ p[scorer + "thing_weight"])
        values = hidden @ p[scorer + "output.weight"] + p[scorer + "output.bias"]
        scores |= dict(enumerate(values[:, 0], groups[g]["actions"]))
    plain = iter(core @ p["plain.weight"] + p["plain.bias"])
    n_actions = len(p["plain.bias"]) + len(scores)
    return np.array([scores[a] if a in scores else next(plain) for a in range(n_actions)])


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2


class OnnxPolicy:
    """The same from an .onnx file."""

    def __init__(self, file: str | Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.facts: dict[str, str] = self.session.get_modelmeta().custom_metadata_map
        self.reset()

    def reset(self) -> None:
        self.memory = np.zeros((1, int(self.facts["memory_size"])), np.float32)
        self.last_action = -1

    def act(self, observation: np.ndarray, available: np.ndarray | None = None) -> int:
        if available is None:
            available = np.ones(int(self.facts["n_actions"]), bool)
        inputs = {
            "observation": np.asarray(observation, np.float32)[None],
            "available": np.asarray(available, bool)[None],
            "memory": self.memory,
            "last_action": np.array([self.last_action]),
        }
        outputs = ["action", "q_values", "next_memory"]
        action, q_values, self.memory = self.session.run(outputs, inputs)
        self.last_action, self.q_values = int(action[0]), q_values[0]
        return self.last_action


def load(file: str | Path) -> NumpyPolicy | OnnxPolicy:
    return OnnxPolicy(file) if Path(file).suffix == ".onnx" else NumpyPolicy(file)


def flatten(space: Any, observation: Any) -> np.ndarray:
    """Flatten an observation to (O,) float32 as pevdn does: bytes to 0 … 1, choices one-hot."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = isinstance(space, spaces.Dict)
        parts = space.spaces.items() if named else enumerate(space.spaces)
        return np.concatenate(
            [flatten(part, observation[key]) for key, part in parts if key != "action_mask"]
        )
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        return np.ravel(observation).astype(np.float32) * np.float32(1 / space.high.max())
    return spaces.flatten(space, observation).astype(np.float32)


def play(env: Any, team: list[NumpyPolicy | OnnxPolicy], seed: int, limit: float) -> float:
    """Play one episode of at most `limit` steps; return the sum of all agents' rewards."""
    policies = dict(zip(env.possible_agents, team, strict=True))
    observations, infos = env.reset(seed=seed)
    for policy in team:
        policy.reset()
    total, steps = 0.0, 0
    while env.agents and steps < limit:  # the agents that have not left
        actions = {}
        for agent in env.agents:
            own, info = observations[agent], infos.get(agent) or {}
            mask = (own if isinstance(own, dict) else info).get("action_mask")
            available = None if mask is None else np.asarray(mask, bool)
            action = policies[agent].act(flatten(env.observation_space(agent), own), available)
            actions[agent] = int(env.action_space(agent).start) + action
        observations, rewards, _, _, infos = env.step(actions)
        total, steps = total + sum(rewards.values()), steps + 1
    return total


def make(world: str) -> tuple[Any, float]:
    """Return the world `MODULE?name=value&…`, as in a run, and its episode limit."""
    module, _, text = world.partition("?")
    pairs = [pair.split("=", 1) for pair in text.split("&") if pair]
    arguments = {name: number_or_word(value) for name, value in pairs if "-" not in name}
    limit = float(dict(pairs).get("max-steps", "inf"))  # a hyphen marks an option of pevdn
    return importlib.import_module(module).parallel_env(**arguments), limit


def number_or_word(text: str) -> Any:
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("world", help="a module with parallel_env, such as mpe2.simple_spread_v3")
    parser.add_argument("files", nargs="+", help="one exported policy per agent")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    options = parser.parse_args()
    sys.path.append(".")  # the module may be in this folder
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env, limit = make(options.world)
    if len(options.files) != len(env.possible_agents):
        parser.error(f"{options.world} has {len(env.possible_agents)} agents: pass one file each")
    team = [load(file) for file in options.files]
    returns = [play(env, team, options.seed + n, limit) for n in range(options.episodes)]
    env.close()
    print(f"mean return {np.mean(returns):.3f} over {options.episodes} episodes")


if __name__ == "__main__":
    main()
