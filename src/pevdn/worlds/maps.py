"""The worlds there are, as plain data: listing them must not wait for JAX to start."""

from __future__ import annotations

from typing import NamedTuple

STOCK_LIMIT = 100  # steps, on every map of stock SMAX


class BattleMap(NamedTuple):
    """One battle: the learning team, the scripted team, and SMAC's limit on its length."""

    allies: int
    enemies: int
    limit: int  # steps, as in the SMAC (or SMACv2) map registry
    units: str


BATTLE_MAPS: dict[str, BattleMap] = {
    "3m": BattleMap(3, 3, 60, "3 marines each"),
    "8m": BattleMap(8, 8, 120, "8 marines each"),
    "25m": BattleMap(25, 25, 150, "25 marines each"),
    "5m_vs_6m": BattleMap(5, 6, 70, "5 marines against 6"),
    "10m_vs_11m": BattleMap(10, 11, 150, "10 marines against 11"),
    "27m_vs_30m": BattleMap(27, 30, 180, "27 marines against 30"),
    "2s3z": BattleMap(5, 5, 120, "2 stalkers and 3 zealots each"),
    "3s5z": BattleMap(8, 8, 150, "3 stalkers and 5 zealots each"),
    "3s5z_vs_3s6z": BattleMap(8, 9, 170, "3 stalkers and 5 zealots against 3 and 6"),
    "3s_vs_5z": BattleMap(3, 5, 250, "3 stalkers against 5 zealots"),
    "6h_vs_8z": BattleMap(6, 8, 150, "6 hydralisks against 8 zealots"),
    "smacv2_5_units": BattleMap(5, 5, 400, "5 random units each, random places"),
    "smacv2_10_units": BattleMap(10, 10, 400, "10 random units each, random places"),
    "smacv2_20_units": BattleMap(20, 20, 400, "20 random units each, random places"),
}


class ToyGame(NamedTuple):
    """One toy world at its default size."""

    agents: int
    limit: int
    about: str


TOY_GAMES: dict[str, ToyGame] = {
    "coordination": ToyGame(2, 3, "recall a private cue; additive, and impossible without memory"),
    "two-step": ToyGame(2, 2, "QMIX's two-step game; an additive value settles for 7 of 8"),
}
