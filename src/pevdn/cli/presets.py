"""`pevdn presets`: recipes with a name, and what they cost."""

from __future__ import annotations

from pevdn.cli.output import Json, print_json, print_table


def main(as_json: Json = False) -> None:
    """List the presets of `pevdn train --preset`, with the ε that they plan for three agents."""
    from pevdn.experiment import presets
    from pevdn.privacy.planner import Plan

    rows = []
    for preset in presets.PRESETS.values():
        plan = Plan.of(presets.configure(None, preset=preset.name), agents=3)
        rows.append(
            {
                "name": preset.name,
                "algorithm": preset.algorithm,
                "view": preset.view,
                "epsilon_agent": plan.epsilon("agent"),
                "epsilon_team": plan.epsilon("team"),
                "delta": plan.delta,
                "steps": preset.steps,
                "settings": dict(preset.settings),
                "about": preset.about,
            }
        )
    if as_json:
        print_json(rows)
        return
    print_table(
        ["preset", "made for", "ε agent", "ε team", "steps", "what it is"],
        [
            [
                row["name"],
                row["view"],
                f"{row['epsilon_agent']:.2f}",
                f"{row['epsilon_team']:.2f}",
                f"{row['steps']:,}",
                row["about"],
            ]
            for row in rows
        ],
    )
