"""Claims about what a run leaves behind: who can read it, what may leave, what can be deleted."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import yaml
from safetensors.numpy import load_file
from support import OPTIONS, PRIVATE, SMALL, WORLD, checkpoints_in, cli, content, train

import pevdn
from pevdn import worlds
from pevdn.config import experiment as configuration
from pevdn.config.runtime import option_fields
from pevdn.config.settings import setting_fields
from pevdn.errors import PevdnError, UsageError
from pevdn.policies import export, publish
from pevdn.policies.evaluate import evaluate
from pevdn.policies.export import arrays
from pevdn.simulation.program import Simulation
from pevdn.storage.files import make_private
from pevdn.storage.strict_json import to_json
from pevdn.training import figures, readme
from pevdn.training import loop as runs
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.loop import Progress, Run
from pevdn.verification.attacks.target import Target

SEED, LANES, AGENTS = 1_234_567, 3, 2
HOST = "host-of-the-owner"
SECRET = bytes(range(7, 39))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place whose path is found in no file by chance."""
    return tmp_path_factory.mktemp("place-of-the-owner")


@pytest.fixture(scope="module")
def private(home: Path) -> Run:
    """A finished private run; tests read it and leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: HOST)
        patch.setattr(platform, "node", lambda: HOST)
        return train("pe-vdn-c", home / "private", seed=SEED, seeds=LANES)


@pytest.fixture(scope="module")
def public(private: Run, home: Path) -> publish.Published:
    return pevdn.publish(private, home / "public")


@pytest.fixture
def copy(private: Run, tmp_path: Path) -> Run:
    """A copy of the private run with a secret, to do what one likes with."""
    path = tmp_path / "copy"
    shutil.copytree(private.path, path)
    (path / "secret").write_bytes(SECRET)
    return Run(path)


def untrained(out: Path, algorithm: str = "pe-vdn-c", **changes: Any) -> Run:
    """A run that is finished by its files, with one empty episode and nothing learnt."""
    chosen = {name: changes.pop(name) for name in option_fields() if name in changes}
    settings = {**(PRIVATE if algorithm == "pe-vdn-c" else SMALL), **changes}
    config = configuration.make(algorithm, WORLD[algorithm], 100, 2, SEED, settings)
    options = OPTIONS.replace(chosen)
    simulation = Simulation(worlds.make(config.env), config, options)
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(configuration.to_text(config, options))
    (out / "summary.json").write_text("{}")
    state = jax.jit(simulation.start)(jnp.arange(SEED, SEED + 2))
    state = state._replace(episodes=jnp.ones(2, jnp.int32))
    checkpoints = Checkpoints(out, config)
    checkpoints.save(state, Progress(), simulation)
    checkpoints.close()
    return Run(out)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def state_of(run: Run) -> Any:
    simulation = Simulation(worlds.make(run.config.env), run.config, run.options)
    checkpoints = Checkpoints(run.path, run.config, read_only=True)
    state, _ = checkpoints.restore(simulation)
    checkpoints.close()
    return state


def told(page: str) -> dict[str, str]:
    """The files that a README.md names, and whether they may be published."""
    rows = re.findall(r"^\| (`.*?) \| .* \| (.*) \|$", page, re.MULTILINE)
    return {name: may for names, may in rows for name in re.findall(r"`(.*?)`", names)}


# --- who can read a run ----------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o177], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_run_is_closed_to_other_users_whatever_the_umask(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs._Training, "go", lambda self: None)
    tmp_path.chmod(0o755)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty").chmod(0o777)
    for out in (tmp_path / "new", tmp_path / "empty"):
        pevdn.train("pe-vdn-b", "toy:two-step", steps=10, out=out)
        assert mode(out) == 0o700
    assert mode(tmp_path) == 0o755, "a parent that was there is nobody's business"


def test_a_directory_is_never_open_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = Path.chmod
    monkeypatch.setattr(
        Path, "chmod", lambda self, bits: (seen.append(mode(self)), real(self, bits))
    )
    before = os.umask(0)
    try:
        make_private(tmp_path / "new")
    finally:
        os.umask(before)
    assert seen == [0o700]


def test_a_directory_that_holds_something_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full").chmod(0o750)
    (tmp_path / "full" / "notes").write_text("mine")
    make_private(tmp_path / "full")
    assert mode(tmp_path / "full") == 0o750


def test_a_directory_of_somebody_else_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, bits: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(PevdnError, match=r"cannot be closed to other users.*--out"):
        make_private(tmp_path / "new")


# --- the README of a run ---------------------------------------------------------------------


def test_the_readme_names_every_file_of_a_private_run(private: Run) -> None:
    page = (private.path / "README.md").read_text()
    names = told(page)
    files = {p.name + "/" * p.is_dir() for p in private.path.iterdir()} - {".lock", "README.md"}
    assert files <= set(names)
    assert "raw training episodes" in page and "pevdn publish" in page and "pevdn forget" in page
    assert names["checkpoints/"] == "never" and names["config.yaml"].startswith("no")
    assert "31 bits" in page and "void" in page
    assert str(private.path) not in page and str(SEED) not in page


def test_the_readme_depends_on_whether_the_run_is_private() -> None:
    plain = configuration.make("pe-vdn-b", "toy:two-step", 10)
    page = readme.of_run(plain)
    assert "without differential privacy" in page and "pevdn publish" not in page
    assert "ledger" not in page and told(page)["checkpoints/"] == "never"


def test_the_readme_of_a_run_with_a_secret_says_so() -> None:
    config = configuration.make("pe-vdn-c", "toy:coordination", 10, settings={"randomness": "os"})
    page = readme.of_run(config)
    assert told(page)["secret"].startswith("never") and "void" not in page
    assert "`secret` " not in readme.of_run(config, forgotten=True).partition("| file |")[2]


def test_the_readme_is_there_before_training_starts_and_an_old_run_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        runs._Training,
        "go",
        lambda self, new_noise=False: seen.append((self.run.path / "README.md").exists()),
    )
    run = pevdn.train("pe-vdn-b", "toy:two-step", steps=10, out=tmp_path / "run")
    (run.path / "README.md").unlink()
    pevdn.resume(run.path)
    (run.path / "README.md").write_text("mine")
    pevdn.resume(run.path)
    assert seen == [True] * 3 and (run.path / "README.md").read_text() == "mine"


# --- what checkpoints hold -------------------------------------------------------------------


def inside(folder: Path) -> bytes:
    """What the databases of a checkpoint hold, decompressed: manifests, nodes and metadata."""
    texts = []
    for base in {path.parent for path in folder.rglob("manifest.ocdbt")}:
        store = tensorstore.KvStore.open(f"file://{base}/|ocdbt:").result()
        texts += [key + store.read(key).result().value for key in store.list().result()]
        manifest = tensorstore.ocdbt.dump(tensorstore.KvStore.open(f"file://{base}/").result())
        texts.append(json.dumps(manifest.result(), default=repr).encode())
    assert texts
    return b"".join(texts)


def test_no_file_of_a_run_names_the_place_or_the_machine_where_it_was_trained(
    private: Run, home: Path
) -> None:
    for name, data in {**content(private.path), "databases": inside(private.path)}.items():
        for trace in (home.name, HOST, os.environ.get("HOME", "/root") + "/"):
            assert trace.encode() not in data, f"{trace} is in {name}"


def test_a_run_that_was_moved_is_restored_and_names_neither_place(
    private: Run, tmp_path: Path
) -> None:
    shutil.copytree(private.path, tmp_path / "elsewhere")
    moved = Run(tmp_path / "elsewhere")
    states = jax.tree.leaves(state_of(moved)), jax.tree.leaves(state_of(private))
    for a, b in zip(*states, strict=True):
        key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        a, b = (jax.random.key_data(x) if key else x for x in (a, b))
        assert np.array_equal(a, b)
    assert all(private.path.parent.name.encode() not in x for x in content(moved.path).values())


def test_what_a_kill_before_sealing_left_is_cleaned_when_the_run_goes_on(copy: Run) -> None:
    folder = copy.path / "checkpoints" / str(checkpoints_in(copy.path)[-1])
    (folder / "seal.sha256").unlink()
    (folder / "learners" / "commit_success.txt").write_text(f"committed to {copy.path}")
    Checkpoints(copy.path, copy.config, read_only=True).close()
    assert str(copy.path) in (folder / "learners" / "commit_success.txt").read_text()
    Checkpoints(copy.path, copy.config).close()
    assert all(str(copy.path).encode() not in data for data in content(folder).values())


# --- publishing ------------------------------------------------------------------------------


def test_what_is_published_is_on_the_list_and_complete(
    private: Run, public: publish.Published
) -> None:
    policies = {f"lane-{k}/agent-{i}.safetensors" for k in range(LANES) for i in range(AGENTS)}
    wanted = {"README.md", "config.yaml", "curve.png", "metrics.jsonl", "privacy.json"}
    assert set(content(public.path)) == set(public.files) == wanted | policies | {"summary.json"}
    assert set(told((public.path / "README.md").read_text())) == set(public.files) - {"README.md"}
    for lane in range(LANES):
        team = pevdn.load(private, seed=SEED + lane)
        for i, agent in enumerate(team.agents):
            found = load_file(public.path / f"lane-{lane}" / f"agent-{i}.safetensors")
            assert found.keys() == arrays(agent.params).keys()
            assert all(np.array_equal(found[k], v) for k, v in arrays(agent.params).items())


def test_no_byte_that_is_published_is_a_seed_a_secret_a_path_or_an_episode(
    copy: Run, private: Run, home: Path, tmp_path: Path
) -> None:
    public = pevdn.publish(copy, tmp_path / "out")
    traces = {f"seed {SEED + k}": str(SEED + k).encode() for k in range(LANES)}
    traces |= {"path": home.name.encode(), "own path": str(tmp_path).encode()}
    traces |= {"host": HOST.encode(), "secret": SECRET, "secret in hex": SECRET.hex().encode()}
    ledger = (copy.path / "ledger.jsonl").read_text()
    digests = set(re.findall(r'"(?:digest|check|nonce|run)": "([0-9a-f]{16,})"', ledger))
    assert len(digests) > 10
    traces |= {f"digest {d}": d.encode() for d in digests}
    traces["fingerprint"] = configuration.fingerprint(copy.config).encode()
    state = state_of(private)
    keys = np.asarray(jax.random.key_data(state.key))
    traces |= {f"key {n}": key.tobytes() for n, key in enumerate(keys)}
    stored = 0
    for episodes in state.replays:
        for row in np.asarray(episodes.observations).reshape(-1, *episodes.observations.shape[3:]):
            if np.any(row):
                traces[f"episode {stored}"] = np.ascontiguousarray(row).tobytes()
                stored += 1
    assert stored > 20
    for name, data in content(public.path).items():
        for what, trace in traces.items():
            assert trace not in data, f"{what} is in {name}"
        if name.endswith((".json", ".jsonl", ".yaml")):
            assert not re.search(rb"_seconds|peak_memory|device|python|jax|cpu", data), name


def test_nothing_that_lies_about_in_a_run_is_published(copy: Run, tmp_path: Path) -> None:
    before = set(content(pevdn.publish(copy, tmp_path / "before").path))
    for name in ("notes.txt", "agent-7.safetensors", "checkpoints/notes.txt", "lane-0"):
        (copy.path / name).write_bytes(SECRET)
    summary = {**copy.summary, "owner": "Bob"}
    (copy.path / "summary.json").write_text(json.dumps(summary))
    lines = [{**line, "owner": "Bob"} for line in copy.metrics]
    (copy.path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = content(pevdn.publish(copy, tmp_path / "after").path)
    assert set(found) == before
    assert all(SECRET not in data and b"Bob" not in data for data in found.values())


def test_the_figures_that_are_published_are_the_runs(
    private: Run, public: publish.Published
) -> None:
    lines = [json.loads(x) for x in (public.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(private.metrics)
    for line, own in zip(lines, private.metrics, strict=True):
        assert line.pop("lane") == own.pop("seed") - SEED
        for name in ("epsilon_team", "epsilon_agent"):  # of a line: spent so far
            own[f"{name}_spent"] = own.pop(name)
        assert line == own
    summary = json.loads((public.path / "summary.json").read_text())
    assert summary["lanes"] == LANES and "seeds" not in summary
    for name in ("win_rate", "late_win_rate", "epsilon_team", "epsilon_agent", "delta", "updates"):
        assert summary[name] == private.summary[name]
    assert summary["late_win_rate_by_lane"] == private.summary["late_win_rate_by_seed"]
    found = yaml.safe_load((public.path / "config.yaml").read_text())
    settings = dataclasses.asdict(private.config.settings)
    assert found.pop("settings").items() <= settings.items()
    assert found == {"algorithm": "pe-vdn-c", "env": private.config.env, "steps": 200, "lanes": 3}


def test_every_setting_is_either_published_or_withheld_on_purpose() -> None:
    """A new setting belongs into `publish.SETTINGS`; runtime options tell of the machine."""
    assert set(setting_fields()) == set(publish.SETTINGS)
    assert not set(option_fields()) & set(publish.SETTINGS)


def test_the_privacy_of_a_publication_is_the_ledgers(
    private: Run, public: publish.Published
) -> None:
    found = json.loads((public.path / "privacy.json").read_text())
    assert found == json.loads(to_json(public.privacy))
    facts = pevdn.export(private, 0, out=private.path.parent / "policy").facts
    assert found["epsilon"]["team"] == float(facts["epsilon_team"])
    assert found["epsilon"]["teammate"] is None and found["delta"] == private.config.delta
    assert found["mechanism"]["noise_multiplier"] == 1.0 and len(found["lanes"]) == LANES
    assert found["relation"]["name"] == "zero-out" and len(found["not_covered"]) > 3


def test_a_publication_says_where_its_noise_came_from(
    public: publish.Published, tmp_path: Path
) -> None:
    for text in (json.dumps(public.privacy["randomness"]), (public.path / "README.md").read_text()):
        assert "31 bits" in text and "void" in text
    run = train("pe-vdn-c", tmp_path / "run", steps=100, randomness="os")
    other = pevdn.publish(run, tmp_path / "os")
    assert other.privacy["randomness"]["source"] == "os"
    assert "void" not in (other.path / "README.md").read_text()
    secret = (run.path / "secret").read_bytes()
    assert not any(secret in file.read_bytes() for file in other.path.iterdir())


@pytest.mark.parametrize("name", ["plain", "no noise", "little noise"])
def test_a_run_that_promises_nothing_is_not_published(name: str, tmp_path: Path) -> None:
    changes = {"no noise": {"noise_multiplier": 0.0}, "little noise": {"noise_multiplier": 0.01}}
    algorithm = "pe-vdn-b" if name == "plain" else "pe-vdn-c"
    run = untrained(tmp_path / "run", algorithm, **changes.get(name, {}))
    if name == "little noise":
        from pevdn.privacy.ledger import Ledger
        from pevdn.privacy.planner import Plan

        plan = Plan.of(run.config, AGENTS)
        ledger = Ledger.begin(run.path, configuration.fingerprint(run.config), plan.mechanism, 2, 9)
        ledger.settle(ledger.reserve(40, 30, [100, 100], 1), [30, 30], [30, 30], "")
    said = cli("publish", run.path, "--out", tmp_path / "out")
    assert said.code == 2 and "carry no guarantee" in said.sentence
    assert ("pevdn export" in said.sentence) == (name != "little noise")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_published_is_refused_in_a_sentence(copy: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refusal(code: int = 2) -> str:
        said = cli("publish", copy.path, "--out", out)
        assert said.code == code, said
        return said.sentence

    out.mkdir()
    (out / "notes").write_text("mine")
    assert "is not empty" in refusal() and (out / "notes").read_text() == "mine"
    (out / "notes").unlink()
    out.rmdir()
    out.write_text("mine")
    assert "is a file" in refusal()
    out.unlink()
    summary = (copy.path / "summary.json").rename(tmp_path / "summary.json")
    assert "is not finished" in refusal()
    summary.rename(copy.path / "summary.json")
    (copy.path / "ledger.head").rename(tmp_path / "ledger.head")
    assert "ledger.head cannot be read" in refusal(1)
    (tmp_path / "ledger.head").rename(copy.path / "ledger.head")
    assert "unknown format" in cli("publish", copy.path, "--out", out, "--format", "pt").sentence
    assert not out.exists() and list(tmp_path.glob(".out*")) == []


def test_a_publication_that_fails_leaves_nothing_behind(
    private: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures, "draw_lines", fail)
    with pytest.raises(PevdnError, match=r"cannot write .*out: No space left"):
        pevdn.publish(private, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_data_of_a_party_are_not_published_as_a_run(tmp_path: Path) -> None:
    config = configuration.make("pe-vdn-c", "toy:coordination", 10)
    (tmp_path / "config.yaml").write_text(configuration.to_text(config))
    (tmp_path / "snapshot-0.bin").write_bytes(b"")
    for command in (["publish", "--out", tmp_path / "out"], ["forget"]):
        said = cli(command[0], tmp_path, *command[1:])
        assert said.code == 2 and "the data of" in said.sentence


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ("smax-sc2:3m", "smax-sc2:3m"),
        ("jaxmarl:overcooked?layout=coord_ring", "jaxmarl:overcooked?layout=coord_ring"),
        ("pettingzoo:own_world?file=/home/bob/data.csv", "pettingzoo:own_world?…"),
        ("pettingzoo:own_world?data=patients.csv&token=abc", "pettingzoo:own_world?…"),
        ("pettingzoo:own_world?seed=42", "pettingzoo:own_world?…"),
        ("pettingzoo:own_world?N=3&local=true", "pettingzoo:own_world?N=3&local=true"),
    ],
)
def test_a_path_in_the_name_of_a_world_is_not_published(env: str, shown: str) -> None:
    assert export.public_world(env) == shown


def test_the_command_says_what_it_published(private: Run, tmp_path: Path) -> None:
    said = cli("publish", private.path, "--out", tmp_path / "out", "--json")
    document = json.loads(said.out)
    assert said.code == 0 and set(document["files"]) == set(content(tmp_path / "out"))
    assert document["privacy"]["epsilon"]["team"] > 0
    (tmp_path / "empty").mkdir()
    said = cli("publish", private.path, "--out", tmp_path / "empty")
    assert said.code == 0 and "ε" in said.out and "void" in said.out


def test_export_says_what_may_be_published(private: Run, tmp_path: Path) -> None:
    arguments = ["export", private.path, "--agent", 0, "--out", tmp_path / "policy"]
    said = cli(*arguments)
    assert "may be published under the ε" in said.out and "pevdn publish" in said.out
    plain = untrained(tmp_path / "plain", "pe-vdn-b")
    said = cli("export", plain.path, "--agent", 0, "--json")
    assert "carries no guarantee" in json.loads(said.out)["publish"]


# --- forgetting ------------------------------------------------------------------------------


def used(run: Run, folder: Path) -> list[Any]:
    """Everything that a finished run is good for."""
    shutil.rmtree(folder, ignore_errors=True)
    return [
        evaluate(run, episodes=4),
        pevdn.replay(run).as_json(),
        pevdn.export(run, 1, out=folder / "policy").path.read_bytes(),
        content(pevdn.publish(run, folder / "out").path),
        json.loads(cli("ledger", run.path, "--json").out)["seeds"],
    ]


def assert_forgotten(run: Run) -> None:
    """Neither episodes nor optimiser state, keys or secret are left."""
    (number,) = checkpoints_in(run.path)
    assert {p.name for p in (run.path / "checkpoints").iterdir()} == {str(number)}
    folder = run.path / "checkpoints" / str(number)
    assert (folder / "seal.sha256").exists() and not (folder / "replays").exists()
    assert not (run.path / "secret").exists()
    checkpoints = Checkpoints(run.path, run.config, read_only=True)
    found = checkpoints._read("learners", "counters", "progress")
    checkpoints.close()
    optimiser = [x for name, x in found["learners"].items() if ".optimiser." in name]
    assert optimiser and not any(np.any(x) for x in optimiser)
    assert not np.any(found["counters"]["key"]) and np.any(found["counters"]["updates"])


def test_a_forgotten_run_acts_as_before_and_cannot_be_trained(copy: Run, tmp_path: Path) -> None:
    before = used(copy, tmp_path / "used")
    size = sum(map(len, content(copy.path).values()))
    said = cli("forget", copy.path, "--json")
    assert said.code == 0 and json.loads(said.out)["bytes_after"] < size
    assert_forgotten(copy)
    assert used(copy, tmp_path / "used") == before
    assert "were deleted" in (copy.path / "README.md").read_text()
    assert len(Target(copy).learners) > 0, "it can still be attacked"
    assert pevdn.resume(copy.path).summary == copy.summary, "it is finished, as before"
    (copy.path / "summary.json").unlink()
    said = cli("resume", copy.path)
    assert said.code == 1 and "has no stored episodes" in said.sentence


def test_forgetting_twice_is_forgetting_once(copy: Run) -> None:
    assert "seed in config.yaml is kept" in cli("forget", copy.path).out
    once = content(copy.path)
    assert cli("forget", copy.path).code == 0
    assert content(copy.path) == once


def test_a_run_that_is_not_finished_forgets_nothing(copy: Run) -> None:
    (copy.path / "summary.json").unlink()
    before = content(copy.path)
    said = cli("forget", copy.path)
    assert said.code == 2 and "is not finished" in said.sentence and "resume" in said.sentence
    assert content(copy.path) == before


def parameters(run: Run) -> list[dict[str, bytes]]:
    """Of the last team, as it is loaded."""
    team = pevdn.load(run, seed=SEED + LANES - 1)
    return [{k: v.tobytes() for k, v in arrays(agent.params).items()} for agent in team.agents]


class Killed(BaseException):
    """Nothing catches this."""


@pytest.mark.parametrize("when", ["save", "seal", "sync", "delete", "unlink"])
def test_a_kill_while_forgetting_leaves_a_run_that_works_and_can_forget(
    copy: Run, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pevdn.training import checkpoint

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    where: dict[str, tuple[Any, str, Callable[..., None]]] = {
        "save": (checkpoint.ocp.CheckpointManager, "save", die),
        "seal": (checkpoint, "_seal", die),
        "sync": (os, "sync", die),
        "delete": (checkpoint.ocp.CheckpointManager, "delete", die),
        "unlink": (Path, "unlink", die),
    }
    wanted = parameters(copy)
    with monkeypatch.context() as patch:
        patch.setattr(*where[when])
        with pytest.raises(Killed):
            pevdn.forget(copy)
    assert parameters(copy) == wanted
    pevdn.forget(copy)
    assert_forgotten(copy)
    assert parameters(copy) == wanted


def test_episodes_in_host_memory_are_forgotten_too(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", "pe-vdn-b", buffer="host")
    pevdn.load(run)
    pevdn.forget(run)
    assert len(pevdn.load(run)) == AGENTS
    (number,) = checkpoints_in(run.path)
    assert not (run.path / "checkpoints" / str(number) / "replays").exists()


def test_what_is_no_run_is_not_forgotten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        pevdn.forget(tmp_path)
