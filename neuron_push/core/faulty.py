"""An agent that fails on purpose: the double that tests put around a real one.

Faults are planned per call. The plan outlives an agent: one that replaces an abandoned agent
goes on with what is left of it.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field

from neuron_push.core.agent import (
    Agent,
    AgentAbandonedError,
    AgentError,
    Memory,
    WriteState,
)
from neuron_push.core.layout import Allocation
from neuron_push.core.plan import Copies


class Kind(enum.StrEnum):
    RAISE = "raise"  # the call raises AgentError without being made
    BLOCK = "block"  # the call takes block_s longer; the watchdog sees that it has not returned
    FAILED = "failed"  # poll_write: a WRITE that has ended reports an error instead
    DROP = "drop"  # notifications: the next one to arrive is lost
    DUPLICATE = "duplicate"  # notifications: the next one arrives twice
    REORDER = "reorder"  # notifications: the next one arrives after the one behind it


@dataclass
class Fault:
    """``call``: the method's name. It lets ``skip`` calls pass, then strikes ``times`` calls."""

    call: str
    kind: Kind
    times: int = 1
    skip: int = 0
    block_s: float = 0.0


@dataclass
class FaultPlan:
    """What is still to go wrong; may be added to from any thread."""

    faults: list[Fault] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)  # "call kind" of each fault that happened
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self.faults.extend(faults)

    def clear(self) -> None:
        with self._lock:
            self.faults.clear()

    def take(self, call: str, *kinds: Kind) -> Fault | None:
        """The fault that strikes this call, if one does."""
        with self._lock:
            for fault in self.faults:
                if fault.call != call or fault.kind not in kinds:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                self.struck.append(f"{call} {fault.kind.value}")
                return fault
        return None


class FaultyAgent:
    """Passes every call on to ``inner``, but for what ``plan`` says."""

    def __init__(self, inner: Agent, plan: FaultPlan) -> None:
        self.name = inner.name
        self.backend = inner.backend
        self._inner = inner
        self._plan = plan
        self._lock = threading.Lock()
        self._blocked: tuple[str, float] | None = None
        self._is_abandoned = False
        self._late: list[tuple[str, bytes]] = []

    def abandon_if_stuck(self, timeout_s: float) -> str | None:
        with self._lock:
            if self._blocked is not None:
                call, since_s = self._blocked
                if time.monotonic() - since_s < timeout_s:
                    return None
                self._is_abandoned = True
                return call
        return self._inner.abandon_if_stuck(timeout_s)

    def register(self, allocations: tuple[Allocation, ...], memory_type: str) -> None:
        self._strike("register")
        self._inner.register(allocations, memory_type)

    def metadata(self) -> bytes:
        self._strike("metadata")
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> str:
        self._strike("add_peer")
        return self._inner.add_peer(metadata)

    def remove_peer(self, peer: str) -> None:
        self._strike("remove_peer")
        self._inner.remove_peer(peer)

    def post_write(
        self, peer: str, copies: Copies, local: Memory, remote: Memory, notification: bytes
    ) -> object:
        self._strike("post_write")
        return self._inner.post_write(peer, copies, local, remote, notification)

    def poll_write(self, handle: object) -> WriteState:
        self._strike("poll_write")
        state = self._inner.poll_write(handle)
        # A handle in progress must not be released: the error is told when it has ended.
        if state is WriteState.DONE and self._plan.take("poll_write", Kind.FAILED):
            return WriteState.FAILED
        return state

    def release(self, handle: object) -> None:
        self._strike("release")
        self._inner.release(handle)

    def notify(self, peer: str, notification: bytes) -> None:
        self._strike("notify")
        self._inner.notify(peer, notification)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._strike("notifications")
        arrived: list[tuple[str, bytes]] = []
        for one in self._inner.notifications():
            fault = self._plan.take("notifications", Kind.DROP, Kind.DUPLICATE, Kind.REORDER)
            if fault is None:
                arrived += [one, *self._late]
                self._late.clear()
            elif fault.kind is Kind.DUPLICATE:
                arrived += [one, one]
            elif fault.kind is Kind.REORDER:
                self._late.append(one)
        return arrived

    def close(self) -> None:
        self._strike("close")
        self._inner.close()

    def _strike(self, call: str) -> None:
        fault = self._plan.take(call, Kind.RAISE, Kind.BLOCK)
        if fault is None:
            return
        if fault.kind is Kind.RAISE:
            raise AgentError(f"NIXL {call}: a planned fault")
        with self._lock:
            self._blocked = (call, time.monotonic())
        time.sleep(fault.block_s)
        with self._lock:
            self._blocked = None
            if self._is_abandoned:
                raise AgentAbandonedError(call)
