"""The README.md of a party's directory NAME.data: what each file holds, and for whom.

docs/privacy.md, "What a run leaves behind", has the same table with reasons.
"""

from __future__ import annotations

from pathlib import Path

from pevdn.config.experiment import Config
from pevdn.storage.readme import Row, leave, ledger_row, page, table


def write(folder: Path, config: Config, rehearsal: bool) -> None:
    """Write README.md into a party's directory unless there is one."""
    leave(folder, text(config, rehearsal))


def text(config: Config, rehearsal: bool) -> str:
    trained = "with" if config.private else "without"
    policy = "yes, under the ε stated in it" if config.private else "no guarantee applies"
    rows: list[Row] = [
        ("`config.yaml`", "the settings of the team", "yes, unless it is a rehearsal"),
        (
            "`secret`",
            "32 bytes that noise, exploration and this party's nonces derive from",
            "never: whoever has them can remove the noise",
        ),
        ("`episodes-*.bin`", "the agent's observations and actions", "never"),
        (
            "`snapshot-*.bin`",
            "parameters, optimiser state, and the outcome of the last step: opened sums, nonces",
            "never; export the policy instead",
        ),
        (
            "`journal-*.jsonl`",
            "opened sums before any noise, and all parties' nonces",
            "never; teammates have the same",
        ),
        ("`metrics.jsonl`", "scores of evaluations, and ε if private", "as `config.yaml`"),
        *([ledger_row("digests of the parameters")] if config.private else []),
        (
            "`status.json`, `log.jsonl`, `output.txt`, `farewells.json`",
            "state, traffic and times of the process",
            "no: names and times of the members",
        ),
        ("`agent-I.safetensors`, `.onnx`", "the policy, if you export it", policy),
    ]
    return page(
        f"# A party's data\n\nOne agent of `{config.algorithm}` on `{config.env}`, trained "
        f"{trained} differential privacy.",
        "**Do not publish this directory, nor a copy of it.** It belongs to the agent's owner "
        "alone. It has mode 0700; keep that mode when you copy it.",
        "    pevdn export NAME.data          # the agent's policy in a file of its own",
        "Once every member of the team has finished, you may delete `episodes-*.bin`, "
        "`journal-*.jsonl` and `secret`; the policy can still be loaded and exported.",
        "This is a rehearsal: all random numbers derive from the seed in the roster, and nothing "
        "is hidden."
        if rehearsal
        else "",
        table(rows),
    )
