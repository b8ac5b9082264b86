"""Random keys: secret ones cannot be guessed, and no key is used twice."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_worlds as tiny
from hypothesis import given
from hypothesis import strategies as st
from ledgers import without_epsilon
from scipy.stats import chisquare
from support import OPTIONS, PRIVATE, cli

import pevdn
from pevdn.errors import PevdnError
from pevdn.privacy import chacha, secret
from pevdn.privacy.ledger import FILE, HEAD, Ledger
from pevdn.training.checkpoint import Checkpoints
from pevdn.training.loop import Run

KEY = chacha.key(bytes(range(32)))


def data(keys: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys))


# ---- ChaCha20 -----------------------------------------------------------------------------


def test_blocks_are_those_of_rfc_8439():
    """Section 2.3.2: the key 00 01 … 1f, counter 1."""
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4")
    found = chacha.block(jnp.asarray(data(KEY)), jnp.array([1], jnp.uint32), tuple(map(int, nonce)))
    assert np.asarray(found).astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@given(st.binary(min_size=32, max_size=32), st.integers(1, 200))
def test_bits_are_the_keystream_of_another_implementation(key, words):
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    nonce = np.array([0, 1, 0, 0], "<u4").tobytes()  # counter, then the nonce of drawing bits
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(4 * words))
    found = np.asarray(jax.random.bits(chacha.key(key), (words,), jnp.uint32))
    assert found.astype("<u4").tobytes() == stream


def test_no_two_ways_to_derive_a_key_give_the_same():
    """With JAX's own generator folding in n is the n-th part of a split; here nothing coincides."""
    own = jax.random.key(0)
    assert np.array_equal(data(jax.random.fold_in(own, 1)), data(jax.random.split(own, 3))[1])
    derived = np.concatenate(
        [
            data(jax.random.split(KEY, 50)),
            np.stack([data(jax.random.fold_in(KEY, n)) for n in range(50)]),
            np.asarray(jax.random.bits(KEY, (50, 8), jnp.uint32)),
            data(KEY)[None],
        ]
    )
    assert len(np.unique(derived, axis=0)) == len(derived)
    words = derived.ravel()
    assert len(np.unique(words)) >= len(words) - 3  # 151 · 8 words: three equal pairs in 1e11 runs


def test_words_are_uniform_and_differ_from_key_to_key():
    """χ² over 256 cells; keys that differ in one bit differ in half. One false alarm in 1e6."""
    drawn = np.asarray(jax.random.bits(KEY, (200_000,), jnp.uint32))
    assert chisquare(np.bincount(drawn >> 24, minlength=256)).pvalue > 1e-6
    other = chacha.key(bytes([1, *range(1, 32)]))
    flips = np.bitwise_count(drawn ^ np.asarray(jax.random.bits(other, (200_000,), jnp.uint32)))
    assert abs(flips.mean() - 16) < 4.9 * np.sqrt(8 / 200_000)


def test_a_key_is_not_made_of_a_seed_or_of_too_few_bytes():
    with pytest.raises(TypeError, match="32 secret bytes"):
        jax.random.key(0, impl=chacha.generator())
    with pytest.raises(ValueError, match="not 16"):
        chacha.key(bytes(16))


def test_keys_work_in_mapped_and_compiled_programs():
    @jax.jit
    def program(keys):
        chosen = jnp.where(jnp.array([True, False]), keys[:2], keys[2:4])
        return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 3), (5,)))(chosen)

    keys = jax.random.split(KEY, 4)
    expected = [jax.random.uniform(jax.random.fold_in(keys[i], 3), (5,)) for i in (0, 3)]
    assert np.array_equal(program(keys), np.stack(expected))


# ---- runs ---------------------------------------------------------------------------------


CHECKPOINTS = {"checkpoint_every": OPTIONS.checkpoint_every}


def train(out: Path, env: Any = "toy:coordination", steps: int = 200, **changes: Any) -> Run:
    return pevdn.train(
        "pe-vdn-c", env, steps=steps, out=out, **{**CHECKPOINTS, **PRIVATE, **changes}
    )


@pytest.fixture(scope="module")
def from_os(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("os") / "run", randomness="os", seed=7)


def test_two_runs_with_one_seed_share_nothing_but_it(from_os: Run, tmp_path: Path) -> None:
    again = train(tmp_path / "again", randomness="os", seed=7)
    # Not the anchor, which may be the initial network: there, all biases are 0.
    ours, theirs = (pevdn.load(run, model="running")[0].params for run in (again, from_os))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.size == 1 or not np.array_equal(a, b)


def test_the_secret_is_for_its_owner_alone(from_os: Run) -> None:
    path = from_os.path / secret.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 32


def test_the_secret_is_in_no_other_file(from_os: Run) -> None:
    own = (from_os.path / secret.FILE).read_bytes()
    exported, _ = pevdn.export(from_os, 0, out=from_os.path.parent / "agent.safetensors")
    for path in [exported, *from_os.path.rglob("*")]:
        if path.is_file() and path.name != secret.FILE:
            text = path.read_bytes()
            assert own not in text and own.hex().encode() not in text, path


@pytest.mark.parametrize(
    ("env", "algorithm", "expected"),
    [
        ("toy:coordination", "pe-vdn-c", "seed"),
        (tiny.COORDINATION, "pe-vdn-c", "os"),
        (tiny.TWO_STEP, "pe-vdn-b", "seed"),
    ],
)
def test_private_episodes_from_outside_get_noise_from_outside(
    tmp_path: Path, env: Any, algorithm: str, expected: str
) -> None:
    settings = {**PRIVATE, "workers": 1}
    run = pevdn.train(algorithm, env, steps=20, out=tmp_path / "run", **settings)
    assert run.config.settings.randomness == expected
    assert (run.path / secret.FILE).exists() == (expected == "os")


def test_whoever_reads_about_a_run_reads_where_its_noise_came_from(from_os: Run) -> None:
    assert from_os.summary["randomness"] == "os"
    assert "32 bytes of the operating system" in from_os.summary["guarantee"]
    found = json.loads(cli("ledger", from_os.path, "--json").out)
    assert found["randomness"] == "os"
    assert "operating system" in cli("ledger", from_os.path).out.replace("\n", " ")
    _, facts = pevdn.export(from_os, 0, out=from_os.path.parent / "facts.safetensors")
    assert facts["randomness"] == "os" and "operating system" in facts["privacy"]


def test_a_run_with_a_seed_says_that_its_noise_can_be_taken_off(tmp_path: Path) -> None:
    run = train(tmp_path / "run", steps=40)
    assert run.summary["randomness"] == "seed"
    assert "subtract it" in run.summary["guarantee"]
    assert "subtract it" in cli("ledger", run.path).out.replace("\n", " ")


def test_what_a_kill_lost_is_repeated_with_the_same_noise(
    from_os: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last checkpoint but one, and from nothing but the secret."""
    monkeypatch.setattr(Ledger, "note_copy", lambda self: False)  # which draws new random numbers
    for name, lost in (("newest", 1), ("all", 9)):
        path = tmp_path / name
        shutil.copytree(from_os.path, path)
        (path / "summary.json").unlink()
        folder = path / "checkpoints"
        for number in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)[-lost:]:
            if number.is_dir():
                shutil.rmtree(number)
        pevdn.resume(path)
        assert without_epsilon(Run(path)) == without_epsilon(from_os), name


def test_a_run_that_lost_its_secret_before_its_first_checkpoint_is_refused(
    from_os: Run, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(from_os.path, path)
    for name in ("summary.json", secret.FILE, "metrics.jsonl"):
        (path / name).unlink()
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(PevdnError, match="secret is missing"):
        pevdn.resume(path)


@pytest.mark.parametrize("noticed", [True, False])
def test_whoever_goes_on_draws_new_random_numbers(tmp_path: Path, noticed: bool) -> None:
    """Also where a copy is not noticed: the disk may have been set back to a snapshot."""
    run = train(tmp_path / "run", randomness="os", steps=300)
    (run.path / "summary.json").unlink()
    shutil.rmtree(sorted((run.path / "checkpoints").iterdir(), key=lambda p: int(p.name))[-1])
    before = keys_of(run)
    lines = (run.path / FILE).read_text().splitlines(keepends=True)
    saved = Checkpoints(run.path, run.config, read_only=True)
    position = saved.restore(simulation_of(run))[1].ledger_line
    saved.close()
    assert 0 < position < len(lines)
    # As if nothing had come after the checkpoint.
    (run.path / FILE).write_text("".join(lines[:position]))
    last = json.loads(lines[position - 1])
    (run.path / HEAD).write_text(json.dumps({k: last[k] for k in ("line", "check")}))
    after = []
    for name in ("one", "two"):
        path = tmp_path / name
        shutil.copytree(run.path, path)
        with pytest.MonkeyPatch.context() as patch:
            if not noticed:
                patch.setattr(Ledger, "note_copy", lambda self: False)
            pevdn.resume(path)
        after.append(keys_of(Run(path)))
        kinds = [json.loads(line)["kind"] for line in (path / FILE).read_text().splitlines()]
        assert kinds[position : position + 1 + noticed] == ["copied"] * noticed + ["renew"]
        assert kinds.count("renew") == 1
        assert cli("ledger", path).code == 0
    assert not np.array_equal(*after)
    assert not any(np.array_equal(found, before) for found in after)


def simulation_of(run: Run) -> Any:
    from pevdn import worlds
    from pevdn.simulation.program import Simulation

    return Simulation(worlds.make(run.config.env), run.config)


def keys_of(run: Run) -> np.ndarray:
    checkpoints = Checkpoints(run.path, run.config, read_only=True)
    state, _ = checkpoints.restore(simulation_of(run))
    checkpoints.close()
    return data(state.key)
