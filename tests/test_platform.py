"""Claims about what pevdn tells the machine: training must not hang where there are few cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import finish, python, start

from pevdn._platform import LEVEL, SCHEDULER, peak_memory_bytes


def flags_after_import(flags: str | None, before: str = "") -> tuple[str, str]:
    """XLA_FLAGS once pevdn is imported, and the warnings on the way."""
    program = f"""
import os
os.environ.pop("XLA_FLAGS", None)
flags = {flags!r}
if flags is not None:
    os.environ["XLA_FLAGS"] = flags
{before}
import pevdn
print(os.environ["XLA_FLAGS"])
"""
    said = finish(python(program))
    assert said.code == 0, said.err
    return said.out.strip(), said.err


def test_importing_pevdn_turns_the_hanging_scheduler_off() -> None:
    assert flags_after_import(None) == (f"{SCHEDULER}=false", "")


def test_the_users_other_flags_stay() -> None:
    mine = "--xla_force_host_platform_device_count=2"
    assert flags_after_import(mine) == (f"{mine} {SCHEDULER}=false", "")


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_users_own_choice_of_scheduler_stays(value: str) -> None:
    mine = f"{SCHEDULER}={value}"
    assert flags_after_import(mine, before="import jax; jax.devices()") == (mine, "")


def test_jax_that_is_imported_but_not_started_can_still_be_told() -> None:
    assert flags_after_import(None, before="import jax") == (f"{SCHEDULER}=false", "")


def test_jax_that_is_already_running_makes_pevdn_warn() -> None:
    _, warnings = flags_after_import(None, before="import jax; jax.devices()")
    assert "JAX was already running when pevdn was imported" in warnings
    assert f"XLA_FLAGS={SCHEDULER}=false" in warnings
    assert "import pevdn before the first use of JAX" in warnings


@pytest.mark.parametrize(
    ("cores", "mine", "found"), [(2, None, "1"), (1, None, "1"), (4, None, "None"), (2, "2", "2")]
)
def test_xla_gets_one_thread_where_there_are_two_cores(cores, mine, found) -> None:
    program = f"""
import os
os.cpu_count = lambda: {cores}
os.environ.pop("NPROC", None)
if {mine!r}:
    os.environ["NPROC"] = {mine!r}
import pevdn
print(os.environ.get("NPROC"))
"""
    assert finish(python(program)).out.strip() == found


def test_programs_are_compiled_with_fewer_passes_unless_the_user_says_how() -> None:
    program = "import pevdn._platform as p; print(p.compiler_options())"
    unset = "import os; os.environ['XLA_FLAGS'] = ''; "
    assert finish(python(unset + program)).out.strip() == f"{{{LEVEL!r}: 1}}"
    asked = f"import os; os.environ['XLA_FLAGS'] = '--{LEVEL}=2'; "
    assert finish(python(asked + program)).out.strip() == "{}"


def test_importing_pevdn_does_not_import_jax() -> None:
    said = finish(python("import sys, pevdn; print('jax' in sys.modules)"))
    assert said.out == "False\n"


@pytest.mark.parametrize("mine", ["", "/somewhere/else"])
def test_compiled_programs_are_kept_where_the_user_says(mine: str, tmp_path: Path) -> None:
    program = """
import os
if not os.environ["JAX_COMPILATION_CACHE_DIR"]:
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
import jax
from pevdn._platform import cache_compilations
cache_compilations()
print(jax.config.jax_compilation_cache_dir)
"""
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": mine}
    said = finish(python(program, env=env))
    assert said.out.strip() == (mine or str(tmp_path / "pevdn" / "jax"))


def test_peak_memory_is_that_of_a_process_that_loaded_jax() -> None:
    assert 50 * 2**20 < peak_memory_bytes() < 2**43


def test_a_battle_is_trained_to_the_end_on_few_cores(tmp_path: Path) -> None:
    """The rollout and the recurrent update in one program are what used to hang."""
    sizes = {
        "hidden_size": 8,
        "buffer_size": 16,
        "expected_batch_size": 4,
        "parallel_episodes": 2,
        "eval_episodes": 2,
        "eval_every": 150,
    }
    words = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    path = tmp_path / "run"
    process = start(
        "train", "pe-vdn-b", "--env=smax-sc2:3m", "--steps=300", f"--out={path}", "--json", *words
    )
    said = finish(process, timeout=400)
    assert said.code == 0, said.err
    assert json.loads(said.out)["updates"] > 0


def test_many_seeds_are_started_on_few_cores() -> None:
    """Orthogonal matrices for so many at once hang in XLA's batched QR."""
    program = """
import jax, jax.numpy as jnp
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.simulation.program import Simulation
settings = {"buffer_size": 16, "expected_batch_size": 4, "hidden_size": 32}
world = worlds.make("toy:coordination")
simulation = Simulation(world, config.make("pe-vdn-b", world.name, settings=settings))
print(jax.jit(simulation.start)(jnp.arange(96)).learners[0].params.input_bias.shape)
"""
    said = finish(python(program), timeout=120)
    assert said.code == 0 and said.out == "(96, 1, 32)\n"
