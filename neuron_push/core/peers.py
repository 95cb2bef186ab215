"""The engines this rank has met, and for each of their ranks: agent, keys, plans, liveness."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import ClassVar

from neuron_push.core.agent import Agent, AgentError, Memory
from neuron_push.core.layout import KvLayout
from neuron_push.core.link import MeetPeer
from neuron_push.core.messages import Identity, Seal, pair_key
from neuron_push.core.pairing import RankPair, pair_ranks
from neuron_push.core.plan import PairPlan

logger = logging.getLogger(__name__)


@dataclass
class PeerRank:
    """One rank of a peer engine.

    ``outgoing`` plans WRITEs from this rank to it, ``incoming`` the other way; None where the
    two have no KV in common in that direction. Its death would
    concern ``sending`` (keys of transfers to it, an ordered set) and ``loading`` (request id ->
    key of transfers from it); ``announced`` keys will be registered once there are blocks.
    ``queued`` (key -> bytes) are its registrations whose last segment is not posted yet.
    """

    name: str
    engine: PeerEngine
    seal: Seal
    layout: KvLayout
    outgoing: PairPlan | None
    incoming: PairPlan | None
    unit_tokens: int
    last_heard_s: float
    last_sent_s: float = 0.0
    sending: dict[str, None] = field(default_factory=dict)
    loading: dict[str, str] = field(default_factory=dict)
    announced: dict[str, None] = field(default_factory=dict)
    num_writes: int = 0
    is_lost: bool = False
    queued: dict[str, int] = field(default_factory=dict)
    queued_bytes: int = 0

    def enqueue(self, key: str, num_bytes: int) -> None:
        """It has registered these bytes."""
        self.queued[key] = num_bytes
        self.queued_bytes += num_bytes

    def dequeue(self, key: str) -> None:
        """Its last segment is posted, or it gets no more. Once more is harmless."""
        self.queued_bytes -= self.queued.pop(key, 0)

    def need(self, now_s: float) -> None:
        """A transfer with it opens: its silence counts from here."""
        if not self.is_needed:
            self.last_heard_s = now_s

    @property
    def is_needed(self) -> bool:
        """Whether a transfer with it is open."""
        return bool(self.sending or self.loading)

    @property
    def memory(self) -> Memory:
        return Memory.of(self.layout)


@dataclass
class PeerEngine:
    """A peer engine as this rank sees it.

    ``producers``: its ranks that this rank, as a consumer, must register with.
    ``num_consumers``: how many of its ranks register with this rank as a producer.
    """

    identity: Identity
    ranks: list[PeerRank] = field(default_factory=list)
    producers: list[PeerRank] = field(default_factory=list)
    num_consumers: int = 0
    confirmed_s: float = 0.0

    FRESH_S: ClassVar[float] = 1.0

    def is_fresh(self, now_s: float) -> bool:
        """Whether it proved a moment ago that it is still the same living process.

        Else its side channel is asked first: a registration sent to a process that has been
        restarted would be lost, and only the peer time-out would tell.
        """
        heard_s = max((peer.last_heard_s for peer in self.ranks), default=0.0)
        return now_s - max(heard_s, self.confirmed_s) < self.FRESH_S


def registrars(pairs: list[RankPair], num_src: int, num_dst: int) -> list[list[int]]:
    """For each producer rank, the consumer ranks that register with it.

    A producer rank that writes to nobody (its KV heads are replicas) still has to hear from
    one consumer rank that its blocks can be freed: consumer rank ``src % num_dst``.
    """
    lists: list[list[int]] = [[] for _ in range(num_src)]
    for pair in pairs:
        lists[pair.src].append(pair.dst)
    for src, consumers in enumerate(lists):
        if not consumers:
            consumers.append(src % num_dst)
    return lists


class PeerTable:
    """All peers of one rank. Owner: the transfer thread."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent = agent
        self._rank = rank
        self.engines: dict[str, PeerEngine] = {}
        self.ranks: dict[str, PeerRank] = {}
        self._leaving: dict[str, PeerRank] = {}  # dropped, with WRITEs in flight

    def find(self, engine_id: str) -> PeerEngine | None:
        return self.engines.get(engine_id)

    def meet(self, message: MeetPeer, now_s: float) -> PeerEngine:
        """Add the ranks of this engine that this rank deals with. Raises AgentError, PlanError.

        The caller has dropped an earlier connection to the same engine. On an error none of its
        ranks is there.
        """
        engine = PeerEngine(message.theirs.identity, confirmed_s=now_s)
        try:
            self._add_ranks(engine, message, now_s)
        except Exception:
            self.drop(engine)
            raise
        self.engines[engine.identity.engine_id] = engine
        return engine

    def _add_ranks(self, engine: PeerEngine, message: MeetPeer, now_s: float) -> None:
        mine = [card.layout for card in message.mine.ranks]
        theirs = [card.layout for card in message.theirs.ranks]
        to_them = pair_ranks(mine, theirs)
        to_us = pair_ranks(theirs, mine)
        their_registrars = registrars(to_them, len(mine), len(theirs))[self._rank]
        our_producers = [
            src
            for src, consumers in enumerate(registrars(to_us, len(theirs), len(mine)))
            if self._rank in consumers
        ]
        outgoing = {pair.dst: pair for pair in to_them if pair.src == self._rank}
        incoming = {pair.src: pair for pair in to_us if pair.dst == self._rank}
        engine.num_consumers = len(their_registrars)
        own = mine[self._rank]
        for index in sorted({*their_registrars, *our_producers}):
            card = message.theirs.ranks[index]
            name = self._agent.add_peer(card.nixl_metadata)
            if name != card.agent_name:
                raise AgentError(
                    f"rank {index} of engine {engine.identity.engine_id!r} calls its NIXL agent "
                    f"{card.agent_name!r}, its metadata says {name!r}"
                )
            out, into = outgoing.get(index), incoming.get(index)
            secrets = (message.my_secret, message.their_secret)
            peer = PeerRank(
                name=name,
                engine=engine,
                seal=Seal(
                    pair_key(*secrets, self._agent.name, name),
                    pair_key(*secrets, name, self._agent.name),
                ),
                layout=card.layout,
                outgoing=PairPlan(own, card.layout, out.shares) if out else None,
                incoming=PairPlan(card.layout, own, into.shares) if into else None,
                unit_tokens=common_unit(own, card.layout),
                last_heard_s=now_s,
            )
            engine.ranks.append(peer)
            self.ranks[name] = peer
            if index in our_producers:
                engine.producers.append(peer)

    def is_leaving(self, message: MeetPeer) -> bool:
        """Whether WRITEs to one of these agents are in flight from before it was dropped.

        Adding it again would make NIXL report them as failed while they still land.
        """
        return any(card.agent_name in self._leaving for card in message.theirs.ranks)

    def drop(self, engine: PeerEngine) -> None:
        """Disconnect from all ranks of an engine; those with WRITEs in flight stay in NIXL.

        NIXL must not lose a peer's metadata while something is in flight with it; a new
        incarnation has other agent names, so what stays behind is in nobody's way.
        """
        for peer in engine.ranks:
            peer.is_lost = True
            self.ranks.pop(peer.name, None)
            if peer.num_writes == 0:
                self.forget(peer)
            else:
                self._leaving[peer.name] = peer
        if self.engines.get(engine.identity.engine_id) is engine:
            del self.engines[engine.identity.engine_id]

    def forget(self, peer: PeerRank) -> None:
        """Remove a dropped rank from NIXL, unless it has been added again since.

        NIXL may refuse to take leave of a dead peer: what it keeps is a little memory.
        """
        self._leaving.pop(peer.name, None)
        if peer.name in self.ranks:
            return
        try:
            self._agent.remove_peer(peer.name)
        except AgentError as e:
            logger.info("peer %s: %s", peer.name, e)

    def silent(self, now_s: float, timeout_s: float) -> list[PeerRank]:
        """Ranks with open transfers that have not been heard for ``timeout_s``."""
        return [
            peer
            for peer in self.ranks.values()
            if peer.is_needed and now_s - peer.last_heard_s > timeout_s
        ]


def common_unit(mine: KvLayout, theirs: KvLayout) -> int:
    """Tokens after which a block ends on both sides, in every group."""
    sizes = {
        layout.tokens_per_block(group)
        for layout in (mine, theirs)
        for group in range(layout.num_groups)
    }
    return math.lcm(*sizes)
