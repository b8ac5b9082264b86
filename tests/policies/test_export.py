"""Claims about exported policies: they act as `pevdn.load` does, and hold nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support import PRIVATE, SMALL, cli, finish, python, train

import pevdn
from pevdn import worlds
from pevdn.agent import networks
from pevdn.config import experiment as configuration
from pevdn.config.settings import setting_fields
from pevdn.errors import PevdnError, UsageError
from pevdn.network.compiled_agent import CompiledAgent
from pevdn.network.recovery import Journal
from pevdn.policies import export
from pevdn.policies.policy import AgentPolicy, describe_model
from pevdn.privacy.ledger import Ledger
from pevdn.privacy.planner import Plan
from pevdn.simulation.program import Simulation
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.loop import Progress, Run
from pevdn.worlds.interface import AgentSpec, EntityGroup

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "export.md"
NETWORKS = setting_fields()["network"].metadata["choices"]


@pytest.fixture(scope="module")
def player() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import play_exported

        yield play_exported


def fresh(out: Path, algorithm: str, env: str, seeds: int = 2, **settings: Any) -> Run:
    """A run with one empty episode and nothing learnt; seeds and agents have other parameters."""
    config = configuration.make(algorithm, env, 100, seeds, 5, {**SMALL, **settings})
    simulation = Simulation(worlds.make(env), config)
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(configuration.to_text(config))
    state = jax.jit(simulation.start)(jnp.arange(5, 5 + seeds))
    state = state._replace(episodes=jnp.ones(seeds, jnp.int32))  # orbax saves no empty arrays
    checkpoints = Checkpoints(out, config)
    checkpoints.save(state, Progress(), simulation)
    checkpoints.close()
    return Run(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fresh(tmp_path_factory.mktemp("runs") / "plain", "pe-vdn-b", "toy:coordination")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A private run whose first seed has spent less than was planned, and its second more."""
    path = tmp_path_factory.mktemp("runs") / "private"
    run = fresh(path, "pe-vdn-c", "toy:coordination", **PRIVATE)
    plan = Plan.of(run.config, 2)
    ledger = Ledger.begin(path, configuration.fingerprint(run.config), plan.mechanism, 2, 20)
    chunk = ledger.reserve(40, 30, [100, 100], 1)
    ledger.settle(chunk, [10, 30], [10, 30], "")
    return run


def parameters(network: str, spec: AgentSpec, chance: np.random.Generator) -> Any:
    """Random ones, with biases as after some training."""
    shapes = jax.eval_shape(
        lambda key: networks.initialise(network, key, spec, 4), jax.random.key(0)
    )
    return jax.tree.map(lambda x: chance.normal(size=x.shape).astype(np.float32), shapes)


def files_of(params: Any, folder: Path, stem: str = "policy") -> dict[str, Path]:
    """Parameters that were never trained, in a file of each format."""
    files = {name: folder / f"{stem}.{name}" for name in export.FORMATS}
    for name, file in files.items():
        file.write_bytes(export.FORMATS[name]()(params, export.about(params)))
    return files


def assert_same(theirs: Any, ours: AgentPolicy, seen: np.ndarray, open_: Any) -> int:
    """One step of both; the action."""
    action = ours.act(seen, open_)
    assert theirs.act(seen, open_) == action
    np.testing.assert_allclose(theirs.q_values, ours.q_values, rtol=0, atol=1e-5)
    return action


# --- the same actions ------------------------------------------------------------------------


def assert_same_episodes(run: Run, format: str, player: ModuleType, episodes: int) -> None:
    """Every step of whole episodes, in the run's own world."""
    world, team = worlds.make(run.config.env), pevdn.load(run, seed=6)
    theirs = [
        player.load(pevdn.export(run, i, format=format, seed=6).path) for i in range(len(team))
    ]
    reset, go = jax.jit(world.reset), jax.jit(world.step)
    for episode in range(episodes):
        for policy in (team, *theirs):
            policy.reset()
        state, step = reset(jax.random.key(episode))
        while not step.done:
            pairs = zip(theirs, team.agents, step.observations, step.available, strict=True)
            actions = [assert_same(a, b, *map(np.asarray, given)) for a, b, *given in pairs]
            state, step = go(jax.random.key(0), state, tuple(map(jnp.array, actions)))


@pytest.mark.parametrize("network", NETWORKS)
def test_an_exported_team_plays_episodes_as_the_loaded_one_does(
    network: str, tmp_path: Path, player: ModuleType
) -> None:
    run = fresh(tmp_path / "run", "pe-vdn-b", "toy:coordination", network=network)
    for format in export.FORMATS:
        assert_same_episodes(run, format, player, 5)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_an_exported_team_fights_whole_battles_as_the_loaded_one_does(
    network: str, tmp_path: Path, player: ModuleType
) -> None:
    run = fresh(tmp_path / "run", "pe-vdn-b", "smax-sc2:3m", network=network, hidden_size=32)
    for format in export.FORMATS:
        assert_same_episodes(run, format, player, 3)


@st.composite
def specs(draw: Callable[[Any], Any]) -> AgentSpec:
    """Groups with and without things, actions about them and gaps between, in any order."""
    start, action, things = draw(st.integers(0, 2)), draw(st.integers(0, 2)), []
    for _ in range(draw(st.integers(0, 3))):
        count, size, acted_on = (
            draw(st.integers(0, 3)),
            draw(st.integers(1, 3)),
            draw(st.booleans()),
        )
        things.append(EntityGroup(start, count, size, action if acted_on else None))
        start += count * size + draw(st.integers(0, 2))
        action += count * acted_on + draw(st.integers(0, 1))
    if all(group.count for group in things):
        things = draw(st.permutations(things))
    return AgentSpec(max(start, 1), max(action, 1), tuple(things))


@settings(max_examples=10)
@given(spec=specs(), network=st.sampled_from(NETWORKS), seed=st.integers(0, 2**31))
def test_whatever_an_agent_sees_and_does_its_files_act_as_it_does(
    player: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    spec: AgentSpec,
    network: str,
    seed: int,
) -> None:
    chance = np.random.default_rng(seed)
    ours = AgentPolicy(parameters(network, spec, chance))
    for file in files_of(ours.params, tmp_path_factory.mktemp("files")).values():
        ours.reset()
        theirs = player.load(file)
        for _ in range(4):
            seen = chance.normal(size=spec.observation_size) * chance.integers(
                0, 2, spec.observation_size
            )
            open_ = chance.random(spec.n_actions) < 0.5
            open_[chance.integers(spec.n_actions)] = True
            assert_same(theirs, ours, seen.astype(np.float32), open_)


# --- what a file holds -----------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and facts, by the libraries of the formats."""
    if path.suffix == ".onnx":
        model = onnx.load(path)
        arrays = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
        return arrays, {fact.key: fact.value for fact in model.metadata_props}
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("format", export.FORMATS)
def test_a_file_holds_one_agents_parameters_and_nothing_else(
    run: Run, format: str, tmp_path: Path
) -> None:
    team = pevdn.load(run, seed=6)
    path, facts = pevdn.export(run, 1, format=format, seed=6, out=tmp_path / "sub" / "policy")
    assert [file.name for file in path.parent.iterdir()] == ["policy"]
    path = path.rename(tmp_path / f"policy.{format}")
    arrays, told = read(path)
    assert told == facts
    own = team[1].params._asdict()
    for name, array in own.items():
        np.testing.assert_array_equal(arrays.pop(name), array)
    assert sum(x.size for x in arrays.values()) < 10  # the graph's own: axes, numbers of actions
    content = path.read_bytes()
    for other in (team[0].params, pevdn.load(run, seed=5)[1].params):
        for weight in (other.input_weight, other.output_weight):
            assert np.asarray(weight).tobytes()[:32] not in content
    assert b"seed" not in content and str(run.path).encode() not in content


@pytest.mark.parametrize("format", export.FORMATS)
def test_the_same_policy_is_the_same_file(run: Run, format: str, tmp_path: Path) -> None:
    files = {pevdn.export(run, 0, format=format, out=tmp_path / str(n)).path for n in range(3)}
    assert len(files) == 3 and len({file.read_bytes() for file in files}) == 1


def test_the_facts_say_what_it_takes_to_play(run: Run, tmp_path: Path) -> None:
    facts = pevdn.export(run, 1, out=tmp_path / "policy").facts
    assert facts == {
        "pevdn_format": "1",
        "pevdn_version": pevdn.__version__,
        "algorithm": "pe-vdn-b",
        "world": "toy:coordination",
        "agent": "1",
        "model": "running",
        "network": "recurrent",
        "observation_size": "6",
        "n_actions": "4",
        "hidden_size": "8",
        "memory_size": "8",
        "privacy": export.NOTHING,
    }
    spec = AgentSpec(9, 6, (EntityGroup(2, 2, 2, actions=0), EntityGroup(6, 3, 1)))
    told = export.about(parameters("entities", spec, np.random.default_rng(0)))
    assert tuple(EntityGroup(**group) for group in json.loads(told["entities"])) == spec.entities
    assert (told["hidden_size"], told["memory_size"]) == ("4", "0")


def test_a_graph_takes_many_agents_at_a_time(player: ModuleType, tmp_path: Path) -> None:
    """Such as the copies of a world: each row is an agent with a memory of its own."""
    spec = AgentSpec(11, 5, (EntityGroup(0, 2, 2), EntityGroup(4, 3, 2, actions=2)))
    chance = np.random.default_rng(3)
    for network in NETWORKS:
        files = files_of(parameters(network, spec, chance), tmp_path)
        one, many = (player.load(file) for file in files.values())
        seen = chance.normal(size=(7, 11)).astype(np.float32)
        memory = chance.normal(size=(7, *one.memory.shape)).astype(np.float32)
        given = {
            "observation": seen,
            "available": np.ones((7, 5), bool),
            "memory": memory,
            "last_action": np.arange(7) % 6 - 1,
        }
        action, q_values, after = many.session.run(["action", "q_values", "next_memory"], given)
        for n in range(7):
            one.memory, one.last_action = memory[n], n % 6 - 1
            assert one.act(seen[n]) == action[n]
            np.testing.assert_allclose(one.q_values, q_values[n], atol=1e-5)
            np.testing.assert_allclose(one.memory, after[n], atol=1e-5)


def test_the_example_on_the_page_runs_as_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pevdn.export(run, 0, format="onnx", out="agent-0.onnx")
    policy, names = pevdn.load(run)[0], {}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE, "exec"), names)
    actions = [policy.act(np.zeros(policy.observation_size)) for _ in range(3)]
    assert names["last_action"].tolist() == actions[-1:]
    np.testing.assert_allclose(names["q_values"][0], policy.q_values, atol=1e-5)


def test_every_array_and_fact_is_on_the_page(private: Run, tmp_path: Path) -> None:
    page = PAGE.read_text()
    spec = AgentSpec(11, 5, (EntityGroup(0, 2, 2), EntityGroup(4, 3, 2, actions=2)))
    for network in NETWORKS:
        params = parameters(network, spec, np.random.default_rng(0))
        for name in export.arrays(params):
            shown = re.sub(r"encoders\.\d", "encoders.g", re.sub(r"scorers\.\d", "scorers.s", name))
            stem, _, last = shown.rpartition(".")
            assert f"`{shown}`" in page or (f"`{stem}." in page and f"`.{last}`" in page), name
        assert all(f"`{fact}`" in page for fact in export.about(params))
    for fact in pevdn.export(private, 0, out=tmp_path / "policy").facts:
        assert f"`{fact}`" in page


# --- what it says about the training ---------------------------------------------------------


@pytest.mark.parametrize("lane", [0, 1])
def test_a_private_policy_says_what_the_ledger_says_of_its_seed(
    private: Run, lane: int, tmp_path: Path
) -> None:
    guaranteed = Plan.of(private.config, 2).mechanism.spent([20, 30][lane])
    facts = pevdn.export(private, 0, seed=5 + lane, out=tmp_path / "policy").facts
    assert {name: float(facts[name]) for name in guaranteed.known} == guaranteed.known
    assert "no matter when or why the training ended" in facts["privacy"]
    assert "neighbours by zero-out" in facts["privacy"] and "selected anchors" in facts["privacy"]
    assert (
        "epsilon_agent covers one agent's own gradients alone and is no bound" in facts["privacy"]
    )


def test_what_a_damaged_ledger_says_is_not_told(private: Run, tmp_path: Path) -> None:
    ledger = private.path / "ledger.jsonl"
    before = ledger.read_bytes()
    try:
        ledger.write_bytes(before.replace(b'"made": [10, 30]', b'"made": [10, 31]'))
        with pytest.raises(PevdnError, match="cannot be relied on"):
            pevdn.export(private, 0, out=tmp_path / "policy")
        assert not (tmp_path / "policy").exists()
    finally:
        ledger.write_bytes(before)


def test_without_noise_nothing_is_promised(tmp_path: Path) -> None:
    run = fresh(tmp_path / "run", "pe-vdn-c", "toy:two-step", **{**PRIVATE, "noise_multiplier": 0})
    mechanism = Plan.of(run.config, 2).mechanism
    ledger = Ledger.begin(run.path, configuration.fingerprint(run.config), mechanism, 2, 20)
    ledger.settle(ledger.reserve(40, 30, [100, 100], 1), [10, 30], [10, 30], "")
    facts = pevdn.export(run, 0).facts
    assert facts["privacy"] == export.NOTHING and "epsilon_team" not in facts


@pytest.mark.parametrize(
    ("model", "changes", "described"),
    [
        ("best", {"anchor": True}, "anchor, or running if there is none"),
        ("best", {"anchor": True, "average_decay": 0.9}, "anchor, or average if there is none"),
        ("running", {"average_decay": 0.9}, "running"),
    ],
)
def test_the_model_is_named(model: str, changes: dict[str, Any], described: str) -> None:
    config = configuration.make("pe-vdn-b", settings={**SMALL, **changes})
    assert describe_model(model, config.settings) == described


# --- a party's agent -------------------------------------------------------------------------


def test_a_party_exports_its_own_agent(tmp_path: Path, player: ModuleType) -> None:
    folder = tmp_path / "bob.data"
    folder.mkdir()
    config = configuration.make("pe-vdn-b", "toy:coordination", 100, settings=SMALL)
    (folder / "config.yaml").write_text(configuration.to_text(config))
    agents = worlds.make("toy:coordination").agents
    leaves = jax.tree.leaves(CompiledAgent(config, agents[1], 2, 1).begin(jax.random.key(4)))
    arrays = {str(n): np.asarray(leaf) for n, leaf in enumerate(leaves)}
    Journal(folder).save(0, arrays, {"agent": 1, "progress": {"anchored": False}})

    path, facts = pevdn.export(folder)
    assert path == folder / "agent-1.safetensors" and facts["agent"] == "1"
    ours, theirs = pevdn.load_agent(folder), player.load(path)
    for seen in np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32):
        assert_same(theirs, ours, seen, None)
    with pytest.raises(UsageError, match=r"agent is 0, but .* has only agent 1"):
        pevdn.export(folder, 0)
    with pytest.raises(UsageError, match=r"seed is 3, but .* omit --seed"):
        pevdn.export(folder, seed=3)


# --- the command, and what it refuses --------------------------------------------------------


def test_the_command_says_what_it_wrote(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    said = cli("export", run.path, "--agent", 1, "--out", out, "--json")
    assert said.code == 0 and said.err == ""
    told = json.loads(said.out)
    assert told["file"] == str(out) and told["bytes"] == out.stat().st_size
    assert told["facts"] == read(out)[1]
    again = cli("export", run.path, "--agent", 1, "--out", out)
    assert again.code == 2 and again.sentence.endswith(
        "policy exists; choose another --out, or replace it with --force."
    )
    said = cli("export", run.path, "--agent", 0, "--out", out, "--force")
    assert said.code == 0 and str(out) in said.out and "observation_size" in said.out
    assert read(out)[1]["agent"] == "0"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--agent", "0", "--format", "onx"], "unknown format 'onx'; did you mean 'onnx'\\?"),
        ([], "plain holds a team; select one agent with --agent."),
        (["--agent", "2"], "agent is 2, but .*plain has agents 0 to 1."),
        (["--agent", "-1"], "agent is -1, but .*plain has agents 0 to 1."),
        (["--agent", "0", "--seed", "9"], "seed is 9, but .*plain has seeds 5 to 6."),
        (["--agent", "0", "--model", "average"], "plain was trained without an average"),
    ],
)
def test_what_cannot_be_exported_is_refused(run: Run, words: list[str], sentence: str) -> None:
    said = cli("export", run.path, *words)
    assert said.code == 2 and re.search(sentence, said.sentence)


def test_a_run_without_a_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run.path / "config.yaml").read_text())
    said = cli("export", tmp_path, "--agent", 0)
    assert said.code == 2 and "has no checkpoint yet" in said.sentence


def test_a_place_that_cannot_be_written_is_one_sentence(run: Run, tmp_path: Path) -> None:
    for out in (run.path / "config.yaml" / "policy", tmp_path):
        said = cli("export", run.path, "--agent", 0, "--out", out, "--force")
        assert said.code == 1 and said.sentence.startswith(f"pevdn: cannot write {out}: ")
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_the_sentence_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "pevdn.policies.onnx_graph", raising=False)
    said = cli("export", run.path, "--agent", 0, "--format", "onnx")
    assert said.code == 2 and said.sentence.endswith("pip install 'pevdn[onnx]'.")


# --- the example -----------------------------------------------------------------------------

WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["pevdn", "jax", "safetensors", *sys.argv.pop(1).split()]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def play_example(without: str, *arguments: object, **how: Any) -> str:
    """The example in a process that can import neither pevdn nor JAX."""
    process = python(WITHOUT, without, EXAMPLES / "play_exported.py", *arguments, **how)
    said = finish(process)
    assert said.code == 0, said.err
    return said.out


def test_the_example_plays_an_exported_team_in_simple_spread(tmp_path: Path) -> None:
    """Without pevdn and JAX, it earns what the policies themselves do."""
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    env, chance, team, files = spread.parallel_env(), np.random.default_rng(1), [], []
    for n, agent in enumerate(env.possible_agents):
        spec = AgentSpec(env.observation_space(agent).shape[0], int(env.action_space(agent).n))
        team.append(AgentPolicy(parameters(NETWORKS[n % len(NETWORKS)], spec, chance)))
        files.append(files_of(team[-1].params, tmp_path, agent))
    returns = []
    for seed in (7, 8):
        observations, _ = env.reset(seed=seed)
        returns.append(0.0)
        for policy in team:
            policy.reset()
        while env.agents:
            pairs = zip(env.agents, team, strict=True)
            actions = {agent: policy.act(observations[agent]) for agent, policy in pairs}
            observations, rewards, *_ = env.step(actions)
            returns[-1] += sum(rewards.values())
    for format, without in (("safetensors", "onnx onnxruntime"), ("onnx", "onnx")):
        given = [file[format] for file in files]
        said = play_example(without, spread.__name__, *given, "--episodes", 2, "--seed", 7)
        assert said == f"mean return {np.mean(returns):.3f} over 2 episodes\n"


LEAVING = """
from gymnasium.spaces import Box, Dict, Discrete
import numpy as np

class parallel_env:
    possible_agents = ["painter", "waiter"]

    def __init__(self, width):
        self.width = width

    def observation_space(self, agent):
        if agent == "waiter":
            return Discrete(3)
        picture = Box(0, 255, (self.width, 2), np.uint8)
        return Dict({"action_mask": Box(0, 1, (4,), np.int8), "observation": picture})

    def action_space(self, agent):
        return Discrete(4) if agent == "painter" else Discrete(2, start=5)

    def reset(self, seed):
        self.agents, self.t = list(self.possible_agents), seed
        return self._seen()

    def _seen(self):
        self.open = np.array([self.t % 4 == n or self.t % 2 == n for n in range(4)], np.int8)
        picture = (np.arange(2 * self.width) * 37 * self.t % 256).astype(np.uint8)
        picture = picture.reshape(self.width, 2)
        seen = {"painter": {"observation": picture, "action_mask": self.open}}
        seen["waiter"] = self.t % 3
        infos = {"waiter": {"action_mask": [1, self.t % 2]}}
        return {a: seen[a] for a in self.agents}, {a: infos[a] for a in self.agents if a in infos}

    def step(self, actions):
        assert list(actions) == self.agents
        if "painter" in actions:
            assert self.open[actions["painter"]]
        assert actions["waiter"] in (5, 5 + self.t % 2)
        rewards = {a: (self.t + 1) * (10 if a == "waiter" else 1) * n for a, n in actions.items()}
        self.t += 1
        self.agents = ["waiter"] if self.t % 7 > 2 else list(self.possible_agents)
        seen, infos = self._seen()
        return seen, rewards, {}, {}, infos

    def close(self):
        pass
"""


def test_the_example_minds_masks_pictures_choices_and_who_has_left(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    chance = np.random.default_rng(2)
    specs = AgentSpec(6, 4), AgentSpec(3, 2)
    painter, waiter = (AgentPolicy(parameters("recurrent", spec, chance)) for spec in specs)
    files = [
        files_of(policy.params, tmp_path, str(n))["safetensors"]
        for n, policy in enumerate((painter, waiter))
    ]
    total = 0
    for t in range(6):
        if t <= 2:  # then it leaves
            picture = (np.arange(6) * 37 * t % 256).astype(np.uint8) / np.float32(255)
            open_ = np.array([t % 4 == n or t % 2 == n for n in range(4)])
            total += (t + 1) * painter.act(picture, open_)
        total += (t + 1) * 10 * (5 + waiter.act(np.eye(3)[t % 3], [True, t % 2 == 1]))
    world = "leaving?width=3&max-steps=6"
    said = play_example("onnxruntime", world, *files, "--episodes", 1, cwd=tmp_path)
    assert said == f"mean return {total:.3f} over 1 episodes\n"


def test_the_example_reads_observations_as_the_worlds_do(player: ModuleType) -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    space = spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3, start=1)])
    picture = np.array([[0, 51], [102, 255]], np.uint8)
    found = player.flatten(space, (picture, 2))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0, 0.2, 0.4, 1, 0, 1, 0], rtol=1e-6)


@pytest.mark.slow
def test_a_policy_that_was_trained_privately_travels(tmp_path: Path, player: ModuleType) -> None:
    run = train("pe-vdn-c", tmp_path / "run", average_decay=0.9)
    for agent, policy in enumerate(pevdn.load(run).agents):
        path, facts = pevdn.export(run, agent, format="onnx")
        assert float(facts["epsilon_team"]) == run.summary["epsilon_team"]
        theirs = player.load(path)
        seen = np.random.default_rng(0).normal(size=(20, policy.observation_size))
        for row in seen.astype(np.float32):
            assert_same(theirs, policy, row, None)
