"""`pevdn presets`: list the presets and their ε."""

from __future__ import annotations

import typer

from pevdn.cli.output import Json, print_json, print_table


def main(as_json: Json = False) -> None:
    """List the presets of `pevdn train --preset`, with their ε."""
    from pevdn.config import presets
    from pevdn.privacy.planner import Plan

    rows = []
    for preset in presets.PRESETS.values():
        plan = Plan.of(presets.configure(None, preset=preset.name), preset.agents)
        rows.append(
            {
                "name": preset.name,
                "algorithm": preset.algorithm,
                "agents": preset.agents,
                "observer": preset.observer,
                **({"epsilon_record": plan.epsilon("record")} if plan.openings else {}),
                "epsilon_team": plan.epsilon("team"),
                "epsilon_agent": plan.epsilon("agent"),
                "delta": plan.delta,
                "steps": preset.steps,
                "settings": dict(preset.settings),
                "options": dict(preset.options),
                "about": preset.about,
            }
        )
    if as_json:
        print_json(rows)
        return
    print_table(
        ["preset", "ε record", "ε team", "δ", "steps", "description"],
        [
            [
                row["name"],
                f"{row['epsilon_record']:.2f}" if "epsilon_record" in row else "–",
                f"{row['epsilon_team']:.2f}",
                f"{row['delta']:g}",
                f"{row['steps']:,}",
                row["about"],
            ]
            for row in rows
        ],
    )
    typer.echo(
        f"ε record holds against teammates too, in teams of any size; ε team against outsiders, in "
        f"teams of {presets.AGENTS} (docs/privacy.md)."
    )
