"""The signal that wakes the transfer thread."""

from __future__ import annotations

import threading
import time

from neuron_push.core.wake import Wake


def test_a_signal_set_before_is_taken_once() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    assert wake.wait(0)
    assert not wake.wait(0)


def test_clear_takes_it_back() -> None:
    wake = Wake()
    wake.clear()
    wake.set()
    wake.clear()
    assert not wake.wait(0)


def test_a_waiter_is_woken_at_once() -> None:
    wake, woken_s = Wake(), []

    def wait() -> None:
        if wake.wait(10):
            woken_s.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    set_s = time.monotonic()
    wake.set()
    thread.join(10)
    assert len(woken_s) == 1
    assert woken_s[0] - set_s < 1


def test_many_setters_lose_no_signal() -> None:
    """What a waiter looks at after each signal holds all that was put there before it."""
    wake, put, seen = Wake(), [], []

    def setter(number: int) -> None:
        for i in range(500):
            put.append((number, i))
            wake.set()

    def waiter() -> None:
        end_s = time.monotonic() + 20
        while len(seen) < 2000 and time.monotonic() < end_s and wake.wait(10):
            while put:
                seen.append(put.pop())

    threads = [threading.Thread(target=setter, args=(n,)) for n in range(4)]
    threads.append(threading.Thread(target=waiter))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 2000
