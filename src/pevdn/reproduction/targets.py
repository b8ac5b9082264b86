"""What an experiment is asked for, and what its arms are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pevdn.config import presets
from pevdn.reproduction.campaign import Arm
from pevdn.reproduction.measure import Row

VDNS = ("vdn", "vdn-ours")  # the second has the network that our recipe has
NETWORK = ("network", "hidden_size")  # settings that are about it
RATE = 1e-3  # at which VDN learns best with it (docs/research-log.md)


@dataclass(frozen=True)
class Wanted:
    """How large an experiment is to be, and where."""

    out: Path
    seeds: int
    steps: int
    quick: bool = False
    env: str | None = None  # another world than the experiment's own
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every arm

    def arm(
        self, name: str, env: str, algorithm: str | None, preset: str | None = None, **own: Any
    ) -> Arm:
        config = presets.configure(
            algorithm,
            self.env or env,
            self.steps,
            self.seeds,
            settings={**self.settings, **own},
            preset=preset,
        )
        return Arm(name, config, self.out / name, presets.options_of(preset))

    def recipe(self, preset: str, env: str) -> Arm:
        """A preset; in a world with another number of agents, with the noise that its ε takes."""
        from pevdn import worlds
        from pevdn.privacy.planner import Plan, smallest_noise

        made, arm = presets.find(preset), self.arm(preset, env, None, preset=preset)
        agents = worlds.team_size(arm.config.env)
        if agents == made.agents or "noise_multiplier" in self.settings:
            return arm
        found = smallest_noise(Plan.of(arm.config, agents), made.epsilon, "team")
        noise = {"noise_multiplier": found.noise_multiplier}
        return self.arm(preset, env, None, preset=preset, **noise)

    def vdns(self, env: str, recipe: str) -> list[Arm]:
        """VDN, and VDN with the network of a recipe where that is another."""
        plain = self.arm(VDNS[0], env, "vdn")
        ours = self.arm(recipe, env, None, preset=recipe).config.settings
        network = {name: getattr(ours, name) for name in NETWORK}
        known = {name: getattr(plain.config.settings, name) for name in NETWORK}
        if self.quick or network == known:
            return [plain]
        return [plain, self.arm(VDNS[1], env, "vdn", **network, learning_rate=RATE)]


class Experiment(Protocol):
    """A module that says what to train and how to read it."""

    NAME: str
    TITLE: str
    SEEDS: int
    STEPS: int
    QUICK_SEEDS: int
    QUICK_STEPS: int

    def arms(self, wanted: Wanted) -> list[Arm]: ...
    def left_out(self, wanted: Wanted) -> list[str]: ...
    def original(self, arm: str, model: str) -> str | None: ...
    def baselines(self, arm: str) -> Sequence[str]: ...
    def draw(self, figure: Any, arms: Sequence[Arm], rows: Sequence[Row]) -> None: ...
    def words(self, rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]: ...


def among(rows: Sequence[Row], *arms: str) -> list[Row]:
    """The rows of what these arms would release."""
    return [row for row in rows if row["arm"] in arms and row["released"]]


def find(rows: Sequence[Row], arm: str) -> Row:
    return among(rows, arm)[0]
