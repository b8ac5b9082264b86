"""Worlds outside of JAX: the same training as inside, and every way in which they fail."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_worlds as tiny
from hypothesis import given
from hypothesis import strategies as st
from jax import Array
from support import OPTIONS, PRIVATE, SMALL, Run, checkpoints_in, cli, metrics_of

import pevdn
from pevdn import worlds
from pevdn.agent.keys import world_seed
from pevdn.config import experiment as config
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions, option_fields
from pevdn.errors import UsageError, WorldFault
from pevdn.policies.evaluate import evaluate
from pevdn.simulation.players import WorkerPlayer
from pevdn.simulation.program import Simulation
from pevdn.simulation.replays import DeviceReplay
from pevdn.training import loop as run
from pevdn.verification.attacks.target import Target
from pevdn.verification.dataflow import violations
from pevdn.worlds.base import ExternalWorld, Step, World
from pevdn.worlds.toy import Coordination, CoordinationState

STEPS = 120


class SeededCoordination(Coordination):
    """The game inside of JAX, with the cues that `tiny.Coordination` has."""

    def __init__(self) -> None:
        super().__init__()
        self.name = tiny.COORDINATION.name

    def reset(self, key: Array) -> tuple[CoordinationState, Step]:
        cues = jnp.stack(tiny.cues_of(world_seed(key)))
        state = CoordinationState(cues, jnp.zeros((), jnp.int32), jnp.zeros(()))
        return state, self._result(state, jnp.zeros(()))


INSIDE: dict[str, World] = {
    "pe-vdn-b": worlds.make("toy:two-step"),
    "pe-vdn-c": SeededCoordination(),
    "pe-vdn-d": SeededCoordination(),
}
OUTSIDE = {
    "pe-vdn-b": tiny.TWO_STEP,
    "pe-vdn-c": tiny.COORDINATION,
    "pe-vdn-d": tiny.COORDINATION,
}
# With a secret no two trainings would be the same.
SEEDED = {**PRIVATE, "randomness": "seed"}
SETTINGS = {"pe-vdn-b": SMALL, "pe-vdn-c": SEEDED, "pe-vdn-d": {**SEEDED, "openings": 2}}


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Trainings with the same settings share their programs."""
    patch, kept = pytest.MonkeyPatch(), dict[Any, Any]()

    def once(owner: Any, name: str, of: Callable[..., tuple[Config, Any]]) -> None:
        real = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            wanted, shape = of(self, *args)
            same = dataclasses.replace(wanted.settings, eval_every=1)
            key = (name, wanted.algorithm, wanted.env, wanted.seeds, same, shape)
            if key not in kept:
                kept[key] = real(self, *args)
            return kept[key]

        patch.setattr(owner, name, call)

    once(DeviceReplay, "compile", lambda self, simulation, jit: (simulation.config, None))
    once(
        WorkerPlayer,
        "_compiled",
        lambda self, params, keys: (self.config, (keys.shape, str(keys.dtype))),
    )
    yield
    patch.undo()


def train(algorithm: str, world: World | ExternalWorld, out: Path, **changes: Any) -> Run:
    settings = {**SETTINGS[algorithm], **changes}
    steps, seeds = settings.pop("steps", STEPS), settings.pop("seeds", 1)
    chosen = {name: settings.pop(name) for name in option_fields() if name in settings}
    wanted = config.make(algorithm, world.name, steps, seeds, settings=settings)
    return run.begin(wanted, out, options=OPTIONS.replace(chosen), world=world)


def parameters(of: Run) -> list[np.ndarray]:
    return jax.tree.leaves([agent.params for agent in pevdn.load(of, model="running")])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each algorithm in its world outside of JAX, with as many copies as usual."""
    out = tmp_path_factory.mktemp("trained")
    return {name: train(name, world, out / name) for name, world in OUTSIDE.items()}


# ---- the same training --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["pe-vdn-b", "pe-vdn-c", "pe-vdn-d"])
def test_a_world_gives_the_same_training_inside_of_jax_and_outside(
    algorithm: str, trained: dict[str, Run], tmp_path: Path
) -> None:
    inside = train(algorithm, INSIDE[algorithm], tmp_path / "run")
    outside = trained[algorithm]
    assert len(inside.metrics) == 4
    assert inside.metrics[-1]["updates"] > 20
    for ours, theirs in zip(outside.metrics, inside.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name] == pytest.approx(theirs[name], rel=1e-5) for name in ours)
    for a, b in zip(parameters(outside), parameters(inside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "env",
    [tiny.TwoStepParallel(), tiny.TwoStepBattle(), tiny.TwoStepParallel],
    ids=["PettingZoo", "SMAC", "who makes one"],
)
def test_objects_give_the_same_training_as_the_world_that_they_are(
    env: Any, trained: dict[str, Run], tmp_path: Path
) -> None:
    found = pevdn.train("pe-vdn-b", env, steps=STEPS, out=tmp_path / "run", **SMALL)
    assert found.config.env.startswith("object:TwoStep")
    assert metrics_of(found.path) == metrics_of(trained["pe-vdn-b"].path)
    for a, b in zip(parameters(found), parameters(trained["pe-vdn-b"]), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_copies_changes_nothing(
    workers: int, trained: dict[str, Run], tmp_path: Path
) -> None:
    found = train("pe-vdn-c", tiny.COORDINATION, tmp_path / "run", workers=workers)
    assert metrics_of(found.path) == metrics_of(trained["pe-vdn-c"].path)
    for a, b in zip(parameters(found), parameters(trained["pe-vdn-c"]), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_buffers_in_host_memory_train_the_same(trained: dict[str, Run], tmp_path: Path) -> None:
    found = train("pe-vdn-b", tiny.TWO_STEP, tmp_path / "run", buffer="host")
    assert metrics_of(found.path) == metrics_of(trained["pe-vdn-b"].path)


def test_what_was_learnt_loads_without_the_world_and_plays_with_it(
    trained: dict[str, Run],
) -> None:
    found = trained["pe-vdn-c"]
    assert len(pevdn.load(found)) == 2
    with pytest.raises(UsageError, match=r"trained in an object \(tiny:coordination\).* as env="):
        evaluate(found)
    with pytest.raises(UsageError, match="in world 'tiny:coordination', and this is 'tiny:two-s"):
        evaluate(found, env=tiny.TWO_STEP)
    (row,) = evaluate(found, env=tiny.COORDINATION, episodes=8)
    with pytest.raises(UsageError, match="another one of that name"):
        evaluate(found, env=dataclasses.replace(tiny.COORDINATION, max_steps=4))
    assert row["episode_length"] == 3


@given(st.integers(0, 2**32 - 1))
def test_seeds_of_episodes_have_31_bits(seed: int) -> None:
    found = world_seed(jax.random.key(seed))
    assert 0 <= int(found) < 2**31
    assert int(found) == int(jax.random.bits(jax.random.key(seed), dtype=jnp.uint32)) // 2


# ---- faults -------------------------------------------------------------------------------------


def test_a_private_run_goes_on_where_another_stops(tmp_path: Path) -> None:
    world = tiny.failing(tiny.pays_nan, after=7)
    with pytest.raises(WorldFault, match="returned reward nan"):
        train("pe-vdn-b", world, tmp_path / "plain")
    found = train("pe-vdn-c", world, tmp_path / "private")
    assert found.finished and found.metrics[-1]["updates"] > 0


def test_a_fault_stops_the_run_with_a_sentence_and_what_was_learnt_is_saved(
    trained: dict[str, Run], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(WorldFault) as told:
        train(
            "pe-vdn-b", tiny.failing(tiny.raises, 80), out, workers=1
        )  # 16 to evaluate, 40 to train, …
    sentence = str(told.value)
    assert sentence.startswith(
        "world 'tiny:two-step' raised ValueError: the dice are lost, at step 2 of episode 24 ("
    ), sentence
    assert sentence.endswith(f"is saved, continue with `pevdn resume {out}`.")
    assert checkpoints_in(out)[-1] == 44 + 2  # steps of whole iterations, and evaluations
    found = run.resume(out, env=tiny.TWO_STEP)
    assert metrics_of(out) == metrics_of(trained["pe-vdn-b"].path)
    assert all(map(np.array_equal, parameters(found), parameters(trained["pe-vdn-b"])))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(("step", "voided"), [(60, 1), (100, 0)])  # the latter in an evaluation
def test_a_fault_of_a_private_run_spends_nothing(
    trained: dict[str, Run], tmp_path: Path, step: int, voided: int, lost: bool
) -> None:
    """Not even if the checkpoint after it is lost, and the block that failed is played again."""

    class Once(tiny.Coordination):
        played = 0

        def step(self, actions: tuple[int, ...]) -> Step:
            Once.played += 1
            if Once.played == step:
                raise ArithmeticError
            return super().step(actions)

    out, world = tmp_path / "run", dataclasses.replace(tiny.COORDINATION, build=Once, max_workers=1)
    with pytest.raises(WorldFault, match="raised ArithmeticError, at step"):
        train("pe-vdn-c", world, out)
    if lost:
        shutil.rmtree(out / "checkpoints")
    resumed, wanted = run.resume(out, env=world), trained["pe-vdn-c"]
    pairs = zip(resumed.metrics, wanted.metrics, strict=True)
    assert all(x[name] == y[name] for x, y in pairs for name in ("updates", "return", "win_rate"))
    for name in ("epsilon_team", "epsilon_team_spent"):
        assert resumed.summary[name] == wanted.summary[name]
    kinds = [json.loads(line)["kind"] for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert kinds.count("void") == voided


def test_a_fault_of_several_seeds_or_in_an_evaluation_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorldFault, match=r"at step 1 of episode 5 of an evaluation of seed 1 \("):
        train("pe-vdn-b", tiny.failing(tiny.pays_nan, 25), tmp_path / "run", workers=1, seeds=2)


def test_one_copy_is_played_in_this_process_and_ctrl_c_saves(
    trained: dict[str, Run], tmp_path: Path
) -> None:
    made: list[Any] = []

    def build() -> Any:  # nothing that could be sent away
        made.append(tiny.TwoStep() if made else tiny.Failing(tiny.interrupts, 60))
        return made[-1]

    out, world = tmp_path / "run", dataclasses.replace(tiny.TWO_STEP, build=build, max_workers=1)
    with pytest.raises(run.Interrupted):
        train("pe-vdn-b", world, out)
    run.resume(out, env=world)
    assert len(made) == 2
    assert metrics_of(out) == metrics_of(trained["pe-vdn-b"].path)


def test_more_copies_than_can_be_are_refused() -> None:
    world = dataclasses.replace(tiny.TWO_STEP, max_workers=2)
    with pytest.raises(UsageError, match="workers is 3, but world 'tiny:two-step' allows 2"):
        Simulation(world, config.make("pe-vdn-b", world.name), RuntimeOptions(workers=3))


def test_what_needs_a_compiled_world_says_so(trained: dict[str, Run]) -> None:
    wanted = config.make("pe-vdn-b", tiny.TWO_STEP.name, settings=SMALL)
    for ask in (
        lambda: violations(Simulation(tiny.TWO_STEP, wanted)),
        lambda: Target(trained["pe-vdn-b"]),
    ):
        with pytest.raises(UsageError, match="world 'tiny:two-step' is an external world, but "):
            ask()


def test_the_command_line_takes_workers() -> None:
    said = cli("train", "pe-vdn-b", "--env", "toy:two-step", "--workers", "0.5")
    assert said.code == 2
    said = cli("train", "pe-vdn-b", "--env", "toy:two-step", "--workers", "-1")
    assert said.sentence == "pevdn: workers is -1, but must be at least 0."


def test_a_private_training_and_its_evaluations_may_play_as_many_episodes(tmp_path: Path) -> None:
    """With a secret their keys are of different generators: one program cannot serve both."""
    block = {"parallel_episodes": 8, "update_every": 4, "eval_episodes": 8, "steps": 40}
    made = train("pe-vdn-c", tiny.COORDINATION, tmp_path / "run", randomness="os", **block)
    assert made.config.block_size == made.config.settings.eval_episodes
    assert made.finished
