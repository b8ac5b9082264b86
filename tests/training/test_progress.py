"""Claims about what is shown while a team trains."""

from __future__ import annotations

import pytest

from pevdn.training.progress import Bar, Moment, Plain

# --- progress --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Plain, Bar])
def test_progress_is_shown_on_standard_error_alone(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = kind()
    reporter.note("compiling")
    reporter.start("pe-vdn-c on toy", 100, 0)
    seen = {"win_rate": 0.25, "win_rate_anchor": 0.5, "epsilon_agent": 1.0, "epsilon_team": 2.0}
    reporter.moment(Moment(0, 0.0))
    reporter.moment(Moment(50, 1234.0, seen))
    reporter.stop()
    shown = capsys.readouterr()
    assert shown.out == "" and "pe-vdn-c on toy" in shown.err
    assert "win rate 0.25 (anchor 0.50) · ε team 2.00" in shown.err
    assert "1,234" in shown.err and "50" in shown.err


def test_the_bar_of_a_long_run_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bar = Bar()
    bar.start("a run", 10_000_000, 0)
    bar.moment(Moment(9_876_543, 123_456.0, {"win_rate": 0.25}))
    bar.stop()
    assert "9,876,543/10,000,000 123,456/s 0:00:0" in capsys.readouterr().err


def test_plain_progress_is_one_line_for_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    reporter, seen = Plain(), {"win_rate": 0.25}
    reporter.start("a run", 100, 0)
    for steps in (10, 20, 30):
        reporter.moment(Moment(steps, 1.0, seen))
    reporter.moment(Moment(40, 1.0, {"win_rate": 0.5}))
    assert len(capsys.readouterr().err.splitlines()) == 3
