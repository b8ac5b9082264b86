"""Ctrl-C and SIGTERM as a request to stop at the next safe point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a stop was requested."""

    def __init__(self) -> None:
        self.received = False

    def __bool__(self) -> bool:
        return self.received


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect stop signals while the block runs; the second one raises KeyboardInterrupt.

    Outside the main thread nothing is collected: there the caller decides about signals.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.received:
            raise KeyboardInterrupt
        request.received = True

    try:
        before = {number: signal.signal(number, handle) for number in STOP}
    except ValueError:
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
