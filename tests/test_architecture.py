"""Claims about the architecture: imports point down the layers of the package, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pevdn

SOURCE = Path(pevdn.__file__).parent
LAYERS = [  # from top to bottom; packages of one layer do not import each other
    {"cli"},
    {"viewer", "reproduction"},
    {"verification", "policies"},
    {"training"},
    {"simulation", "network"},
    {"privacy"},
    {"exchange"},
    {"agent"},
    {"worlds"},
    {"config"},
    {"storage"},
    {"_platform"},
    {"errors"},
]
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}


def package_of(file: Path) -> str:
    """Return the package of a module, or the name of a module at the top."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of all imports of pevdn, in functions and type checking, too."""
    here = ["pevdn", *file.relative_to(SOURCE).with_suffix("").parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: from . import x
                base = ".".join([*here[: -node.level], *filter(None, [base])])
            inside = base == "pevdn"  # from pevdn import worlds
            names = [f"pevdn.{alias.name}" for alias in node.names] if inside else [base]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith("pevdn."))


def against_the_arrow(package: str) -> list[str]:
    """Return `file:line imports module` for every import that does not point down."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        if package_of(file) != package:
            continue
        name = file.relative_to(SOURCE).as_posix()
        for line, module in imports(file):
            other = module.split(".")[1]
            down = other == package or DEPTH.get(other, len(LAYERS)) > DEPTH[package]
            if not down:
                found.append(f"src/pevdn/{name}:{line} imports {module}")
    return found


def test_every_module_has_its_layer() -> None:
    packages = {package_of(file) for file in SOURCE.rglob("*.py")}
    assert packages - {"__init__", "__main__"} == set(DEPTH)


@pytest.mark.parametrize("package", sorted(DEPTH))
def test_imports_point_down(package: str) -> None:
    found = against_the_arrow(package)
    assert not found, "\n".join(found)


def test_an_import_against_the_arrow_is_found_wherever_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "bad.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import pevdn.worlds.base\n"
        "if TYPE_CHECKING:\n"
        "    from pevdn.network.party import Party\n"
        "def act():\n"
        "    from pevdn import training\n"
        "    from .. import cli\n"
        "    from pevdn.agent import learning\n"
    )
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert against_the_arrow("agent") == [
        "src/pevdn/agent/bad.py:4 imports pevdn.network.party",
        "src/pevdn/agent/bad.py:6 imports pevdn.training",
        "src/pevdn/agent/bad.py:7 imports pevdn.cli",
    ]
