"""The producer rank's side of one transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from neuron_push.core.messages import Cancel, CancelAck, Nack, Reason, Register, Segment
from neuron_push.core.session import (
    PRODUCER_LEG,
    Action,
    Local,
    Outcome,
    PEvent,
    Prompt,
    PState,
    Report,
    Send,
    Write,
)


@dataclass(slots=True)
class ProducerLeg:
    """One consumer rank. ``register`` is None when its Cancel came before its registration."""

    peer: str
    nonce: int
    register: Register | None
    unit_tokens: int
    state: PState = PState.OPEN
    sent_tokens: int = 0
    num_segments: int = 0
    is_lost: bool = False
    in_flight: set[int] = field(default_factory=set)
    reason: Reason | None = None
    detail: str = ""

    def move(self, event: PEvent) -> bool:
        """Follow the table; True if the state changed."""
        before = self.state
        self.state = PRODUCER_LEG[before, event]
        return self.state is not before

    def refusal(self) -> list[Action]:
        """What a consumer rank is told of a leg that has stopped."""
        reason = self.reason or Reason.CANCELLED
        return [
            Send(self.peer, Nack(self.nonce, reason, self.detail)),
            Send(self.peer, CancelAck(self.nonce)),
        ]

    @property
    def is_done(self) -> bool:
        return self.state is PState.DONE

    @property
    def closed(self) -> bool:
        return self.state in (PState.DONE, PState.STOPPED)


class ProducerSession:
    """State machine of one transfer on one producer rank.

    Owner: the transfer thread. Registration and prefill may come in either order; whichever
    is second starts the writing. ``lease_s`` bounds how long finished blocks wait for a
    consumer, ``patience_s`` how long a registration waits for its prefill; heartbeats renew
    both.
    """

    def __init__(self, key: str, *, lease_s: float, patience_s: float) -> None:
        self.key = key
        self.local = Local.ABSENT
        self.legs: dict[str, ProducerLeg] = {}
        self.final_tokens = 0
        self.suspended = False
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._prompt: Prompt | None = None
        self._deadline_s = math.inf
        self._expected_legs: int | None = None
        self._engine = ""
        self._next_write_id = 0
        self._computing = False
        self._held = False
        self._sent = False
        self._reason = Reason.UNKNOWN_TRANSFER
        self._detail = ""

    # ------------------------------------------------------------ what the owner may ask

    @property
    def deadline_s(self) -> float:
        """When to call :meth:`on_tick` at the latest; infinity if time changes nothing."""
        return self._deadline_s

    @property
    def num_in_flight(self) -> int:
        return sum(len(leg.in_flight) for leg in self.legs.values())

    @property
    def is_over(self) -> bool:
        """Released, the engine owes no on_finish or on_fail, and no leg is open."""
        return (
            self.local is Local.RELEASED
            and not self._computing
            and all(leg.closed for leg in self.legs.values())
        )

    def open_peers(self) -> list[str]:
        return [leg.peer for leg in self.legs.values() if not leg.closed]

    # ------------------------------------------------------------ the engine's events

    def on_begin(self, prompt: Prompt, now_s: float) -> list[Action]:
        """The engine has scheduled the prefill (again, after a preemption)."""
        self.suspended = False
        self._computing = True
        if self.local is Local.RELEASED:
            self._held = self._sent = False  # a late prefill, or a key that is used again
        if self.local is not Local.ABSENT:
            return []
        self.local = Local.COMPUTING
        self._prompt = prompt
        self._deadline_s = math.inf
        actions: list[Action] = []
        for leg in list(self.legs.values()):
            self._check_prompt(leg, actions)
        return actions + self._advance()

    def on_progress(self, final_tokens: int, now_s: float) -> list[Action]:
        """KV of tokens ``[0, final_tokens)`` is in memory and will not change again.

        Ignored while suspended: a marker from before the preemption speaks of freed blocks.
        """
        if self.suspended:
            return []
        self.final_tokens = final_tokens
        return self._advance()

    def on_suspend(self) -> None:
        """Preempted: post nothing more. The owner waits for ``num_in_flight`` to become 0."""
        self.suspended = True
        self.final_tokens = 0

    def on_finish(self, now_s: float) -> list[Action]:
        """The engine has finished the request and holds its blocks until we report SENT."""
        if not self._computing:
            return []
        self._computing = False
        self._held = True
        if self.local is Local.COMPUTING:
            self.local = Local.HELD
            self._deadline_s = now_s + self._lease_s
        return self._settle()

    def on_fail(self, reason: Reason, detail: str, *, held: bool, now_s: float) -> list[Action]:
        """The engine's request failed. ``held``: its blocks wait for our SENT report."""
        self._computing = False
        self._held = self._held or held
        if self.local is Local.RELEASED:
            return self._settle()
        self.local = Local.GONE
        self._reason, self._detail = reason, detail
        self._deadline_s = now_s + self._patience_s
        actions: list[Action] = []
        for leg in self.legs.values():
            self._fail_leg(leg, reason, detail, actions)
        return actions + self._settle()

    # ------------------------------------------------------------ the wire's events

    def on_register(
        self,
        peer: str,
        message: Register,
        *,
        unit_tokens: int,
        num_consumers: int,
        now_s: float,
        engine: str = "",
    ) -> list[Action]:
        """A consumer rank's registration, already checked against both layouts.

        ``unit_tokens``: segments other than the last end at multiples of it.
        ``num_consumers``: how many consumer ranks this rank serves for that engine.
        ``engine``: names the engine process; the first one that speaks has the key.
        """
        actions: list[Action] = []
        leg = self.legs.get(peer)
        if leg is not None:
            self._register_again(leg, message, actions)
            return actions + self._settle()
        leg = ProducerLeg(peer, message.nonce, message, unit_tokens)
        leg.sent_tokens = message.first_token
        if not self._has_room(engine, num_consumers):
            # Another engine came with the same key. The first one keeps it: a leg of its own
            # would let a stranger's cancel release the first one's blocks.
            actions.append(
                Send(peer, Nack(message.nonce, Reason.CONFLICT, "another consumer has this key"))
            )
            actions.append(Send(peer, CancelAck(message.nonce)))
            return actions
        self.legs[peer] = leg
        self._renew(now_s)
        if self.local in (Local.GONE, Local.RELEASED):
            self._fail_leg(leg, self._reason, self._detail, actions)
        elif self._prompt is not None:
            self._check_prompt(leg, actions)
        return actions + self._advance()

    def on_cancel(
        self, peer: str, message: Cancel, *, num_consumers: int, now_s: float, engine: str = ""
    ) -> list[Action]:
        leg = self.legs.get(peer)
        if leg is None:
            # The cancel overtook the registration, or there never was one: remember it.
            if not self._has_room(engine, num_consumers):
                return [Send(peer, CancelAck(message.nonce))]
            leg = ProducerLeg(peer, message.nonce, None, 1, reason=Reason.CANCELLED)
            self.legs[peer] = leg
            self._renew(now_s)
        if leg.nonce != message.nonce:
            return [Send(peer, CancelAck(message.nonce))]
        leg.reason = leg.reason or Reason.CANCELLED
        leg.move(PEvent.CANCEL)
        if leg.closed:
            return [Send(peer, CancelAck(leg.nonce)), *self._settle()]
        return self._settle()

    def on_renew(self, peer: str, now_s: float) -> list[Action]:
        """A heartbeat says that a consumer rank still wants this.

        One whose leg has stopped has not heard of it: it is told again.
        """
        self._renew(now_s)
        leg = self.legs.get(peer)
        return leg.refusal() if leg is not None and leg.state is PState.STOPPED else []

    def on_peer_lost(self, peer: str, now_s: float) -> list[Action]:
        leg = self.legs.get(peer)
        if leg is None:
            return []
        leg.is_lost = True
        leg.reason = leg.reason or Reason.PEER_LOST
        leg.move(PEvent.PEER_LOST)
        return self._settle()

    def on_write_done(self, peer: str, write_id: int) -> list[Action]:
        self.legs[peer].in_flight.discard(write_id)
        return self._settle()

    def on_write_failed(self, peer: str, write_id: int, detail: str) -> list[Action]:
        """The WRITE ended in an error, or could not be posted: it is in flight no more."""
        leg = self.legs[peer]
        leg.in_flight.discard(write_id)
        actions: list[Action] = []
        self._fail_leg(leg, Reason.WRITE_FAILED, detail, actions)
        return actions + self._settle()

    def on_stall(self, peer: str, detail: str) -> list[Action]:
        """A WRITE of this leg makes no progress. It stays in flight until NIXL says otherwise."""
        actions: list[Action] = []
        self._fail_leg(self.legs[peer], Reason.STALLED, detail, actions)
        return actions + self._settle()

    def on_tick(self, now_s: float) -> list[Action]:
        if now_s < self._deadline_s:
            return []
        if self.local is Local.HELD:
            return self.on_fail(
                Reason.LEASE_OVER,
                f"no consumer took the blocks within {self._lease_s:g} s",
                held=True,
                now_s=now_s,
            )
        if self.local is Local.ABSENT:
            detail = f"no prefill of {self.key} within {self._patience_s:g} s"
            return self.on_fail(Reason.UNKNOWN_TRANSFER, detail, held=False, now_s=now_s)
        self._deadline_s = math.inf
        return self._settle()

    # ------------------------------------------------------------ inside

    def _renew(self, now_s: float) -> None:
        if self.local is Local.HELD:
            self._deadline_s = now_s + self._lease_s
        elif self.local is Local.ABSENT:
            self._deadline_s = now_s + self._patience_s

    def _has_room(self, engine: str, num_consumers: int) -> bool:
        """Whether one more consumer rank of ``engine`` may have a leg."""
        if self._expected_legs is None:
            self._expected_legs, self._engine = num_consumers, engine
        return engine == self._engine and len(self.legs) < self._expected_legs

    def _register_again(self, leg: ProducerLeg, message: Register, actions: list[Action]) -> None:
        if leg.register == message:
            if leg.state is PState.STOPPED:
                actions += leg.refusal()
            return
        reason, detail = Reason.CONFLICT, "this rank has registered this transfer before"
        if leg.nonce == message.nonce and not leg.closed:
            # Nothing may be acknowledged under this nonce before its WRITEs have ended.
            self._fail_leg(leg, reason, f"{detail}, under this nonce, differently", actions)
            return
        if leg.nonce == message.nonce and leg.register is None:
            reason, detail = Reason.CANCELLED, "its cancel came first"
        actions.append(Send(leg.peer, Nack(message.nonce, reason, detail)))
        actions.append(Send(leg.peer, CancelAck(message.nonce)))

    def _check_prompt(self, leg: ProducerLeg, actions: list[Action]) -> None:
        if self._prompt is None or leg.register is None:
            return
        theirs = Prompt(leg.register.num_prompt_tokens, leg.register.prompt_hash)
        mismatch = self._prompt.explain_mismatch(theirs)
        if mismatch is not None:
            self._fail_leg(leg, Reason.PROMPT_MISMATCH, mismatch, actions)

    def _fail_leg(
        self, leg: ProducerLeg, reason: Reason, detail: str, actions: list[Action]
    ) -> None:
        if leg.move(PEvent.FAIL):
            leg.reason, leg.detail = reason, detail
            actions.append(Send(leg.peer, Nack(leg.nonce, reason, detail)))

    def _advance(self) -> list[Action]:
        """Post what has become final, on every leg that wants it."""
        actions: list[Action] = []
        if self.local in (Local.COMPUTING, Local.HELD) and not self.suspended:
            for leg in self.legs.values():
                if leg.state is PState.OPEN and leg.register is not None:
                    self._write_next(leg, leg.register, actions)
        return actions + self._settle()

    def _write_next(self, leg: ProducerLeg, register: Register, actions: list[Action]) -> None:
        last = self.final_tokens >= register.end_token
        if last:
            end = register.end_token
        else:
            end = self.final_tokens // leg.unit_tokens * leg.unit_tokens
        nothing_wanted = register.first_token == register.end_token
        if end <= leg.sent_tokens and not (last and not nothing_wanted):
            if nothing_wanted:
                leg.move(PEvent.LAST_POSTED)
            return
        index = leg.num_segments
        segment = Segment(leg.nonce, index, index + 1 if last else 0, leg.sent_tokens, end)
        leg.num_segments += 1
        leg.sent_tokens = end
        write_id = self._next_write_id
        self._next_write_id += 1
        leg.in_flight.add(write_id)
        if last:
            leg.move(PEvent.LAST_POSTED)
        actions.append(Write(leg.peer, write_id, segment))

    def _settle(self) -> list[Action]:
        """Close legs whose WRITEs have ended, and give the blocks back when all are closed."""
        actions: list[Action] = []
        for leg in self.legs.values():
            if leg.in_flight or leg.state not in (PState.CLOSING, PState.STOPPING):
                continue
            leg.move(PEvent.DRAINED)
            if not leg.is_done and not leg.is_lost:
                actions.append(Send(leg.peer, CancelAck(leg.nonce)))
        if self.num_in_flight:
            return actions
        served = len(self.legs) == self._expected_legs and all(
            leg.closed for leg in self.legs.values()
        )
        if self.local is Local.GONE or (self.local is Local.HELD and served):
            if self.local is Local.HELD:
                self._reason, self._detail = Reason.LEASE_OVER, "the blocks were given back"
            self.local = Local.RELEASED
            self._deadline_s = math.inf
        if self.local is Local.RELEASED and self._held and not self._sent:
            self._sent = True
            actions.append(Report(Outcome.SENT))
        return actions
