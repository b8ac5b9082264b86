"""All worlds: their ids, the list of them, and the shapes that they promise."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pevdn import worlds
from pevdn.errors import UsageError
from pevdn.worlds.base import EntityGroup, World
from pevdn.worlds.maps import BATTLE_MAPS, JAXMARL_GAMES

TOYS = ["toy:coordination", "toy:two-step"]
JAXMARL = [f"jaxmarl:{name}" for name in JAXMARL_GAMES]

# --- the list and the names ------------------------------------------------------------------


def test_listing_the_worlds_imports_neither_jax_nor_a_simulator() -> None:
    code = (
        "import sys, pevdn.worlds as w; assert w.available(); "
        "print(sorted({'jax', 'jaxmarl', 'flax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_building_a_world_prints_nothing_and_leaves_a_notebooks_output_alone() -> None:
    code = (
        "import io, sys, pevdn.worlds as w; sys.stdout = notebook = io.StringIO(); "
        "w.make('smax:3m'); assert sys.stdout is notebook and not notebook.getvalue()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "ubmodule" not in done.stderr


def test_smax_comes_without_the_other_worlds_of_jaxmarl_and_leaves_it_whole() -> None:
    program = (
        "import sys; from pevdn import worlds; world = worlds.make('smax-sc2:3m'); "
        "print([name for name in sys.modules if 'storm' in name or 'jaxnav' in name]); "
        "import jaxmarl; from jaxmarl.environments.smax import HeuristicEnemySMAX; "
        "print('jaxmarl.environments.storm' in sys.modules, type(world._env) is HeuristicEnemySMAX)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[]"
    assert lines[-1] == "True True"


def test_the_table_of_maps_is_jaxmarls() -> None:
    worlds.make("smax:3m")  # imports JaxMARL without its greeting
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

    theirs = {name: (s.num_allies, s.num_enemies) for name, s in MAP_NAME_TO_SCENARIO.items()}
    assert {name: (m.allies, m.enemies) for name, m in BATTLE_MAPS.items()} == theirs


@pytest.mark.parametrize("info", worlds.available(), ids=lambda info: info.id)
def test_every_world_is_what_the_list_says(info: worlds.WorldInfo) -> None:
    world = worlds.make(info.id)
    assert isinstance(world, World)
    assert world.name == info.id
    assert len(world.agents) == info.agents
    assert world.max_steps == info.episode_limit
    assert worlds.make(info.id) is world


def test_starcraft_limits_are_smacs() -> None:
    limits = {i.id: i.episode_limit for i in worlds.available()}
    assert limits["smax-sc2:3m"] == 60
    assert limits["smax-sc2:27m_vs_30m"] == 180
    assert limits["smax-sc2:3s_vs_5z"] == 250
    assert limits["smax-sc2:smacv2_10_units"] == 400
    assert limits["smax:3m"] == limits["smax:3s_vs_5z"] == 100


@pytest.mark.parametrize(
    ("world_id", "message"),
    [
        ("smax-sc2:3mm", "unknown world 'smax-sc2:3mm'; did you mean 'smax-sc2:3m'?"),
        ("smax:2s3", "unknown world 'smax:2s3'; did you mean 'smax:2s3z'?"),
        ("smx:3m", "unknown world 'smx:3m'; did you mean 'smax:3m'?"),
        ("3m", "unknown world '3m'; choose one of: smax-sc2:3m, smax:3m."),
        ("coordination", "unknown world 'coordination'; did you mean 'toy:coordination'?"),
        (
            "chess",
            "unknown world family 'chess'; choose one of: jaxmarl, pettingzoo, smac, smax, "
            "smax-sc2, toy.",
        ),
    ],
)
def test_a_wrong_name_says_what_would_be_right(world_id: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        worlds.make(world_id)
    assert message in str(caught.value)


# --- shapes ----------------------------------------------------------------------------------


@functools.cache
def start_shapes(world_id: str) -> Any:
    return jax.eval_shape(worlds.make(world_id).reset, jax.random.key(0))


def describe(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@pytest.mark.parametrize("world_id", [f"smax-sc2:{name}" for name in BATTLE_MAPS] + JAXMARL + TOYS)
def test_reset_gives_every_agent_its_promised_shapes(world_id: str) -> None:
    _, first = start_shapes(world_id)
    agents = worlds.make(world_id).agents
    for spec, seen, mask in zip(agents, first.observations, first.available, strict=True):
        assert (seen.shape, seen.dtype) == ((spec.observation_size,), jnp.float32)
        assert (mask.shape, mask.dtype) == ((spec.n_actions,), jnp.bool_)
    assert (first.reward.shape, first.reward.dtype) == ((), jnp.float32)
    for flag in (first.done, first.truncated, first.won):
        assert (flag.shape, flag.dtype) == ((), jnp.bool_)


@pytest.mark.parametrize(
    "world_id",
    ["smax:2s3z", "smax-sc2:27m_vs_30m", "smax-sc2:smacv2_5_units", *JAXMARL, *TOYS],
)
def test_a_step_gives_back_the_types_it_took_so_that_episodes_loop(world_id: str) -> None:
    world = worlds.make(world_id)
    state, first = start_shapes(world_id)
    actions = tuple(np.int32(0) for _ in world.agents)
    after, step = jax.eval_shape(world.step, jax.random.key(0), state, actions)
    assert describe(after) == describe(state)
    assert describe(step) == describe(first)


@pytest.mark.parametrize("name", BATTLE_MAPS)
def test_an_agent_observes_every_other_unit_and_may_target_every_enemy(name: str) -> None:
    world, battle = worlds.make(f"smax-sc2:{name}"), BATTLE_MAPS[name]
    for spec in world.agents:
        assert spec.observation_size == 13 * (battle.allies - 1 + battle.enemies) + 10
        assert spec.n_actions == 5 + battle.enemies
        others = EntityGroup(0, battle.allies - 1, 13)
        assert spec.entities == (
            others,
            EntityGroup(13 * others.count, battle.enemies, 13, actions=5),
        )
