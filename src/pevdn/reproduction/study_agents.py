"""Study of team size: win rate and traffic for n marines against n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.drawing import errors, legend, style
from pevdn.reproduction.experiment import Request, released_row, share_of
from pevdn.reproduction.measure import Row

NAME, TITLE = "agents", "Win rate and traffic against team size"
MAPS, QUICK = ("3m", "8m", "25m"), ("3m", "8m")
SEEDS, STEPS = 8, 400_000
QUICK_SEEDS, QUICK_STEPS = 1, 15_000
BUFFER = 1000  # episodes; 5,000 would need 49 GB per seed of 25m
COLOURS = {"vdn": "#000000", "pe-vdn-b": "#0072B2"}


def arms(request: Request) -> list[Arm]:
    own = {"buffer_size": BUFFER, **request.settings}
    return [
        request.arm(f"{algorithm}-{name}", f"smax-sc2:{name}", algorithm, **own)
        for name in (QUICK if request.quick else MAPS)
        for algorithm in COLOURS
    ]


def left_out(request: Request) -> list[str]:
    return ["25m"] if request.quick else []


def original(arm: str, model: str) -> str | None:
    return None


def baselines(arm: str) -> Sequence[str]:
    return [f"vdn-{arm.rpartition('-')[2]}"]


def _rows_of(rows: Sequence[Row], algorithm: str) -> list[Row]:
    return [row for row in rows if row["algorithm"] == algorithm and row["released"]]


def draw(figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None:
    figure.set_size_inches(10, 4.2)
    won, sent = figure.subplots(1, 2)
    for algorithm, colour in COLOURS.items():
        own = _rows_of(rows, algorithm)
        sizes = [row["agents"] for row in own]
        errors(won, sizes, own, colour, algorithm)
        megabytes = [row["bytes_per_agent"] / 1e6 for row in own]
        sent.plot(sizes, megabytes, "o-", color=colour, label=algorithm)
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


def conclusions(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    sentences = [
        "The maps differ in more than the number of agents: an agent observes every unit, so its "
        "observation grows with the team; it has one action per enemy; and SMAC's episode limit "
        "grows (3m 60, 8m 120, 25m 150 steps), so equal environment steps are fewer episodes. The "
        f"replay buffer holds {arms[0].config.settings.buffer_size:,} episodes on every map."
    ]
    for row in _rows_of(rows, "pe-vdn-b"):
        vdn = released_row(rows, row["baseline"])
        undefined = row["share_of_vdn"] is None
        kept = "VDN has win rate 0" if undefined else share_of(row, "VDN")
        sentences.append(
            f"{row['env']}, {row['agents']} agents: {row['win_rate']:.3f}, {kept}; an "
            f"agent sends {row['bytes_per_agent'] / 1e6:,.0f} MB, with VDN "
            f"{vdn['bytes_per_agent'] / 1e6:,.0f} MB to the central node."
        )
    return sentences
