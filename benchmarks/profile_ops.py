"""Where the time of training goes: operations of the compiled program by the time they took.

    .venv/bin/python benchmarks/profile_ops.py [ALGORITHM] [KEY=VALUE …]

Trains for a while, then records one block of episodes and the updates they call for. Small
operations look slower than they are, because recording costs a microsecond or two each: compare
shares, not seconds. On a GPU the listed times are those of the kernels.
"""

from __future__ import annotations

import collections
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import pevdn  # noqa: F401  (sets the XLA flags)
from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.config.settings import MOST, parse_assignments
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation

SHOWN = 40


def main() -> None:
    algorithm = sys.argv[1] if len(sys.argv) > 1 else "pe-vdn-b"
    wanted = config.make(algorithm, settings=parse_assignments(sys.argv[2:]))
    sim, seeds = Simulation(worlds.make(wanted.env), wanted), jnp.arange(1)
    advance = sim.compile(Lanes(1, 1, print).jit)
    state, limit = jax.jit(sim.start)(seeds), jnp.array([MOST], jnp.int32)
    blocks = 2 + wanted.learning_starts // wanted.block_size
    state = advance(state, jnp.int32(MOST), jnp.int32(blocks), limit)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(advance(state, jnp.int32(MOST), jnp.int32(1), limit))
        (found,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(found.read_bytes()))["traceEvents"]

    lines = re.findall(r"^\s*(?:ROOT )?%(\S+) = (.*)$", advance.as_text(), re.MULTILINE)
    meaning = dict(reversed(lines))
    times: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and event["name"] in meaning:
            times[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    for name, microseconds in times.most_common(SHOWN):
        source = re.search(r'op_name="([^"]*)"', meaning[name])
        where = source[1][-60:] if source else ""
        print(
            f"{microseconds / 1e3:9.2f} ms {calls[name]:6} × {name[:32]:32} "
            f"{meaning[name][:44]:44} {where}"
        )


if __name__ == "__main__":
    main()
