"""A signal between two threads that costs the one who gives it next to nothing.

``threading.Event`` is Python all through: setting one costs some 20 us on a core whose caches a
forward has just used, and waiting on one makes a new lock each time. This is one lock.
"""

from __future__ import annotations

import threading


class Wake:
    """Set by any thread; waited for by one, which takes the signal with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # free while the signal is set
        self._lock.acquire()

    def set(self) -> None:
        if not self._lock.locked():
            return
        try:
            self._lock.release()
        except RuntimeError:  # somebody else has set it between the two lines
            return

    def wait(self, timeout_s: float) -> bool:
        """Whether the signal was set, or came within ``timeout_s``; it is not set afterwards."""
        return self._lock.acquire(timeout=timeout_s)

    def clear(self) -> None:
        self._lock.acquire(blocking=False)
