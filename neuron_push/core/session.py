"""The life of one transfer, as tables: states, events, and what sessions ask their owner to do.

A transfer is one prompt's KV going from the ranks of a producer engine to the ranks of a
consumer engine. Each rank keeps one session for it: :class:`~neuron_push.core.producer.\
ProducerSession` or :class:`~neuron_push.core.consumer.ConsumerSession`. A session has one *leg*
for every peer rank it deals with. Sessions do no I/O and read no clock: their owner (the
transfer thread) feeds them events with the time, and carries out the actions they return.

Every transition of every leg stands in the tables below. A pair that is not in its table
cannot happen unless the code is wrong; events a peer can cause at any moment are in the table
for every state.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from neuron_push.core.messages import Message, Reason, Segment


class PState(enum.Enum):
    """A producer's leg: one consumer rank that this rank writes to."""

    OPEN = "open"  # registered; segments are written as blocks become final
    CLOSING = "closing"  # the last segment is posted
    DONE = "done"  # every WRITE has completed
    STOPPING = "stopping"  # failed or cancelled; WRITEs still in flight
    STOPPED = "stopped"  # nothing more will ever be written


class PEvent(enum.Enum):
    LAST_POSTED = "last segment posted"
    DRAINED = "no WRITE in flight"
    CANCEL = "consumer cancelled"
    FAIL = "producer failed"
    PEER_LOST = "consumer lost"


PRODUCER_LEG: Final[dict[tuple[PState, PEvent], PState]] = {
    (PState.OPEN, PEvent.LAST_POSTED): PState.CLOSING,
    (PState.OPEN, PEvent.CANCEL): PState.STOPPING,
    (PState.OPEN, PEvent.FAIL): PState.STOPPING,
    (PState.OPEN, PEvent.PEER_LOST): PState.STOPPING,
    (PState.CLOSING, PEvent.DRAINED): PState.DONE,
    (PState.CLOSING, PEvent.CANCEL): PState.STOPPING,
    (PState.CLOSING, PEvent.FAIL): PState.STOPPING,
    (PState.CLOSING, PEvent.PEER_LOST): PState.STOPPING,
    (PState.DONE, PEvent.CANCEL): PState.DONE,
    (PState.DONE, PEvent.FAIL): PState.DONE,
    (PState.DONE, PEvent.PEER_LOST): PState.DONE,
    (PState.STOPPING, PEvent.DRAINED): PState.STOPPED,
    (PState.STOPPING, PEvent.CANCEL): PState.STOPPING,
    (PState.STOPPING, PEvent.FAIL): PState.STOPPING,
    (PState.STOPPING, PEvent.PEER_LOST): PState.STOPPING,
    (PState.STOPPED, PEvent.CANCEL): PState.STOPPED,
    (PState.STOPPED, PEvent.FAIL): PState.STOPPED,
    (PState.STOPPED, PEvent.PEER_LOST): PState.STOPPED,
}


class Local(enum.Enum):
    """The producer engine's own request, as this session knows it."""

    ABSENT = "absent"  # the registration came first
    COMPUTING = "computing"  # prefill under way, or done and not yet handed over
    HELD = "held"  # the engine has finished with it and keeps its blocks for us
    GONE = "gone"  # failed, aborted or expired: nothing more to send
    RELEASED = "released"  # blocks given back; what is left is a tombstone


class CState(enum.Enum):
    """A consumer's leg: one producer rank that writes into this rank."""

    OPEN = "open"  # registered; segments are counted
    COMPLETE = "complete"  # every segment has arrived
    FENCING = "fencing"  # failed or cancelled; it may still write
    FENCED = "fenced"  # it has promised to write no more, or can write no more
    LOST = "lost"  # its connection is torn down; quarantine runs


class CEvent(enum.Enum):
    ALL_SEGMENTS = "all segments arrived"
    STOP = "transfer failed or cancelled"
    CANCEL_ACK = "producer acknowledged"
    PEER_LOST = "producer lost"
    QUARANTINE_OVER = "quarantine over"


CONSUMER_LEG: Final[dict[tuple[CState, CEvent], CState]] = {
    (CState.OPEN, CEvent.ALL_SEGMENTS): CState.COMPLETE,
    (CState.OPEN, CEvent.STOP): CState.FENCING,
    (CState.OPEN, CEvent.CANCEL_ACK): CState.FENCED,
    (CState.OPEN, CEvent.PEER_LOST): CState.LOST,
    (CState.COMPLETE, CEvent.STOP): CState.COMPLETE,
    (CState.COMPLETE, CEvent.CANCEL_ACK): CState.COMPLETE,
    (CState.COMPLETE, CEvent.PEER_LOST): CState.COMPLETE,
    (CState.FENCING, CEvent.ALL_SEGMENTS): CState.COMPLETE,
    (CState.FENCING, CEvent.STOP): CState.FENCING,
    (CState.FENCING, CEvent.CANCEL_ACK): CState.FENCED,
    (CState.FENCING, CEvent.PEER_LOST): CState.LOST,
    (CState.FENCED, CEvent.STOP): CState.FENCED,
    (CState.FENCED, CEvent.CANCEL_ACK): CState.FENCED,
    (CState.FENCED, CEvent.PEER_LOST): CState.FENCED,
    (CState.LOST, CEvent.STOP): CState.LOST,
    (CState.LOST, CEvent.CANCEL_ACK): CState.LOST,
    (CState.LOST, CEvent.PEER_LOST): CState.LOST,
    (CState.LOST, CEvent.QUARANTINE_OVER): CState.FENCED,
}


class Outcome(enum.Enum):
    """What the engine is told about a request. Each is reported at most once per session."""

    SENT = "sent"  # producer: blocks may be freed
    RECEIVED = "received"  # consumer: every byte is there
    FAILED = "failed"  # consumer: the load failed; blocks stay ours
    RELEASED = "released"  # consumer, after FAILED or abort: blocks may be freed


@dataclass(frozen=True, slots=True)
class Send:
    """Send a notification to the agent named ``peer``."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Post a WRITE of ``segment``'s tokens to ``peer``; report its end under ``write_id``."""

    peer: str
    write_id: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the engine, with the reason when it is bad news."""

    outcome: Outcome
    reason: Reason | None = None
    detail: str = ""


Action = Send | Write | Report


@dataclass(frozen=True, slots=True)
class Prompt:
    """What both sides must agree on before a byte moves."""

    num_tokens: int
    digest: bytes

    def explain_mismatch(self, other: Prompt) -> str | None:
        if self.num_tokens != other.num_tokens:
            return (
                f"producer's prompt has {self.num_tokens} tokens, consumer's "
                f"{other.num_tokens}: the router must send both legs the same body"
            )
        if self.digest and other.digest and self.digest != other.digest:
            return (
                f"prompts of {self.num_tokens} tokens differ in content: the router must send "
                "both legs the same body, and both engines must use the same tokenizer"
            )
        return None
