"""Compute the privacy cost of choosing settings by the results of several runs.

Three cases, for one episode (docs/privacy.md has the arguments):

- `fresh`: each run trains on its own episodes and is evaluated on others. An episode is used in one
  run only, and a later choice is post-processing of what that run released: it costs one run.
- `all`: the runs train on the same episodes, and all results are examined: the runs compose.
- `logarithmic`, `geometric`, `poisson`: as `all`, but the number of runs is drawn from this
  distribution beforehand and only the best run is examined: Papernot and Steinke (2022),
  "Hyperparameter tuning with Rényi differential privacy". Each run draws its settings from one
  distribution that was fixed without the episodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pevdn.errors import UsageError, unknown
from pevdn.privacy import accounting
from pevdn.privacy.accounting import NO_NOISE
from pevdn.privacy.planner import Plan

NUMBERS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}  # shape η of the count
ORDERS = [1.01, 1.02, 1.05, 1.1, 1.15, 1.2, *accounting.ORDERS, 80, 128, 256, 512]


def all_examined(runs: Sequence[Plan], observer: str, delta: float) -> float:
    """Return ε(δ) of an episode that all runs train on, if all their results are examined.

    The settings of a run may depend on the results of the runs before it.
    """
    relation, *others = {run.relation for run in runs}
    if others:
        raise UsageError(
            f"the runs of a search must share one relation, but have {relation} and {others}."
        )
    alike = Counter(some for run in runs for some in run.mechanism.steps(run.exposure, observer))
    steps = [one._replace(updates=times * one.updates) for one, times in alike.items()]
    return accounting.composed(steps, delta, relation)


def best_examined(plan: Plan, mean: float, observer: str, number: str) -> float | None:
    """Return ε(δ) if a random `number` of runs is made and only the best is examined.

    Theorem 2 for `logarithmic` (η = 0) and `geometric` (η = 1), Theorem 6 for `poisson`, whose
    number may be 0. None for relations whose Rényi divergences are not known. Runs with different
    settings cost at most as much as if all used the most costly settings.
    """
    if number not in NUMBERS:
        raise unknown("distribution of the number of runs", number, NUMBERS)
    steps = [some for some in plan.mechanism.steps(plan.exposure, observer) if some.updates]
    always_one = mean == 1 and number != "poisson"
    if always_one or not steps or min(some.noise_multiplier for some in steps) < NO_NOISE:
        return plan.epsilon(observer)
    if plan.relation != "zero-out":
        return None
    from dp_accounting.dp_event import ComposedDpEvent, RepeatAndSelectDpEvent

    one_run = ComposedDpEvent([some.event for some in steps])
    repeated = RepeatAndSelectDpEvent(one_run, mean, NUMBERS[number])
    return accounting.at_delta(accounting.renyi_account(ORDERS).compose(repeated), plan.delta)


def report(plan: Plan, runs: Sequence[int]) -> list[dict[str, Any]]:
    """Return ε of searches with each number of `runs`, for each observer."""
    for k in runs:
        if k < 1:
            raise UsageError(f"runs is {k}, but must be at least 1.")
    return [
        {
            "runs": k,
            "observer": observer,
            "fresh": plan.epsilon(observer),
            "all": all_examined([plan] * k, observer, plan.delta),
            **{number: best_examined(plan, k, observer, number) for number in NUMBERS},
        }
        for observer in plan.mechanism.observers
        for k in runs
    ]
