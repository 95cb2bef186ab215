"""What the producer and the consumer half of the transfer thread share."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from neuron_push.core.agent import Agent, AgentError, Memory
from neuron_push.core.coalesce import Ranges
from neuron_push.core.commands import Counters, Result
from neuron_push.core.layout import KvLayout
from neuron_push.core.messages import Message
from neuron_push.core.oncepermin import OncePerMinute
from neuron_push.core.peers import PeerTable
from neuron_push.core.timers import Timers

logger = logging.getLogger(__name__)

Table = TypeVar("Table", list[int], npt.NDArray[np.int64])

ReadMemory = Callable[[int, int], bytes]
"""(address, bytes) -> the bytes there; from the device backend."""


@dataclass(frozen=True)
class Limits:
    """The times that sessions live by, all in seconds, see PushConfig; and two bounds.

    max_open_per_peer: transfers that one consumer rank may have open with one producer rank.
    always_open_bytes: that much a rank may ask for however small its KV memory is; beyond it no
        more than that memory holds, see :meth:`max_open_bytes`.
    """

    lease_s: float
    request_timeout_s: float
    peer_timeout_s: float
    handshake_timeout_s: float
    quarantine_s: float
    stall_timeout_s: float = 30.0
    nixl_call_timeout_s: float = 3.0
    max_open_per_peer: int = 16384
    always_open_bytes: int = 64 << 20

    def max_open_bytes(self, layout: KvLayout) -> int:
        """What the loads of a consumer rank with this layout may have open together.

        No block is in two loads at a time, so an honest rank never asks for more than it has.
        """
        return max(layout.pool_bytes, self.always_open_bytes)


@dataclass
class Shop:
    """One rank's tools. Owner: the transfer thread; nothing here is touched by another."""

    agent: Agent
    layout: KvLayout
    peers: PeerTable
    limits: Limits
    timers: Timers
    counters: Counters
    quiet: OncePerMinute
    read_memory: ReadMemory
    report: Callable[[Result], None]
    verify: bool

    @property
    def memory(self) -> Memory:
        """Where this rank's own KV lies."""
        return Memory.of(self.layout)

    def send(self, name: str, message: Message, now_s: float) -> bool:
        """To a peer's agent. False for a peer that is gone, or a notification that fails: no
        error for most, since the peer's silence is noticed by its heartbeat.
        """
        peer = self.peers.ranks.get(name)
        if peer is None:
            return False
        try:
            self.agent.notify(name, peer.seal.seal(message))
        except AgentError as e:
            self.quiet.warning(logger, f"notify {name}", "%s", e)
            return False
        peer.last_sent_s = now_s
        return True

    def digest(self, ranges: Ranges) -> bytes:
        """Of the bytes at these ranges, in their order: 16 bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for address, num_bytes in zip(ranges.addr.tolist(), ranges.num_bytes.tolist(), strict=True):
            digest.update(self.read_memory(address, num_bytes))
        return digest.digest()


def read_host_memory(address: int, num_bytes: int) -> bytes:
    """For memory that the CPU can read at its own address."""
    return ctypes.string_at(address, num_bytes)


def window(
    layout: KvLayout, tables: Sequence[Table], base_token: int, first: int, end: int
) -> tuple[list[Table], int]:
    """The entries of each group's table that hold tokens [first, end), and their base token.

    ``tables[g][i]`` holds tokens from ``base_token + i * tokens_per_block(g)`` on. Cut so that
    work per segment is O(blocks of the segment), not of the request.
    """
    sizes = [layout.tokens_per_block(group) for group in range(layout.num_groups)]
    step = max(sizes)
    start = base_token + (first - base_token) // step * step
    if any((start - base_token) % size for size in sizes):
        start = base_token
    cut = [
        table[(start - base_token) // size : -(-(end - base_token) // size)]
        for table, size in zip(tables, sizes, strict=True)
    ]
    return cut, start
