"""Battles of StarCraft units in JAX: JaxMARL's SMAX, as it comes or with StarCraft II's rules.

A team of allies learns; the other team follows JaxMARL's script (cross the map, chase whom you
see, shoot the closest until it is dead). Every agent sees the units within its sight, each as 13
numbers, and 10 numbers about itself; it may move in four directions, stop, or attack an enemy in
range. A dead agent sees zeros and can only stop.

`smax:MAP` is stock SMAX: its figures, deadly walls, visible enemy actions, and a reward of 1 for
all enemy health plus 1 for the victory.

`smax-sc2:MAP` takes what can be taken from StarCraft II without changing the simulator: the unit
figures below, walls that block, hidden enemy actions, SMAC's limit on the episode, and SMAC's
reward scale (a perfect episode is worth 20). It is still not the real game:

- the map is an open square of 32 by 32 without terrain, and the teams start where SMAX puts them;
- the enemy is SMAX's script, not the game's built-in AI;
- half of the reward is for the enemies' health, each enemy counting the same, and half for the
  victory, where SMAC counts health points and kills, and pays the rest for the victory;
- a step is half a second (8 ticks of 1/16 s), where SMAC's 8 ticks at 'faster' speed are 0.36 s:
  units walk and shoot more in one step, and battles take fewer of them;
- every kind of unit has its own sight and range, where SMAC gives agents 9 and 6 for all kinds;
- shields are plain health and do not grow back; armour, bonus damage, abilities, acceleration
  and the flight of projectiles are left out; the attacks of one tick land together, so that both
  teams may die at once, which is not a victory;
- the SMACv2 maps draw units of all races into one team.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pevdn.errors import unknown
from pevdn.worlds.base import AgentSpec, EntityGroup, Step
from pevdn.worlds.maps import BATTLE_MAPS, STOCK_LIMIT
from pevdn.worlds.quiet import alone, silence


class UnitFigures(NamedTuple):
    """One kind of unit; distances in map units, times in seconds at 'faster' speed."""

    speed: float
    damage: float  # of one attack
    range: float
    sight: float
    radius: float
    health: float  # with shields
    cooldown: float  # between two attacks


# Between centres. The game publishes 0.1 from edge to edge, but SMAX measures between centres and
# moves in coarse steps: a melee unit with the published reach would hardly ever hit.
MELEE = 2.0

# StarCraft II, patch 4.10. Armour and damage bonuses are left out: in SMAX the damage of an
# attack depends on the attacker alone. The order is JaxMARL's numbering of the units.
# fmt: off
STARCRAFT_UNITS: dict[str, UnitFigures] = {
    #                        speed  damage  range  sight  radius  health  cooldown
    "marine":    UnitFigures(3.15,     6.0,   5.0,   9.0,  0.375,   45.0,     0.61),
    "marauder":  UnitFigures(3.15,    10.0,   6.0,  10.0, 0.5625,  125.0,     1.07),
    "stalker":   UnitFigures(4.13,    13.0,   6.0,  10.0,  0.625,  160.0,     1.34),
    "zealot":    UnitFigures(3.15,   2 * 8, MELEE,   9.0,    0.5,  150.0,     0.86),
    "zergling":  UnitFigures(4.13,     5.0, MELEE,   8.0,  0.375,   35.0,    0.497),
    "hydralisk": UnitFigures(3.15,    12.0,   5.0,   9.0,  0.625,   90.0,     0.59),
}
# fmt: on

# SMAX pays 1 for all enemy health and 1 for the victory; SMAC's perfect episode is worth 20.
STARCRAFT_REWARD_SCALE = 10.0


class SmaxWorld:
    """One SMAX map as a world; `starcraft` switches from stock SMAX to StarCraft II's rules."""

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
        return state, self._seen(state, reward=jnp.zeros(()), done=jnp.zeros((), bool))

    def step(self, key: Array, state: Any, actions: tuple[Array, ...]) -> tuple[Any, Step]:
        chosen = dict(zip(self._env.agents, jnp.stack(actions).astype(jnp.int32), strict=True))
        _, state, rewards, dones, _ = self._env.step_env(key, state, chosen)
        state = self._settle(state)
        reward = self._reward_scale * rewards[self._env.agents[0]]  # every ally is paid the same
        return state, self._seen(state, reward, dones["__all__"])

    def _seen(self, state: Any, reward: Array, done: Array) -> Step:
        """What the team is told of `state`; the observations JaxMARL also made are not compiled."""
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
        """The state with walls that hold, and with the same types after `reset` and `step`.

        SMAX stops a unit that walks into a wall, then lets units push each other apart, through
        the wall if need be, and places some SMACv2 units outside the map.
        """
        if self._starcraft:
            corner = jnp.array([self._env.map_width, self._env.map_height])
            inside = jnp.clip(state.state.unit_positions, 0.0, corner)
            state = state.replace(state=state.state.replace(unit_positions=inside))
        # A Python number in JaxMARL's state is weakly typed at reset only: a loop would not close.
        return jax.tree.map(lambda x: jnp.asarray(x, dtype=x.dtype), state)


def starcraft_rules() -> dict[str, Any]:
    """What JaxMARL's SMAX is told to play by StarCraft II's rules."""
    columns = zip(*STARCRAFT_UNITS.values(), strict=True)
    arrays: Any = [jnp.asarray(column, jnp.float32) for column in columns]
    figures = UnitFigures(*arrays)  # each (kinds of units,)
    return {
        "unit_type_velocities": figures.speed,
        "unit_type_attacks": figures.damage,
        "unit_type_attack_ranges": figures.range,
        "unit_type_sight_ranges": figures.sight,
        "unit_type_radiuses": figures.radius,
        "unit_type_health": figures.health,
        "unit_type_weapon_cooldowns": figures.cooldown,
        "walls_cause_death": False,
        "see_enemy_actions": False,
    }


def _environment(map_name: str, limit: int, rules: dict[str, Any]) -> Any:
    """JaxMARL's environment against its scripted enemy, ending after exactly `limit` steps."""
    with silence(), alone("jaxmarl.environments.smax.smax_env"):
        from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import map_name_to_scenario

    # It looks at the clock before moving it, so that `max_steps=100` ends after 101 steps.
    return HeuristicEnemySMAX(scenario=map_name_to_scenario(map_name), max_steps=limit - 1, **rules)
