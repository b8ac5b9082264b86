"""A training run: a directory with everything about it, and the loop that fills it.

config.yaml      what was asked for
metrics.jsonl    one line per seed and evaluation, written as it goes
checkpoints/     the newest states; `pevdn resume` goes on from there
summary.json     the final figures, once finished
curve.png        the win rate as a picture
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pevdn.errors import PevdnError, UsageError
from pevdn.experiment import config as configuration
from pevdn.experiment.config import Config
from pevdn.experiment.progress import Moment, Observer, Silent


@dataclass(frozen=True)
class Run:
    """The directory of a run, finished or not."""

    path: Path

    @property
    def config(self) -> Config:
        return configuration.load(self.path / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl written so far."""
        return [from_json(line) for line in _whole_lines(self.path / "metrics.jsonl")]

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        if not self.finished:
            raise UsageError(
                f"{self.path} is not finished; continue with `pevdn resume {self.path}`."
            )
        path = self.path / "summary.json"
        try:
            found: dict[str, Any] = from_json(path.read_text())
        except ValueError:
            raise PevdnError(
                f"{path} is damaged; delete it, and `pevdn resume {self.path}` writes it again."
            ) from None
        return found


class Interrupted(PevdnError):
    """Training was asked to stop; everything is saved."""


def train(
    algorithm: str,
    env: str = "smax-sc2:3m",
    *,
    steps: int = 400_000,
    seeds: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Run:
    """Train a team for each of `seeds` seeds, starting at `seed`, and return the finished run.

    Settings are those that `pevdn config` lists, by name: `train("pe-vdn-c", noise_multiplier=2)`.
    """
    return begin(configuration.make(algorithm, env, steps, seeds, seed, settings), out, observer)


def begin(config: Config, out: str | Path | None = None, observer: Observer | None = None) -> Run:
    """Train what a checked configuration asks for, in a new directory."""
    from pevdn import worlds

    world = worlds.make(config.env)
    path = Path(out) if out is not None else _fresh_directory(config)
    _refuse_taken(path)
    run = Run(path)
    training = _Training(run, config, world, observer or Silent())
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            _refuse_taken(path)  # again: it takes a while to get here
            _write_whole(path / "config.yaml", configuration.to_text(config))
            training.go()
    return run


def resume(path: str | Path, observer: Observer | None = None) -> Run:
    """Go on with a run that was stopped or killed; a finished one is returned as it is."""
    run = Run(Path(path))
    config = run.config
    if run.finished:
        return run
    from pevdn import worlds

    training = _Training(run, config, worlds.make(config.env), observer or Silent())
    with _disk_errors(run.path), _lock(run.path):
        training.go()
    return run


class _Training:
    """The host's side of a run: calls the compiled program, writes down what comes out."""

    def __init__(self, run: Run, config: Config, world: Any, observer: Observer) -> None:
        from pevdn._platform import cache_compilations
        from pevdn.experiment.checkpoint import Progress
        from pevdn.runtime.simulation import Simulation

        cache_compilations()
        self.run, self.config, self.observer = run, config, observer
        self.simulation = Simulation(world, config)
        self.progress = Progress()
        self.latest: dict[str, float] | None = None
        self._stop = False
        self._saved_at = 0
        _check_memory(self.simulation)

    def go(self) -> None:
        from pevdn.experiment.checkpoint import Checkpoints

        self._began = time.monotonic()
        self.checkpoints = Checkpoints(self.run.path, self.config)
        with self._signals():
            self._continue_or_begin()
            self._compile()
            self._loop()
        self._finish()
        self.checkpoints.close()

    # ---- preparation ----------------------------------------------------------------------

    def _continue_or_begin(self) -> None:
        import jax
        import jax.numpy as jnp

        self.seeds = jnp.arange(self.config.seed, self.config.seed + self.config.seeds)
        metrics = self.run.path / "metrics.jsonl"
        if self.checkpoints.latest is None:
            self.state = jax.jit(self.simulation.start)(self.seeds)
            metrics.write_text("")
        else:
            self.state, self.progress = self.checkpoints.restore(self.simulation)
            self._saved_at = self._lowest()
            _keep_lines(metrics, self.progress.metrics_lines)

    def _compile(self) -> None:
        import jax
        import jax.numpy as jnp

        began = time.monotonic()
        self.observer.note("compiling (cached for the next time) …")
        state = jax.eval_shape(self.simulation.start, self.seeds)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self.advance = (
            jax.jit(self.simulation.advance, donate_argnums=0)
            .lower(state, number, number)
            .compile()
        )
        params = tuple(learner.params for learner in state.learners)
        self.evaluate = jax.jit(self.simulation.evaluate).lower(params, state.key).compile()
        self.keep_anchor = jax.jit(self.simulation.keep_anchor)
        self.compile_seconds = time.monotonic() - began

    # ---- the loop -------------------------------------------------------------------------

    def _loop(self) -> None:
        s, steps = self.config.settings, self.config.steps
        last_round = -(-steps // s.eval_every)
        title = f"{self.config.algorithm} on {self.config.env}"
        if self.config.seeds > 1:
            title += f" × {self.config.seeds} seeds"
        self.observer.start(title, steps, min(self._lowest(), steps))
        try:
            while self.progress.evaluations <= last_round:
                self._train_until(min(self.progress.evaluations * s.eval_every, steps))
                self._evaluate()
                self._show()
                due = self._lowest() - self._saved_at >= s.checkpoint_every
                if due or self.progress.evaluations > last_round:
                    self._save()
        finally:
            self.observer.stop()

    def _train_until(self, until: int) -> None:
        """Short calls of the compiled program, so that a person sees it move and can stop it."""
        import jax.numpy as jnp

        most = 1
        while self._lowest() < until:
            before, began = self._total(), time.monotonic()
            self.state = self.advance(self.state, jnp.int32(until), jnp.int32(most))
            after = self._total()
            took = time.monotonic() - began
            self.progress.training_seconds += took
            self.progress.training_steps += after - before
            most = max(1, min(2 * most, int(most * 0.5 / max(took, 1e-3))))
            self._refuse_wrapped_messages()
            self._show()
            if self._stop:
                self._save()
                raise Interrupted(
                    f"stopped at {self._lowest():,} steps, everything is saved; "
                    f"continue with `pevdn resume {self.run.path}`."
                )

    def _evaluate(self) -> None:
        import jax
        import jax.numpy as jnp

        number = self.progress.evaluations

        def score(which: str, salt: int) -> Any:
            params = tuple(getattr(learner, which) for learner in self.state.learners)
            return self.evaluate(params, evaluation_keys(self.seeds, 2 * number + salt))

        running = score("params", 0)
        anchor = None
        if self.config.settings.anchor:
            self.state = self.keep_anchor(self.state, running.win_rate)
            anchor = score("anchor", 1)
        state = jax.device_get(self.state._replace(learners=(), replays=(), key=jnp.zeros(())))
        lines = []
        for lane in range(self.config.seeds):
            line: dict[str, Any] = {
                "seed": self.config.seed + lane,
                "env_steps": int(state.env_steps[lane]),
                "episodes": int(state.episodes[lane]),
                "updates": int(state.updates[lane]),
                "win_rate": float(running.win_rate[lane]),
                "return": float(running.total_reward[lane]),
                "episode_length": float(running.length[lane]),
            }
            if anchor is not None:
                has = bool(state.anchored[lane])
                line["win_rate_anchor"] = float(anchor.win_rate[lane]) if has else None
                line["return_anchor"] = float(anchor.total_reward[lane]) if has else None
            if self.config.private:
                line |= self._spent(int(state.exposure[lane]))
            lines.append(line)
        with (self.run.path / "metrics.jsonl").open("a") as file:
            file.write("".join(to_json(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self.progress.evaluations += 1
        self.progress.metrics_lines += len(lines)
        self.latest = mean_of_seeds(lines)

    def _spent(self, exposure: int) -> dict[str, Any]:
        from pevdn.privacy.accounting import spent

        s = self.config.settings
        found = spent(
            exposure,
            self.config.sampling_rate,
            s.noise_multiplier,
            self.config.delta,
            len(self.simulation.team),
        )
        return found._asdict()

    def _refuse_wrapped_messages(self) -> None:
        import numpy as np

        from pevdn.exchange.secret_shared import Code

        worst = float(np.max(self.state.refused))
        if worst == 0:
            return
        s = self.config.settings
        limit = Code(s.precision, s.modulus).limit(len(self.simulation.team))
        self._save()
        raise PevdnError(
            f"a message of size {worst:g} does not fit into ±{limit:g}, the range that precision="
            f"{s.precision} and modulus={s.modulus} leave to {len(self.simulation.team)} agents; "
            "the update was not made. Lower precision or learning_rate, or raise modulus."
        )

    # ---- saving and telling ---------------------------------------------------------------

    def _save(self) -> None:
        now = time.monotonic()
        self.progress.wall_seconds += now - self._began
        self._began = now
        self.checkpoints.save(self.state, self.progress)
        self._saved_at = self._lowest()

    def _finish(self) -> None:
        from pevdn.experiment.figures import draw_curve
        from pevdn.experiment.report import summarise

        draw_curve(self.run)
        summary = summarise(self.run, self.config, self.progress, self.compile_seconds)
        # Last of all, because it says that the run is finished.
        _write_whole(self.run.path / "summary.json", to_json(summary, indent=2) + "\n")

    def _lowest(self) -> int:
        import numpy as np

        return int(np.min(self.state.env_steps))

    def _total(self) -> int:
        import numpy as np

        return int(np.sum(self.state.env_steps))

    def _show(self) -> None:
        done, seconds = self.progress.training_steps, self.progress.training_seconds
        self.observer.moment(
            Moment(
                min(self._total() // self.config.seeds, self.config.steps),
                done / seconds if seconds else 0.0,
                self.latest,
            )
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and a polite kill ask for a stop; a second Ctrl-C insists."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        try:
            before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the caller decides about signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def evaluation_keys(seeds: Any, number: int) -> Any:
    """Keys (S,) of one evaluation; they depend on the seed and the evaluation's number alone."""
    import jax

    branch = 0x65766C  # apart from everything that training derives from the seed

    def key(seed: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), branch), number)

    return jax.vmap(key)(seeds)


def mean_of_seeds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the numbers in the lines of one evaluation; ε is the largest, not the mean."""
    result = {}
    for name in lines[0]:
        values = [line[name] for line in lines if line[name] is not None]
        if values:
            largest = name.startswith("epsilon")
            result[name] = max(values) if largest else sum(values) / len(values)
    return result


def _fresh_directory(config: Config) -> Path:
    name = f"{config.algorithm}-{config.env.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def to_json(document: Any, indent: int | None = None) -> str:
    """Strict JSON, which has no infinity: it becomes the text "inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return json.dumps(plain(document), indent=indent)


def from_json(text: str) -> Any:
    """The way back."""

    def numbers(found: dict[str, Any]) -> dict[str, Any]:
        return {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in found.items()}

    return json.loads(text, object_hook=numbers)


def _refuse_taken(path: Path) -> None:
    """A new run never touches a directory that holds something."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another directory with --out.")
    if (path / "config.yaml").exists():
        raise UsageError(
            f"{path} holds another run; choose another --out, or continue that one with "
            f"`pevdn resume {path}`."
        )
    if path.exists() and any(file.name != ".lock" for file in path.iterdir()):
        raise UsageError(f"{path} is not empty; choose another --out.")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process per run."""
    file: IO[str] = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PevdnError(f"{path} is being trained by another process; wait for it.") from None
    try:
        yield
    finally:
        file.close()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A full disk is one sentence; what was saved before stays as it was."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            begun = (path / "config.yaml").exists()
            then = f"continue with `pevdn resume {path}`" if begun else "train again"
            raise PevdnError(
                f"no space left on the disk of {path}; free some, then {then}."
            ) from None
        raise PevdnError(f"cannot write to {path}: {problem.strerror or problem}.") from None


def _keep_lines(path: Path, count: int) -> None:
    """Drop what was written after the checkpoint; it will be written again, the same."""
    lines = _whole_lines(path)
    if len(lines) < count:
        raise PevdnError(
            f"{path} has {len(lines)} lines, but the checkpoint was made after {count}; "
            "it was cut short, and the run cannot go on from it."
        )
    _write_whole(path, "".join(lines[:count]))


def _whole_lines(path: Path) -> list[str]:
    """Without a last one that is still being written, or was when the process was killed."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing."""
    draft = path.with_name(path.name + ".new")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _check_memory(simulation: Any) -> None:
    """Say so before the machine starts to swap."""
    import jax
    import jax.numpy as jnp

    config = simulation.config
    shapes = jax.eval_shape(simulation.start, jnp.arange(config.seeds)).replays
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    room = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * room:
        fits = int(config.settings.buffer_size * 0.6 * room / needed)
        raise UsageError(
            f"replay buffers of buffer_size={config.settings.buffer_size} episodes need "
            f"{needed / 2**30:.1f} GiB, but {device.platform} has {room / 2**30:.1f} GiB; "
            f"set buffer_size to {fits} or less, or train fewer seeds at a time."
        )
