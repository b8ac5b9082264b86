"""What a member shows of itself: status.json, a log of events, and figures for Prometheus."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pevdn.errors import UsageError
from pevdn.network.group import Group
from pevdn.storage.files import write_atomically
from pevdn.storage.strict_json import to_json

STATUS, LOG = "status.json", "log.jsonl"
STALE = 5.0  # seconds after which a member that writes nothing is thought to be down


class Status:
    """Written every second, and whenever something happens."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group
        self.state = "starting"
        self.facts: dict[str, Any] = {}
        # of computing, talking, waiting and playing
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.rounds: Counter[str] = Counter()
        self._began = time.monotonic()

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the time of what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    def event(self, what: str, **facts: Any) -> None:
        """One line of the log."""
        line = {"time": round(time.time(), 3), "event": what, **facts}
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def report(self) -> dict[str, Any]:
        """Everything, now."""
        transport, up = self.group.transport, time.monotonic() - self._began
        waiting = list(self.group.waiting_for)
        made = sum(self.rounds.values())
        return {
            "name": self.group.me,
            "time": time.time(),
            "state": f"waiting for {', '.join(waiting)}" if waiting else self.state,
            "waiting_for": waiting,
            **self.facts,
            "up_seconds": up,
            "rounds": dict(self.rounds),
            "rounds_per_second": made / up if up > 0 else 0.0,
            "seconds": dict(self.seconds),
            "peers": {name: asdict(talk) for name, talk in transport.counters.talks.items()},
            "refused": transport.counters.refused,
        }

    def write(self) -> None:
        write_atomically(self.folder / STATUS, to_json(self.report()))


def read(folder: Path) -> dict[str, Any] | None:
    """A member's last report, marked as down if it is old; None if there is none."""
    try:
        report: dict[str, Any] = json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return None
    if report.get("state") not in ("finished", "stopped") and time.time() - report["time"] > STALE:
        report["state"] = "down"
    return report


def serve(port: int, status: Status) -> None:
    """Figures for Prometheus on a port of this machine alone."""
    from prometheus_client import REGISTRY, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Figures:
        def collect(self) -> Iterator[Any]:
            report = status.report()
            labels = ["member"]
            for name in ("round", "env_steps", "updates", "epsilon_agent", "epsilon_team"):
                if report.get(name) is not None:
                    gauge = GaugeMetricFamily(f"pevdn_{name}", name, labels=labels)
                    gauge.add_metric([report["name"]], report[name])
                    yield gauge
            spent = CounterMetricFamily("pevdn_seconds", "time by what", labels=["member", "what"])
            for what, seconds in report["seconds"].items():
                spent.add_metric([report["name"], what], seconds)
            yield spent
            sizes = CounterMetricFamily(
                "pevdn_bytes", "traffic", labels=["member", "peer", "direction"]
            )
            for peer, traffic in report["peers"].items():
                for direction in ("sent", "received"):
                    amount = traffic[f"bytes_{direction}"]
                    sizes.add_metric([report["name"], peer, direction], amount)
            yield sizes

    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as problem:
        raise UsageError(
            f"figures cannot be served at --metrics-port {port} ({problem.strerror}); choose "
            "another port."
        ) from None
    REGISTRY.register(Figures())
