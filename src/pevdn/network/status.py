"""A member's status: status.json, a log of events, and metrics for Prometheus."""

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
from pevdn.storage.strict_json import from_json, to_json

STATUS, LOG = "status.json", "log.jsonl"
STALE = 5.0  # seconds without a report after which a member counts as down


class Status:
    """What a member is doing; written every second."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group
        self.state = "starting"
        self.facts: dict[str, Any] = {}
        # by activity: computing, talking, waiting, playing
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: Counter[str] = Counter()  # completed, by kind
        self._began = time.monotonic()

    @contextmanager
    def spending(self, activity: str) -> Iterator[None]:
        """Add the time of the block to an activity."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - began

    def event(self, what: str, **facts: Any) -> None:
        """Write a line to the log."""
        line = {"time": round(time.time(), 3), "event": what, **facts}
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def report(self) -> dict[str, Any]:
        """Return everything as of now."""
        transport, up = self.group.transport, time.monotonic() - self._began
        waiting = list(self.group.waiting_for)
        made = sum(self.steps.values())
        return {
            "name": self.group.me,
            "time": time.time(),
            "state": f"waiting for {', '.join(waiting)}" if waiting else self.state,
            "waiting_for": waiting,
            **self.facts,
            "up_seconds": up,
            "steps": dict(self.steps),
            "steps_per_second": made / up if up > 0 else 0.0,
            "seconds": dict(self.seconds),
            "peers": {name: asdict(peer) for name, peer in transport.counters.peers.items()},
            "refused": transport.counters.refused,
        }

    def write(self) -> None:
        write_atomically(self.folder / STATUS, to_json(self.report()))


def read(folder: Path) -> dict[str, Any] | None:
    """Return a member's last report, marked as down if it is old; None if there is none."""
    try:
        report: dict[str, Any] = from_json((folder / STATUS).read_text())
    except (OSError, ValueError):
        return None
    if report.get("state") not in ("finished", "stopped") and time.time() - report["time"] > STALE:
        report["state"] = "down"
    return report


def serve(port: int, status: Status) -> None:
    """Serve metrics for Prometheus on a local port."""
    from prometheus_client import REGISTRY, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[Any]:
            report = status.report()
            labels = ["member"]
            epsilons = ("epsilon_record", "epsilon_team", "epsilon_agent")
            for name in ("step", "env_steps", "updates", *epsilons):
                if report.get(name) is not None:
                    gauge = GaugeMetricFamily(f"pevdn_{name}", name, labels=labels)
                    gauge.add_metric([report["name"]], report[name])
                    yield gauge
            spent = CounterMetricFamily("pevdn_seconds", "time", labels=["member", "activity"])
            for activity, seconds in report["seconds"].items():
                spent.add_metric([report["name"], activity], seconds)
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
            f"--metrics-port {port} cannot be used ({problem.strerror}); choose another port."
        ) from None
    REGISTRY.register(Collector())
