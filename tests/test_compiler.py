"""The installed compiler computes what is written, and versions that do not are refused.

jaxlib 0.10.2 silently returns wrong numbers on the CPU for products of a small matrix with many
vectors whose squares are then summed (jax issue 39103): it fuses the three operations and reads
the wrong rows in the last tile. Of the programs below it gets the reproducer wrong and the squares
of 3-by-3 and 2-by-3 matrices with 32,769 and 40,001 rows, under every compiler option tested here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cli, finish, import_path, python

import pevdn
from pevdn import _platform
from pevdn.errors import PevdnError

ROOT = Path(__file__).resolve().parents[1]
SHAPES = [  # rows, columns of the matrix, rows of the matrix
    *((rows, 3, 3) for rows in (32_767, 32_768, 32_769, 40_001, 65_535, 65_537)),
    *((rows, 3, 2) for rows in (32_769, 40_001)),
    *((40_001, k, m) for k, m in ((2, 2), (4, 3), (3, 4), (8, 8), (13, 16))),
]
REDUCTIONS: dict[str, Callable[..., Any]] = {  # of the product (..., m), by either NumPy
    "squares": lambda np, product, bias, other: (product**2).sum(-1),
    "layer": lambda np, product, bias, other: np.maximum(product + bias, 0).sum(-1),
    "products": lambda np, product, bias, other: (product * other).sum(-1),
}


def wrong_rows(options: dict[str, Any]) -> dict[str, int]:
    """How many rows the installed jax gets wrong under these compiler options, by program.

    All numbers are small integers, for which float32 is exact.
    """
    found = {"issue 39103": _issue_39103(options)}
    for n, k, m in SHAPES:
        rng = np.random.default_rng(n + 100 * k + m)
        shapes = (n, k), (n, m), (m, k), (m,)
        x, other, matrix, bias = (rng.integers(-8, 9, s).astype(np.float32) for s in shapes)
        for name, reduce in REDUCTIONS.items():

            def of_row(row: Any, other: Any, matrix: Any, bias: Any, reduce: Any = reduce) -> Any:
                return reduce(jnp, matrix @ row, bias, other)

            mapped = jax.jit(jax.vmap(of_row, (0, 0, None, None)), compiler_options=options)
            right = reduce(np, x @ matrix.T, bias, other)
            wrong = np.asarray(mapped(x, other, matrix, bias)) != right
            found[f"{name} of {n} rows, {m} by {k}"] = int(np.sum(wrong))
    return {name: count for name, count in found.items() if count}


def _issue_39103(options: dict[str, Any]) -> int:
    """The reproducer as reported: the squares of 0 to 32,768."""
    rows = np.zeros((32_769, 3), np.float32)
    rows[:, 0] = np.arange(32_769)
    f = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
    found = jax.jit(f, compiler_options=options)(rows)
    return int(np.sum(np.asarray(found) != rows[:, 0] ** 2))


@pytest.mark.parametrize("which", ["default", "package"])
def test_the_installed_compiler_is_right_in_this_process(which: str) -> None:
    assert wrong_rows(_platform.compiler_options() if which == "package" else {}) == {}


@pytest.mark.parametrize("which", ["default", "package"])
def test_the_installed_compiler_is_right_as_it_is_in_production(which: str) -> None:
    """In a process without the flags of tests/conftest.py, which compile differently."""
    options = "{}" if which == "default" else "_platform.compiler_options()"
    program = f"""
import pevdn
from pevdn import _platform
options = {options}
from test_compiler import wrong_rows
print(options, wrong_rows(options))
"""
    path = import_path(Path(pevdn.__file__).parents[1], Path(__file__).parent)
    environment = {"XLA_FLAGS": "", "PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    said = finish(python(program, env=environment))
    assert said.code == 0, said.err
    used = {} if which == "default" or jax.default_backend() != "cpu" else {_platform.LEVEL: 1}
    assert said.out.strip() == f"{used} {{}}"


# ---- no environment of ours has the wrong one -----------------------------------------------


def test_the_requirements_exclude_the_wrong_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needs = [*project["dependencies"], *(need for extra in extras for need in extra)]
    ours = [need for need in needs if re.match(r"jax(lib)?\b(?!-)", need)]
    assert {re.match(r"\w+", need)[0] for need in ours} == {"jax", "jaxlib"}  # type: ignore[index]
    for need in ours:
        assert all(f"!={version}" in need for version in _platform.MISCOMPILING), need


def test_the_constraints_pin_right_versions() -> None:
    pins = re.findall(r"^jax(?:lib)?==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pins) >= 2
    assert not set(pins) & set(_platform.MISCOMPILING)


# ---- nothing is trained with the wrong one --------------------------------------------------


def wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlib.__version__", "0.10.2")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


def test_the_installed_version_is_accepted() -> None:
    _platform.refuse_miscompiling_jaxlib()


def test_a_gpu_may_be_used_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_version(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _platform.refuse_miscompiling_jaxlib()


def test_training_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong_version(monkeypatch)
    said = cli("train", "pe-vdn-c", "--env=toy:two-step", f"--out={tmp_path / 'run'}")
    assert said.code == 1
    assert said.sentence == (
        "pevdn: jaxlib 0.10.2 computes wrong numbers on the CPU (jax issue 39103); install another "
        'version, for example with `pip install "jax!=0.10.2" "jaxlib!=0.10.2"`.'
    )
    assert not (tmp_path / "run").exists()


def test_a_party_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pevdn.network.transport", reason="the extra is not installed")
    from pevdn.network.member import run_member

    made = cli(
        "keys",
        "pe-vdn-c",
        "--env=toy:two-step",
        f"--out={tmp_path}",
        "--world=127.0.0.1:3",
        "--party=ann=127.0.0.1:1",
        "--party=bob=127.0.0.1:2",
    )
    assert made.code == 0, made.err
    wrong_version(monkeypatch)
    with pytest.raises(PevdnError, match=r"jaxlib 0\.10\.2 computes wrong numbers"):
        run_member(tmp_path / "team.toml", "ann")


def test_a_program_from_the_cache_loads_without_a_word(tmp_path: Path) -> None:
    program = "import pevdn, jax; print(jax.jit(lambda x: x * 2)(3.0))"
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for _ in range(2):
        said = finish(python(program, env=env))
        assert (said.code, said.out, said.err) == (0, "6.0\n", "")
    assert any(tmp_path.iterdir())
