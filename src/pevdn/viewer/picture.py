"""Draw one instant of a recording with matplotlib: the scene, the actions, and Q-values."""

from __future__ import annotations

import base64
import io
import itertools
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle, RegularPolygon
from PIL import Image

from pevdn.viewer.recording import Frame, Recording

DPI = 100
WIDTH, HEIGHT, HEAD, FOOT, SIDE = 720, 480, 58, 42, 280  # pixels; even when scaled by 1.5

GROUND, VISIBLE, EDGE = "#0d1320", "#141d30", "#22304a"
INK, DIM, FAINT = "#e8edf6", "#8b98b0", "#4a5873"
TEAMS, TEAM_NAMES = ("#4cc2ff", "#ff7a66", "#f2c14e"), ("agents", "enemies", "landmarks")
GOOD, FAIR, BAD = "#5bd68a", "#f2c14e", "#ff5d5d"
SHOTS = ("#bfeaff", "#ffd0c4")
TRAIL = 3.0  # steps
AFTERGLOW = 2.5  # frames for which a shot is visible
SMALLEST = 11  # radius of a body in pixels
MOST_ROWS = 20  # of Q-values
MOST_LABELS = 10  # agents with a label each


class Painter:
    """Draws images of one recording, all of one size."""

    def __init__(self, recording: Recording, scale: float = 1.0) -> None:
        self.recording, self._px = recording, scale
        self._first = np.concatenate([[0], np.cumsum([len(s.frames) for s in recording.steps])])
        self._frames = [recording.start, *itertools.chain(*(s.frames for s in recording.steps))]
        self._side = SIDE if recording.q_values_of is not None else 0
        if recording.scene["kind"] == "field":
            self._fit_field()
        self._wide = WIDTH + self._side
        size = (self._wide / DPI, (HEAD + HEIGHT + FOOT) / DPI)
        self._figure = Figure(figsize=size, dpi=DPI * scale, facecolor=GROUND)
        self._canvas = FigureCanvasAgg(self._figure)
        self._head = self._panel(0, FOOT + HEIGHT, self._wide, HEAD)
        self._scene = self._panel(0, FOOT, WIDTH, HEIGHT)
        self._foot = self._panel(0, 0, WIDTH, FOOT)
        self._aside = self._panel(WIDTH, FOOT, self._side, HEIGHT) if self._side else None
        if recording.scene["kind"] == "field":
            self._legend(self._foot)

    def at(self, time: float) -> np.ndarray:
        """Return the image (height, width, 3) at `time`, in steps; 0 is the start."""
        step, last = int(time), len(self.recording.steps)
        kind = self.recording.scene["kind"]
        self._summary(_cleared(self._head), step)
        scene = _cleared(self._scene)
        {"field": self._field, "pictures": self._picture, "table": self._table}[kind](scene, time)
        if kind == "pictures":
            self._choice_line(_cleared(self._foot), step)
        if self._aside:
            self._q_values(_cleared(self._aside), min(step, last - 1))
        if step == last:
            self._ending(scene)
        self._canvas.draw()
        return np.asarray(self._canvas.buffer_rgba())[..., :3].copy()

    def _panel(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes in pixels, from the lower left."""
        whole = self._wide, HEAD + HEIGHT + FOOT
        axes = self._figure.add_axes(
            (x / whole[0], y / whole[1], width / whole[0], height / whole[1])
        )
        axes.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[], facecolor=GROUND)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    # ---- around the scene ----------------------------------------------------------------

    def _summary(self, bar: Axes, step: int) -> None:
        r = self.recording
        _line(bar, [(0, 0.5), (self._wide, 0.5)], color=EDGE, lw=1)
        bar.text(22, 35, r.world, color=INK, size=13, weight="bold", va="center")
        team = f"{r.algorithm} · {r.which} · episode {r.episode}"
        bar.text(22, 16, team, color=DIM, size=8.5, va="center")
        total = sum(s.reward for s in r.steps[:step])
        figures = [("return", f"{total:.2f}"), ("step", f"{step} / {len(r.steps)}")]
        for place, (name, value) in enumerate(figures):
            right = self._wide - 22 - 100 * place
            bar.text(right, 35, value, color=INK, size=13, ha="right", va="center")
            bar.text(right, 16, name, color=DIM, size=8.5, ha="right", va="center")

    def _ending(self, axes: Axes) -> None:
        r = self.recording
        colour = GOOD if r.won else BAD if r.ending == "lost" else FAIR
        box = {"boxstyle": "round,pad=0.6", "facecolor": GROUND, "edgecolor": colour, "lw": 1.5}
        result = f"{r.ending} · return {r.total_reward:.2f} in {len(r.steps)} steps"
        style: Any = {"color": colour, "size": 13, "weight": "bold", "ha": "center", "zorder": 9}
        axes.text(WIDTH / 2, 44, result, bbox=box, **style)

    def _legend(self, foot: Axes) -> None:
        """Explain the colours of teams, then the shapes of unit types."""
        bodies = self.recording.scene["bodies"]
        teams = {TEAM_NAMES[b["team"]]: (TEAMS[b["team"]], b["shape"]) for b in bodies}
        kinds = {b["kind"]: (DIM, b["shape"]) for b in bodies if b["health"]}
        if kinds:
            teams = {name: (colour, (0, 0)) for name, (colour, _) in teams.items()}
        x = 22.0
        for name, (colour, shape) in {**teams, **kinds}.items():
            _unit(foot, (x + 7, FOOT / 2), 6, shape, colour)
            text = foot.text(x + 19, FOOT / 2 - 0.5, name, color=DIM, size=8.5, va="center")
            x += 40 + text.get_window_extent(self._canvas.get_renderer()).width / self._px

    # ---- the field -----------------------------------------------------------------------

    def _fit_field(self) -> None:
        """Choose the area to show: all positions of the episode, in the shape of the panel."""
        places = np.array([frame["at"] for frame in self._frames])  # (frames, bodies, 2)
        radius = max(body["radius"] for body in self.recording.scene["bodies"])
        low, high = places.min((0, 1)) - 5 * radius, places.max((0, 1)) + 5 * radius
        span = high - low
        span = np.maximum(span, span[::-1] * np.array([WIDTH / HEIGHT, HEIGHT / WIDTH]))
        self._low = (low + high - span) / 2
        self._unit_px = WIDTH / span[0]

    def _to_px(self, place: Any) -> np.ndarray:
        return (np.asarray(place) - self._low) * self._unit_px

    def _now(self, time: float) -> tuple[float, Frame]:
        """Return the fractional number of the frame at `time`, and the interpolated frame."""
        steps = self.recording.steps
        step = min(int(time), len(steps) - 1)
        spot = self._first[step] + (time - step) * len(steps[step].frames)
        before = min(int(spot), len(self._frames) - 1)
        a, b = self._frames[before], self._frames[min(before + 1, len(self._frames) - 1)]
        part = spot - before
        at = (1 - part) * np.array(a["at"]) + part * np.array(b["at"])
        return spot, {"at": at, "health": b["health"] if part else a["health"]}

    def _field(self, axes: Axes, time: float) -> None:
        scene = self.recording.scene
        bodies = scene["bodies"]
        spot, frame = self._now(time)
        at = self._to_px(frame["at"])
        health = frame["health"] or [1.0] * len(bodies)
        alive = [h > 0 for h in health]
        sizes = [max(b["radius"] * self._unit_px, SMALLEST) for b in bodies]
        self._ground(axes, at, alive)
        for i, j in scene["links"]:
            _line(axes, at[[i, j]], color=TEAMS[0], lw=1, ls=(0, (2, 4)), alpha=0.6)
        self._trails(axes, spot, alive)
        self._choices(axes, at, alive, sizes, int(time))
        for i in sorted(range(len(bodies)), key=lambda i: (-bodies[i]["team"], -i)):
            if not alive[i]:
                _cross(axes, at[i], sizes[i] * 0.6, TEAMS[bodies[i]["team"]])
                continue
            colour = TEAMS[bodies[i]["team"]]
            _unit(axes, at[i], sizes[i], bodies[i]["shape"], colour, bodies[i]["label"])
            if bodies[i]["health"]:
                _bar(axes, at[i], sizes[i], health[i] / bodies[i]["health"])
        self._shots(axes, spot, at, sizes)

    def _ground(self, axes: Axes, at: np.ndarray, alive: list[bool]) -> None:
        """Draw the area in the team's sight lighter, and weapon ranges as thin circles."""
        bodies = self.recording.scene["bodies"]
        for i, body in enumerate(bodies):
            if body["team"] == 0 and body["sight"] and alive[i]:
                axes.add_artist(Circle(at[i], body["sight"] * self._unit_px, color=VISIBLE, lw=0))
        for i, body in enumerate(bodies):
            if body["range"] and alive[i]:
                ring = Circle(at[i], body["range"] * self._unit_px, fill=False, lw=0.8)
                ring.set(edgecolor=TEAMS[body["team"]], alpha=min(0.3, 1.5 / len(bodies)))
                axes.add_artist(ring)
        if walls := self.recording.scene["walls"]:
            (x, y), (right, top) = self._to_px(walls[:2]), self._to_px(walls[2:])
            axes.add_artist(Rectangle((x, y), right - x, top - y, fill=False, edgecolor=FAINT))

    def _trails(self, axes: Axes, spot: float, alive: list[bool]) -> None:
        each = len(self.recording.steps[0].frames)
        first = max(0, int(spot - TRAIL * each))
        path = self._to_px([frame["at"] for frame in self._frames[first : int(spot) + 1]])
        strength = np.linspace(0, 0.55, max(len(path) - 1, 1))
        for i, body in enumerate(self.recording.scene["bodies"]):
            if len(path) > 1 and alive[i] and body["team"] < 2:
                lines = np.stack([path[:-1, i], path[1:, i]], axis=1)
                axes.add_artist(
                    LineCollection(
                        list(lines), colors=TEAMS[body["team"]], alpha=strength, linewidths=2.2
                    )
                )

    def _choices(
        self, axes: Axes, at: np.ndarray, alive: list[bool], sizes: list[float], step: int
    ) -> None:
        """Draw an arrow for a move, a dashed line to a target, and the action's name below."""
        if step == len(self.recording.steps):
            return
        chosen = self.recording.steps[step].actions
        for i, action in enumerate(chosen):
            if not alive[i]:
                continue
            about = self.recording.actions[i][action]
            if "move" in about:
                way = np.array(about["move"])
                tail, tip = at[i] + way * (sizes[i] + 4), at[i] + way * (sizes[i] + 17)
                style = {"arrowstyle": "-|>", "color": INK, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", tip, tail, arrowprops=style)
            if "target" in about and alive[about["target"]]:
                ends = at[[i, about["target"]]]
                _line(axes, ends, color=TEAMS[0], lw=0.9, ls=(0, (3, 3)), alpha=0.7)
            if len(chosen) <= MOST_LABELS:
                down = about.get("move") == [0, -1]  # where the arrow is
                below = at[i] - (0, sizes[i] + (24 if down else 9))
                name = about["name"].replace("attack enemy", "attack")
                axes.text(below[0], below[1], name, color=DIM, size=7, ha="center", va="center")

    def _shots(self, axes: Axes, spot: float, at: np.ndarray, sizes: list[float]) -> None:
        bodies = self.recording.scene["bodies"]
        for number in range(max(0, int(spot - AFTERGLOW)), min(len(self._frames), int(spot) + 2)):
            age = spot - (number - 1)
            if not 0 < age <= AFTERGLOW:
                continue
            for i, j in self._frames[number]["shots"]:
                light, colour = 1 - age / (AFTERGLOW + 0.5), SHOTS[bodies[i]["team"]]
                for width, strength in ((5.0, 0.25), (1.6, 1.0)):
                    glow = {"alpha": light * strength, "zorder": 4}
                    _line(axes, at[[i, j]], color=colour, lw=width, **glow)
                hit = Circle(at[j], sizes[j] + 4, fill=False, lw=1.6)
                hit.set(edgecolor=colour, alpha=light, zorder=4)
                axes.add_artist(hit)

    # ---- other scenes --------------------------------------------------------------------

    def _picture(self, axes: Axes, time: float) -> None:
        data = base64.b64decode(self._frames[self._first[int(time)]]["png"])
        image = Image.open(io.BytesIO(data)).convert("RGB")
        fit = min((WIDTH - 44) / image.width, (HEIGHT - 44) / image.height)
        wide, high = image.width * fit, image.height * fit
        x, y = (WIDTH - wide) / 2, (HEIGHT - high) / 2
        axes.imshow(image, extent=(x, x + wide, y, y + high), interpolation="lanczos")
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))

    def _choice_line(self, axes: Axes, step: int) -> None:
        if step == len(self.recording.steps):
            return
        chosen = enumerate(self.recording.steps[step].actions)
        names = [f"agent {i}: {self.recording.actions[i][a]['name']}" for i, a in chosen]
        line = "    ".join(names)[:110]
        axes.text(22, FOOT / 2, line, color=DIM, size=8.5, va="center")

    def _table(self, axes: Axes, time: float) -> None:
        """Draw the newest steps, one line each: the state of the game, the actions, the reward."""
        r, line, step = self.recording, 30, int(time)
        texts = [self._frames[first]["text"] for first in self._first]
        columns = np.linspace(72 + 5.6 * max(map(len, texts)), WIDTH - 90, len(r.actions) + 1)[:-1]
        y = HEIGHT - 34
        for i, x in enumerate(columns):
            axes.text(x, y, f"agent {i}", color=TEAMS[0], size=9, va="center")
        axes.text(WIDTH - 22, y, "reward", color=DIM, size=9, ha="right", va="center")
        rows = min(len(r.steps) + 1, int((y - 20) / line))
        for number in range(max(0, step - rows + 1), step + 1):
            y -= line
            ink = INK if number == step else DIM
            axes.text(22, y, str(number), color=FAINT, size=9, va="center")
            axes.text(50, y, texts[number], color=ink, size=8.5, va="center")
            if number == len(r.steps):
                break
            for i, x in enumerate(columns):
                name = r.actions[i][r.steps[number].actions[i]]["name"]
                axes.text(x, y, name, color=ink, size=9, va="center")
            reward = f"{r.steps[number].reward:.2f}"
            axes.text(WIDTH - 22, y, reward, color=ink, size=9, ha="right", va="center")

    # ---- Q-values ------------------------------------------------------------------------

    def _q_values(self, axes: Axes, step: int) -> None:
        r, agent = self.recording, self.recording.q_values_of
        assert agent is not None
        _line(axes, [(0, 0), (0, HEIGHT)], color=EDGE, lw=1)
        axes.text(20, HEIGHT - 26, f"Q-values of agent {agent}", color=INK, size=10, weight="bold")
        played = r.steps[step]
        values, open_ = played.q_values or [], played.available or []
        shown = rows(values, open_)
        low, high = self._q_range()
        line = min(26.0, (HEIGHT - 70) / max(len(shown), 1))
        size = min(8.5, line * 0.45)
        left, right = 138.0, self._side - 60.0
        for place, action in enumerate(shown):
            y = HEIGHT - 54 - line * (place + 0.5)
            chosen = action == played.actions[agent]
            ink = TEAMS[0] if chosen else INK if open_[action] else FAINT
            name = r.actions[agent][action]["name"]
            weight = "bold" if chosen else "normal"
            axes.text(20, y, name[:18], color=ink, size=size, va="center", weight=weight)
            if not open_[action]:
                axes.text(left, y, "–", color=FAINT, size=size, va="center")
                continue
            length = max(2.0, (right - left) * (values[action] - low) / (high - low))
            axes.add_artist(
                FancyBboxPatch(
                    (left, y - line * 0.24),
                    length,
                    line * 0.48,
                    boxstyle="round,pad=0,rounding_size=2",
                    color=ink if chosen else FAINT,
                    lw=0,
                )
            )
            value = f"{values[action]:.2f}"
            axes.text(self._side - 18, y, value, color=ink, size=size, ha="right", va="center")

    def _q_range(self) -> tuple[float, float]:
        """Return the range of available Q-values in the episode, so that steps are comparable."""
        pairs = [
            zip(s.q_values or (), s.available or (), strict=True) for s in self.recording.steps
        ]
        values = [q for q, open_ in itertools.chain(*pairs) if open_]
        low, high = min(values), max(values)
        return low - 0.08 * (high - low) - 1e-6, high


def rows(values: list[float], available: list[bool]) -> list[int]:
    """Return the actions to show: all or, if they are many, the best available ones."""
    if len(values) <= MOST_ROWS:
        return list(range(len(values)))
    best = sorted(np.flatnonzero(available), key=lambda a: -values[a])[:MOST_ROWS]
    return sorted(int(a) for a in best)


def _unit(axes: Axes, at: Any, size: float, shape: Any, colour: str, label: str = "") -> None:
    """Draw a body with a radius of `size` pixels."""
    sides, turn = shape
    fill: Any = {"facecolor": colour, "edgecolor": GROUND, "lw": 1, "zorder": 3}
    patch: Any = Circle(at, size, **fill)
    if sides:
        patch = RegularPolygon(at, sides, radius=1.2 * size, orientation=math.radians(turn), **fill)
    axes.add_artist(patch)
    if label:
        style: Any = {"color": GROUND, "size": size * 0.72, "weight": "bold", "zorder": 3}
        axes.text(at[0], at[1] - 0.5, label, ha="center", va="center_baseline", **style)


def _bar(axes: Axes, at: Any, size: float, part: float) -> None:
    wide = max(2 * size, 22.0)
    x, y = at[0] - wide / 2, at[1] + size + 5
    colour = GOOD if part > 0.6 else FAIR if part > 0.3 else BAD
    axes.add_artist(Rectangle((x, y), wide, 4, color=EDGE, lw=0, zorder=3.5))
    axes.add_artist(Rectangle((x, y), wide * min(part, 1.0), 4, color=colour, lw=0, zorder=3.5))


def _cross(axes: Axes, at: Any, size: float, colour: str) -> None:
    for slope in (1, -1):
        ends = at + size * np.array([(-1, -slope), (1, slope)])
        _line(axes, ends, color=colour, lw=2, alpha=0.4, solid_capstyle="round")


def _line(axes: Axes, points: Any, **style: Any) -> None:
    axes.add_artist(Line2D(*np.asarray(points).T, **style))


def _cleared(axes: Axes) -> Axes:
    """Remove all artists from the axes, which is faster than making new axes."""
    for artist in (*axes.lines, *axes.patches, *axes.collections, *axes.texts, *axes.images):
        artist.remove()
    return axes
