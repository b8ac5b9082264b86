"""Stop signals: the first asks to stop, the second raises, and handlers are restored."""

from __future__ import annotations

import signal
import threading

import pytest

from pevdn.storage.signals import STOP, stop_requests


@pytest.mark.parametrize("number", STOP)
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    with stop_requests() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop


@pytest.mark.parametrize("first", STOP)
@pytest.mark.parametrize("second", STOP)
def test_the_second_signal_raises(first: signal.Signals, second: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests() as stop:
        signal.raise_signal(first)
        assert stop
        signal.raise_signal(second)


@pytest.mark.parametrize("fails", [False, True])
def test_the_handlers_from_before_are_restored(fails: bool) -> None:
    before = [signal.getsignal(number) for number in STOP]
    try:
        with stop_requests():
            assert all(signal.getsignal(number) not in before for number in STOP)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert [signal.getsignal(number) for number in STOP] == before


def test_outside_the_main_thread_nothing_is_collected() -> None:
    before = [signal.getsignal(number) for number in STOP]
    seen: list[bool] = []

    def work() -> None:
        with stop_requests() as stop:
            seen.append(bool(stop))
            assert [signal.getsignal(number) for number in STOP] == before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
