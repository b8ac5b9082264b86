"""`make bench`: how fast training is on this machine, against the floor and against others.

Parts that are compared with each other are timed in turns in one process, so that whatever else
the machine does hits all of them. Whole trainings are processes of their own. Prints a table, or
with --json one document; --guard measures only the ratios that CI watches, and fails if one is
worse than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import external
import jax
import jax.numpy as jnp
import network
import numpy as np
from jaxmarl_vdn import jaxmarl_update

from pevdn import worlds
from pevdn.config import experiment as config
from pevdn.config.presets import PAPER
from pevdn.simulation.program import Simulation
from pevdn.simulation.state import State

ENV = "smax-sc2:3m"
STEPS = 20_000  # environment steps of a whole training
TEAMS = ("3m", "8m", "25m", "27m_vs_30m")


class Row(NamedTuple):
    """One line of the table: a figure, what it must reach, and what we aim for."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)


def in_turns(seconds: float, **programs: Callable[[], Any]) -> dict[str, float]:
    """The median time of each program, called in turns."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program())
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken[name]) < 5:  # noqa: F821  (the last one below)
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program())
            taken[name].append(time.perf_counter() - began)
    return {name: float(np.median(times)) for name, times in taken.items()}


# ---- a buffer as training fills it ------------------------------------------------------------


def typical_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """As seen on 3m (mean 21.5, nine of ten up to 25, a few up to 60), for a limit `longest`."""
    rng = np.random.default_rng(seed)
    usual = rng.normal(20.3, 3.0, count)
    lengths = np.where(rng.random(count) < 0.05, rng.uniform(25, 60, count), usual)
    return np.clip(np.rint(lengths * longest / 60), 1, longest).astype(np.int32)


def make(algorithm: str, env: str = ENV, **settings: Any) -> Simulation:
    wanted = config.make(algorithm, env, settings={"buffer_size": 256, **settings})
    return Simulation(worlds.make(env), wanted)


def filled(sim: Simulation, lengths: np.ndarray) -> State:
    """A fresh team with a full buffer of random episodes of these lengths (buffer_size,)."""
    state = jax.jit(sim.start)(jnp.arange(1))
    length = jnp.append(jnp.asarray(lengths), 0)
    replays = []
    for rows in state.replays:
        noise = jax.random.normal(jax.random.key(0), rows.observations.shape)
        replays.append(
            rows._replace(
                observations=noise,
                available=jnp.ones_like(rows.available),
                rewards=jnp.ones_like(rows.rewards),
                length=jnp.broadcast_to(length, rows.length.shape),
            )
        )
    return state._replace(
        replays=tuple(replays), episodes=jnp.full(1, sim.settings.buffer_size, jnp.int32)
    )


def gradients(sim: Simulation, lengths: np.ndarray) -> Callable[[], Any]:
    """One minibatch from drawing it to the gradient: all of an update but the optimiser's step."""
    state = filled(sim, lengths)
    program = jax.jit(sim.gradients)
    numbers = iter(range(1_000_000))
    return lambda: program(state, jax.random.split(jax.random.key(next(numbers)), (1, 4)))


def minibatch(sim: Simulation, lengths: np.ndarray, size: int) -> Callable[[], Any]:
    """The gradients of the first `size` episodes, however they are drawn."""
    state = filled(sim, lengths)
    program, keys = jax.jit(sim.sum_minibatch), jax.random.split(jax.random.key(0), (1, 4))
    return lambda: program(state, jnp.arange(size)[None], keys)


def part(sim: Simulation, steps: int) -> Callable[[], Any]:
    """The gradients of 8 episodes of so many steps, whatever the world's own limit is."""
    state = filled(sim, np.full(8, steps, np.int32))

    @jax.jit
    def program(state: State) -> Any:
        batches = sim.replay.fetch(state, jnp.arange(8)[None], steps)
        return sim.sum_batch(state.learners, batches, jnp.zeros((1, 8), bool), state.key)

    return lambda: program(state)


# ---- the floor ----------------------------------------------------------------------------------


class Machine(NamedTuple):
    matmul: float  # FLOP/s, 2,048² in numpy
    bandwidth: float  # bytes/s, read and written by a large copy


def measure_machine() -> Machine:
    a = np.random.default_rng(0).random((2048, 2048), np.float32)
    source = np.ones(2**26, np.float32)
    into = np.empty_like(source)
    times = in_turns(2.0, matmul=lambda: a @ a, copy=lambda: np.copyto(into, source))
    return Machine(2 * 2048**3 / times["matmul"], 2 * source.nbytes / times["copy"])


def work_per_step(sim: Simulation) -> tuple[float, float]:
    """Floating-point operations and bytes that a step of an episode costs an agent in an update.

    Products: both networks forward, then twice the online one's, but for the gradient by the
    inputs. Bytes: what is stored of the step read once, and each of the layers' values (features,
    gates, memory) written once and read once, for both networks and for the way back.
    """
    spec, H = sim.world.agents[0], sim.settings.hidden_size
    inputs, A = spec.observation_size + spec.n_actions, spec.n_actions
    forward = 2 * (inputs * H + 6 * H * H + H * A)
    backward = 2 * (inputs * H + 12 * H * H + 2 * H * A)
    values = inputs + 5 * H + A
    return 2 * forward + backward, 4 * (inputs + 3 * 2 * values)


def floor(sim: Simulation, lengths: np.ndarray, machine: Machine) -> float:
    """Seconds that a minibatch of typical episodes must take, without a step of padding."""
    operations, size = work_per_step(sim)
    steps = sim.settings.expected_batch_size * float(lengths.mean() + 1) * len(sim.team)
    return max(steps * operations / machine.matmul, steps * size / machine.bandwidth)


# ---- rows ---------------------------------------------------------------------------------------


def ratios(seconds: float) -> list[Row]:
    """What CI watches as well: the same machine, the same minute, one against the other."""
    lengths = typical_lengths(256, 60)
    full = np.full(256, 60, np.int32)
    shared = make("pe-vdn-b")
    many, equal = typical_lengths(1024, 60), {"buffer_size": 1024, "return_lambda": 0.3}
    times = in_turns(
        seconds,
        shared=gradients(shared, lengths),
        broadcast=gradients(make("pe-vdn-a"), lengths),
        jaxmarl=jaxmarl_update(shared.world, shared.settings),
        whole=minibatch(shared, full, 32),
        plain=minibatch(shared, lengths, 32),
        clipped=minibatch(
            make("pe-vdn-c", **{**PAPER, "buffer_size": 256, "learning_starts": 256}), lengths, 32
        ),
        outsiders=gradients(make("pe-vdn-c", **equal), many),
        teammates=gradients(make("pe-vdn-d", **equal), many),
    )
    machine = measure_machine()
    least = floor(shared, lengths, machine)
    return [
        Row(
            "one update: JaxMARL's over ours, episodes as played",
            times["jaxmarl"] / times["shared"], "×", at_least=2, aim=3,
            note=f"{times['jaxmarl'] * 1e3:.1f} ms over {times['shared'] * 1e3:.1f} ms",
        ),
        Row(
            "one update: JaxMARL's over ours, every episode of 60 steps",
            times["jaxmarl"] / times["whole"], "×",
            note=f"{times['jaxmarl'] * 1e3:.1f} ms over {times['whole'] * 1e3:.1f} ms",
        ),
        Row(
            "cost of secret sharing over broadcast",
            100 * (times["shared"] / times["broadcast"] - 1), "%", at_most=5, aim=2,
        ),
        Row(
            "cost of per-episode clipping over a plain gradient",
            times["clipped"] / times["plain"], "×", at_most=1.6, aim=1.2,
        ),
        Row(
            "one update of pe-vdn-d over one of pe-vdn-c, their defaults",
            times["teammates"] / times["outsiders"], "×", at_most=1.0,
            note=f"{times['teammates'] * 1e3:.1f} ms over {times['outsiders'] * 1e3:.1f} ms",
        ),
        Row(
            "a minibatch of episodes as played over one of full length",
            times["plain"] / times["whole"], "×",
            note=f"their steps are {(lengths.mean() + 1) / 61:.2f} of the full ones",
        ),
        Row(
            "one update: fraction of the floor", least / times["shared"], "",
            note=f"floor {least * 1e3:.1f} ms: {machine.matmul / 1e9:.0f} GFLOP/s, "
            f"{machine.bandwidth / 1e9:.0f} GB/s",
        ),
    ]  # fmt: skip


def growth(seconds: float) -> list[Row]:
    """Gradients of 8 episodes of 60 steps for larger and larger teams; the world plays no part."""
    rows, first = [], None
    for name in TEAMS:
        sim = make("pe-vdn-b", f"smax-sc2:{name}", buffer_size=8, expected_batch_size=8)
        taken = in_turns(seconds, update=part(sim, 60))["update"] / len(sim.team)
        work = work_per_step(sim)[0]
        first = first or (taken, work)
        rows.append(
            Row(
                f"update of {name}, time per agent over 3m's",
                taken / first[0],
                "×",
                at_most=1.0 if name != "3m" else None,
                note=f"operations per agent: {work / first[1]:.2f} ×",
            )
        )
    return rows


def train(arguments: list[str], cache: str) -> dict[str, Any]:
    """A whole training in a process of its own, and when its first step had been made."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", "from pevdn.cli import main; main()", "train", *arguments]
        command += ["--set", "eval_every=6000", "--out", f"{out}/run", "--json"]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        began, first = time.monotonic(), 0.0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            for line in process.stderr:
                if not first and "win rate" in line:  # of the evaluation before the first step
                    first = time.monotonic() - began
            summary: dict[str, Any] = json.loads(process.stdout.read())
    return {**summary, "first": first}


def trainings() -> list[Row]:
    """Whole runs: steps a second with updates (compilation and evaluation left out), and starts.

    The paper's pe-vdn-c has a small buffer here: it learns only when that is full, and from 32
    episodes on average.
    """
    small = ["--preset", "paper-c", "--set", "buffer_size=64", "--set", "learning_starts=64"]
    kinds = {
        "b": ["pe-vdn-b"],
        "warm": ["pe-vdn-b"],
        "c": ["pe-vdn-c", *small, "--set", "hidden_size=32"],
        "c64": ["pe-vdn-c", *small],
        "ours": ["pe-vdn-c", "--set", "learning_starts=128"],
    }
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, arguments in kinds.items():
            steps = 600 if name == "warm" else STEPS
            found[name] = train([*arguments, "--steps", str(steps)], cache)
    speed = {name: run["env_steps_per_second"] for name, run in found.items()}
    peak = found["b"]["peak_memory_bytes"] / 2**30
    first = {name: run["first"] for name, run in found.items()}
    row = partial(Row, unit="steps/s")
    return [
        row("pe-vdn-b, 3m", speed["b"], at_least=1200, aim=2000, note=f"peak {peak:.2f} GiB"),
        row("pe-vdn-c, 3m, as in the paper, hidden 32", speed["c"], at_least=900, aim=1500),
        row("pe-vdn-c, 3m, as in the paper, hidden 64", speed["c64"], at_least=900, aim=1500),
        row("pe-vdn-c, 3m, its defaults", speed["ours"], note="from the 128th episode on"),
        Row("command to first step, nothing cached", first["b"], "s", at_most=40, aim=25),
        Row("command to first step, programs cached", first["warm"], "s", at_most=8, aim=6),
    ]


def strangers() -> list[Row]:
    """Every agent a process of its own: what the secure sum over TLS costs an update."""
    rows = []
    for mode in network.MODES:
        spent = network.train(mode)
        rows.append(
            Row(
                f"3 agents apart, {mode}: talking over computing", spent.ratio, "×", at_most=1,
                note=f"{spent.talking * 1e3:.1f} ms over {spent.computing * 1e3:.1f} ms, and "
                f"{spent.waiting * 1e3:.1f} ms waiting for others that compute",
            )
        )  # fmt: skip
    return rows


def outside() -> list[Row]:
    """A world outside of JAX, against a bare loop over the same copies with random actions."""
    if find_spec("mpe2") is None:
        sys.stderr.write("simple_spread is left out: mpe2 is not installed\n")
        return []
    speeds = external.measure()
    where = f"{speeds.copies} copies in {speeds.processes} processes"
    row = partial(Row, unit="×")
    return [
        row(
            "simple_spread: playing over a bare loop", speeds.playing / speeds.bare, at_least=0.5,
            note=f"{speeds.playing:.0f} over {speeds.bare:.0f} steps/s, {where}",
        ),
        row(
            "simple_spread: playing and learning over a bare loop", speeds.training / speeds.bare,
            note=f"{speeds.training:.0f} steps/s, an update an episode",
        ),
    ]  # fmt: skip


GUARDED = {  # limits for CI, where a neighbour may disturb one of the two that are compared
    "one update: JaxMARL's over ours, episodes as played": ("at_least", 1.5),
    "cost of secret sharing over broadcast": ("at_most", 15),
    "cost of per-episode clipping over a plain gradient": ("at_most", 2.0),
    "one update of pe-vdn-d over one of pe-vdn-c, their defaults": ("at_most", 1.3),
    "a minibatch of episodes as played over one of full length": ("at_most", 0.75),
}


def guard() -> list[Row]:
    """The watched ratios with their limits; a bad one is measured once more before it counts."""

    def measured() -> list[Row]:
        rows = {row.name: row for row in ratios(12.0)}
        return [
            rows[name]._replace(**{"at_least": None, "at_most": None, "aim": None, which: limit})
            for name, (which, limit) in GUARDED.items()
        ]

    rows = measured()
    if not all(row.reached for row in rows):
        rows = [a if a.reached else b for a, b in zip(rows, measured(), strict=True)]
    return rows


def show(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        bound = f"≥ {row.at_least:g}" if row.at_least is not None else ""
        bound = f"≤ {row.at_most:g}" if row.at_most is not None else bound
        aim = f"{row.aim:g}" if row.aim is not None else ""
        mark = ("" if row.reached else "short") if bound else ""
        lines.append(
            f"{row.name:60} {row.value:8.4g} {row.unit:8} {bound:8} {aim:6} {mark:6} {row.note}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--guard", action="store_true", help="only the ratios that CI watches")
    chosen = parser.parse_args()
    rows = (
        guard()
        if chosen.guard
        else (trainings() + ratios(30.0) + growth(10.0) + strangers() + outside())
    )
    if chosen.json:
        document = [{**row._asdict(), "reached": row.reached} for row in rows]
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        where = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}"
        title = f"{'':60} {'measured':>8} {'':8} {'at least':8} {'aim':6}"
        sys.stdout.write(f"{title}\n{show(rows)}\non {where}, Python {platform.python_version()}\n")
    if chosen.guard and not all(row.reached for row in rows):
        sys.exit("a ratio that CI watches is worse than its limit")


if __name__ == "__main__":
    main()
