"""Catch up with peers that completed a step whose end this party missed."""

from __future__ import annotations

import numpy as np

from pevdn.errors import PevdnError
from pevdn.network import secure_sum
from pevdn.network import wire_pb2 as wire
from pevdn.network.group import Group
from pevdn.network.recovery import Outcome


def to_wire(outcome: Outcome) -> wire.Outcome:
    names = sorted(outcome.nonces)
    return wire.Outcome(
        kind=outcome.kind,
        words=secure_sum.to_bytes(outcome.words),
        names=names,
        nonces=[outcome.nonces[name] for name in names],
    )


async def missed_outcome(group: Group, step: int, ahead: list[str]) -> Outcome:
    """Recall the outcome of a step from all peers that completed it; they must agree."""
    await group.send(ahead, step, recall=wire.Recall())
    answers = await group.collect(ahead, step, "outcome")
    if len({body.SerializeToString(deterministic=True) for body in answers.values()}) > 1:
        raise PevdnError(
            f"{' and '.join(ahead)} report different outcomes of step {step}; one of them is "
            "faulty, or has lost its files."
        )
    body = answers[ahead[0]]
    nonces = dict(zip(body.names, body.nonces, strict=True))
    return Outcome(step, body.kind, np.frombuffer(body.words, "<u4").astype(np.uint32), nonces)
