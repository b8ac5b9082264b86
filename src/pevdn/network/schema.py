"""Lengths of the fields of wire.proto, which protocol buffers do not check."""

from __future__ import annotations

from pevdn.network.wire_pb2 import Envelope

_VIEW = {"hello": 0}  # bytes; 16 in all others
# Allowed lengths of a field, or of each of its entries, in bytes.
_EXACTLY: dict[str, dict[str, tuple[int, ...]]] = {
    "hello": {"incarnation": (16,), "incarnations": (16,), "mask_key": (0, 32)},
    "commit": {"commitment": (32,), "facts": (32,)},
    "reveal": {"nonce": (32,)},
    "digest": {"digest": (32,)},
    "outcome": {"nonces": (32,)},
}
# Size of one array entry, in bytes.
_ENTRIES: dict[str, dict[str, int]] = {
    "share": {"words": 4},
    "partial_sum": {"words": 4},
    "masked": {"words": 4},
    "plain": {"words": 4},
    "outcome": {"words": 4},
    "observation": {"observations": 4, "rewards": 4},
    "actions": {"actions": 2},
}
# Lists with one entry per name in `names`.
_BESIDE_NAMES = {"hello": "incarnations", "outcome": "nonces"}


def misfit(envelope: Envelope, body: str) -> str:
    """Return the first field whose length the schema does not allow, or an empty string."""
    if len(envelope.run) != 32:
        return "run"
    if len(envelope.view) != _VIEW.get(body, 16):
        return "view"
    message = getattr(envelope, body)
    for name, lengths in _EXACTLY.get(body, {}).items():
        value = getattr(message, name)
        values = (value,) if isinstance(value, bytes) else value
        if any(len(value) not in lengths for value in values):
            return f"{body}.{name}"
    for name, size in _ENTRIES.get(body, {}).items():
        if len(getattr(message, name)) % size:
            return f"{body}.{name}"
    beside = _BESIDE_NAMES.get(body)
    if beside and len(getattr(message, beside)) != len(message.names):
        return f"{body}.{beside}"
    return ""
