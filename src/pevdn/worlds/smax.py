"""Battles of StarCraft units in JAX: JaxMARL's SMAX, unchanged or with StarCraft II's rules.

A team of allies learns. The enemies follow JaxMARL's script: cross the map, chase visible units,
attack the closest until it is dead. An agent observes each unit in sight as 13 numbers, and itself
as 10; it can move in four directions, stop, or attack an enemy in range. A dead agent observes
zeros and can only stop.

`smax:MAP` is stock SMAX: its unit statistics, deadly walls, visible enemy actions, and a reward of
1 for all enemy health plus 1 for the victory.

`smax-sc2:MAP` takes from StarCraft II what SMAX can express: the unit statistics below, walls that
block, hidden enemy actions, SMAC's episode limit, and SMAC's reward scale (a perfect episode is
worth 20). It still differs from the real game:

- The map is an open square of 32 by 32 without terrain, and SMAX chooses the starting positions.
- The enemy is SMAX's script, not the game's built-in AI.
- Half of the reward is for the enemies' health, equally for each enemy, and half for the victory;
  SMAC rewards health points, kills and the victory.
- A step is half a second (8 ticks of 1/16 s), SMAC's is 0.36 s (8 ticks at 'faster' speed): units
  move and shoot more per step, and battles take fewer steps.
- Sight and range depend on the unit type; SMAC gives all agents a sight of 9 and a range of 6.
- Shields are plain health and do not regenerate. Armour, bonus damage, abilities, acceleration and
  projectile flight are left out. The attacks of one tick land together, so both teams may die at
  once, which is not a victory.
- The SMACv2 maps mix units of all races in one team.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pevdn.errors import unknown
from pevdn.worlds.base import AgentSpec, EntityGroup, Step
from pevdn.worlds.jaxmarl_worlds import strongly_typed
from pevdn.worlds.maps import BATTLE_MAPS, STOCK_LIMIT
from pevdn.worlds.quiet import isolated_import, silence


class UnitStatistics(NamedTuple):
    """One unit type; distances in map units, times in seconds at 'faster' speed."""

    speed: float
    damage: float  # of one attack
    range: float
    sight: float
    radius: float
    health: float  # including shields
    cooldown: float  # between two attacks


# Between centres. The published range is 0.1 from edge to edge, but SMAX measures between centres
# and moves in coarse steps: a melee unit with the published range would hardly ever hit.
MELEE = 2.0

# StarCraft II, patch 4.10. Armour and damage bonuses are left out: in SMAX the damage of an
# attack depends on the attacker alone. The order is JaxMARL's numbering of unit types.
# fmt: off
STARCRAFT_UNITS: dict[str, UnitStatistics] = {
    #                           speed  damage  range  sight  radius  health  cooldown
    "marine":    UnitStatistics(3.15,     6.0,   5.0,   9.0,  0.375,   45.0,     0.61),
    "marauder":  UnitStatistics(3.15,    10.0,   6.0,  10.0, 0.5625,  125.0,     1.07),
    "stalker":   UnitStatistics(4.13,    13.0,   6.0,  10.0,  0.625,  160.0,     1.34),
    "zealot":    UnitStatistics(3.15,   2 * 8, MELEE,   9.0,    0.5,  150.0,     0.86),
    "zergling":  UnitStatistics(4.13,     5.0, MELEE,   8.0,  0.375,   35.0,    0.497),
    "hydralisk": UnitStatistics(3.15,    12.0,   5.0,   9.0,  0.625,   90.0,     0.59),
}
# fmt: on

# A perfect episode is worth 2 in SMAX (1 for all enemy health, 1 for the victory), 20 in SMAC.
STARCRAFT_REWARD_SCALE = 10.0


class SmaxWorld:
    """One SMAX map as a world; `starcraft` selects StarCraft II's rules instead of stock SMAX."""

    def __init__(self, map_name: str, starcraft: bool = False) -> None:
        if map_name not in BATTLE_MAPS:
            raise unknown("map", map_name, BATTLE_MAPS)
        battle = BATTLE_MAPS[map_name]
        self.name = f"smax-sc2:{map_name}" if starcraft else f"smax:{map_name}"
        self.max_steps = battle.limit if starcraft else STOCK_LIMIT
        self._starcraft = starcraft
        self._reward_scale = STARCRAFT_REWARD_SCALE if starcraft else 1.0
        self._env = _environment(map_name, self.max_steps, starcraft_rules() if starcraft else {})
        size, moves = len(self._env.unit_features), self._env.num_movement_actions
        allies, enemies = len(self._env.agents) - 1, self._env.num_enemies
        entities = (
            EntityGroup(0, allies, size),
            EntityGroup(allies * size, enemies, size, actions=moves),
        )
        self.agents = tuple(
            AgentSpec(
                self._env.observation_spaces[a].shape[0], self._env.action_spaces[a].n, entities
            )
            for a in self._env.agents
        )

    def reset(self, key: Array) -> tuple[Any, Step]:
        _, state = self._env.reset(key)
        state = self._settle(state)
        return state, self._result(state, reward=jnp.zeros(()), done=jnp.zeros((), bool))

    def step(self, key: Array, state: Any, actions: tuple[Array, ...]) -> tuple[Any, Step]:
        chosen = dict(zip(self._env.agents, jnp.stack(actions).astype(jnp.int32), strict=True))
        _, state, rewards, dones, _ = self._env.step_env(key, state, chosen)
        state = self._settle(state)
        reward = self._reward_scale * rewards[self._env.agents[0]]  # the same for every ally
        return state, self._result(state, reward, dones["__all__"])

    def _result(self, state: Any, reward: Array, done: Array) -> Step:
        """Return the step that led to `state`; XLA drops the observations of `step_env`."""
        observations = self._env.get_obs(state)
        available = self._env.get_avail_actions(state)
        alive = state.state.unit_alive  # (N + E,)
        allies, enemies = jnp.any(alive[: len(self.agents)]), jnp.any(alive[len(self.agents) :])
        return Step(
            observations=tuple(observations[a].astype(jnp.float32) for a in self._env.agents),
            available=tuple(available[a].astype(bool) for a in self._env.agents),
            reward=reward,
            done=done,
            truncated=done & allies & enemies,
            won=allies & ~enemies,
        )

    def _settle(self, state: Any) -> Any:
        """Return the state with all units inside the walls, and with strong types.

        SMAX stops a unit at a wall, but then lets units push each other apart, even through the
        wall, and places some SMACv2 units outside the map.
        """
        if self._starcraft:
            corner = jnp.array([self._env.map_width, self._env.map_height])
            inside = jnp.clip(state.state.unit_positions, 0.0, corner)
            state = state.replace(state=state.state.replace(unit_positions=inside))
        return strongly_typed(state)


def starcraft_rules() -> dict[str, Any]:
    """Return the arguments that give JaxMARL's SMAX StarCraft II's rules."""
    columns = zip(*STARCRAFT_UNITS.values(), strict=True)
    arrays: Any = [jnp.asarray(column, jnp.float32) for column in columns]
    units = UnitStatistics(*arrays)  # each (unit types,)
    return {
        "unit_type_velocities": units.speed,
        "unit_type_attacks": units.damage,
        "unit_type_attack_ranges": units.range,
        "unit_type_sight_ranges": units.sight,
        "unit_type_radiuses": units.radius,
        "unit_type_health": units.health,
        "unit_type_weapon_cooldowns": units.cooldown,
        "walls_cause_death": False,
        "see_enemy_actions": False,
    }


def _environment(map_name: str, limit: int, rules: dict[str, Any]) -> Any:
    """Build JaxMARL's environment with its scripted enemy and an episode limit of `limit` steps."""
    with silence(), isolated_import("jaxmarl.environments.smax.smax_env"):
        from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import map_name_to_scenario

    # SMAX compares its step counter before incrementing it: max_steps=100 ends after 101 steps.
    return HeuristicEnemySMAX(scenario=map_name_to_scenario(map_name), max_steps=limit - 1, **rules)
