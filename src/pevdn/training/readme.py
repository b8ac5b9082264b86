"""The README.md of a run, of a party's data and of a publication: what each file is, and for whom.

Only a publication may be handed out as it is. docs/privacy.md, "What a run leaves behind", has the
same tables with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pevdn.config.experiment import Config
from pevdn.privacy import randomness
from pevdn.storage.files import write_atomically

FILE = "README.md"

Row = tuple[str, str, str]  # file, what it holds, whether it may be published


def leave(path: Path, text: str) -> None:
    """Write README.md into a directory unless there is one."""
    if not (path / FILE).exists():
        write_atomically(path / FILE, text)


def of_run(config: Config, forgotten: bool = False) -> str:
    """The README.md of a run's directory; `forgotten` after `pevdn forget`."""
    head = f"# A run of pevdn\n\n`{config.algorithm}` on `{config.env}`, "
    rows = _files_of_run(config, forgotten)
    if not config.private:
        return _page(
            head + "trained without differential privacy.",
            "Nothing here is protected: parameters, policies and scores may tell which episodes "
            "they were learnt from. Publish them only if these episodes are nobody's secret. The "
            "directory has mode 0700, so that no other user of the machine can read it.",
            "    pevdn export RUN --agent 0      # one agent's policy in a file of its own\n"
            "    pevdn forget RUN                # once finished: delete the stored episodes",
            _table(rows),
        )
    holds = "what the noise is there to hide: raw training episodes and random keys"
    forget = (
        "\n    pevdn forget RUN                # once finished: delete stored episodes, optimiser "
        "state and random keys"
    )
    if forgotten:
        holds, forget = "the seed, and digests by which others can check a guess", ""
    return _page(
        head + "trained with differential privacy.",
        f"**Do not publish this directory, nor a copy of it.** It holds {holds}. It has mode 0700, "
        "so that no other user of the machine can read it; keep it that way when you copy it.",
        "    pevdn publish RUN --out DIR     # copies what may be handed out, and nothing else"
        + forget,
        randomness.MEANING[randomness.source(config)],
        _table(rows),
    )


def of_party(config: Config, rehearsal: bool) -> str:
    """The README.md of a party's directory NAME.data."""
    what = "with" if config.private else "without"
    policy = "yes, under the ε that is in it" if config.private else "it promises nothing"
    rows = [
        ("`config.yaml`", "the settings of the team", "yes, unless the team rehearses"),
        (
            "`secret`",
            "32 bytes from which noise, exploration and this party's part of the samples follow",
            "never: whoever has them can take the noise off",
        ),
        ("`episodes-*.bin`", "what the agent saw and did, raw", "never"),
        (
            "`snapshot-*.bin`",
            "parameters, optimiser state, and the newest round: opened sums, parts of the seed",
            "never; export the policy instead",
        ),
        (
            "`journal-*.jsonl`",
            "opened sums before any noise, and everybody's parts of the seed",
            "never; teammates have the same",
        ),
        ("`metrics.jsonl`", "scores of evaluations, and ε if private", "as `config.yaml`"),
        *_books(config, "digests of the parameters"),
        (
            "`status.json`, `log.jsonl`, `words.txt`, `farewells.json`",
            "state, traffic and times of the process",
            "no: names and times of the members",
        ),
        ("`agent-I.safetensors`, `.onnx`", "the policy, if you export it", policy),
    ]
    told = (
        "This is a rehearsal: everything is drawn from the seed in the roster, and nothing is "
        "hidden."
        if rehearsal
        else ""
    )
    return _page(
        f"# A party's data\n\nOne agent of `{config.algorithm}` on `{config.env}`, trained {what} "
        "differential privacy.",
        "**Do not publish this directory, nor a copy of it.** It belongs to the agent's owner "
        "alone. It has mode 0700; keep it that way when you copy it.",
        "    pevdn export NAME.data          # the agent's policy in a file of its own",
        "Once every member of the team has finished, `episodes-*.bin`, `journal-*.jsonl` and "
        "`secret` may be deleted; the policy can still be loaded and exported.",
        told,
        _table(rows),
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
    return _page(
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
        _table(rows),
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
    rows += _books(config, "digests of parameters and random keys")
    rows += [
        ("`world.json`", "sizes of observations and actions (worlds outside of JAX)", free),
        ("`agent-I.safetensors`, `.onnx`", "a policy, if you export it", policy),
        ("`replay.*`", "a fresh episode of the whole team, if you draw it", policy),
    ]
    return rows


def _books(config: Config, hold: str) -> list[Row]:
    if not config.private:
        return []
    told = "no: a digest confirms a guess"
    return [("`ledger.jsonl`, `ledger.head`", f"what was spent, and {hold}", told)]


def _table(rows: Iterable[Row]) -> str:
    head = "| file | holds | may be published? |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _page(*parts: str) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
