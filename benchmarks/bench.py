"""`make bench`: how fast and how large training is on this machine, in one run.

Each row is a fresh process, so that memory is its own. Prints a table, or with --json one document.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 6_000  # environment steps a row; about ten seconds each on two cores
ROWS = {
    "pe-vdn-b, buffer 5,000": ["pe-vdn-b"],
    "pe-vdn-b, one episode at a time": ["pe-vdn-b", "--set", "parallel_episodes=1"],
    "pe-vdn-a": ["pe-vdn-a"],
    "vdn": ["vdn"],
    "iql": ["iql"],
    "pe-vdn-c, from the first minibatch": ["pe-vdn-c", "--set", "learning_starts=32"],
    "pe-vdn-c, hidden 64": [
        *("pe-vdn-c", "--set", "learning_starts=32", "--set", "hidden_size=64")
    ],
}


def measure(name: str, arguments: list[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from pevdn.cli import main; main()", "train", *arguments]
    command += ["--steps", str(STEPS), "--set", "eval_every=3000", "--out", str(out), "--json"]
    began = time.monotonic()
    first_progress = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if first_progress is None and " of " in line:
                first_progress = time.monotonic() - began
        summary = json.loads(process.stdout.read())
    return {
        "row": name,
        "env_steps_per_second": summary["env_steps_per_second"],
        "peak_memory_gib": summary["peak_memory_bytes"] / 2**30,
        "seconds_to_first_progress": first_progress,
        "compile_seconds": summary["compile_seconds"],
        "device": summary["device"],
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, arguments) in enumerate(ROWS.items()):
            sys.stderr.write(f"{name} …\n")
            rows.append(measure(name, arguments, Path(scratch) / str(number)))
    if "--json" in sys.argv[1:]:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    base = rows[0]["env_steps_per_second"]
    lines = [
        f"{'smax-sc2:3m, one seed':36} {'steps/s':>8} {'ratio':>6} {'peak GiB':>9} {'start s':>8}"
    ]
    for row in rows:
        speed = row["env_steps_per_second"]
        lines.append(
            f"{row['row']:36} {speed:8.0f} {speed / base:6.2f} {row['peak_memory_gib']:9.2f} "
            f"{row['seconds_to_first_progress']:8.1f}"
        )
    sys.stdout.write("\n".join([*lines, f"on {rows[0]['device']}"]) + "\n")


if __name__ == "__main__":
    main()
