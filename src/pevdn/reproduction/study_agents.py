"""Win rate and traffic against the size of the team: n marines against n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.drawing import errors, legend, style
from pevdn.reproduction.measure import Row
from pevdn.reproduction.targets import Wanted, find

NAME, TITLE = "agents", "Win rate and traffic against team size"
MAPS, QUICK = ("3m", "8m", "25m"), ("3m", "8m")
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 15_000
BUFFER = 1000  # episodes; with 5,000, a seed of 25m would need 49 GB
COLOURS = {"vdn": "#000000", "pe-vdn-b": "#0072B2"}


def arms(wanted: Wanted) -> list[Arm]:
    own = {"buffer_size": BUFFER, **wanted.settings}
    return [
        wanted.arm(f"{algorithm}-{name}", f"smax-sc2:{name}", algorithm, **own)
        for name in (QUICK if wanted.quick else MAPS)
        for algorithm in COLOURS
    ]


def left_out(wanted: Wanted) -> list[str]:
    return ["25m"] if wanted.quick else []


def original(arm: str, model: str) -> str | None:
    return None


def baselines(arm: str) -> Sequence[str]:
    return [f"vdn-{arm.rpartition('-')[2]}"]


def _of(rows: Sequence[Row], algorithm: str) -> list[Row]:
    return [row for row in rows if row["algorithm"] == algorithm and row["released"]]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    figure.set_size_inches(10, 4.2)
    won, sent = figure.subplots(1, 2)
    for algorithm, colour in COLOURS.items():
        own = _of(rows, algorithm)
        sizes = [row["agents"] for row in own]
        errors(won, sizes, own, colour, algorithm)
        sent.plot(
            sizes,
            [row["bytes_per_agent"] / 1e6 for row in own],
            "o-",
            color=colour,
            label=algorithm,
        )
    won.set(ylabel="win rate, last quarter", ylim=(-0.02, 1.02))
    sent.set(ylabel="sent by an agent, MB", yscale="log")
    sent.yaxis.set_major_formatter("{x:g}")
    sent.yaxis.set_minor_formatter("{x:g}")
    ticks = sorted({row["agents"] for row in rows})
    for axes in (won, sent):
        axes.set(xlabel="agents", xscale="log")
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_xticks([], minor=True)
        style(figure, axes, arms)
    legend(won)
    legend(sent)


def words(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    told = [
        "With the map more changes than the number of agents: an agent observes every unit, so its "
        "observation grows with the team; it has an action for every enemy; SMAC's limit on an "
        "episode rises (3m 60, 8m 120, 25m 150 steps), and the same number of environment steps "
        f"are fewer episodes. The replay buffer is {arms[0].config.settings.buffer_size:,} "
        "episodes on every map."
    ]
    for row in _of(rows, "pe-vdn-b"):
        share, low, high = (row[f"share_of_vdn{x}"] for x in ("", "_low", "_high"))
        vdn = find(rows, row["baseline"])
        kept = "VDN won nothing" if share is None else f"{share:.0%} of VDN"
        bounds = f" ({low:.0%} to {high:.0%})" if low is not None else ""
        told.append(
            f"{row['env']}, {row['agents']} agents: {row['win_rate']:.3f}, {kept}{bounds}; an "
            f"agent sends {row['bytes_per_agent'] / 1e6:,.0f} MB, with VDN "
            f"{vdn['bytes_per_agent'] / 1e6:,.0f} MB to the central node."
        )
    return told
