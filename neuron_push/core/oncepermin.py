"""Warnings that a stranger can cause at will: one per cause and minute, with a count."""

from __future__ import annotations

import logging
import time


class OncePerMinute:
    """Not thread-safe; bounded: with many causes the oldest are forgotten."""

    MAX_CAUSES = 1024

    def __init__(self, period_s: float = 60.0) -> None:
        self._period_s = period_s
        self._causes: dict[str, tuple[float, int]] = {}

    def warning(self, logger: logging.Logger, cause: str, text: str, *args: object) -> None:
        now_s = time.monotonic()
        last_s, suppressed = self._causes.get(cause, (-1e9, 0))
        if now_s - last_s < self._period_s:
            self._causes[cause] = (last_s, suppressed + 1)
            return
        while len(self._causes) >= self.MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = (now_s, 0)
        if suppressed:
            text += f" (and {suppressed} times more in the last minute)"
        logger.warning(text, *args)
