"""Claims about what a member shows of itself."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pevdn.cli import team
from pevdn.cli.party import line
from pevdn.errors import UsageError
from pevdn.network import status
from pevdn.network.traffic import Counters


@pytest.fixture
def member(tmp_path: Path) -> status.Status:
    counters = Counters()
    counters.peers["bob"].bytes_sent = 1234
    group: Any = SimpleNamespace(
        me="alice", waiting_for=[], transport=SimpleNamespace(counters=counters)
    )
    found = status.Status(tmp_path, group)
    found.facts |= {"step": 7, "env_steps": 90, "epsilon_team": 1.5, "epsilon_agent": 0.5}
    return found


def test_a_report_says_whom_a_member_waits_for(member: status.Status) -> None:
    member.state = "training"
    assert member.report()["state"] == "training"
    member.group.waiting_for = ["bob", "world"]
    assert member.report()["state"] == "waiting for bob, world"


def test_time_is_counted_by_what_it_is_spent_on(member: status.Status) -> None:
    with pytest.raises(ZeroDivisionError), member.spending("talking"):
        time.sleep(0.02)
        1 / 0  # noqa: B018
    assert 0.02 <= member.report()["seconds"]["talking"] < 1.0


def test_a_member_that_writes_nothing_any_more_is_down(member: status.Status) -> None:
    member.write()
    found = status.read(member.folder)
    assert found is not None and found["state"] == "starting" and found["step"] == 7
    old = {**found, "time": time.time() - 2 * status.STALE}
    for state, shown in (("training", "down"), ("finished", "finished"), ("stopped", "stopped")):
        (member.folder / status.STATUS).write_text(json.dumps({**old, "state": state}))
        again = status.read(member.folder)
        assert again is not None and again["state"] == shown
    assert status.read(member.folder / "nowhere") is None


def test_the_table_of_a_team_leads_with_the_guarantee_against_teammates(
    member: status.Status, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for facts in ({}, {"epsilon_record": 6.51}):
        member.facts |= facts
        team.show({"alice": member.report()}, as_json=False)
        shown.append(capsys.readouterr().out)
    assert "record" not in shown[0] and "1.50" in shown[0]
    assert "record" in shown[1] and "6.51" in shown[1] and "1.50" not in shown[1]


def test_an_infinite_epsilon_can_be_shown(member: status.Status) -> None:
    member.facts |= {"epsilon_team": math.inf, "epsilon_record": None}
    member.write()
    found = status.read(member.folder)
    assert (
        found is not None and line(found) == "alice: starting · step 7 · 90 env steps · ε team inf"
    )
    assert line({**found, "epsilon_record": 8.0}).endswith("ε record 8.00")


def test_events_are_lines_of_json(member: status.Status) -> None:
    member.event("view agreed", step=3)
    member.event("stopped", reason="because")
    lines = [json.loads(x) for x in (member.folder / status.LOG).read_text().splitlines()]
    assert [(x["event"], x.get("step"), x.get("reason")) for x in lines] == [
        ("view agreed", 3, None),
        ("stopped", None, "because"),
    ]


def test_prometheus_is_served_on_this_machine_alone(member: status.Status) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status.serve(port, member)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert 'pevdn_step{member="alice"} 7.0' in text
    assert 'pevdn_epsilon_team{member="alice"} 1.5' in text
    assert 'pevdn_bytes_total{direction="sent",member="alice",peer="bob"} 1234.0' in text
    with pytest.raises(UsageError, match=f"--metrics-port {port} .* choose another port"):
        status.serve(port, member)
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((own, port), timeout=1).close()
