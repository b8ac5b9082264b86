"""Treat Ctrl-C and SIGTERM as requests to stop at the next safe point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """True once a stop signal was received."""

    def __init__(self) -> None:
        self.received = False

    def __bool__(self) -> bool:
        return self.received


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect stop signals while the block runs; the second one raises KeyboardInterrupt.

    Outside the main thread, where Python installs no handlers, no signals are collected.
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
