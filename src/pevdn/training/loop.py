"""Train a team: call the compiled program, evaluate, and write the directory of the run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pevdn._platform import cache_compilations, refuse_miscompiling_jaxlib
from pevdn.agent import schedule
from pevdn.config import presets
from pevdn.config.experiment import Config, fingerprint, to_text
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST
from pevdn.errors import Interrupted, PevdnError, UsageError, WorldFault
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import planner, randomness, secret
from pevdn.privacy.ledger import Ledger
from pevdn.simulation.devices import Lanes
from pevdn.simulation.program import Simulation
from pevdn.storage.files import disk_errors, lock, make_private, write_atomically
from pevdn.storage.readme import leave
from pevdn.storage.signals import stop_requests
from pevdn.storage.strict_json import to_json
from pevdn.training import directory, figures, memory, metrics, readme, summary
from pevdn.training import world as environment
from pevdn.training.accountant import Accountant
from pevdn.training.checkpoint import Checkpoints, Progress
from pevdn.training.directory import Run
from pevdn.training.evaluator import Evaluator
from pevdn.training.progress import Moment, Reporter, Silent
from pevdn.worlds.base import ExternalWorld, World

CALL_SECONDS = 0.5  # how long a call of the compiled program should take


class MessageRefused(PevdnError):
    """A message does not fit into the encoding, so training cannot continue."""


def train(
    algorithm: str,
    env: Any = "smax-sc2:3m",
    *,
    steps: int | None = None,
    seeds: int = 1,
    seed: int = 0,
    preset: str | None = None,
    out: str | Path | None = None,
    reporter: Reporter | None = None,
    buffer: str | None = None,
    workers: int | None = None,
    world_timeout: float | None = None,
    checkpoint_every: int | None = None,
    devices: int | str | None = None,
    **settings: Any,
) -> Run:
    """Train a team for each of `seeds` seeds, starting at `seed`, and return the finished run.

    `env` is the id of a world, or an object that `pevdn.worlds.adopt` accepts. `settings` are those
    that `pevdn config` lists: `train("pe-vdn-c", noise_multiplier=2)`. They override the `preset`,
    which is for a given team size, unless noise_multiplier is set as well. `steps` defaults to the
    preset's, or 400,000. `buffer`, `workers`, `world_timeout`, `checkpoint_every` and `devices` are
    runtime options (docs/settings.md): they change how the run is computed, not its results.
    """
    world = None if isinstance(env, str) else environment.find(env)
    name = env if world is None else world.name
    config = presets.configure(algorithm, name, steps, seeds, seed, settings, preset)
    agents = None if world is None else len(world.agents)
    planner.check_preset(preset, settings, config, agents)
    if reporter is not None and (note := planner.other_team(preset, settings, config, agents)):
        reporter.note(note)
    options = presets.options_of(preset).replace(
        {
            "buffer": buffer,
            "workers": workers,
            "world_timeout": world_timeout,
            "checkpoint_every": checkpoint_every,
            "devices": devices,
        }
    )
    return begin(config, out, reporter, options, world)


def begin(
    config: Config,
    out: str | Path | None = None,
    reporter: Reporter | None = None,
    options: RuntimeOptions = RuntimeOptions(),
    world: World | ExternalWorld | None = None,
) -> Run:
    """Train a checked configuration in a new directory.

    A `world` that was given as an object must have the name `config.env`.
    """
    is_object = world is not None
    world = environment.find(config.env) if world is None else world
    config = _decide_randomness(config, is_object or isinstance(world, ExternalWorld))
    path = Path(out) if out is not None else directory.fresh_directory(config)
    directory.refuse_taken(path)
    run, reporter = Run(path), reporter or Silent()
    training = _Training(run, config, options, world, reporter)
    if (cap := config.settings.reward_cap) and not config.env.startswith("smax"):
        reporter.note(
            f"rewards are capped at {cap:g} per step (reward_cap, tuned on SMAX); set reward_cap=0 "
            "if larger rewards are common here."
        )
    if (note := planner.unused_openings(config)) is not None:
        reporter.note(note)
    if config.private:
        plan = planner.Plan.of(config, len(world.agents))
        if (note := planner.large_delta(plan)) is not None:
            reporter.note(note)
    with disk_errors(path):
        make_private(path)
        with lock(path):
            directory.refuse_taken(path)  # again: another process may have taken it meanwhile
            environment.keep(path, world, is_object)
            write_atomically(path / "config.yaml", to_text(config, options))
            leave(path, readme.of_run(config))
            training.go()
    return run


def resume(
    path: str | Path,
    reporter: Reporter | None = None,
    *,
    env: Any = None,
    new_noise: bool = False,
    workers: int | None = None,
    world_timeout: float | None = None,
    checkpoint_every: int | None = None,
    devices: int | str | None = None,
) -> Run:
    """Continue a stopped or killed run; return a finished one unchanged.

    The result matches an uninterrupted run bit for bit. With `new_noise` it does not: new random
    numbers are drawn, and the lost updates of a private run count as spent. Runtime options default
    to those that the run was started with. `devices` cannot change while lost updates of a private
    run have to be repeated, and `buffer` never can: checkpoints contain the buffers. A run in an
    object needs that object again, as `env`.
    """
    run = Run(Path(path))
    config = run.config
    options = run.options.replace(
        {
            "workers": workers,
            "world_timeout": world_timeout,
            "checkpoint_every": checkpoint_every,
            "devices": devices,
        }
    )
    if new_noise and not config.private:
        raise UsageError(
            f"{run.path} was trained with {config.algorithm}, which adds no noise; resume it "
            "without --new-noise."
        )
    if run.finished:
        if config.private:  # its figures are only as good as its ledger
            Ledger.read(run.path, fingerprint(config))
        return run
    world = environment.again(run, env)
    training = _Training(run, config, options, world, reporter or Silent())
    with disk_errors(run.path), lock(run.path):
        leave(run.path, readme.of_run(config))
        training.go(new_noise)
    return run


def _decide_randomness(config: Config, external: bool) -> Config:
    """Resolve randomness=auto: episodes of external worlds may be private data."""
    if config.settings.randomness != "auto":
        return config
    source = "os" if config.private and external else "seed"
    settings = dataclasses.replace(config.settings, randomness=source)
    return dataclasses.replace(config, settings=settings)


class _Training:
    """One run while it trains."""

    def __init__(
        self,
        run: Run,
        config: Config,
        options: RuntimeOptions,
        world: World | ExternalWorld,
        reporter: Reporter,
    ) -> None:
        refuse_miscompiling_jaxlib()
        cache_compilations()
        self.run, self.config, self.options, self.reporter = run, config, options, reporter
        self.simulation = Simulation(world, config, options)
        self.lanes = Lanes(options.devices, config.seeds, reporter.note)
        if self.lanes.devices > 1 and not self.simulation.compiled_whole:
            where, instead = "in an external world", ""
            if options.buffer == "host":
                where, instead = "with buffer=host", ", or keep the episodes on the devices"
            raise UsageError(
                f"devices is {options.devices}, but a run {where} uses one; leave --devices out"
                f"{instead}."
            )
        self.progress = Progress()
        self.latest: dict[str, float] | None = None
        self._saved_at = 0
        self.accountant: Accountant | None = None
        if config.private:
            self.accountant = Accountant(run.path, config, self.simulation, self.lanes.devices)
        memory.check_device_buffers(self.simulation, self.lanes.devices)

    def go(self, new_noise: bool = False) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        self._began = time.monotonic()
        with (
            stop_requests() as self._stop,
            memory.device_memory_errors(self.run.path),
            self._world_errors(),
        ):
            self._begin_or_restore(new_noise)
            self._compile()
            self._loop()
        self._finish()
        self.checkpoints.close()

    # ---- preparation ----------------------------------------------------------------------

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run.path, self.config)

    def _is_new(self) -> bool:
        """Whether there is no checkpoint to continue from."""
        return not (self.run.path / "checkpoints").exists() or self.checkpoints.latest is None

    def _begin_or_restore(self, new_noise: bool) -> None:
        self.seeds = jnp.arange(self.config.seed, self.config.seed + self.config.seeds)
        new = self._is_new()
        own_secret = self._secret() if new else None  # before the ledger counts what is drawn
        if self.accountant is not None:
            self.accountant.open(new and not (self.run.path / metrics.FILE).exists())
        if new:
            nonce = self.accountant.nonce if self.accountant is not None else ""
            origins = randomness.origins(self.config, own_secret, nonce)
            self.state = self.lanes.jit(self.simulation.start, origins)(origins)
        else:
            self.state, self.progress = self.checkpoints.restore(self.simulation)
            self._saved_at = self._lowest()
        self.state = self.lanes.place(self.state)
        if self.accountant is not None:
            position = self.progress.ledger_line, self.progress.ledger_check
            self.accountant.go_on(*position, new_noise, self.reporter.note)
        metrics.cut(self.run.path, self.progress.metrics_lines)

    def _secret(self) -> bytes | None:
        """Return the secret that a new run draws from; None if it draws from its seed."""
        if randomness.source(self.config) == "seed":
            return None
        path = self.run.path / secret.FILE
        if not path.exists() and Ledger.begun(self.run.path):
            raise PevdnError(
                f"{path} is missing, so updates lost in a crash can be neither repeated nor given "
                "up; restore it, or train anew."
            )
        return secret.load_or_create(path)

    def _compile(self) -> None:
        began = time.monotonic()
        self.reporter.note("compiling (cached for the next run) …")
        self.evaluate = Evaluator(self.simulation, self.seeds, self.lanes.jit)
        with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
            evaluation = pool.submit(self.evaluate.compile)
            self.advance = self.simulation.compile(self.lanes.jit)
            evaluation.result()
        self.compile_seconds = time.monotonic() - began

    # ---- the loop -------------------------------------------------------------------------

    def _loop(self) -> None:
        steps, evaluations = self.config.steps, schedule.evaluations(self.config)
        title = f"{self.config.algorithm} on {self.config.env}"
        if self.config.seeds > 1:
            title += f" × {self.config.seeds} seeds"
        if self.lanes.devices > 1:
            title += f" on {self.lanes.devices} devices"
        self.reporter.start(title, steps, min(self._lowest(), steps))
        try:
            while self.progress.evaluations < evaluations and not self.progress.budget_spent:
                self._train_until(schedule.steps_before(self.progress.evaluations, self.config))
                self._evaluate()
                self._show()
                self.progress.budget_spent = bool(np.all(np.asarray(self.state.exhausted)))
                due = self._lowest() - self._saved_at >= self.options.checkpoint_every
                if due or self.progress.evaluations == evaluations or self.progress.budget_spent:
                    self._save()
        finally:
            self.reporter.stop()

    def _train_until(self, until: int) -> None:
        """Make short calls of the compiled program, to show progress and to react to signals."""
        iterations = 1
        while self._underway(until):
            before, began = self._total(), time.monotonic()
            iterations = self._advance(until, iterations)
            made = self._total() - before  # waits for the program
            took = time.monotonic() - began
            self.progress.training_seconds += took
            self.progress.training_steps += made
            fitting = int(iterations * CALL_SECONDS / max(took, 1e-3))
            iterations = max(1, min(2 * iterations, fitting))
            self._check_messages()
            self._check_host_memory()
            self._show()
            if self._stop:
                self._save()
                raise Interrupted(
                    f"stopped at {self._lowest():,} steps, everything is saved; "
                    f"continue with `pevdn resume {self.run.path}`."
                )

    def _advance(self, until: int, iterations: int) -> int:
        """Make this many iterations, or repeat a lost chunk; return the number made."""
        iterations = min(iterations, self.simulation.player.max_iterations or iterations)
        accountant = self.accountant
        if accountant is None:
            unlimited = [MOST] * self.config.seeds
            self.state = self._compute(self.state, until, iterations, unlimited)
            return iterations
        if (state := accountant.renew_keys(self.state)) is not self.state:
            self.state = self.lanes.place(state)
        try:
            chunk = accountant.reserve(until, iterations)
        except UsageError:  # the next chunk needs other devices
            self._save()
            raise
        self.state = accountant.compute(chunk, self.state, self._compute)
        return chunk.iterations

    def _compute(self, state: Any, until: int, iterations: int, limit: list[int]) -> Any:
        """Call the compiled program, which takes over the memory of `state`."""
        numbers = jnp.int32(until), jnp.int32(iterations), jnp.array(limit, jnp.int32)
        return self.advance(state, *numbers)

    def _evaluate(self) -> None:
        spent = self.accountant.spent() if self.accountant is not None else None
        self.state, lines = self.evaluate(self.state, self.progress.evaluations, spent)
        metrics.write(self.run.path, lines)
        self.progress.evaluations += 1
        self.progress.metrics_lines += len(lines)
        self.latest = metrics.mean_of_seeds(lines)

    def _check_messages(self) -> None:
        """Stop when a message did not fit into the encoding."""
        largest = float(np.max(np.asarray(self.state.refused)))
        if largest == 0:
            return
        s, agents = self.config.settings, len(self.simulation.team)
        self._save()
        code = Code(s.precision, s.modulus)
        raise MessageRefused(code.refusal(agents, f"a message of size {largest:g}"))

    def _check_host_memory(self) -> None:
        """Stop before packed buffers fill the machine: their size shows only as they grow."""
        if self.config.private:  # the packed size depends on the episodes
            return
        stored, size = int(np.max(self.state.episodes)), self.config.settings.buffer_size
        problem = memory.outgrown(self.simulation.replay.nbytes, stored, size)
        if problem is not None:
            self._save()
            raise problem

    # ---- saving and reporting -------------------------------------------------------------

    def _save(self) -> None:
        now = time.monotonic()
        self.progress.wall_seconds += now - self._began
        self._began = now
        if self.accountant is not None:
            self.progress.ledger_line, self.progress.ledger_check = self.accountant.position
        self.checkpoints.save(self.state, self.progress, self.simulation)
        self._saved_at = self._lowest()

    def _finish(self) -> None:
        ledger = None if self.accountant is None else self.accountant.ledger
        figures.draw_curve(self.run, None if ledger is None else max(ledger.guaranteed()))
        document = summary.summarise(
            self.run,
            self.config,
            self.progress,
            self.compile_seconds,
            self.lanes.devices,
            ledger,
        )
        # Last, because this file marks the run as finished.
        write_atomically(self.run.path / "summary.json", to_json(document, indent=2) + "\n")

    def _underway(self, until: int) -> bool:
        """Whether a seed has steps to make and budget left."""
        steps, stopped = np.asarray(self.state.env_steps), np.asarray(self.state.exhausted)
        return bool(np.any((steps < until) & ~stopped))

    def _lowest(self) -> int:
        """Return the steps of the slowest seed that still has budget."""
        steps, stopped = np.asarray(self.state.env_steps), np.asarray(self.state.exhausted)
        return int(np.min(steps if stopped.all() else steps[~stopped]))

    def _total(self) -> int:
        return int(np.sum(np.asarray(self.state.env_steps)))

    def _show(self) -> None:
        done, seconds = self.progress.training_steps, self.progress.training_seconds
        self.reporter.moment(
            Moment(
                min(self._total() // self.config.seeds, self.config.steps),
                done / seconds if seconds else 0.0,
                self.latest,
            )
        )

    @contextmanager
    def _world_errors(self) -> Iterator[None]:
        """Save when the world fails; close it at the end."""
        try:
            yield
        except WorldFault as fault:
            self._save()
            raise WorldFault(
                f"{fault}; training so far is saved, continue with `pevdn resume {self.run.path}`."
            ) from None
        finally:
            self.simulation.close()
