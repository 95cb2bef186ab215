"""What a transfer thread does: one rank's agent, peers and sessions, a turn at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from neuron_push.core.agent import Agent, AgentError
from neuron_push.core.coalesce import PlanError
from neuron_push.core.commands import (
    AbortConsumer,
    AnnounceConsumer,
    BeginProducer,
    Command,
    Counters,
    FailConsumer,
    FailProducer,
    FinishProducer,
    OpenConsumer,
    Progress,
    Result,
    StepDone,
)
from neuron_push.core.consuming import Consuming
from neuron_push.core.layout import KvLayout, LayoutError
from neuron_push.core.link import (
    Confirmed,
    Dead,
    DialFailed,
    MeetPeer,
    PeerLost,
    Polling,
    WorkerLink,
)
from neuron_push.core.messages import (
    Cancel,
    Heartbeat,
    MessageError,
    RankCard,
    Register,
)
from neuron_push.core.oncepermin import OncePerMinute
from neuron_push.core.peers import PeerRank, PeerTable
from neuron_push.core.producing import Producing
from neuron_push.core.shop import Limits, ReadMemory, Shop, read_host_memory
from neuron_push.core.timers import Timers

logger = logging.getLogger(__name__)

BUSY_POLL_S = 100e-6
"""Pause between polls while something is in flight: below it the core spins for nothing,
above it a completion is seen late (NIXL 1.4.1 over tcp: flat from 50 to 200 us)."""

IDLE_POLL_S = 1e-3
LINK_POLL_S = 1e-3
KEYS_PER_HEARTBEAT = 256

T = TypeVar("T")


class RebuildError(Exception):
    """This agent holds memory that it will not give back: its loop wants a new one."""


@dataclass(frozen=True)
class RankSetup:
    """What one rank's transfer thread is made of.

    make_agent: runs on the thread itself.
    confirm: looks at an agent that has registered the memory, on the thread; what it raises is
        what ``start`` raises.
    describe_rails: the rank's rails card, asked for after that, on the thread. Never raises.
    """

    rank: int
    layout: KvLayout
    make_agent: Callable[[], Agent]
    link_path: str
    limits: Limits
    verify: bool = False
    read_memory: ReadMemory = read_host_memory
    confirm: Callable[[Agent], None] | None = None
    describe_rails: Callable[[], bytes] = bytes


@dataclass
class Suspend:
    """A caller waits until these requests have nothing in flight."""

    request_ids: tuple[str, ...]
    accepted: threading.Event
    drained: threading.Event | None = None


@dataclass
class Inbox:
    """What the engine's threads share with the transfer thread; it outlives an agent."""

    commands: deque[Command | Suspend] = field(default_factory=deque)
    counters: Counters = field(default_factory=Counters)
    quiet: OncePerMinute = field(default_factory=OncePerMinute)


class RankLoop:
    """Everything that belongs to one NIXL agent. Owner: the thread that calls :meth:`turn`.

    ``old``: the loop this one replaces, whose thread is stuck or has ended; its requests are
    taken over. Raises what setting up raises.
    """

    def __init__(
        self,
        setup: RankSetup,
        inbox: Inbox,
        report: Callable[[Result], None],
        old: RankLoop | None = None,
    ) -> None:
        self._setup = setup
        self.inbox = inbox
        agent = setup.make_agent()
        agent.register(setup.layout.allocations, setup.layout.memory_type)
        if setup.confirm is not None:
            setup.confirm(agent)
        card = RankCard(
            agent.name, agent.backend, agent.metadata(), setup.layout, setup.describe_rails()
        )
        self.agent = agent
        self._shop = Shop(
            agent=agent,
            layout=setup.layout,
            peers=PeerTable(agent, setup.rank),
            limits=setup.limits,
            timers=Timers(),
            counters=inbox.counters,
            quiet=inbox.quiet,
            read_memory=setup.read_memory,
            report=report,
            verify=setup.verify,
        )
        self._link = WorkerLink(setup.link_path, setup.rank)
        self._producing = Producing(self._shop)
        self._consuming = Consuming(self._shop, self._link.send)
        self._steps: deque[StepDone] = deque()
        self._next_link_s = 0.0
        self._next_care_s = 0.0
        if old is not None:
            now_s = time.monotonic()
            old.hang_up()
            self._steps = old._steps
            self._producing.take_over(old._producing, now_s)
            self._consuming.take_over(old._consuming, now_s)
        self._link.announce(card)

    def turn(self) -> float:
        """One round; returns how long to pause before the next."""
        now_s = time.monotonic()
        worked = self._take_commands(now_s)
        worked |= self._take_steps(now_s)
        worked |= self._take_notifications(now_s)
        if self._producing.num_flights:
            worked |= self._producing.poll_writes(now_s)
        if now_s >= self._next_link_s:
            self._next_link_s = now_s + LINK_POLL_S
            self._take_link(now_s)
        for name in self._shop.timers.due(now_s):
            self._on_timer(name, now_s)
        if now_s >= self._next_care_s:
            self._next_care_s = now_s + self._shop.limits.peer_timeout_s / 10
            self._care_for_peers(now_s)
        if worked:
            return 0.0
        busy = self._producing.num_flights or self._consuming.num_open or self._steps
        return BUSY_POLL_S if busy else IDLE_POLL_S

    def hang_up(self) -> None:
        """Close the link of a loop whose thread will not use it again. Once more is harmless.

        A ZeroMQ context with an open socket must not be left to the garbage collector, which
        would wait for the socket for ever.
        """
        self._link.close()

    def tear_down(self) -> None:
        """Give the memory back to whom it belongs: no WRITE of a peer can land in it any more."""
        self.hang_up()
        try:
            if self._producing.num_flights == 0:
                self.agent.close()
        except AgentError as e:
            logger.warning("rank %d: closing NIXL: %s", self._setup.rank, e)

    # ------------------------------------------------------------ from the engine

    def _take_commands(self, now_s: float) -> bool:
        worked = False
        while self.inbox.commands:
            worked = True
            command = self.inbox.commands.popleft()
            if isinstance(command, StepDone):
                self._steps.append(command)
            elif isinstance(command, Progress):
                self._producing.progress(command, now_s)
            elif isinstance(command, BeginProducer):
                self._producing.begin(command, now_s)
            elif isinstance(command, FinishProducer):
                self._producing.finish(command, now_s)
            elif isinstance(command, FailProducer):
                self._producing.fail(command, now_s)
            elif isinstance(command, AnnounceConsumer):
                self._consuming.announce(command, now_s)
            elif isinstance(command, OpenConsumer):
                self._consuming.open(command, now_s)
            elif isinstance(command, FailConsumer):
                self._consuming.fail(command, now_s)
            elif isinstance(command, AbortConsumer):
                self._consuming.abort(command, now_s)
            else:
                self._suspend(command)
        return worked

    def _suspend(self, command: Suspend) -> None:
        # What these requests computed before is void: their blocks are being taken away.
        self._steps = deque(
            StepDone(
                tuple(p for p in step.progress if p.request_id not in command.request_ids),
                step.marker,
            )
            for step in self._steps
        )
        command.drained = self._producing.suspend(command.request_ids)
        command.accepted.set()

    def _take_steps(self, now_s: float) -> bool:
        worked = False
        while self._steps and self._steps[0].marker.done():
            worked = True
            for progress in self._steps.popleft().progress:
                self._producing.progress(progress, now_s)
        return worked

    # ------------------------------------------------------------ from peers

    def _take_notifications(self, now_s: float) -> bool:
        try:
            arrived = self.agent.notifications()
        except AgentError as e:
            # One dead peer can make the poll of all fail (LIBFABRIC); whose silence it was, the
            # heartbeats tell.
            self._shop.quiet.warning(logger, "poll", "rank %d: %s", self._setup.rank, e)
            return False
        for sender, blob in arrived:
            peer = self._shop.peers.ranks.get(sender)
            if peer is None:
                self._drop(sender, "it is not connected")
                continue
            try:
                message = peer.seal.open(blob)
            except MessageError as e:
                self._drop(sender, str(e))
                continue
            peer.last_heard_s = now_s
            if isinstance(message, Register):
                self._producing.on_register(peer, message, now_s)
            elif isinstance(message, Cancel):
                self._producing.on_cancel(peer, message, now_s)
            elif isinstance(message, Heartbeat):
                for key in message.open_keys:
                    self._producing.on_renew(peer, key, now_s)
            else:
                self._consuming.on_message(peer, message, now_s)
        return bool(arrived)

    def _drop(self, sender: str, why: str) -> None:
        self.inbox.counters.event("dropped_notification")
        self._shop.quiet.warning(
            logger, f"drop {sender}", "notification from %r dropped: %s", sender, why
        )

    def _care_for_peers(self, now_s: float) -> None:
        """Heartbeats while transfers are open, and the death of those that are silent."""
        limits = self._shop.limits
        for peer in self._shop.peers.silent(now_s, limits.peer_timeout_s):
            if not peer.is_lost:
                self._lose(peer, f"not heard for {limits.peer_timeout_s:g} s", now_s)
        self._consuming.care(now_s)
        self._check_stuck(now_s)
        beat_s = limits.peer_timeout_s / 4
        for peer in list(self._shop.peers.ranks.values()):
            if (peer.is_needed or peer.announced) and now_s - peer.last_sent_s >= beat_s:
                keys = tuple(_rotate(peer, KEYS_PER_HEARTBEAT))
                self._shop.send(peer.name, Heartbeat(keys), now_s)

    def _check_stuck(self, now_s: float) -> None:
        """Whether peers that fell silent hold memory that only a new agent can give back.

        A posted WRITE cannot be cancelled, ours or theirs. Nobody else is disturbed while
        others' transfers are open, for a while. Raises RebuildError.
        """
        limits = self._shop.limits
        ours_s, theirs_s = self._producing.stuck_since_s, self._consuming.unfenced_since_s
        waited_s = now_s - min(ours_s, theirs_s)
        nobody_else = not any(peer.is_needed for peer in self._shop.peers.ranks.values())
        patience_s = limits.peer_timeout_s + 2 * limits.quarantine_s
        if waited_s > (patience_s if nobody_else else limits.request_timeout_s):
            raise RebuildError(
                "WRITEs to lost peers do not end"
                if ours_s <= theirs_s
                else "a producer that fell silent, and may not be dead, could still write"
            )

    def _lose(self, peer: PeerRank, sentence: str, now_s: float, *, tell: bool = True) -> None:
        """Give up the whole engine this rank belongs to. ``tell``: our own engine too."""
        engine = peer.engine
        if any(rank.is_needed for rank in engine.ranks):
            logger.warning("peer %s lost: %s", peer.name, sentence)
            self.inbox.counters.event("lost_peer")
        else:
            logger.info("peer %s forgotten: %s", peer.name, sentence)
        self._shop.peers.drop(engine)
        for rank in engine.ranks:
            for key in list(rank.sending):
                self._producing.on_peer_lost(rank.name, key, now_s)
            for request_id in list(rank.loading):
                self._consuming.on_peer_silent(rank, request_id, now_s)
        if tell:
            identity = engine.identity
            self._link.send(PeerLost(identity.engine_id, identity.incarnation, sentence))

    # ------------------------------------------------------------ from our engine

    def _take_link(self, now_s: float) -> None:
        for message in self._link.poll(now_s):
            if isinstance(message, MeetPeer):
                self._meet(message, now_s)
            elif isinstance(message, DialFailed):
                self._consuming.on_dial_failed(message.address, message.sentence, now_s)
            elif isinstance(message, Dead):
                self._consuming.on_dead(message.address, now_s)
            elif isinstance(message, Confirmed):
                engine = self._shop.peers.find(message.engine_id)
                if engine is not None and engine.identity.incarnation == message.incarnation:
                    self._consuming.on_met(engine, now_s)

    def _meet(self, message: MeetPeer, now_s: float) -> None:
        identity = message.theirs.identity
        known = self._shop.peers.find(identity.engine_id)
        if known is not None:
            self._lose(known.ranks[0], "it has connected again", now_s, tell=False)
        self._consuming.on_identity(identity, now_s)
        is_leaving = self._shop.peers.is_leaving(message)
        if message.ack and is_leaving:
            return  # without our word, our engine tells the caller to ask again
        if message.ack:
            self._link.send(Polling(self._setup.rank, message.ack))
        try:
            if is_leaving:
                raise AgentError("WRITEs from before it was lost have not ended")
            engine = self._shop.peers.meet(message, now_s)
        except (AgentError, PlanError, LayoutError) as e:
            sentence = f"engine {identity.engine_id!r} cannot be added: {e}"
            logger.warning("rank %d: %s", self._setup.rank, sentence)
            self._link.send(PeerLost(identity.engine_id, identity.incarnation, sentence))
            address = f"{identity.host}:{identity.port}"
            self._consuming.on_dial_failed(address, sentence, now_s)
            return
        self._consuming.on_met(engine, now_s)

    def _on_timer(self, name: object, now_s: float) -> None:
        if not isinstance(name, tuple):
            return
        kind, key = name
        if kind == "p":
            self._producing.on_timer(key, now_s)
        elif kind == "c":
            self._consuming.on_timer(key, now_s)
        elif kind == "g":
            self._producing.on_ghost_timer(now_s)
        elif kind == "h":
            self._consuming.on_handshake_timer(key, now_s)


def _rotate(peer: PeerRank, num_keys: int) -> list[str]:
    """The next keys of ours to renew with this producer: each of a long list has its turn."""
    keys = _head(peer.announced, num_keys)
    loading = _head(peer.loading, num_keys - len(keys))
    return keys + [peer.loading[request_id] for request_id in loading]


def _head(ordered: dict[str, T], num: int) -> list[str]:
    """Take the first ``num`` entries of an ordered dict and move them to its end."""
    head = list(islice(ordered, num))
    for name in head:
        ordered[name] = ordered.pop(name)
    return head
