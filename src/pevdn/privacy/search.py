"""What it costs to choose settings by looking at the results of several runs.

Three cases, for one episode (docs/privacy.md has the arguments):

- `fresh`: every run plays its own episodes and is judged by others. An episode is learnt from in
  one run only, and whatever is chosen later is computed from what that run released: the cost is
  that of the run.
- `all`: the runs learn from the same episodes, and all results are looked at: they compose.
- the same, but the number of runs is drawn at random beforehand and only the best run is looked
  at: Papernot and Steinke (2022), "Hyperparameter tuning with Rényi differential privacy". Every
  run draws its settings anew from one distribution that was fixed without the episodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pevdn.errors import UsageError, unknown
from pevdn.privacy import accounting
from pevdn.privacy.accounting import NO_NOISE, OBSERVERS
from pevdn.privacy.planner import Plan

NUMBERS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}  # of runs, by shape η
ORDERS = [1.01, 1.02, 1.05, 1.1, 1.15, 1.2, *accounting.ORDERS, 80, 128, 256, 512]


def all_looked_at(runs: Sequence[Plan], view: str, delta: float) -> float:
    """ε(δ) of an episode that all runs learnt from, if all their results are looked at.

    A run's settings may follow from the results of those before it.
    """
    relation, *others = {run.relation for run in runs}
    if others:
        raise UsageError(f"the runs of a search share one relation, not {relation} and {others}.")
    counted = Counter(run.mechanism.steps(run.exposure, view) for run in runs)
    steps = [one._replace(updates=times * one.updates) for one, times in counted.items()]
    return accounting.composed(steps, delta, relation)


def best_looked_at(plan: Plan, mean: float, view: str, number: str) -> float | None:
    """ε(δ) if a random `number` of such runs is made and only the best is looked at.

    Theorem 2 for `logarithmic` (η = 0) and `geometric` (η = 1), Theorem 6 for `poisson`, which may
    also come to no run at all. None where Rényi divergences are not known for the relation. Runs
    with different settings cost at most what they would if all were as the most costly one.
    """
    if number not in NUMBERS:
        raise unknown("distribution of the number of runs", number, NUMBERS)
    seen = plan.mechanism.steps(plan.exposure, view)
    always_one = mean == 1 and number != "poisson"
    if always_one or seen.updates == 0 or seen.noise_multiplier < NO_NOISE:
        return plan.epsilon(view)
    if plan.relation != "zero-out":
        return None
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    repeated = RepeatAndSelectDpEvent(seen.event, mean, NUMBERS[number])
    return accounting.at_delta(accounting.renyi(ORDERS).compose(repeated), plan.delta)


def report(plan: Plan, runs: Sequence[int]) -> list[dict[str, Any]]:
    """ε of searches by so many runs, for each view."""
    for k in runs:
        if k < 1:
            raise UsageError(f"runs is {k}, but must be at least 1.")
    return [
        {
            "runs": k,
            "view": view,
            "fresh": plan.epsilon(view),
            "all": all_looked_at([plan] * k, view, plan.delta),
            **{number: best_looked_at(plan, k, view, number) for number in NUMBERS},
        }
        for view in OBSERVERS
        for k in runs
    ]
