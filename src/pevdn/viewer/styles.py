"""What the state of a world looks like to an observer: plain views out of JAX arrays.

SMAX and the particle worlds are fields with bodies, Overcooked is drawn by JaxMARL itself, and
everything else is a table of what was chosen, with a line on where the game stands.
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
from pevdn.viewer.recording import View
from pevdn.worlds.base import AgentSpec, Step, World
from pevdn.worlds.jaxmarl_worlds import JaxmarlWorld
from pevdn.worlds.quiet import silence
from pevdn.worlds.smax import SmaxWorld

Named = list[list[dict[str, Any]]]  # by agent and action


def of(world: World) -> Look:
    """How this world is looked at."""
    game = world.name.partition("?")[0]
    if isinstance(world, SmaxWorld):
        return Battle(world)
    if isinstance(world, JaxmarlWorld) and game.startswith("jaxmarl:MPE_"):
        return Particles(world)
    if isinstance(world, JaxmarlWorld) and game in KITCHENS:
        return Kitchen(world, *KITCHENS[game])
    return Table(world, *TABLES.get(game, (None, None)))


def numbered(agents: Sequence[AgentSpec]) -> Named:
    """Actions that nobody has named."""
    return [[{"name": f"action {a}"} for a in range(agent.n_actions)] for agent in agents]


def png(picture: Any) -> str:
    """A picture (height, width, 3) of uint8, as text."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(picture, np.uint8)).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _short(values: Any, digits: int) -> Any:
    return np.asarray(values, float).round(digits).tolist()


class Look:
    """A world in JAX, and how its states are seen; `scene` and `view` are what worlds differ in."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def actions(self) -> Named:
        return numbered(self.world.agents)

    def scene(self, state: Any) -> dict[str, Any]:
        raise NotImplementedError

    def view(self, state: Any) -> View:
        raise NotImplementedError

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Step, Any]:
        """The world's own step, and what happened inside it."""
        return *self.world.step(key, state, actions), ()

    def views(self, before: Any, inside: Any, after: Any) -> list[View]:
        """What there is to see of one step, in order."""
        return [self.view(after)]


# ---- battles ---------------------------------------------------------------------------------

# Every kind of unit has a shape: corners (0: round) and a turn in degrees.
SHAPES = {
    "marine": (0, 0),
    "marauder": (6, 0),
    "stalker": (4, 0),
    "zealot": (4, 45),
    "zergling": (3, 0),
    "hydralisk": (5, 0),
}
NORTH_EAST_SOUTH_WEST = ([0, 1], [1, 0], [0, -1], [-1, 0])


class Battle(Look):
    """SMAX: units with health that move and shoot, seen at every tick of the simulator."""

    def __init__(self, world: SmaxWorld) -> None:
        super().__init__(world)
        self._env = world._env
        self._allies, self._moves = len(world.agents), self._env.num_movement_actions

    def actions(self) -> Named:
        walks = zip(("north", "east", "south", "west"), NORTH_EAST_SOUTH_WEST, strict=True)
        moves: list[dict[str, Any]] = [{"name": name, "move": way} for name, way in walks]
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
        figures = [
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
            radius, reach, sight, health = (round(float(column[i]), 4) for column in figures)
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

    def view(self, state: Any) -> View:
        return self._seen(state.state)

    def views(self, before: Any, inside: Any, after: Any) -> list[View]:
        cooling, seen = before.state.unit_weapon_cooldowns, []
        for tick in range(self._env.world_steps_per_env_step):
            units = type(inside)(**{k: v[tick] for k, v in vars(inside).items()})
            seen.append(self._seen(units, units.unit_weapon_cooldowns > cooling))
            cooling = units.unit_weapon_cooldowns
        # Walls that hold put units back at the end of a step.
        seen[-1]["at"] = self._seen(after.state)["at"]
        return seen

    def _seen(self, units: Any, fired: Any = ()) -> View:
        """`fired` (N + E,) says who shot in this tick: whose weapon has begun to cool down."""
        corner = [self._env.map_width, self._env.map_height]
        return {
            "at": _short(np.clip(units.unit_positions, 0, corner), 3),
            "health": _short(units.unit_health, 2),
            "shots": [[int(i), self._target(units, int(i))] for i in np.flatnonzero(fired)],
        }

    def _target(self, units: Any, i: int) -> int:
        """Enemies count the allies from the last to the first, as they see them."""
        chosen = int(units.prev_attack_actions[i]) - self._moves
        return self._allies + chosen if i < self._allies else self._allies - 1 - chosen


# ---- particle worlds -------------------------------------------------------------------------


class Particles(Look):
    """MPE: agents that glide, landmarks that do not, goals, and words."""

    def __init__(self, world: JaxmarlWorld) -> None:
        super().__init__(world)
        self._env = world._env

    def actions(self) -> Named:
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
        """Who has to go where, as bodies; in spread everyone may go anywhere."""
        if game.goal is None:
            return []
        n, goals = self._env.num_agents, np.atleast_1d(game.goal)
        walkers = range(n - len(goals), n)  # the speaker comes first and stays where it is
        return [[i, n + int(goal)] for i, goal in zip(walkers, goals, strict=True)]

    def view(self, state: Any) -> View:
        return {"at": _short(state.game.p_pos, 4), "health": [], "shots": []}


# ---- kitchens --------------------------------------------------------------------------------


class Kitchen(Look):
    """Overcooked, drawn by JaxMARL."""

    def __init__(self, world: JaxmarlWorld, actions: str, draw: Callable[[Any], Any]) -> None:
        super().__init__(world)
        self._names, self._draw = actions.split(), draw

    def actions(self) -> Named:
        return [[{"name": name} for name in self._names] for _ in self.world.agents]

    def scene(self, state: Any) -> dict[str, Any]:
        return {"kind": "pictures"}

    def view(self, state: Any) -> View:
        return {"png": png(self._draw(state.game))}


def _kitchen(game: Any) -> Any:
    with silence():
        from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    floor = np.asarray(game.maze_map)[4:-4, 4:-4]  # JaxMARL pads it for the view of an agent
    return OvercookedVisualizer._render_grid(
        floor, agent_dir_idx=game.agent_dir_idx, agent_inv=game.agent_inv
    )


@functools.cache  # it compiles its drawing
def _visualizer() -> Any:
    try:
        with silence():
            from jaxmarl.viz.overcooked_v2_visualizer import OvercookedV2Visualizer
    except ModuleNotFoundError:
        raise PevdnError(
            "JaxMARL needs imageio to draw overcooked_v2; run `pip install 'pevdn[video]'`."
        ) from None
    return OvercookedV2Visualizer()


def _kitchen_v2(game: Any) -> Any:
    return _visualizer()._render_state(game)


KITCHENS = {
    "jaxmarl:overcooked": ("up down right left stay interact", _kitchen),
    "jaxmarl:overcooked_v2": ("right down left up stay interact", _kitchen_v2),
}


# ---- tables ----------------------------------------------------------------------------------


class Table(Look):
    """Any other world: what was chosen, and where the game stands if that can be said."""

    def __init__(
        self,
        world: World,
        names: Callable[[Any], Sequence[str]] | None,
        standing: Callable[[Any], str] | None,
    ) -> None:
        super().__init__(world)
        self._names, self._standing = names, standing

    def actions(self) -> Named:
        if self._names is None:
            return super().actions()
        names = self._names(self.world)
        return [[{"name": n} for n in names[: agent.n_actions]] for agent in self.world.agents]

    def scene(self, state: Any) -> dict[str, Any]:
        return {"kind": "table"}

    def view(self, state: Any) -> View:
        return {"text": self._standing(state) if self._standing else ""}


def _cues(world: Any) -> Sequence[str]:
    return "wait", *(f"cue {k}" for k in range(max(world.cue_counts)))


def _cards(world: Any) -> Sequence[str]:
    """JaxMARL writes D0, P0, HR to P1 relative, N."""
    spoken = {"D": "discard ", "P": "play ", "H": "hint ", "N": "pass"}
    return [
        spoken[code[0]] + code[1:].removesuffix(" relative").replace("P", "+")
        for code in world._env.action_encoding.values()
    ]


def _piles(state: Any) -> str:
    tops = np.asarray(state.game.fireworks).sum(axis=1).astype(int)
    made = " ".join(f"{colour}{top}" for colour, top in zip("RYGWB", tops, strict=True))
    hints, lives = np.sum(state.game.info_tokens), np.sum(state.game.life_tokens)
    return f"{made} · hints {int(hints)} · lives {int(lives)}"


def _room(state: Any) -> str:
    game = state.game
    been = " ".join(str(i) for i in np.flatnonzero(game.has_been)) or "nobody"
    light = "on" if game.bulb_state else "off"
    return f"in the room {int(game.agent_in_room)} · light {light} · been {been}"


TABLES: dict[str, tuple[Callable[[Any], Sequence[str]], Callable[[Any], str]]] = {
    "toy:coordination": (_cues, lambda state: f"cues {' '.join(map(str, state.cues))}"),
    "toy:two-step": (
        lambda world: ("first", "second"),
        lambda state: ("start", "game A", "game B", "end")[int(state)],
    ),
    "jaxmarl:switch_riddle": (lambda world: ("nothing", "switch", "tell"), _room),
    "jaxmarl:hanabi": (_cards, _piles),
}
