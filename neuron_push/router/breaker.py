"""One engine's circuit breaker: when requests stay away from it, and how it comes back.

Closed, every request may use the engine. It opens when connections are refused,
or after so many failures in a row. While it is open other engines are taken;
when its time is over it is half-open, and one request is the trial: success
closes it, failure opens it again for twice as long. An engine is never shut out
when no other one is left: a breaker chooses, it does not refuse clients.
"""

from __future__ import annotations

import logging
import time

OPEN_S = 1.0
LONGEST_OPEN_S = 30.0

CLOSED, HALF_OPEN, OPEN = "closed", "half_open", "open"

_log = logging.getLogger("neuron_push.router")


class Ticket:
    """One attempt's use of an engine. Whoever took it reports, and releases it at the end.

    What an attempt says of an engine counts only if the breaker has not changed
    since: a failure that began before an engine recovered says nothing about it.
    """

    def __init__(self, breaker: Breaker, epoch: int, *, trial: bool) -> None:
        self._breaker = breaker
        self._epoch = epoch
        self.trial = trial

    def succeeded(self) -> None:
        if self._current:
            self._breaker.close()

    def failed(self, reason: str, *, refused: bool = False) -> None:
        """`refused`: there was no connection, so no other request will have one either."""
        if self._current:
            self._breaker.count(reason, refused=refused, trial=self.trial)

    def release(self) -> None:
        if self._current and self.trial:
            self._breaker.end_trial()
        self.trial = False

    @property
    def _current(self) -> bool:
        return self._epoch == self._breaker.epoch


class Breaker:
    """The state of one engine; `limit` failures in a row open it."""

    def __init__(self, name: str, limit: int) -> None:
        self.epoch = 0
        self.failures = 0
        self.times_opened = 0
        self._name = name
        self._limit = limit
        self._opened = False
        self._refused = False
        self._trial = False
        self._open_s = OPEN_S
        self._until = 0.0

    @property
    def state(self) -> str:
        if not self._opened:
            return CLOSED
        return OPEN if time.monotonic() < self._until else HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether the next request should come here while there are other engines."""
        return not self._opened or (self.state == HALF_OPEN and not self._trial)

    def enter(self) -> Ticket:
        """A request comes here; in half-open state the first one is the trial."""
        trial = self._opened and self.admits
        self._trial = self._trial or trial
        return Ticket(self, self.epoch, trial=trial)

    def is_reachable(self) -> None:
        """A health probe got through: an engine that refused connections may be tried now."""
        if self._refused:
            self._until = min(self._until, time.monotonic())

    def count(self, reason: str, *, refused: bool, trial: bool) -> None:
        if self._opened and not trial:
            return
        self.failures += 1
        if trial or refused or self.failures >= self._limit:
            self._open(reason, refused=refused)

    def close(self) -> None:
        self.failures = 0
        if not self._opened:
            return
        _log.info("%s: breaker closed", self._name)
        self.epoch += 1
        self._opened = self._refused = self._trial = False
        self._open_s = OPEN_S

    def end_trial(self) -> None:
        self._trial = False

    def _open(self, reason: str, *, refused: bool) -> None:
        self._open_s = min(2 * self._open_s, LONGEST_OPEN_S) if self._opened else OPEN_S
        self._until = time.monotonic() + self._open_s
        self._opened, self._refused, self._trial = True, refused, False
        self.epoch += 1
        self.times_opened += 1
        _log.warning(
            "%s: breaker open for %.0f s after %d failures in a row, the last: %s",
            *(self._name, self._open_s, self.failures, reason),
        )
