"""The loop that fills the directory of a run: calls the compiled program, writes down the rest."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pevdn.config import experiment as configuration
from pevdn.config import presets
from pevdn.config.experiment import Config
from pevdn.config.runtime import RuntimeOptions
from pevdn.config.settings import MOST
from pevdn.errors import Interrupted, PevdnError, UsageError, WorldFault
from pevdn.privacy import randomness, secret
from pevdn.storage.files import append, disk_errors, lock, make_private, write_atomically
from pevdn.storage.signals import stop_requests
from pevdn.storage.strict_json import to_json
from pevdn.training import directory, readme
from pevdn.training import world as environment
from pevdn.training.directory import Run
from pevdn.training.progress import Moment, Observer, Silent

if TYPE_CHECKING:
    from pevdn.privacy.ledger import Ledger
    from pevdn.training.checkpoint import Checkpoints
    from pevdn.worlds.base import ExternalWorld, World


class MessageRefused(PevdnError):
    """A message did not fit into the encoding, so that training cannot go on."""


def train(
    algorithm: str,
    env: Any = "smax-sc2:3m",
    *,
    steps: int | None = None,
    seeds: int = 1,
    seed: int = 0,
    preset: str | None = None,
    out: str | Path | None = None,
    observer: Observer | None = None,
    devices: int | str = 1,
    **settings: Any,
) -> Run:
    """Train a team for each of `seeds` seeds, starting at `seed`, and return the finished run.

    Settings are those that `pevdn config` lists, by name: `train("pe-vdn-c", noise_multiplier=2)`.
    They win over those of a `preset`, which is for a number of agents, unless noise_multiplier is
    given as well. `steps` are the preset's, or 400,000, unless given. Seeds are
    shared evenly by so many `devices`, or by "all" of the machine's. `env` is the id of a world, or
    an object that `pevdn.worlds.adopt` makes one of.
    """
    given = None if isinstance(env, str) else environment.find(env)
    name = env if given is None else given.name
    config = presets.configure(algorithm, name, steps, seeds, seed, settings, preset)
    presets.check_team(preset, settings, config, None if given is None else len(given.agents))
    return begin(config, out, observer, devices, given)


def begin(
    config: Config,
    out: str | Path | None = None,
    observer: Observer | None = None,
    devices: int | str = 1,
    given: World | ExternalWorld | None = None,
) -> Run:
    """Train what a checked configuration asks for, in a new directory; in the world given if any.

    Its name has to be the configuration's `env`.
    """
    world = environment.find(config.env) if given is None else given
    config = _with_randomness(config, world, given is not None)
    path = Path(out) if out is not None else directory.fresh_directory(config)
    directory.refuse_taken(path)
    run, observer = Run(path), observer or Silent()
    training = _Training(run, config, world, observer, devices)
    if (cap := config.settings.reward_cap) and not config.env.startswith("smax"):
        observer.note(
            f"a step's reward counts for {cap:g} at most (reward_cap, chosen on SMAX); set "
            "reward_cap=0 if larger ones are not rare here."
        )
    if config.private:
        from pevdn.privacy import planner

        if (note := planner.large_delta(planner.Plan.of(config, len(world.agents)))) is not None:
            observer.note(note)
    with disk_errors(path):
        make_private(path)
        with lock(path):
            directory.refuse_taken(path)  # again: it takes a while to get here
            environment.keep(path, world, given is not None)
            write_atomically(path / "config.yaml", configuration.to_text(config))
            readme.leave(path, readme.of_run(config))
            training.go()
    return run


def resume(
    path: str | Path,
    observer: Observer | None = None,
    *,
    env: Any = None,
    new_noise: bool = False,
    devices: int | str = 1,
) -> Run:
    """Go on with a run that was stopped or killed; a finished one is returned as it is.

    What was lost in a kill is computed again, bit for bit. With `new_noise` it is not: new random
    numbers are drawn, and the lost updates of a private run are counted as spent. `devices` may
    be others than before, unless updates of a private run were lost and have to be repeated. A run
    in an object needs it again, as `env`.
    """
    run = Run(Path(path))
    config = run.config
    if new_noise and not config.private:
        raise UsageError(
            f"{run.path} was trained with {config.algorithm}, which adds no noise; resume it "
            "without --new-noise."
        )
    if run.finished:
        if config.private:  # its figures are no better than its ledger
            from pevdn.privacy.ledger import Ledger

            Ledger.read(run.path, configuration.fingerprint(config))
        return run
    world = environment.again(run, env)
    training = _Training(run, config, world, observer or Silent(), devices)
    with disk_errors(run.path), lock(run.path):
        readme.leave(run.path, readme.of_run(config))
        training.go(new_noise)
    return run


@dataclasses.dataclass
class Progress:
    """What the host knows beside the program's state."""

    evaluations: int = 0  # rounds of evaluation made
    metrics_lines: int = 0  # lines of metrics.jsonl that belong to this state
    training_seconds: float = 0.0
    training_steps: int = 0  # steps those seconds went into
    wall_seconds: float = 0.0
    budget_spent: bool = False  # no seed can afford another update
    ledger_line: int = 0  # the ledger's position of this state, and its checksum
    ledger_check: str = ""


@contextmanager
def _memory_errors(path: Path) -> Iterator[None]:
    """A full GPU is one sentence; what was saved before stays as it was."""
    try:
        yield
    except RuntimeError as problem:  # as jax's own is
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        raise PevdnError(
            "the memory of the device is full; free some and continue with "
            f"`pevdn resume {path}`, or train with fewer --seeds, a smaller buffer_size, or "
            "buffer=host."
        ) from None


def _with_randomness(config: Config, world: Any, given: bool) -> Config:
    """The configuration with randomness=auto decided: episodes from outside may be somebody's."""
    from pevdn.worlds.base import ExternalWorld

    if config.settings.randomness != "auto":
        return config
    outside = given or isinstance(world, ExternalWorld)
    chosen = "os" if config.private and outside else "seed"
    return dataclasses.replace(
        config, settings=dataclasses.replace(config.settings, randomness=chosen)
    )


class _Training:
    """The host's side of a run: calls the compiled program, writes down what comes out."""

    def __init__(
        self, run: Run, config: Config, world: Any, observer: Observer, devices: int | str
    ) -> None:
        from pevdn._platform import cache_compilations, refuse_miscompiling_jaxlib
        from pevdn.simulation.devices import Lanes
        from pevdn.simulation.program import Simulation

        refuse_miscompiling_jaxlib()
        cache_compilations()
        self.run, self.config, self.observer = run, config, observer
        s = config.settings
        options = RuntimeOptions(s.buffer, s.envs, s.world_timeout)
        self.simulation = Simulation(world, config, options)
        self.lanes = Lanes(devices, config.seeds, observer.note)
        if self.lanes.devices > 1 and not self.simulation.compiled_whole:
            what, instead = "in a world outside of JAX", ""
            if config.settings.buffer == "host":
                what, instead = "with buffer=host", ", or keep the episodes on the devices"
            raise UsageError(
                f"devices is {devices}, but a run {what} has one; leave --devices out{instead}."
            )
        self.progress = Progress()
        self.latest: dict[str, float] | None = None
        self._saved_at = 0
        self.ledger: Ledger | None = None
        self._to_renew = False  # before the first chunk that is not a repetition
        self.affordable = affordable(config, len(self.simulation.team))
        _check_memory(self.simulation, self.lanes.devices)

    def go(self, new_noise: bool = False) -> None:
        self._began = time.monotonic()
        with stop_requests() as self._stop, _memory_errors(self.run.path), self._world():
            self._continue_or_begin(new_noise)
            self._compile()
            self._loop()
        self._finish()
        self.checkpoints.close()

    # ---- preparation ----------------------------------------------------------------------

    @cached_property
    def checkpoints(self) -> Checkpoints:
        from pevdn.training.checkpoint import Checkpoints  # orbax takes a second to import

        return Checkpoints(self.run.path, self.config)

    def _is_new(self) -> bool:
        """Whether there is no checkpoint to go on from."""
        return not (self.run.path / "checkpoints").exists() or self.checkpoints.latest is None

    def _continue_or_begin(self, new_noise: bool) -> None:
        import jax.numpy as jnp

        self.seeds = jnp.arange(self.config.seed, self.config.seed + self.config.seeds)
        new = self._is_new()
        own = self._secret() if new else None  # before the ledger, which counts what is drawn
        if self.config.private:
            self.ledger = self._open_ledger()
        if new:
            nonce = self.ledger.nonce if self.ledger is not None else ""
            origins = randomness.origins(self.config, own, nonce)
            self.state = self.lanes.jit(self.simulation.start, origins)(origins)
        else:
            self.state, self.progress = self.checkpoints.restore(self.simulation)
            self._saved_at = self._lowest()
        self.state = self.lanes.place(self.state)
        if self.ledger is not None:
            self._continue_ledger(self.ledger, new_noise)
        # What was written after the checkpoint will be written again.
        directory.keep_lines(self.run.path / "metrics.jsonl", self.progress.metrics_lines)

    def _secret(self) -> bytes | None:
        """What the random numbers of a run that begins follow from, if not from its seed."""
        from pevdn.privacy.ledger import Ledger

        if randomness.source(self.config) == "seed":
            return None
        path = self.run.path / secret.FILE
        if not path.exists() and Ledger.begun(self.run.path):
            raise PevdnError(
                f"{path} is missing, so that what was lost in a crash can be neither repeated nor "
                "given up; restore it, or train anew."
            )
        return secret.load_or_create(path)

    def _open_ledger(self) -> Ledger:
        """The ledger of the run; a new one only if nothing was ever reserved."""
        from pevdn.privacy import accounting
        from pevdn.privacy.ledger import Ledger
        from pevdn.privacy.planner import Plan

        path, run = self.run.path, configuration.fingerprint(self.config)
        fresh = self._is_new() and not (path / "metrics.jsonl").exists()
        if not fresh or Ledger.begun(path):
            return Ledger.read(path, run)
        plan = Plan.of(self.config, len(self.simulation.team))
        accounting.check_size(self.simulation.parameters, plan.exposure)
        facts = (plan.mechanism, self.config.seeds, plan.exposure, self.affordable)
        return Ledger.begin(path, run, *facts, randomness.source(self.config))

    def _continue_ledger(self, ledger: Ledger, new_noise: bool) -> None:
        """Go on at the position of the restored state."""
        from pevdn.privacy.ledger import FILE

        ledger.go_on(self.progress.ledger_line, self.progress.ledger_check)
        if ledger.note_copy():
            then = ""
            if randomness.source(self.config) == "seed":
                then = (
                    " Train only one of the two, or resume one with --new-noise, so that both do "
                    "not use the same noise."
                )
            self.observer.note(
                f"this is a copy of a run ({self.run.path / FILE} began as another file): what it "
                "trains from here on is one more spend of the same episodes, and the original's "
                f"ledger does not know of it.{then}"
            )
        if new_noise:
            ledger.renew()
        # A copy, a backup or a snapshot of the disk that is trained on plays other episodes. Under
        # the same noise their difference would show, so what is new gets new random numbers. (With
        # a seed a run can be repeated, and its noise promises nothing about real episodes.)
        begun = len(ledger.lines) > 1
        self._to_renew = begun and not new_noise and randomness.source(self.config) == "os"

    def _compile(self) -> None:
        import jax

        began = time.monotonic()
        self.observer.note("compiling (cached for the next time) …")
        state = self.simulation.like()
        params = tuple(learner.params for learner in state.learners)
        keys = jax.eval_shape(jax.vmap(jax.random.key), self.seeds)
        evaluation = self.simulation.compile_evaluation(params, keys, self.lanes.jit)
        with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
            evaluate = pool.submit(evaluation)
            self.advance = self.simulation.compile(self.lanes.jit)
            self.evaluate = evaluate.result()
        self.keep_anchor = self.lanes.jit(self.simulation.keep_anchor, state, self.seeds)
        self.compile_seconds = time.monotonic() - began

    # ---- the loop -------------------------------------------------------------------------

    def _loop(self) -> None:
        import numpy as np

        s, steps = self.config.settings, self.config.steps
        last_round = -(-steps // s.eval_every)
        title = f"{self.config.algorithm} on {self.config.env}"
        if self.config.seeds > 1:
            title += f" × {self.config.seeds} seeds"
        if self.lanes.devices > 1:
            title += f" on {self.lanes.devices} devices"
        self.observer.start(title, steps, min(self._lowest(), steps))
        try:
            while self.progress.evaluations <= last_round and not self.progress.budget_spent:
                self._train_until(min(self.progress.evaluations * s.eval_every, steps))
                self._evaluate()
                self._show()
                self.progress.budget_spent = bool(np.all(np.asarray(self.state.exhausted)))
                due = self._lowest() - self._saved_at >= s.checkpoint_every
                last = self.progress.evaluations > last_round or self.progress.budget_spent
                if due or last:
                    self._save()
        finally:
            self.observer.stop()

    def _train_until(self, until: int) -> None:
        """Short calls of the compiled program, so that a person sees it move and can stop it."""
        most = 1
        while self._underway(until):
            before, began = self._total(), time.monotonic()
            most = self._advance(until, most)
            made = self._total() - before  # the program has run when this is known
            took = time.monotonic() - began
            self.progress.training_seconds += took
            self.progress.training_steps += made
            most = max(1, min(2 * most, int(most * 0.5 / max(took, 1e-3))))
            self._refuse_wrapped_messages()
            self._refuse_to_swap()
            self._show()
            if self._stop:
                self._save()
                raise Interrupted(
                    f"stopped at {self._lowest():,} steps, everything is saved; "
                    f"continue with `pevdn resume {self.run.path}`."
                )

    def _advance(self, until: int, most: int) -> int:
        """`most` iterations; with DP, written into the ledger before they are made and after.

        Returns how many it was: chunks lost in a kill are repeated as they were.
        """
        import jax.numpy as jnp
        import numpy as np

        ledger, chunk = self.ledger, None
        most = min(most, self.simulation.player.max_iterations or most)
        limit = [MOST] * self.config.seeds
        if ledger is not None:
            if self._to_renew and ledger.up_to_date:
                ledger.renew()
                self._to_renew = False
            self._apply_renewals(ledger)
            if self.affordable is not None:
                limit = [self.affordable - lost for lost in ledger.lost]
            due = self.config.updates_due
            try:
                chunk = ledger.reserve(until, most, limit, due, self.lanes.devices)
            except UsageError:  # other devices are needed from here on
                self._save()
                raise
            most, limit = chunk.iterations, chunk.limit
        before = np.array(self.state.updates)  # a copy: the state is given away
        try:
            self.state = self.advance(
                self.state, jnp.int32(until), jnp.int32(most), jnp.array(limit, jnp.int32)
            )
        except WorldFault:
            # The world failed before the first update of a single iteration: nothing is spent.
            if ledger is not None and most <= 1:
                ledger.void()
            raise
        if ledger is not None and chunk is not None:
            made = np.asarray(self.state.updates) - before
            exposure = np.asarray(self.state.exposure)
            ledger.settle(chunk, made.tolist(), exposure.tolist(), digest(self.state))
        return most

    def _apply_renewals(self, ledger: Ledger) -> None:
        """Derive new keys where the ledger says that this happens, now or once more."""
        while (nonce := ledger.take_renewal()) is not None:
            self.state = self.state._replace(key=renewed(self.state.key, nonce))
            self.state = self.lanes.place(self.state)

    def _evaluate(self) -> None:
        import jax
        import jax.numpy as jnp

        number = self.progress.evaluations

        def score(which: str, salt: int) -> Any:
            params = tuple(getattr(learner, which) for learner in self.state.learners)
            return self.evaluate(params, evaluation_keys(self.seeds, 3 * number + salt))

        running, s = score("params", 0), self.config.settings
        others = {}
        if s.average_decay:
            others["average"] = score("average", 2)
        if s.anchor:
            candidate = others.get("average", running)
            self.state = self.keep_anchor(self.state, candidate.win_rate)
            others["anchor"] = score("anchor", 1)
        state = jax.device_get(self.state._replace(learners=(), replays=(), key=jnp.zeros(())))
        lines, spent = [], self.ledger.spent() if self.ledger is not None else []
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
            for name, found in others.items():
                has = name != "anchor" or bool(state.anchored[lane])
                line[f"win_rate_{name}"] = float(found.win_rate[lane]) if has else None
                line[f"return_{name}"] = float(found.total_reward[lane]) if has else None
            if spent:
                line |= spent[lane]._asdict()
            lines.append(line)
        append(self.run.path / "metrics.jsonl", "".join(to_json(line) + "\n" for line in lines))
        self.progress.evaluations += 1
        self.progress.metrics_lines += len(lines)
        self.latest = mean_of_seeds(lines)

    def _refuse_wrapped_messages(self) -> None:
        import numpy as np

        from pevdn.exchange.secret_shared import Code

        worst = float(np.max(np.asarray(self.state.refused)))
        if worst == 0:
            return
        s = self.config.settings
        limit = Code(s.precision, s.modulus).limit(len(self.simulation.team))
        self._save()
        raise MessageRefused(
            f"a message of size {worst:g} does not fit into ±{limit:g}, the range that precision="
            f"{s.precision} and modulus={s.modulus} leave to {len(self.simulation.team)} agents; "
            "the update was not made. Lower precision or learning_rate, or raise modulus."
        )

    def _refuse_to_swap(self) -> None:
        """What buffers in host memory will take shows only while they fill up."""
        import numpy as np

        if self.config.private:  # how far episodes can be packed tells of them
            return
        held, room = self.simulation.replay.nbytes, machine_memory()
        if held <= 0.8 * room:
            return
        s, stored = self.config.settings, int(np.max(self.state.episodes))
        self._save()
        raise PevdnError(
            f"replay buffers in host memory hold {held / 2**30:.1f} GiB after {stored} of "
            f"buffer_size={s.buffer_size} episodes, and the machine has {room / 2**30:.1f} GiB; "
            "everything is saved. Train anew with a smaller buffer_size or fewer seeds at a time, "
            "or resume on a larger machine."
        )

    # ---- saving and telling ---------------------------------------------------------------

    def _save(self) -> None:
        now = time.monotonic()
        self.progress.wall_seconds += now - self._began
        self._began = now
        if self.ledger is not None:
            self.progress.ledger_line, self.progress.ledger_check = self.ledger.position
        self.checkpoints.save(self.state, self.progress, self.simulation)
        self._saved_at = self._lowest()

    def _finish(self) -> None:
        from pevdn.training.figures import draw_curve
        from pevdn.training.summary import summarise

        worst = None if self.ledger is None else max(self.ledger.guaranteed())
        draw_curve(self.run, worst)
        summary = summarise(
            self.run,
            self.config,
            self.progress,
            self.compile_seconds,
            self.lanes.devices,
            self.ledger,
        )
        # Last of all, because it says that the run is finished.
        write_atomically(self.run.path / "summary.json", to_json(summary, indent=2) + "\n")

    def _underway(self, until: int) -> bool:
        """Whether a seed has steps to make and budget left."""
        import numpy as np

        steps, stopped = np.asarray(self.state.env_steps), np.asarray(self.state.exhausted)
        return bool(np.any((steps < until) & ~stopped))

    def _lowest(self) -> int:
        """Steps of the slowest seed that can still make some."""
        import numpy as np

        steps, stopped = np.asarray(self.state.env_steps), np.asarray(self.state.exhausted)
        return int(np.min(steps if stopped.all() else steps[~stopped]))

    def _total(self) -> int:
        import numpy as np

        return int(np.sum(np.asarray(self.state.env_steps)))

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
    def _world(self) -> Iterator[None]:
        """A world that fails is one sentence; what was learnt before is saved."""
        try:
            yield
        except WorldFault as fault:
            self._save()
            raise WorldFault(
                f"{fault}; what was learnt before is saved, go on with "
                f"`pevdn resume {self.run.path}`."
            ) from None
        finally:
            self.simulation.close()


def digest(state: Any) -> str:
    """Of what training has come to: parameters, random keys and counters."""
    import jax
    import numpy as np

    counters = (state.env_steps, state.episodes, state.updates, state.exposure)
    params = [learner.params for learner in state.learners]
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves((params, jax.random.key_data(state.key), counters)):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    return whole.hexdigest()[:32]


RENEWAL = 0x72656E65  # a branch of a key that training, which splits it in three, never takes


def renewed(keys: Any, nonce: str) -> Any:
    """New keys (S,) for everything after a renewal, from those before it and the ledger's nonce.

    The salt keeps them apart from the keys that training derives: `fold_in(key, n)` is
    `split(key, 3)[n]`, so a renewal that folds in a small number only repeats keys of the block
    that it gives up.
    """
    import jax
    import numpy as np

    words = np.frombuffer(bytes.fromhex(nonce), ">u4").astype(np.uint32)

    def one(key: Any) -> Any:
        for word in (RENEWAL, *words):
            key = jax.random.fold_in(key, word)
        return key

    return jax.vmap(one)(keys)


def evaluation_keys(seeds: Any, number: int) -> Any:
    """Keys (S,) of one evaluation; they depend on the seed and the evaluation's number alone."""
    return _evaluation_keys()(seeds, number)


@cache
def _evaluation_keys() -> Any:
    import jax

    branch = 0x65766C  # apart from everything that training derives from the seed

    def key(seed: Any, number: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), branch), number)

    return jax.jit(jax.vmap(key, (0, None)))


def mean_of_seeds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the numbers in the lines of one evaluation; ε is the largest, not the mean."""
    result = {}
    for name in lines[0]:
        values = [line[name] for line in lines if line[name] is not None]
        if values:
            largest = name.startswith("epsilon")
            result[name] = max(values) if largest else sum(values) / len(values)
    return result


def affordable(config: Config, n_agents: int) -> int | None:
    """The exposure that the run's budget pays for; None without a budget."""
    s = config.settings
    if not s.epsilon_budget:
        return None
    from pevdn.privacy.planner import Plan

    mechanism = Plan.of(config, n_agents).mechanism
    most = 4 * s.buffer_size  # more than any run that is not killed all the time
    found = mechanism.affordable(s.epsilon_budget, s.budget_observer, most)
    if found == 0:
        first = mechanism.epsilon(1, s.budget_observer)
        raise UsageError(
            f"epsilon_budget is {s.epsilon_budget:g}, but the first update already costs "
            f"{first:.3g} in the {s.budget_observer} view; raise the budget or noise_multiplier "
            f"(now {s.noise_multiplier:g})."
        )
    return found


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(simulation: Any, devices: int) -> None:
    """Say so before the machine starts to swap; buffers in host memory are watched as they grow."""
    import jax

    config = simulation.config
    shapes = simulation.like().replays
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    room = limit * devices if limit else machine_memory()
    if needed > 0.8 * room:
        fits = int(config.settings.buffer_size * 0.6 * room / needed)
        raise UsageError(
            f"replay buffers of buffer_size={config.settings.buffer_size} episodes need "
            f"{needed / 2**30:.1f} GiB, but {device.platform} has {room / 2**30:.1f} GiB; "
            f"set buffer_size to {fits} or less, train fewer seeds at a time, or keep them in host "
            "memory, far smaller, with buffer=host."
        )
