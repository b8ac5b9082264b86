"""The built-in worlds as plain data, so that listing them does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

STOCK_LIMIT = 100  # steps, on every map of stock SMAX


class BattleMap(NamedTuple):
    """One battle: the learning team, the scripted team, and SMAC's episode limit."""

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
    "two-step": ToyGame(2, 2, "QMIX's two-step game; an additive value reaches 7 of 8"),
}


class JaxmarlGame(NamedTuple):
    """A JaxMARL world with default options, and the values of each option, the default first."""

    agents: int
    limit: int  # steps
    about: str
    options: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def choices(self) -> list[str]:
        """Return `?layout=…` for every option."""
        return [f"?{name}=…" for name in self.options]


def _team_sizes(*sizes: int) -> dict[str, tuple[str, ...]]:
    return {"num_agents": tuple(map(str, sizes))}


KITCHENS = ("cramped_room", "asymm_advantages", "coord_ring", "forced_coord", "counter_circuit")
# All JaxMARL layouts except long_room, which has one cook.
KITCHENS_V2 = (
    *KITCHENS,
    *("cramped_room_v2", "two_rooms", "two_rooms_both"),
    *(f"asymm_advantages_recipes_{where}" for where in ("center", "right", "left")),
    *("fun_coordination", "more_fun_coordination"),
    *("fun_symmetries", "fun_symmetries_plates", "fun_symmetries1"),
    *("grounded_coord_simple", "grounded_coord_ring"),
    *("test_time_simple", "test_time_wide", "demo_cook_simple", "demo_cook_wide"),
)

JAXMARL_GAMES: dict[str, JaxmarlGame] = {
    "MPE_simple_spread_v3": JaxmarlGame(
        3, 25, "cover every landmark without colliding", _team_sizes(3, 2, 4, 5, 6)
    ),
    "MPE_simple_reference_v3": JaxmarlGame(2, 25, "tell the other agent its landmark"),
    "MPE_simple_speaker_listener_v4": JaxmarlGame(2, 25, "one knows the landmark, one moves"),
    "switch_riddle": JaxmarlGame(
        3, 6, "announce when all have been in the room", _team_sizes(3, 4, 5, 6)
    ),
    "overcooked": JaxmarlGame(2, 400, "cook onion soup and serve it", {"layout": KITCHENS}),
    "overcooked_v2": JaxmarlGame(
        2, 400, "the same with recipes and hidden signs", {"layout": KITCHENS_V2}
    ),
    "hanabi": JaxmarlGame(2, 89, "the card game, full deck", _team_sizes(2, 3, 4, 5)),
}

_COMPETITIVE = "is not cooperative: one agent's reward may be another's loss"
_CONTINUOUS = "has continuous actions, but pevdn needs discrete ones"

JAXMARL_REFUSED: dict[str, str] = {
    "MPE_simple_v3": "has only one agent, but a team needs two",
    **dict.fromkeys(
        (
            *("MPE_simple_tag_v3", "MPE_simple_world_comm_v3", "MPE_simple_crypto_v3"),
            *("MPE_simple_push_v3", "MPE_simple_adversary_v3"),
            *("storm", "storm_2p", "storm_np", "coin_game"),
        ),
        _COMPETITIVE,
    ),
    **dict.fromkeys(
        (
            *("MPE_simple_facmac_v1", "MPE_simple_facmac_3a_v1", "MPE_simple_facmac_6a_v1"),
            *("MPE_simple_facmac_9a_v1", "jaxnav"),
            *("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"),
        ),
        _CONTINUOUS,
    ),
    **dict.fromkeys(
        ("SMAX", "HeuristicEnemySMAX", "LearnedPolicyEnemySMAX"),
        "is available as a family of its own, such as 'smax:3m'",
    ),
    **dict.fromkeys(
        (
            f"JaxRobotarium_{name}"
            for name in (
                *("navigation", "discovery", "material_transport", "warehouse"),
                *("arctic_transport", "foraging", "rware", "predator_prey"),
            )
        ),
        "needs the package jaxrobotarium, which pevdn does not support",
    ),
}
