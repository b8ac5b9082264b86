"""The request for an experiment, its arms, and the interface of an experiment module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pevdn import worlds
from pevdn.config import presets
from pevdn.privacy.planner import Plan, smallest_noise
from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.measure import Row

VDNS = ("vdn", "vdn-ours")  # the second has the network of our recipe
NETWORK = ("network", "hidden_size")  # settings that define it
RATE = 1e-3  # the best learning rate of VDN with that network (docs/research-log.md)


@dataclass(frozen=True)
class Request:
    """The size and the directory of an experiment, and overrides for all its arms."""

    out: Path
    seeds: int
    steps: int
    quick: bool = False
    env: str | None = None  # replaces the world of the experiment
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every arm

    def arm(
        self, name: str, env: str, algorithm: str | None, preset: str | None = None, **own: Any
    ) -> Arm:
        """Return an arm; its `own` settings override those of the request."""
        config = presets.configure(
            algorithm,
            self.env or env,
            self.steps,
            self.seeds,
            settings={**self.settings, **own},
            preset=preset,
        )
        return Arm(name, config, self.out / name, presets.options_of(preset))

    def preset_arm(self, preset: str, env: str) -> Arm:
        """Return the arm of a preset, with its noise adjusted to keep its ε in other team sizes."""

        recipe, arm = presets.find(preset), self.arm(preset, env, None, preset=preset)
        agents = worlds.team_size(arm.config.env)
        if agents == recipe.agents or "noise_multiplier" in self.settings:
            return arm
        plan = smallest_noise(Plan.of(arm.config, agents), recipe.epsilon, "team")
        noise = {"noise_multiplier": plan.noise_multiplier}
        return self.arm(preset, env, None, preset=preset, **noise)

    def vdn_arms(self, env: str, recipe: str) -> list[Arm]:
        """Return VDN, and VDN with the network of a recipe if that differs."""
        plain = self.arm(VDNS[0], env, "vdn")
        ours = self.arm(recipe, env, None, preset=recipe).config.settings
        network = {name: getattr(ours, name) for name in NETWORK}
        default = {name: getattr(plain.config.settings, name) for name in NETWORK}
        if self.quick or network == default:
            return [plain]
        return [plain, self.arm(VDNS[1], env, "vdn", **network, learning_rate=RATE)]


class Experiment(Protocol):
    """A module that defines the arms to train and interprets their results."""

    NAME: str
    TITLE: str
    SEEDS: int
    STEPS: int
    QUICK_SEEDS: int
    QUICK_STEPS: int

    def arms(self, request: Request) -> list[Arm]: ...
    def left_out(self, request: Request) -> list[str]: ...
    def original(self, arm: str, model: str) -> str | None: ...
    def baselines(self, arm: str) -> Sequence[str]: ...
    def draw(self, figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None: ...
    def conclusions(self, rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]: ...


def released_rows(rows: Sequence[Row], *arms: str) -> list[Row]:
    """Return the rows of the models that these arms release."""
    return [row for row in rows if row["arm"] in arms and row["released"]]


def released_row(rows: Sequence[Row], arm: str) -> Row:
    return released_rows(rows, arm)[0]


def share_of(row: Row, baseline: str) -> str:
    """Return `81% of vdn (75% to 88%)`, without the interval if there is none."""
    share, low, high = (row[f"share_of_vdn{x}"] for x in ("", "_low", "_high"))
    bounds = "" if low is None else f" ({low:.0%} to {high:.0%})"
    return f"{share:.0%} of {baseline}{bounds}"
