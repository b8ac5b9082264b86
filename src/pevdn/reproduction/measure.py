"""Measure finished runs: win rate, speed, privacy and traffic.

A run may have several models: the one that trains and others that may be released instead (its
anchor, averaged parameters). Until a seed has such a model its win rate counts as 0, as in the
paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pevdn import worlds
from pevdn.config.experiment import Config, fingerprint
from pevdn.exchange.secret_shared import Code
from pevdn.privacy import accounting
from pevdn.privacy.ledger import Ledger
from pevdn.reproduction import paper, statistics
from pevdn.reproduction.campaign import Arm
from pevdn.training.metrics import by_seed
from pevdn.training.summary import MODELS, final_mean

GOAL = 0.8  # win rate that "steps to 80 %" waits for
SMOOTH = 5  # evaluations in a moving mean, as in the paper's figure
RUNNING = "running"  # the model that trains
Lines = Sequence[dict[str, Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """Win rates of S seeds at K evaluations."""

    steps: NDArray[Any]  # (K,)
    values: NDArray[Any]  # (S, K)

    def upto(self, steps: float) -> Curves:
        """Return the part up to `steps`, with at least two evaluations."""
        known = max(2, int(np.searchsorted(self.steps, steps, side="right")))
        return Curves(self.steps[:known], self.values[:, :known])

    @property
    def smooth(self) -> NDArray[Any]:
        """Return the moving mean over five evaluations, (S, K)."""
        sums = np.cumsum(np.pad(self.values, ((0, 0), (SMOOTH, 0))), axis=1)
        counts = np.minimum(np.arange(1, len(self.steps) + 1), SMOOTH)
        return (sums[:, SMOOTH:] - sums[:, :-SMOOTH]) / counts

    @property
    def final(self) -> NDArray[Any]:
        """(S,) final win rates, as in summary.json."""
        return np.array([final_mean(self.steps.tolist(), own) for own in self.values.tolist()])

    @property
    def area(self) -> NDArray[Any]:
        """Return the area under the curve as a fraction of the largest possible, (S,)."""
        return np.trapezoid(self.values, self.steps, axis=1) / self.steps[-1]

    @property
    def reached(self) -> NDArray[Any]:
        """Return the steps until the moving mean first reaches the goal, (S,); inf if never."""
        there = self.smooth >= GOAL
        return np.where(there.any(1), self.steps[there.argmax(1)], math.inf)


def curves_of(config: Config, lines: Lines) -> dict[str, Curves]:
    """Return curves by model, in the order of the keys in metrics.jsonl."""
    seeds = list(by_seed(lines).values())
    evaluations = min(len(own) for own in seeds)
    steps = np.minimum(np.arange(evaluations) * config.settings.eval_every, config.steps)
    models = [name for name in lines[0] if name.startswith("win_rate")]
    return {
        model.removeprefix("win_rate").lstrip("_") or RUNNING: Curves(
            steps, np.array([[line[model] or 0.0 for line in own[:evaluations]] for own in seeds])
        )
        for model in models
    }


def released(models: Collection[str]) -> str:
    """Return which of the models a run releases."""
    return next(model or RUNNING for model in MODELS if (model or RUNNING) in models)


def published(name: str | None) -> Curves | None:
    """Return a curve of the paper, one run; None if it has none of that name."""
    curve = paper.curve(name) if name is not None else None
    return curve and Curves(np.array(curve.steps), np.array([curve.win_rate]))


# ---- rows -----------------------------------------------------------------------------------


def learning(curves: Curves, vdn: Curves | None) -> Row:
    """Return win rate and speed, with intervals over seeds."""
    row: Row = {"win_rate_by_seed": curves.final.tolist()}
    row |= _with_interval("win_rate", curves.final)
    row["win_rate_iqm"] = float(statistics.iqm(curves.final))
    if vdn is not None:
        whole = vdn.final.mean()
        row["share_of_vdn"] = float(curves.final.mean() / whole) if whole else None
        own = curves is vdn  # of itself it is 100 %, without an interval
        bounds = (1.0, 1.0) if own else statistics.ratio_interval(curves.final, vdn.final)
        row["share_of_vdn_low"], row["share_of_vdn_high"] = map(_plain, bounds or (None, None))
    row |= _with_interval("area", curves.area)
    there = np.isfinite(curves.reached)
    median = float(np.median(curves.reached))
    row["steps_to_80"] = median if math.isfinite(median) else None
    row["seeds_at_80"] = int(there.sum())
    return row


def _with_interval(name: str, values: NDArray[Any]) -> Row:
    low, high = map(_plain, statistics.interval(values) or (None, None))
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


def _plain(value: Any) -> float | None:
    return None if value is None else float(value)


def setting(config: Config, lines: Lines) -> Row:
    """Return the configuration, and the numbers of episodes and updates."""

    s, agents = config.settings, len(worlds.make(config.env).agents)
    last = [own[-1] for own in by_seed(lines).values()]
    return {
        "algorithm": config.algorithm,
        "env": config.env,
        "agents": agents,
        "precision": s.precision,
        "message_limit": Code(s.precision, s.modulus).limit(agents),
        "learning_starts": config.learning_starts,
        "episodes": sum(line["episodes"] for line in last) / len(last),
        "updates": sum(line["updates"] for line in last) / len(last),
    }


def privacy(arm: Arm) -> Row:
    """Return ε from the run's ledger, the largest of its seeds, and the claim of Theorem 1."""
    if not arm.config.private:
        return {}

    s, config = arm.config.settings, arm.config
    ledger = Ledger.read(arm.path, fingerprint(arm.run.config))
    guaranteed, delta = ledger.guaranteed(), ledger.mechanism.delta
    claim, claimed_delta = accounting.theorem_1(
        s.buffer_size, s.buffer_throughput, config.sampling_rate, s.noise_multiplier, delta
    )
    return {
        "epsilon_team": max(x.epsilon_team for x in guaranteed),
        "epsilon_agent": max(x.epsilon_agent for x in guaranteed),
        "delta": delta,
        "noise_multiplier": s.noise_multiplier,
        "theorem_1_epsilon": claim,
        "theorem_1_delta": claimed_delta,
    }


def traffic(config: Config, lines: Lines) -> Row:
    """Return what one agent sends in the training of one seed, mean over seeds and agents.

    A message is one 32-bit number for one step of one sampled episode. In the clear it goes to all
    n − 1 teammates; secret-shared, n − 1 shares and then the partial sum go to n − 1 teammates. A
    central node receives every step once, as it is stored: observation, available actions (one bit
    each) and action (two bytes).
    """

    agents = worlds.make(config.env).agents
    n = len(agents)
    each = {"alone": 0, "broadcast": n - 1, "secret_shared": 2 * (n - 1), "central": 1}
    seeds = by_seed(lines).values()
    if config.exchange == "central":
        steps = sum(own[-1]["env_steps"] for own in seeds) / len(seeds)
        size = sum(4 * a.observation_size + -(-a.n_actions // 8) + 2 for a in agents) / n
    else:
        steps = sum(sampled_steps(config, own) for own in seeds) / len(seeds)
        size = 4.0
    messages = steps * each[config.exchange]
    return {"messages_per_agent": messages, "bytes_per_agent": messages * size}


def sampled_steps(config: Config, lines: Lines) -> float:
    """Return the expected number of episode steps sampled by one seed's updates.

    Between two evaluations every update samples the episodes then in the buffer, whose mean length
    follows from the steps played. Minibatch sizes are exact for uniform sampling.
    """
    played, steps, updates = (
        np.array([line[name] for line in lines], float)
        for name in ("episodes", "env_steps", "updates")
    )
    s = config.settings
    newest = (played[1:] + played[:-1]) / 2
    oldest = np.maximum(0, newest - s.buffer_size)
    stored = np.maximum(newest - oldest, 1)
    length = (np.interp(newest, played, steps) - np.interp(oldest, played, steps)) / stored
    uniform = config.sampling == "uniform"
    batch = s.expected_batch_size if uniform else config.sampling_rate * stored
    return float(np.sum(np.diff(updates) * batch * length))


def table(
    arms: Sequence[Arm],
    original: Callable[[str, str], str | None],
    baselines: Callable[[str], Sequence[str]],
) -> list[Row]:
    """Return one row per model of each finished arm.

    `original` returns the paper's name for an arm's model, `baselines` the VDN arms it is compared
    with: the best of them counts. The paper's figures are taken after the same number of steps.
    """
    finished = {
        arm.name: (arm, lines := arm.lines, curves_of(arm.config, lines))
        for arm in arms
        if arm.run.finished
    }
    rows = []
    for name, (arm, lines, models) in finished.items():
        shared = {**setting(arm.config, lines), **privacy(arm), **traffic(arm.config, lines)}
        vdns = {n: finished[n][2][RUNNING] for n in baselines(name) if n in finished}
        best = max(vdns, key=lambda n: float(vdns[n].final.mean()), default=None)
        shared["baseline"] = best
        vdn = vdns[best] if best is not None else None
        for model, curves in models.items():
            row = {"arm": name, "model": model, **shared, **learning(curves, vdn)}
            row["released"] = model == released(models)
            theirs, their_vdn = published(original(name, model)), published("vdn")
            if theirs is not None and their_vdn is not None:
                steps = arm.config.steps
                row["paper"] = learning(theirs.upto(steps), their_vdn.upto(steps))
            rows.append(row)
    return rows
