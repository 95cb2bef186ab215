"""The consumer rank's side of one transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuron_push.core.messages import Cancel, CancelAck, Nack, Reason, Register, Segment
from neuron_push.core.session import (
    CONSUMER_LEG,
    Action,
    CEvent,
    CState,
    Outcome,
    Report,
    Send,
)

RESEND_S = 1.0
"""A Cancel without an answer is sent again this often (lost with a dying connection)."""


@dataclass(slots=True)
class ConsumerLeg:
    """One producer rank. ``seen`` is a bit mask of segment indexes; ``count`` is 0 until known."""

    peer: str
    state: CState = CState.OPEN
    seen: int = 0
    count: int = 0
    quarantine_end_s: float = math.inf

    def move(self, event: CEvent) -> bool:
        before = self.state
        self.state = CONSUMER_LEG[before, event]
        return self.state is not before

    @property
    def is_complete(self) -> bool:
        return self.count > 0 and self.seen == (1 << self.count) - 1


class ConsumerSession:
    """State machine of one transfer on one consumer rank. Owner: the transfer thread.

    From :meth:`on_register` on, ends in RECEIVED, or in FAILED (unless the engine aborted it
    itself) followed by RELEASED. Destination blocks must not be reused before RECEIVED or
    RELEASED: a one-sided WRITE may land until the producer has acknowledged, or its
    connection has been torn down for ``quarantine_s``.
    """

    def __init__(self, key: str, nonce: int, *, patience_s: float, quarantine_s: float) -> None:
        self.key = key
        self.nonce = nonce
        self.legs: dict[str, ConsumerLeg] = {}
        self.outcome: Outcome | None = None
        self.num_segments = 0
        self.reason: Reason | None = None
        self.detail = ""
        self._quarantine_s = quarantine_s
        # Counts from the registration: before it, the engine's own queue decides how long.
        self._end_s = math.inf
        self._patience_s = patience_s
        self._resend_s = math.inf
        self._registered = False
        self._announced: tuple[str, ...] = ()

    @property
    def deadline_s(self) -> float:
        """When to call :meth:`on_tick` at the latest; infinity when over."""
        if self.is_over:
            return math.inf
        quarantine = min((leg.quarantine_end_s for leg in self.legs.values()), default=math.inf)
        return min(self._end_s, self._resend_s, quarantine)

    @property
    def is_over(self) -> bool:
        return self.outcome in (Outcome.RECEIVED, Outcome.RELEASED)

    def open_peers(self) -> list[str]:
        """Peers whose death or silence matters to this transfer."""
        open_states = (CState.OPEN, CState.FENCING)
        return [leg.peer for leg in self.legs.values() if leg.state in open_states]

    # ------------------------------------------------------------ the engine's events

    def on_announce(self, peers: tuple[str, ...]) -> None:
        """These ranks hold, or will hold, what this request needs: tell them if it is aborted."""
        self._announced = peers

    def on_register(self, messages: dict[str, Register], now_s: float) -> list[Action]:
        """Blocks are allocated: ``messages`` holds the registration for each producer rank.

        Ranks asked for nothing (an empty token range) are told so and owe us nothing.
        """
        if self.outcome is not None:
            return []
        self._registered = True
        self._end_s = now_s + self._patience_s
        actions: list[Action] = []
        for peer, message in messages.items():
            actions.append(Send(peer, message))
            if message.first_token < message.end_token:
                self.legs[peer] = ConsumerLeg(peer)
        return actions + self._settle()

    def on_fail(self, reason: Reason, detail: str, now_s: float) -> list[Action]:
        """A failure on this side: no connection, digest mismatch, time-out."""
        if self.outcome is not None:
            return []
        self.outcome = Outcome.FAILED
        self.reason, self.detail = reason, detail
        actions: list[Action] = [Report(Outcome.FAILED, reason, detail)]
        actions += self._withdraw() + self._stop(now_s)
        return actions + self._settle()

    def on_abort(self, now_s: float) -> list[Action]:
        """The engine gave the request up. It needs no FAILED, only RELEASED."""
        if self.outcome is not None:
            return []
        self.outcome = Outcome.FAILED
        self.reason = Reason.CANCELLED
        return self._withdraw() + self._stop(now_s) + self._settle()

    # ------------------------------------------------------------ the wire's events

    def on_segment(self, peer: str, message: Segment, now_s: float) -> list[Action]:
        leg = self.legs.get(peer)
        if leg is None or leg.state not in (CState.OPEN, CState.FENCING):
            return []
        bit = 1 << message.index
        if leg.seen & bit:
            return []
        leg.seen |= bit
        leg.count = message.count or leg.count
        self.num_segments += 1
        if leg.is_complete:
            leg.move(CEvent.ALL_SEGMENTS)
            return self._settle()
        return []

    def on_nack(self, peer: str, message: Nack, now_s: float) -> list[Action]:
        leg = self.legs.get(peer)
        if leg is None or leg.state is not CState.OPEN:
            return []
        leg.move(CEvent.STOP)
        if self.outcome is None:
            return self.on_fail(message.reason, message.detail, now_s)
        return []

    def on_cancel_ack(self, peer: str, message: CancelAck, now_s: float) -> list[Action]:
        leg = self.legs.get(peer)
        if leg is None:
            return []
        was_open = leg.state is CState.OPEN
        leg.move(CEvent.CANCEL_ACK)
        if was_open and self.outcome is None:
            # Its Nack was lost or overtaken: the acknowledgement alone says enough.
            return self.on_fail(Reason.PRODUCER_ABORTED, "the producer gave up", now_s)
        return self._settle()

    def on_peer_lost(self, peer: str, now_s: float) -> list[Action]:
        """The connection to ``peer`` is torn down; what was in flight may land a while yet."""
        leg = self.legs.get(peer)
        if leg is None:
            return []
        if leg.move(CEvent.PEER_LOST) and leg.state is CState.LOST:
            leg.quarantine_end_s = now_s + self._quarantine_s
            if self.outcome is None:
                return self.on_fail(Reason.PEER_LOST, f"producer rank {peer} is gone", now_s)
        return self._settle()

    def on_tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self.outcome is None and now_s >= self._end_s:
            detail = f"not finished within {self._patience_s:g} s"
            actions += self.on_fail(Reason.TIMEOUT, detail, now_s)
        for leg in self.legs.values():
            if leg.state is CState.LOST and now_s >= leg.quarantine_end_s:
                leg.quarantine_end_s = math.inf
                leg.move(CEvent.QUARANTINE_OVER)
        if self.outcome is Outcome.FAILED and now_s >= self._resend_s:
            actions += self._stop(now_s)
        return actions + self._settle()

    # ------------------------------------------------------------ inside

    def _withdraw(self) -> list[Action]:
        """Ranks that only know this transfer by announcement need not wait for it."""
        if self._registered:
            return []
        return [Send(peer, Cancel(self.key, self.nonce)) for peer in self._announced]

    def _stop(self, now_s: float) -> list[Action]:
        """Cancel every leg that may still write. Again after RESEND_S, until it answers."""
        self._end_s = math.inf
        self._resend_s = now_s + RESEND_S
        actions: list[Action] = []
        for leg in self.legs.values():
            leg.move(CEvent.STOP)
            if leg.state is CState.FENCING:
                actions.append(Send(leg.peer, Cancel(self.key, self.nonce)))
        return actions

    def _settle(self) -> list[Action]:
        states = {leg.state for leg in self.legs.values()}
        if self.outcome is None:
            if not self._registered or states - {CState.COMPLETE}:
                return []
            self.outcome = Outcome.RECEIVED
            return [Report(Outcome.RECEIVED)]
        if self.outcome is Outcome.FAILED and not states - {CState.COMPLETE, CState.FENCED}:
            self.outcome = Outcome.RELEASED
            return [Report(Outcome.RELEASED, self.reason, self.detail)]
        return []
