"""The README.md of a run and of a publication: what each file is, and for whom.

Only a publication may be handed out as it is. docs/privacy.md, "What a run leaves behind", has the
same tables with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from pevdn.config.experiment import Config
from pevdn.privacy import randomness
from pevdn.storage.readme import FILE, Row, leave, ledger_row, page, table

__all__ = ["FILE", "leave", "of_publication", "of_run"]


def of_run(config: Config, forgotten: bool = False) -> str:
    """The README.md of a run's directory; `forgotten` after `pevdn forget`."""
    head = f"# A run of pevdn\n\n`{config.algorithm}` on `{config.env}`, "
    rows = _files_of_run(config, forgotten)
    if not config.private:
        return page(
            head + "trained without differential privacy.",
            "Nothing here is protected: parameters, policies and scores may tell which episodes "
            "they were learnt from. Publish them only if these episodes are nobody's secret. The "
            "directory has mode 0700, so that no other user of the machine can read it.",
            "    pevdn export RUN --agent 0      # one agent's policy in a file of its own\n"
            "    pevdn forget RUN                # once finished: delete the stored episodes",
            table(rows),
        )
    holds = "what the noise is there to hide: raw training episodes and random keys"
    forget = (
        "\n    pevdn forget RUN                # once finished: delete stored episodes, optimiser "
        "state and random keys"
    )
    if forgotten:
        holds, forget = "the seed, and digests by which others can check a guess", ""
    return page(
        head + "trained with differential privacy.",
        f"**Do not publish this directory, nor a copy of it.** It holds {holds}. It has mode 0700, "
        "so that no other user of the machine can read it; keep it that way when you copy it.",
        "    pevdn publish RUN --out DIR     # copies what may be handed out, and nothing else"
        + forget,
        randomness.MEANING[randomness.source(config)],
        table(rows),
    )


def of_publication(config: Config, policies: Iterable[str], epsilon: float, delta: float) -> str:
    """The README.md of what `pevdn publish` made."""
    files = ", ".join(f"`{name}`" for name in policies)
    lanes = "one team" if config.seeds == 1 else f"{config.seeds} teams (lanes)"
    rows = [
        (files, "greedy policies: one agent's parameters and facts about them", "yes"),
        ("`config.yaml`", "the settings", "yes"),
        ("`metrics.jsonl`", "figures of every evaluation", "yes"),
        ("`summary.json`", "the final figures", "yes"),
        ("`curve.png`", "the win rate as a picture", "yes"),
        ("`privacy.json`", "mechanism, ε, δ, and what they do not cover", "yes"),
    ]
    return page(
        f"# Published by pevdn\n\n{lanes.capitalize()}, trained with `{config.algorithm}` on "
        f"`{config.env}` under differential privacy: ε {epsilon:.3g} (team view) at δ {delta:.3g} "
        "for one training episode.",
        "Everything in this directory may be handed out: it is computed from parameters that the "
        "theorem covers, from evaluation episodes and from the settings. It holds no training "
        "episode, optimiser state, random key, seed, path or name of a machine. Lanes are numbered "
        "from 0.",
        randomness.MEANING[randomness.source(config)],
        "`privacy.json` says to whom the guarantee applies, and what it does not cover: above all "
        "teammates and evaluation episodes.",
        table(rows),
    )


def _files_of_run(config: Config, forgotten: bool) -> list[Row]:
    private, source = config.private, randomness.source(config)
    if not private:
        seed = free = policy = "as you like"
    elif source == "seed":
        seed, free, policy = "no: the noise follows from the seed", "yes", "yes, under its ε"
    else:
        seed, free, policy = "through `pevdn publish`", "yes", "yes, under its ε"
    hold = "parameters, **raw training episodes**, optimiser state, random keys"
    if forgotten:
        hold = "parameters; episodes, optimiser state and random keys were deleted"
    rows: list[Row] = [
        ("`config.yaml`", "the settings and the seed", seed),
        ("`metrics.jsonl`", "figures of every evaluation, and the seed", seed),
        ("`summary.json`", "the final figures, the seed, and the machine that made them", seed),
        ("`curve.png`", "the win rate as a picture", free),
        ("`checkpoints/`", hold, "through `pevdn publish`" if forgotten and private else "never"),
    ]
    if private and source == "os" and not forgotten:
        told = "never: whoever has them can take the noise off"
        rows.append(("`secret`", "32 bytes from which all noise and all samples follow", told))
    if private:
        rows.append(ledger_row("digests of parameters and random keys"))
    rows += [
        ("`world.json`", "sizes of observations and actions (worlds outside of JAX)", free),
        ("`agent-I.safetensors`, `.onnx`", "a policy, if you export it", policy),
        ("`replay.*`", "a fresh episode of the whole team, if you draw it", policy),
    ]
    return rows
