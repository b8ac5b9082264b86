"""The README.md of a run and of a publication.

Only a publication may be handed out as it is. docs/privacy.md, "What a run leaves behind", has the
same tables with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pevdn.config.experiment import Config
from pevdn.privacy import planner, randomness
from pevdn.privacy.accounting import DURATION, UNCOVERED, covers_teammates
from pevdn.storage.readme import Row, ledger_rows, page, table

_WHOM = ", also against teammates: the sums that they open carry noise"


def of_run(config: Config, forgotten: bool = False, epsilon_record: float | None = None) -> str:
    """Return the README.md of a run's directory; `forgotten` after `pevdn forget`.

    ε record is that of the ledger, once the run has finished.
    """
    head = f"# A run of pevdn\n\n`{config.algorithm}` on `{config.env}`, "
    rows = _files_of_run(config, forgotten)
    if not config.private:
        return page(
            head + "trained without differential privacy.",
            "Nothing here is protected: parameters, policies and scores may reveal the episodes "
            "that they were learnt from. Publish them only if these episodes are public. The "
            "directory has mode 0700: no other user of the machine can read it.",
            "    pevdn export RUN --agent 0      # one agent's policy in a file of its own\n"
            "    pevdn forget RUN                # once finished: delete the stored episodes",
            table(rows),
        )
    holds = "what the noise hides: raw training episodes and random keys"
    forget = (
        "\n    pevdn forget RUN                # once finished: delete stored episodes, optimiser "
        "state and random keys"
    )
    if forgotten:
        holds, forget = "the seed, and digests that can confirm a guess", ""
    whom = ""
    if config.noised:
        planned = epsilon_record is None and planner.covers_teammates(config)
        whom = _WHOM if planned or covers_teammates(epsilon_record) else f", but with {UNCOVERED}"
    return page(
        head + f"trained with differential privacy{whom}.",
        f"**Do not publish this directory or a copy of it.** It holds {holds}. It has mode 0700: "
        "no other user of the machine can read it; keep that mode when you copy it.",
        "    pevdn publish RUN --out DIR     # copy what may be handed out, and nothing else"
        + forget,
        randomness.MEANING[randomness.source(config)],
        table(rows),
    )


def of_publication(
    config: Config, policies: Iterable[str], epsilon: Mapping[str, float | None], delta: float
) -> str:
    """Return the README.md of the output of `pevdn publish`; ε is by observer."""
    record, others = "", "teammates and evaluation episodes"
    if covers_teammates(epsilon.get("record")):
        record = (
            f" For one agent's record of an episode it is ε {epsilon['record']:.3g}, "
            "against teammates and outsiders together."
        )
        others = f"evaluation episodes and {DURATION}"
    elif "record" in epsilon:
        record = f" There is {UNCOVERED}."
    files = ", ".join(f"`{name}`" for name in policies)
    lanes = "one team" if config.seeds == 1 else f"{config.seeds} teams (lanes)"
    rows = [
        (files, "greedy policies: one agent's parameters and facts about them", "yes"),
        ("`config.yaml`", "the settings", "yes"),
        ("`metrics.jsonl`", "the figures of every evaluation", "yes"),
        ("`summary.json`", "the final figures", "yes"),
        ("`curve.png`", "the win rate over training", "yes"),
        ("`privacy.json`", "mechanism, ε, δ, and what they do not cover", "yes"),
    ]
    return page(
        f"# Published by pevdn\n\n{lanes.capitalize()}, trained with `{config.algorithm}` on "
        f"`{config.env}` under differential privacy: ε {epsilon['team']:.3g} (team observer) at δ "
        f"{delta:.3g} for one training episode.{record}",
        "Everything in this directory may be handed out: it is computed from parameters that the "
        "theorem covers, from evaluation episodes and from the settings. It contains no training "
        "episode, optimiser state, random key, seed, path or machine name. Lanes are numbered "
        "from 0.",
        randomness.MEANING[randomness.source(config)],
        "`privacy.json` states to whom the guarantee applies and what it does not cover: above all "
        f"{others}.",
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
    state = "parameters, **raw training episodes**, optimiser state, random keys"
    if forgotten:
        state = "parameters; episodes, optimiser state and random keys were deleted"
    rows: list[Row] = [
        ("`config.yaml`", "the settings, the seed and the runtime options", seed),
        ("`metrics.jsonl`", "the figures of every evaluation, and the seed", seed),
        ("`summary.json`", "the final figures, the seed, and the machine", seed),
        ("`curve.png`", "the win rate over training", free),
        ("`checkpoints/`", state, "through `pevdn publish`" if forgotten and private else "never"),
    ]
    if private and source == "os" and not forgotten:
        never = "never: with them the noise can be removed"
        rows.append(("`secret`", "32 bytes that determine all noise and all samples", never))
    return [
        *rows,
        *ledger_rows(private, "parameters and random keys"),
        ("`world.json`", "sizes of observations and actions (external worlds)", free),
        ("`agent-I.safetensors`, `.onnx`", "a policy, if exported", policy),
        ("`replay.*`", "a new episode of the whole team, if drawn", policy),
    ]
