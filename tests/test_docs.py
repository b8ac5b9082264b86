"""What the pages say is true: examples run, settings are complete, named tests exist."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from support import cli

from pevdn.config import presets
from pevdn.config.algorithms import ALGORITHMS
from pevdn.config.runtime import option_fields
from pevdn.config.settings import setting_fields
from pevdn.privacy.planner import Plan

ROOT = Path(__file__).resolve().parents[1]


def test_the_examples_for_python_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert (tmp_path / "runs" / "example" / "curve.png").exists()
    assert "did you mean 'gamma'?" in capsys.readouterr().out
    assert names["total"] == pytest.approx(2.0)


def test_every_setting_is_on_the_settings_page_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    for name, field in setting_fields().items():
        own = {a: ALGORITHMS[a].defaults.get(name) for a in ("pe-vdn-c", "pe-vdn-d")}
        told = [f"`{a}`: {value}" for a, value in own.items() if value is not None]
        if len(set(own.values())) == 1 and told:
            told = [f"`pe-vdn-c`, `pe-vdn-d`: {own['pe-vdn-c']}"]
        values = f" ({', '.join(told)})" if told else ""
        assert f"| `{name}` | {field.default}{values} | {field.metadata['meaning']} |" in page


def test_every_runtime_option_is_on_the_settings_page_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    for name, field in option_fields().items():
        flag = f"--{name.replace('_', '-')}"
        assert f"| `{flag}` | {field.default} | {field.metadata['meaning']} |" in page


def test_every_test_that_the_privacy_and_deployment_pages_name_exists():
    pages = [(ROOT / "docs" / name).read_text() for name in ("privacy.md", "deploy.md")]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", "".join(pages)))
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_costs_of_a_search_on_the_privacy_page_are_what_its_command_prints():
    page = (ROOT / "docs" / "privacy.md").read_text().partition("### In numbers")[2]
    (command,) = re.findall(r"^    pevdn (budget.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    said = cli(*command.replace("\\\n", " ").split(), "--json")
    found = [list(row.values()) for row in json.loads(said.out)["search"]]
    table = re.findall(r"^\| (agent|team) \| (\d+) \|(.*) \|$", page, re.MULTILINE)
    assert len(table) == len(found) > 0
    for (view, runs, figures), (number, whose, *costs) in zip(table, found, strict=True):
        assert (view, int(runs)) == (whose, number)
        told = [float(x.replace("∞", "inf")) for x in figures.split("|")]
        assert told == pytest.approx([float(x) for x in costs], abs=0.006)


def test_make_train_and_every_page_name_presets_that_exist():
    """But for the log, which is history, and pages that say what an old name was."""
    pages = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        page.name: re.findall(r"--preset[ =]([a-z][\w.-]+)", page.read_text())
        for page in pages
        if page.name != "research-log.md"
    }
    assert named["Makefile"] == ["record-8"]
    assert set().union(*named.values()) <= set(presets.PRESETS)


def test_the_epsilons_of_the_results_are_what_the_planner_says():
    """Every row of a preset: ε team at its δ, at the paper's, and ε agent at both."""
    page = (ROOT / "docs" / "results.md").read_text().partition("## With differential")[2]
    page = page.partition("| baseline")[0]
    rows = re.findall(
        r"^\| `([\w-]+)` \|[^|]*\| ([\d.e-]+) \|([^|]*)\|([^|]*)\|([^|]*)\|", page, re.M
    )
    assert [row[0] for row in rows] == [x.name for x in presets.PRESETS.values() if not _noised(x)]
    for name, delta, *figures in rows:
        plan = Plan.of(presets.configure(None, preset=name), 3)
        plans = [dataclasses.replace(plan, delta=d) for d in (float(delta), presets.PAPER_DELTA)]
        wanted = [p.epsilon(view) for view in ("team", "agent") for p in plans]
        found = [float(x) for x in ",".join(figures).split(",")]
        assert found == pytest.approx(wanted, abs=0.006)


def _noised(preset):
    return preset.observer == "record"


def test_the_epsilons_against_teammates_are_what_the_planner_says():
    """Every row of a preset: ε record at its δ and at the paper's, and ε team at both."""
    page = (ROOT / "docs" / "results.md").read_text().partition("## Private from teammates")[2]
    page = page.partition("## With differential")[0]
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (\d) \|[^|]*\| ([\d.e-]+) \|([^|]*)\|([^|]*)\|([^|]*)\|", page, re.M
    )
    assert {row[0] for row in rows} == {x.name for x in presets.PRESETS.values() if _noised(x)}
    for name, t, delta, *figures in rows:
        plan = Plan.of(presets.configure(None, preset=name), 3)
        assert float(delta) == plan.delta
        plans = [dataclasses.replace(plan, delta=d) for d in (plan.delta, presets.PAPER_DELTA)]
        plans = [dataclasses.replace(p, colluders=int(t)) for p in plans]
        wanted = [p.epsilon(observer) for observer in ("record", "team") for p in plans]
        found = [float(x) for x in ",".join(figures).split(",")]
        assert found == pytest.approx(wanted, abs=0.006)


def test_every_line_of_algorithm_1_links_to_code_that_exists():
    page = (ROOT / "docs" / "algorithm.md").read_text()
    links = re.findall(r"\[`([\w.]+)`\]\((\.\./src/[\w/]+\.py)\)", page)
    assert len(links) > 12
    for name, target in links:
        tree = ast.parse((ROOT / "docs" / target).read_text())
        scope: list[ast.stmt] = tree.body
        for part in name.split("."):
            (found,) = [x for x in scope if getattr(x, "name", None) == part]
            scope = getattr(found, "body", [])


def test_every_link_between_pages_leads_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(path), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as GitHub makes them, and those set by hand."""
    text = page.read_text()
    titles = (re.sub(r"[^\w\s-]", "", x).strip() for x in re.findall(r"^#+ (.*)$", text, re.M))
    made = {title.lower().replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)">', text))
