"""What the engine's threads tell the transfer thread, and what it tells them.

The scheduler half of the connector makes these, vLLM carries them to the workers inside the
step's metadata, and the worker half hands them on unchanged. All are plain picklable data, and
msgspec's, because the engine's threads make, pickle and read them between two forwards.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import msgspec

from neuron_push.core.messages import Reason
from neuron_push.core.session import Outcome, Prompt


class Marker(Protocol):
    """All work submitted to the device up to some moment, as the device backend sees it."""

    def done(self) -> bool:
        """True when that work is visible to the NIC. Cheap; polled by the transfer thread."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for that, at most `timeout_s`, without the interpreter lock; what `done` says."""


class Target(msgspec.Struct, frozen=True):
    """Where a consumer's producer is, as the router told it."""

    host: str
    port: int
    engine_id: str

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


# ------------------------------------------------------------ producer


class BeginProducer(msgspec.Struct, frozen=True):
    """A prefill whose KV somebody will want has been scheduled for the first time."""

    request_id: str
    key: str
    prompt: Prompt


class Progress(msgspec.Struct, frozen=True):
    """One producer request in one step.

    ``new_blocks[g]`` are appended to the request's table of group ``g``; with ``replace`` they
    are the whole table (first step, or resumed after a preemption). ``final_tokens`` is what
    is valid once the step's marker is done.
    """

    request_id: str
    new_blocks: tuple[tuple[int, ...], ...]
    replace: bool
    final_tokens: int


class StepDone(msgspec.Struct, frozen=True):
    """The work of one step has been submitted to the device."""

    progress: tuple[Progress, ...]
    marker: Marker


class FinishProducer(msgspec.Struct, frozen=True):
    """The engine has finished the request and holds its blocks until SENT is reported."""

    request_id: str


class FailProducer(msgspec.Struct, frozen=True):
    """The producer's request failed. ``held``: its blocks wait for SENT."""

    request_id: str
    key: str
    reason: Reason
    detail: str
    held: bool


# ------------------------------------------------------------ consumer


class AnnounceConsumer(msgspec.Struct, frozen=True):
    """A request that will want KV has arrived: meet its producer now."""

    request_id: str
    key: str
    target: Target


class OpenConsumer(msgspec.Struct, frozen=True):
    """Blocks are allocated: register them with the producer.

    Tokens ``[first_token, end_token)`` are wanted (empty: nothing, the producer may free its
    blocks). ``blocks[g][i]`` holds tokens from ``base_token + i * tokens_per_block`` on.
    """

    request_id: str
    key: str
    target: Target
    prompt: Prompt
    first_token: int
    end_token: int
    base_token: int
    blocks: tuple[tuple[int, ...], ...]


class FailConsumer(msgspec.Struct, frozen=True):
    """The request cannot be loaded, for a reason known before anything was sent.

    ``blocks[g]`` are those that the load would have filled.
    """

    request_id: str
    reason: Reason
    detail: str
    blocks: tuple[tuple[int, ...], ...] = ()


class AbortConsumer(msgspec.Struct, frozen=True):
    """The engine gave the request up; its blocks wait for RELEASED if it was opened."""

    request_id: str


Command = (
    BeginProducer
    | Progress
    | StepDone
    | FinishProducer
    | FailProducer
    | AnnounceConsumer
    | OpenConsumer
    | FailConsumer
    | AbortConsumer
)


# ------------------------------------------------------------ answers


class Result(msgspec.Struct, frozen=True):
    """What became of a request on this rank. The numbers are 0 on FAILED and RELEASED."""

    request_id: str
    outcome: Outcome
    reason: Reason | None = None
    detail: str = ""
    num_bytes: int = 0
    num_segments: int = 0
    num_descriptors: int = 0
    duration_s: float = 0.0
    verified: bool = False


Event = Literal["dropped_notification", "failed_write", "lost_peer", "replaced_agent"]


class Counters:
    """What happened to a rank since its start, beside what its requests report.

    Counted by the transfer thread and its watchdog, read by any other, without a lock: a reader
    may miss the newest count, never an older one.

    num_changes: grows with every count.
    events: by kind.
    refusals: loads that this rank, as a producer, said no to, by reason.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.events: dict[str, int] = dict.fromkeys(get_args(Event), 0)
        self.refusals: dict[str, int] = {}

    def event(self, kind: Event) -> None:
        self.events[kind] += 1
        self.num_changes += 1

    def refusal(self, reason: Reason) -> None:
        self.refusals[reason.value] = self.refusals.get(reason.value, 0) + 1
        self.num_changes += 1
