"""How each world is drawn: its states as frames of plain values.

SMAX and the particle worlds are fields with bodies, Overcooked is drawn by JaxMARL, and all other
worlds are tables of actions with the state of the game as text.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np

from pevdn.errors import PevdnError
from pevdn.viewer.recording import Frame
from pevdn.worlds.base import AgentSpec, Step, World
from pevdn.worlds.jaxmarl_worlds import JaxmarlWorld
from pevdn.worlds.quiet import silence
from pevdn.worlds.smax import SmaxWorld

ActionNames = list[list[dict[str, Any]]]  # by agent and action


def style_for(world: World) -> Style:
    """Return the style of a world."""
    game = world.name.partition("?")[0]
    if isinstance(world, SmaxWorld):
        return Battle(world)
    if isinstance(world, JaxmarlWorld) and game.startswith("jaxmarl:MPE_"):
        return Particles(world)
    if isinstance(world, JaxmarlWorld) and game in KITCHENS:
        return Kitchen(world, *KITCHENS[game])
    return Table(world, *TABLES.get(game, (None, None)))


def numbered_actions(agents: Sequence[AgentSpec]) -> ActionNames:
    """Return names for actions that have none."""
    return [[{"name": f"action {a}"} for a in range(agent.n_actions)] for agent in agents]


def png(image: Any) -> str:
    """Encode an image (height, width, 3) of uint8 as PNG in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(image, np.uint8)).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _rounded(values: Any, digits: int) -> Any:
    return np.asarray(values, float).round(digits).tolist()


class Style:
    """How a JAX world is drawn; subclasses define `scene` and `frame`."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def actions(self) -> ActionNames:
        return numbered_actions(self.world.agents)

    def scene(self, state: Any) -> dict[str, Any]:
        raise NotImplementedError

    def frame(self, state: Any) -> Frame:
        raise NotImplementedError

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Step, Any]:
        """Return the new state, the step, and the simulator's states within the step."""
        return *self.world.step(key, state, actions), ()

    def frames(self, before: Any, inside: Any, after: Any) -> list[Frame]:
        """Return the frames of one step, in order."""
        return [self.frame(after)]


# ---- battles ---------------------------------------------------------------------------------

# The shape of each unit type: corners (0: round) and rotation in degrees.
SHAPES = {
    "marine": (0, 0),
    "marauder": (6, 0),
    "stalker": (4, 0),
    "zealot": (4, 45),
    "zergling": (3, 0),
    "hydralisk": (5, 0),
}
NORTH_EAST_SOUTH_WEST = ([0, 1], [1, 0], [0, -1], [-1, 0])


class Battle(Style):
    """SMAX: units with health that move and shoot; one frame per tick of the simulator."""

    def __init__(self, world: SmaxWorld) -> None:
        super().__init__(world)
        self._env = world._env
        self._allies, self._moves = len(world.agents), self._env.num_movement_actions

    def actions(self) -> ActionNames:
        ways = zip(("north", "east", "south", "west"), NORTH_EAST_SOUTH_WEST, strict=True)
        moves: list[dict[str, Any]] = [{"name": name, "move": way} for name, way in ways]
        attacks = [
            {"name": f"attack enemy {j}", "target": self._allies + j}
            for j in range(self._env.num_enemies)
        ]
        return [[*moves, {"name": "stop"}, *attacks] for _ in range(self._allies)]

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Step, Any]:
        chosen = dict(zip(self._env.agents, actions, strict=True))
        ticks = self._env.step_env(key, state, chosen, get_state_sequence=True)
        return *self.world.step(key, state, actions), ticks

    def scene(self, state: Any) -> dict[str, Any]:
        env = self._env
        statistics = [
            np.asarray(by_type)[state.state.unit_types]
            for by_type in (
                env.unit_type_radiuses,
                env.unit_type_attack_ranges,
                env.unit_type_sight_ranges,
                env.unit_type_health,
            )
        ]
        bodies = []
        for i, kind in enumerate(state.state.unit_types):
            radius, reach, sight, health = (round(float(column[i]), 4) for column in statistics)
            name, enemy = env.unit_type_names[kind], i - self._allies
            bodies.append(
                {
                    "name": f"agent {i}" if enemy < 0 else f"enemy {enemy}",
                    "label": str(i if enemy < 0 else enemy),
                    "kind": name,
                    "team": int(enemy >= 0),
                    "shape": SHAPES[name],
                    **{"radius": radius, "range": reach, "sight": sight, "health": health},
                }
            )
        walls = [0, 0, env.map_width, env.map_height]
        return {"kind": "field", "bodies": bodies, "walls": walls, "links": []}

    def frame(self, state: Any) -> Frame:
        return self._frame(state.state)

    def frames(self, before: Any, inside: Any, after: Any) -> list[Frame]:
        cooldowns, frames = before.state.unit_weapon_cooldowns, []
        for tick in range(self._env.world_steps_per_env_step):
            units = type(inside)(**{k: v[tick] for k, v in vars(inside).items()})
            frames.append(self._frame(units, units.unit_weapon_cooldowns > cooldowns))
            cooldowns = units.unit_weapon_cooldowns
        # `SmaxWorld` moves units back inside the walls at the end of a step.
        frames[-1]["at"] = self._frame(after.state)["at"]
        return frames

    def _frame(self, units: Any, fired: Any = ()) -> Frame:
        """Return the frame of one tick; `fired` (N + E,) marks units whose cooldown has begun."""
        corner = [self._env.map_width, self._env.map_height]
        return {
            "at": _rounded(np.clip(units.unit_positions, 0, corner), 3),
            "health": _rounded(units.unit_health, 2),
            "shots": [[int(i), self._target(units, int(i))] for i in np.flatnonzero(fired)],
        }

    def _target(self, units: Any, i: int) -> int:
        """Return the target of a unit; enemies number the allies from last to first."""
        target = int(units.prev_attack_actions[i]) - self._moves
        return self._allies + target if i < self._allies else self._allies - 1 - target


# ---- particle worlds -------------------------------------------------------------------------


class Particles(Style):
    """MPE: moving agents, fixed landmarks, goals, and messages."""

    def __init__(self, world: JaxmarlWorld) -> None:
        super().__init__(world)
        self._env = world._env

    def actions(self) -> ActionNames:
        walks: list[dict[str, Any]] = [
            {"name": "wait"},
            {"name": "left", "move": [-1, 0]},
            {"name": "right", "move": [1, 0]},
            {"name": "down", "move": [0, -1]},
            {"name": "up", "move": [0, 1]},
        ]
        words = [{"name": f"say {letter}"} for letter in ascii_uppercase]
        named = []
        for agent in self.world.agents:
            if agent.n_actions < len(walks):
                named.append(words[: agent.n_actions])
                continue
            both = [
                {**walk, "name": f"{walk['name']}, {word['name']}"}
                for word in words[: agent.n_actions // len(walks)]
                for walk in walks
            ]
            named.append(both if agent.n_actions > len(walks) else walks)
        return named

    def scene(self, state: Any) -> dict[str, Any]:
        n, bodies = self._env.num_agents, []
        for i, radius in enumerate(np.asarray(self._env.rad)):
            kind, number = ("agent", i) if i < n else ("landmark", i - n)
            bodies.append(
                {
                    "name": f"{kind} {number}",
                    "label": str(number),
                    "kind": kind,
                    "team": 2 * int(i >= n),
                    "shape": (0, 0) if i < n else (4, 0),
                    **{"radius": round(float(radius), 4), "range": 0, "sight": 0, "health": 0},
                }
            )
        return {"kind": "field", "bodies": bodies, "walls": None, "links": self._goals(state.game)}

    def _goals(self, game: Any) -> list[list[int]]:
        """Return pairs of an agent and its goal, as bodies; spread has no assigned goals."""
        if game.goal is None:
            return []
        n, goals = self._env.num_agents, np.atleast_1d(game.goal)
        walkers = range(n - len(goals), n)  # the speaker is first and does not move
        return [[i, n + int(goal)] for i, goal in zip(walkers, goals, strict=True)]

    def frame(self, state: Any) -> Frame:
        return {"at": _rounded(state.game.p_pos, 4), "health": [], "shots": []}


# ---- kitchens --------------------------------------------------------------------------------


class Kitchen(Style):
    """Overcooked, drawn by JaxMARL."""

    def __init__(self, world: JaxmarlWorld, actions: str, render: Callable[[Any], Any]) -> None:
        super().__init__(world)
        self._names, self._render = actions.split(), render

    def actions(self) -> ActionNames:
        return [[{"name": name} for name in self._names] for _ in self.world.agents]

    def scene(self, state: Any) -> dict[str, Any]:
        return {"kind": "pictures"}

    def frame(self, state: Any) -> Frame:
        return {"png": png(self._render(state.game))}


def _render_kitchen(game: Any) -> Any:
    with silence():
        from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    floor = np.asarray(game.maze_map)[4:-4, 4:-4]  # without JaxMARL's padding
    return OvercookedVisualizer._render_grid(
        floor, agent_dir_idx=game.agent_dir_idx, agent_inv=game.agent_inv
    )


@functools.cache  # it compiles
def _visualizer() -> Any:
    try:
        with silence():
            from jaxmarl.viz.overcooked_v2_visualizer import OvercookedV2Visualizer
    except ModuleNotFoundError:
        raise PevdnError(
            "JaxMARL draws overcooked_v2 with imageio, which is missing; run `pip install "
            "'pevdn[video]'`."
        ) from None
    return OvercookedV2Visualizer()


def _render_kitchen_v2(game: Any) -> Any:
    return _visualizer()._render_state(game)


KITCHENS = {
    "jaxmarl:overcooked": ("up down right left stay interact", _render_kitchen),
    "jaxmarl:overcooked_v2": ("right down left up stay interact", _render_kitchen_v2),
}


# ---- tables ----------------------------------------------------------------------------------


class Table(Style):
    """Any other world: the actions, and the state of the game as text if known."""

    def __init__(
        self,
        world: World,
        names: Callable[[Any], Sequence[str]] | None,
        describe: Callable[[Any], str] | None,
    ) -> None:
        super().__init__(world)
        self._names, self._describe = names, describe

    def actions(self) -> ActionNames:
        if self._names is None:
            return super().actions()
        names = self._names(self.world)
        return [[{"name": n} for n in names[: agent.n_actions]] for agent in self.world.agents]

    def scene(self, state: Any) -> dict[str, Any]:
        return {"kind": "table"}

    def frame(self, state: Any) -> Frame:
        return {"text": self._describe(state) if self._describe else ""}


def _cues(world: Any) -> Sequence[str]:
    return "wait", *(f"cue {k}" for k in range(max(world.cue_counts)))


def _cards(world: Any) -> Sequence[str]:
    """Spell out JaxMARL's codes, such as D0, P0, HR to P1 relative, N."""
    words = {"D": "discard ", "P": "play ", "H": "hint ", "N": "pass"}
    return [
        words[code[0]] + code[1:].removesuffix(" relative").replace("P", "+")
        for code in world._env.action_encoding.values()
    ]


def _piles(state: Any) -> str:
    tops = np.asarray(state.game.fireworks).sum(axis=1).astype(int)
    piles = " ".join(f"{colour}{top}" for colour, top in zip("RYGWB", tops, strict=True))
    hints, lives = np.sum(state.game.info_tokens), np.sum(state.game.life_tokens)
    return f"{piles} · hints {int(hints)} · lives {int(lives)}"


def _room(state: Any) -> str:
    game = state.game
    visited = " ".join(str(i) for i in np.flatnonzero(game.has_been)) or "none"
    light = "on" if game.bulb_state else "off"
    return f"in the room {int(game.agent_in_room)} · light {light} · visited {visited}"


TABLES: dict[str, tuple[Callable[[Any], Sequence[str]], Callable[[Any], str]]] = {
    "toy:coordination": (_cues, lambda state: f"cues {' '.join(map(str, state.cues))}"),
    "toy:two-step": (
        lambda world: ("first", "second"),
        lambda state: ("start", "game A", "game B", "end")[int(state)],
    ),
    "jaxmarl:switch_riddle": (lambda world: ("nothing", "switch", "tell"), _room),
    "jaxmarl:hanabi": (_cards, _piles),
}
