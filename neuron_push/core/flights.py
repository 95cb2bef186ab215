"""A segment becomes a posted WRITE; posted WRITEs are watched until they end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuron_push.core.agent import AgentError, WriteState
from neuron_push.core.messages import Register, Segment
from neuron_push.core.peers import PeerRank
from neuron_push.core.producer import ProducerSession
from neuron_push.core.registration import Tables
from neuron_push.core.shop import Shop, window

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Posted:
    """handle: None when there are no bytes, and the notification was all there is."""

    handle: object | None
    num_bytes: int
    num_descriptors: int


def post_segment(
    shop: Shop,
    peer: PeerRank,
    register: Register,
    segment: Segment,
    source_tables: Sequence[list[int]],
    target_tables: Tables,
) -> Posted:
    """WRITE a segment's bytes, and its notification after them.

    source_tables: ours, from token 0 on; target_tables: the peer's, from the registration's
    base token on. Raises AgentError, PlanError.
    """
    plan, layout = peer.outgoing, shop.layout
    if plan is None:
        raise AgentError(f"nothing was registered by {peer.name}")
    first, end = segment.first_token, segment.end_token
    source, source_base = window(layout, source_tables, 0, first, end)
    target, target_base = window(peer.layout, target_tables, register.base_token, first, end)
    source_ids = [np.asarray(ids, dtype=np.int64) for ids in source]
    copies = plan.copies(
        source_ids,
        target,
        first,
        end,
        src_base_token=source_base,
        dst_base_token=target_base,
    )
    if register.verify:
        ranges = plan.ranges(
            "src",
            source_ids,
            first,
            end,
            base_token=source_base,
            peer_blocks=target,
            peer_base_token=target_base,
        )
        segment = Segment(
            segment.nonce, segment.index, segment.count, first, end, shop.digest(ranges)
        )
    blob = peer.seal.seal(segment)
    handle = None
    if copies.num_copies == 0:
        shop.agent.notify(peer.name, blob)
    else:
        handle = shop.agent.post_write(peer.name, copies, shop.memory, peer.memory, blob)
    return Posted(handle, copies.total_bytes, copies.num_copies)


@dataclass
class Flight:
    """A posted WRITE."""

    handle: object
    peer: PeerRank
    session: ProducerSession
    write_id: int
    posted_s: float
    is_stalled: bool = False


class Flights:
    """All that are posted and have not ended. Owner: the transfer thread."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        flight.peer.num_writes += 1
        self._flights.append(flight)

    def take_ended(self) -> list[tuple[Flight, WriteState]]:
        """Those that have ended since the last call. Also drives NIXL."""
        agent = self._shop.agent
        ended: list[tuple[Flight, WriteState]] = [
            (flight, state)
            for flight in self._flights
            if (state := agent.poll_write(flight.handle)) is not WriteState.BUSY
        ]
        if not ended:
            return ended
        gone = {id(flight) for flight, _ in ended}
        self._flights = [flight for flight in self._flights if id(flight) not in gone]
        for flight, _ in ended:
            try:
                agent.release(flight.handle)
            except AgentError as e:
                self._shop.quiet.warning(logger, "release", "%s", e)  # it has ended all the same
            peer = flight.peer
            peer.num_writes -= 1
            if peer.is_lost and peer.num_writes == 0:
                self._shop.peers.forget(peer)
        return ended

    def newly_stalled(self, now_s: float) -> list[Flight]:
        """Those that make no progress for too long, each once."""
        stall_s = self._shop.limits.stall_timeout_s
        if not self._flights or now_s - self._flights[0].posted_s <= stall_s:
            return []  # the first is the oldest
        stalled = [
            flight
            for flight in self._flights
            if not flight.is_stalled and now_s - flight.posted_s > stall_s
        ]
        for flight in stalled:
            flight.is_stalled = True
        return stalled

    @property
    def stuck_since_s(self) -> float:
        """When the first WRITE in flight to a lost peer was posted; infinity without any.

        Its memory stays taken: a posted WRITE cannot be cancelled, and its peer's metadata must
        stay while it is in flight.
        """
        return min((f.posted_s for f in self._flights if f.peer.is_lost), default=math.inf)
