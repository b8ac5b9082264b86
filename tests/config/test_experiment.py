"""Claims about configurations: settings that fit together, and what comes back from disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pevdn.config import experiment as config
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.experiment import Config, make
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import setting_fields
from pevdn.errors import UsageError

FIELDS = setting_fields()


def refusal(*args: Any, **settings: Any) -> str:
    """Why a configuration is refused."""
    with pytest.raises(UsageError) as caught:
        make(*(args or ("pe-vdn-b", "toy:two-step")), settings=settings)
    return str(caught.value)


# --- settings together -----------------------------------------------------------------------


def test_a_minibatch_larger_than_the_buffer_is_refused() -> None:
    message = refusal(buffer_size=16, expected_batch_size=17)
    assert "expected_batch_size is 17" in message and "buffer_size=16" in message


@pytest.mark.parametrize("name", ["parallel_episodes", "update_every"])
def test_the_buffer_must_hold_what_is_played_between_updates(name: str) -> None:
    message = refusal(buffer_size=16, expected_batch_size=4, **{name: 17})
    assert "buffer_size is 16" in message and f"{name}=17" in message


def test_the_buffer_must_hold_a_whole_block_of_episodes() -> None:
    """5 episodes side by side with an update every 4 are played as a block of 8."""
    sizes = {"expected_batch_size": 2, "parallel_episodes": 5, "update_every": 4}
    message = refusal(buffer_size=5, **sizes)
    assert "buffer_size is 5" in message and "8 episodes" in message
    assert "parallel_episodes=5" in message and "update_every=4" in message
    assert "buffer_size is 7" in refusal(buffer_size=7, **sizes)
    made = make("pe-vdn-b", "toy:two-step", 10, settings={"buffer_size": 8, **sizes})
    assert made.block_size == 8


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_block_that_is_checked_is_the_block_that_is_played(parallel: int, every: int) -> None:
    from pevdn import worlds
    from pevdn.simulation.program import Simulation

    settings = {"parallel_episodes": parallel, "update_every": every}
    made = make("pe-vdn-b", "toy:two-step", 10, settings=settings)
    simulation = Simulation(worlds.make("toy:two-step"), made)
    like = simulation.like()
    _, episodes, updates, _ = jax.eval_shape(simulation.draw, like.key, like.env_steps)
    assert episodes.shape == (1, made.block_size) and len(updates) == made.updates_due


def test_learning_that_could_never_start_is_refused() -> None:
    message = refusal(buffer_size=64, learning_starts=65)
    assert "learning_starts is 65" in message and "buffer_size=64" in message


def test_exploration_that_would_rise_is_refused() -> None:
    said = refusal(exploration_start=0.1, exploration_end=0.5)
    assert "exploration_end is 0.5" in said
    assert "exploration_start=0.1" in said


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampling_is_poisson_exactly_where_privacy_rests_on_it(algorithm: str) -> None:
    made = make(algorithm)
    assert made.sampling == ("poisson" if made.private else "uniform")


@given(st.integers(1, 10**9), st.integers(128, 10**6))
def test_delta_is_a_tenth_of_one_over_the_most_episodes_unless_it_is_set(
    steps: int, buffer_size: int
) -> None:
    """Whatever the buffer holds: every episode of the stream is protected."""
    found = make("pe-vdn-c", steps=steps, settings={"buffer_size": buffer_size})
    assert found.delta == 1 / (10 * steps)
    assert make("pe-vdn-c", steps=steps, settings={"delta": "1e-6"}).delta == 1e-6


def test_private_learning_waits_for_a_quarter_of_the_buffer_other_learning_for_a_minibatch() -> (
    None
):
    sizes = {"buffer_size": 100, "expected_batch_size": 10}
    assert make("pe-vdn-c", settings=sizes).learning_starts == 25
    assert make("pe-vdn-b", settings=sizes).learning_starts == 10
    assert make("pe-vdn-c", settings={**sizes, "learning_starts": 20}).learning_starts == 20


def test_what_is_set_wins_over_what_the_algorithm_brings() -> None:
    assert make("pe-vdn-c").settings.buffer_size == 4096
    assert make("pe-vdn-c", settings={"buffer_size": "2000"}).settings.buffer_size == 2000


# --- config.yaml -----------------------------------------------------------------------------


def one_value(name: str) -> st.SearchStrategy[Any]:
    meta, default = FIELDS[name].metadata, FIELDS[name].default
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(meta["low"], min(meta["high"], 2**32))
    return st.floats(meta["low"], min(meta["high"], 1e300))


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    chosen = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    settings = {name: draw(one_value(name)) for name in sorted(chosen)}
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    if not ALGORITHMS[algorithm].private or settings.get("noise_multiplier") == 0:
        settings.pop("epsilon_budget", None)
    kept = ("expected_batch_size", "parallel_episodes", "update_every", "learning_starts")
    settings["buffer_size"] = max(5000, *(settings.get(name, 0) for name in kept))
    start, end = (settings.pop(f"exploration_{x}", v) for x, v in (("start", 1.0), ("end", 0.05)))
    settings |= {"exploration_start": max(start, end), "exploration_end": min(start, end)}
    steps, seeds, seed = draw(
        st.tuples(st.integers(1, 10**9), st.integers(1, 99), st.integers(0, 99))
    )
    return make(algorithm, "toy:two-step", steps, seeds, seed, settings)


@given(configurations())
def test_a_configuration_comes_back_from_disk_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, wanted: Config
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config.to_text(wanted))
    assert config.load(path) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- list\n",
        "algorithm: pe-vdn-b\n",
        "algorithm: [unclosed\n",
        "algorithm: 7\nenv: toy:two-step\nsteps: 1\nseeds: 1\nseed: 0\nsettings: {}\n",
        "algorithm: iql\nenv: toy:two-step\nsteps: 1\nseeds: 1\nseed: 0\nsettings: [1]\n",
        b"\xff\xfe\x00",
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=r"config\.yaml is not a run's configuration") as caught:
        config.load(path)
    assert "\n" not in str(caught.value)


def test_a_configuration_edited_by_hand_is_checked_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_text(make("iql")).replace("gamma: 0.99", "gamma: 1.5"))
    with pytest.raises(UsageError, match=r"gamma is 1.5, but must be at most 1\."):
        config.load(path)


def test_a_path_that_holds_no_run_is_told_from_one_that_does(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, tmp_path / "nothing", file):
        with pytest.raises(UsageError, match="the directory of a run"):
            config.load(path / "config.yaml")


# --- runtime options -------------------------------------------------------------------------


def test_runtime_options_come_back_and_are_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    wanted, path = make("pe-vdn-b"), tmp_path / "config.yaml"
    options = RuntimeOptions("host", 3, 1.5, 77, "all")
    path.write_text(config.to_text(wanted, options))
    assert config.load_with_options(path) == (wanted, options)
    other = dataclasses.replace(wanted, seed=1)
    assert config.fingerprint(config.load(path)) == config.fingerprint(wanted)
    assert config.fingerprint(other) != config.fingerprint(wanted)


def test_a_configuration_without_runtime_options_has_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_text(make("iql")))
    assert config.load_with_options(path) == (make("iql"), RuntimeOptions())


# --- run directories of earlier versions -----------------------------------------------------

# What the version before runtime options wrote for this run, and its fingerprint.
OLD = Path(__file__).with_name("old_config.yaml")
OLD_FINGERPRINT = "576a4afe35e5a860"


def test_the_configuration_of_an_earlier_version_loads_with_its_fingerprint() -> None:
    found, options = config.load_with_options(OLD)
    settings = {"epsilon_budget": 4.0, "randomness": "os", "budget_observer": "agent"}
    assert found == make("pe-vdn-c", "toy:coordination", 300, 2, 7, settings)
    assert options == RuntimeOptions("host", 3, 9.5, 123, 1)
    assert config.fingerprint(found) == OLD_FINGERPRINT
    changed = dataclasses.replace(found, seed=8)
    assert config.fingerprint(changed) == config.fingerprint(
        make("pe-vdn-c", "toy:coordination", 300, 2, 8, settings)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("clipping: whole", "clipping: arrays"),
        ("sampling: poisson", "sampling: uniform"),
        ("target_update: soft", "target_update: hard"),
    ],
)
def test_an_old_run_with_what_was_removed_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "config.yaml"
    text = OLD.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    told = new.replace(": ", "=")
    with pytest.raises(UsageError, match=f"has {told}, which this version of pevdn does not"):
        config.load(path)
