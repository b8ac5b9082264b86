"""The README.md of a party's directory NAME.data (docs/privacy.md, "What a run leaves behind")."""

from __future__ import annotations

from pathlib import Path

from pevdn.config.experiment import Config
from pevdn.privacy import planner
from pevdn.privacy.accounting import UNCOVERED
from pevdn.storage import readme


def leave(folder: Path, config: Config, rehearsal: bool) -> None:
    """Write README.md unless there is one."""
    readme.leave(folder, text(config, rehearsal))


def text(config: Config, rehearsal: bool) -> str:
    opened, whom = "opened sums before any noise, and all parties' parts of the seed", ""
    if config.noised:
        covered = planner.covers_teammates(config)
        opened = (
            f"opened sums, {'which are noised, ' if covered else ''}and digests of rewards and "
            "lengths"
        )
        whom = "" if covered else f", but with {UNCOVERED}"
    rows = [
        ("`config.yaml`", "the settings of the team", "yes, except in a rehearsal"),
        (
            "`secret`",
            "32 bytes that determine noise, exploration and this party's "
            f"{'samples' if config.noised else 'part of the samples'}",
            "never: with them the noise can be removed",
        ),
        ("`episodes-*.bin`", "the agent's observations and actions, raw", "never"),
        (
            "`snapshot-*.bin`",
            "parameters, optimiser state, "
            + (
                "what was opened of each episode, and the last outcome"
                if config.noised
                else "and the last outcome: opened sums, parts of the seed"
            ),
            "never; export the policy instead",
        ),
        ("`journal-*.jsonl`", opened, "never; teammates have the same"),
        ("`metrics.jsonl`", "scores of evaluations, and ε if private", "as `config.yaml`"),
        *readme.ledger_rows(config.private, "parameters and openings"),
        (
            "`status.json`, `log.jsonl`, `output.txt`, `farewells.json`",
            "state, traffic and times of the process",
            "no: names and times of the members",
        ),
        (
            "`agent-I.safetensors`, `.onnx`",
            "the policy, if exported",
            "yes, under the ε stated in it" if config.private else "it has no guarantee",
        ),
    ]
    return readme.page(
        f"# A party's data\n\nOne agent of `{config.algorithm}` on `{config.env}`, trained "
        f"{'with' if config.private else 'without'} differential privacy{whom}.",
        "**Do not publish this directory or a copy of it.** It belongs to the agent's owner "
        "alone. It has mode 0700; keep that mode when you copy it.",
        "    pevdn export NAME.data          # the agent's policy in a file of its own",
        "Once all members of the team have finished, `episodes-*.bin`, `journal-*.jsonl` and "
        "`secret` may be deleted; the policy can still be loaded and exported.",
        "This is a rehearsal: all random numbers derive from the seed in the roster, and nothing "
        "is hidden."
        if rehearsal
        else "",
        readme.table(rows),
    )
