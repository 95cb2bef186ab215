"""The few NIXL calls we use, behind one small class.

After start-up the transfer thread alone makes these calls. Facts about NIXL that this file
relies on (measured with nixl 1.4.1): without NIXL's progress thread nothing moves unless
somebody polls; a posted WRITE cannot be cancelled and its handle must not be released while
it is in progress; ``add_remote_agent`` may not return for a dead peer on LIBFABRIC.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from neuron_push.core.layout import Allocation, KvLayout

if TYPE_CHECKING:
    from neuron_push.core.plan import Copies


class AgentError(RuntimeError):
    """NIXL refused. The text says which call, on which peer, and what NIXL said."""


class AgentAbandonedError(BaseException):
    """This agent was given up while a call of its did not return; its thread must end.

    No Exception: nothing on the way out may take it for an error to recover from.
    """


class Memory(NamedTuple):
    """Where one end of a WRITE lies: NIXL's memory type ("DRAM", "VRAM") and device id."""

    memory_type: str
    device_id: int

    @classmethod
    def of(cls, layout: KvLayout) -> Memory:
        """Where a rank's KV lies."""
        return cls(layout.memory_type, layout.allocations[0].device_id)


class WriteState(enum.Enum):
    BUSY = "busy"
    DONE = "done"
    FAILED = "failed"


class Agent(Protocol):
    """What the transfer thread needs of NIXL. Every method may raise AgentError."""

    name: str
    backend: str

    def abandon_if_stuck(self, timeout_s: float) -> str | None:
        """From another thread: give the agent up if a call has not returned for so long.

        Returns the call's name then. From that moment the call's own thread gets
        AgentAbandonedError if it ever returns, and the agent must not be used again.
        """

    def register(self, allocations: tuple[Allocation, ...], memory_type: str) -> None:
        """Make this memory reachable. Once, before :meth:`metadata`."""

    def memory_types(self) -> list[str]:
        """What the backend says it can register, such as ``["DRAM", "VRAM"]``."""

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and its memory."""

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer's agent name. Both sides must poll while either adds the other."""

    def remove_peer(self, peer: str) -> None:
        """Disconnect. Only when no WRITE to this peer is in flight."""

    def post_write(
        self, peer: str, copies: Copies, local: Memory, remote: Memory, notification: bytes
    ) -> object:
        """Start a WRITE; ``notification`` reaches the peer after its last byte. A handle."""

    def poll_write(self, handle: object) -> WriteState:
        """Also drives progress."""

    def release(self, handle: object) -> None:
        """Forget a handle that is DONE or FAILED."""

    def notify(self, peer: str, notification: bytes) -> None:
        """Send bytes without a WRITE."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """What has arrived, with the sender's agent name. Also drives progress."""

    def close(self) -> None:
        """Give the memory back. No call may follow."""


class NixlAgent:
    """One NIXL agent with one backend, without NIXL's own progress thread.

    Owner: the transfer thread, but for :meth:`abandon_if_stuck`, a watchdog's.
    """

    POLL_PATIENCE_S = 1.0
    """On LIBFABRIC one dead peer makes polls of any WRITE raise, for a moment: a WRITE has
    failed when its own state says so, or when its polls have raised for this long."""

    def __init__(self, name: str, backend: str, parameters: dict[str, str] | None = None) -> None:
        self.name = name
        self.backend = backend
        self._lock = threading.Lock()
        self._call: tuple[str, float] | None = None
        self._is_abandoned = False
        self._raising_since_s: dict[object, float] = {}
        self._registered: list[object] = []
        # NIXL is an optional dependency and heavy: imported where an agent is made.
        from nixl._api import nixl_agent, nixl_agent_config

        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=[])
            self._nixl = nixl_agent(name, config)
            self._nixl.create_backend(backend, parameters or {})
        except Exception as e:
            raise AgentError(
                f"NIXL backend {backend!r} cannot be created: {e!r}. If NIXL says only "
                "'unsupported backend', a library its plugin needs is not on the loader path: "
                "run with NIXL_LOG_LEVEL=DEBUG to see which."
            ) from e

    def abandon_if_stuck(self, timeout_s: float) -> str | None:
        with self._lock:
            if self._call is None or time.monotonic() - self._call[1] < timeout_s:
                return None
            self._is_abandoned = True
            return self._call[0]

    def register(self, allocations: tuple[Allocation, ...], memory_type: str) -> None:
        rows = [(a.address, a.num_bytes, a.device_id, "") for a in allocations]
        with _Timed(self, "register_memory"):
            self._registered.append(self._nixl.register_memory(rows, memory_type))

    def memory_types(self) -> list[str]:
        with _Timed(self, "get_backend_mem_types"):
            names = self._nixl.get_backend_mem_types(self.backend)
        return [str(name).removesuffix("_SEG") for name in names]

    def metadata(self) -> bytes:
        with _Timed(self, "get_agent_metadata"):
            return bytes(self._nixl.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        with _Timed(self, "add_remote_agent"):
            name = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, peer: str) -> None:
        with _Timed(self, f"remove_remote_agent {peer}"):
            self._nixl.remove_remote_agent(peer)

    def post_write(
        self, peer: str, copies: Copies, local: Memory, remote: Memory, notification: bytes
    ) -> object:
        source = _descriptors(copies.src_addr, copies.num_bytes, local.device_id)
        target = _descriptors(copies.dst_addr, copies.num_bytes, remote.device_id)
        with _Timed(self, f"WRITE to {peer}"):
            handle = self._nixl.initialize_xfer(
                "WRITE",
                self._nixl.get_xfer_descs(source, local.memory_type),
                self._nixl.get_xfer_descs(target, remote.memory_type),
                peer,
                notification,
            )
            if self._nixl.transfer(handle) == "ERR":
                handle.release()
                raise AgentError(f"NIXL WRITE to {peer} could not be posted")
        return handle

    def poll_write(self, handle: object) -> WriteState:
        try:
            with _Timed(self, "check_xfer_state"):
                state = self._nixl.check_xfer_state(handle)
        except AgentError as e:
            if "RemoteDisconnect" in repr(e.__cause__):
                return WriteState.FAILED
            now_s = time.monotonic()
            since_s = self._raising_since_s.setdefault(handle, now_s)
            return WriteState.FAILED if now_s - since_s > self.POLL_PATIENCE_S else WriteState.BUSY
        if state == "DONE":
            return WriteState.DONE
        return WriteState.BUSY if state == "PROC" else WriteState.FAILED

    def release(self, handle: object) -> None:
        self._raising_since_s.pop(handle, None)
        with _Timed(self, "release_xfer_handle"):
            self._nixl.release_xfer_handle(handle)

    def notify(self, peer: str, notification: bytes) -> None:
        with _Timed(self, f"send_notif to {peer}"):
            self._nixl.send_notif(peer, notification)

    def notifications(self) -> list[tuple[str, bytes]]:
        with _Timed(self, "get_new_notifs"):
            arrived = self._nixl.get_new_notifs()
        if not arrived:
            return []
        return [(sender, blob) for sender, blobs in arrived.items() for blob in blobs]

    def close(self) -> None:
        for registration in self._registered:
            with _Timed(self, "deregister_memory"):
                self._nixl.deregister_memory(registration)
        self._registered.clear()
        with _Timed(self, "destroy agent"):
            del self._nixl


class _Timed:
    """Marks the NIXL call in progress, and turns whatever NIXL raises into an AgentError."""

    __slots__ = ("_agent", "_name")

    def __init__(self, agent: NixlAgent, name: str) -> None:
        self._agent = agent
        self._name = name

    def __enter__(self) -> None:
        self._agent._call = (self._name, time.monotonic())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._agent._lock:
            self._agent._call = None
            if self._agent._is_abandoned:
                raise AgentAbandonedError(self._name)
        if isinstance(error, Exception) and not isinstance(error, AgentError):
            raise AgentError(f"NIXL {self._name} ({self._agent.backend}): {error!r}") from error


def _descriptors(
    address: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], device_id: int
) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(address), 3), dtype=np.uint64)
    rows[:, 0] = address
    rows[:, 1] = num_bytes
    rows[:, 2] = device_id
    return rows
