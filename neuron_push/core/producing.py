"""The producer half of a transfer thread: prefills under way and the WRITEs they cause."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field

from neuron_push.core.agent import AgentError, WriteState
from neuron_push.core.coalesce import PlanError
from neuron_push.core.commands import (
    BeginProducer,
    FailProducer,
    FinishProducer,
    Progress,
    Result,
)
from neuron_push.core.flights import Flight, Flights, post_segment
from neuron_push.core.messages import (
    Cancel,
    CancelAck,
    MessageError,
    Nack,
    Reason,
    Register,
)
from neuron_push.core.peers import PeerRank
from neuron_push.core.producer import ProducerSession
from neuron_push.core.registration import Tables, checked_tables, over_limit
from neuron_push.core.session import Action, Outcome, PState, Report, Send, Write
from neuron_push.core.shop import Shop

logger = logging.getLogger(__name__)


@dataclass
class _Prefill:
    """One producer request of the engine, and what was sent of it."""

    request_id: str
    key: str
    tables: list[list[int]]
    begun_s: float
    num_bytes: int = 0
    num_segments: int = 0
    num_descriptors: int = 0


@dataclass
class _Drain:
    """Somebody waits until these requests have no WRITE in flight."""

    sessions: list[ProducerSession]
    done: threading.Event = field(default_factory=threading.Event)


class Producing:
    """Owner: the transfer thread."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._sessions: dict[str, ProducerSession] = {}
        self._prefills: dict[str, _Prefill] = {}  # by request id
        self._by_key: dict[str, _Prefill] = {}
        self._registered: dict[tuple[str, str], Tables] = {}  # (key, peer) -> block tables
        self._flights = Flights(shop)
        self._drains: list[_Drain] = []
        self._strangers: set[str] = set()  # requests whose key another one had first
        # WRITEs of an abandoned agent: (end of quarantine, session, peer, write id)
        self._ghosts: list[tuple[float, ProducerSession, str, int]] = []

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    # ------------------------------------------------------------ the engine

    def begin(self, command: BeginProducer, now_s: float) -> None:
        first = self._by_key.get(command.key)
        if first is not None and first.request_id != command.request_id:
            logger.warning(
                "transfer %s: request %s came while request %s has this key: it is not pushed. "
                "The router must give each dispatch a transfer_id of its own.",
                command.key,
                command.request_id,
                first.request_id,
            )
            self._strangers.add(command.request_id)
            return
        if command.request_id not in self._prefills:
            groups = self._shop.layout.num_groups
            prefill = _Prefill(command.request_id, command.key, [[] for _ in range(groups)], now_s)
            self._prefills[command.request_id] = prefill
            self._by_key[command.key] = prefill
        session = self._session(command.key)
        self._do(session, session.on_begin(command.prompt, now_s), now_s)

    def progress(self, command: Progress, now_s: float) -> None:
        prefill = self._prefills.get(command.request_id)
        if prefill is None:
            return
        if command.replace:
            prefill.tables = [list(ids) for ids in command.new_blocks]
        else:
            for table, ids in zip(prefill.tables, command.new_blocks, strict=True):
                table.extend(ids)
        session = self._sessions[prefill.key]
        self._do(session, session.on_progress(command.final_tokens, now_s), now_s)

    def finish(self, command: FinishProducer, now_s: float) -> None:
        if self._turn_away(command.request_id, held=True):
            return
        prefill = self._prefills.get(command.request_id)
        if prefill is not None:
            session = self._sessions[prefill.key]
            self._do(session, session.on_finish(now_s), now_s)

    def fail(self, command: FailProducer, now_s: float) -> None:
        if self._turn_away(command.request_id, held=command.held):
            return
        if command.request_id not in self._prefills and command.held:
            prefill = _Prefill(command.request_id, command.key, [], now_s)
            self._prefills[command.request_id] = self._by_key[command.key] = prefill
        session = self._session(command.key)
        self._do(
            session,
            session.on_fail(command.reason, command.detail, held=command.held, now_s=now_s),
            now_s,
        )

    def _turn_away(self, request_id: str, *, held: bool) -> bool:
        """True for a request whose key another one had: its blocks go back at once."""
        if request_id not in self._strangers:
            return False
        self._strangers.discard(request_id)
        if held:
            self._shop.report(Result(request_id, Outcome.SENT))
        return True

    def suspend(self, request_ids: tuple[str, ...]) -> threading.Event:
        """Post nothing more for these; the event is set when nothing of theirs is in flight."""
        drain = _Drain([])
        for request_id in request_ids:
            prefill = self._prefills.get(request_id)
            if prefill is not None:
                session = self._sessions[prefill.key]
                session.on_suspend()
                drain.sessions.append(session)
        self._drains.append(drain)
        self._check_drains()
        return drain.done

    # ------------------------------------------------------------ the wire

    def on_register(self, peer: PeerRank, message: Register, now_s: float) -> None:
        try:
            tables = checked_tables(peer, message)
        except MessageError as e:
            self._shop.quiet.warning(
                logger, f"register {peer.name}", "registration by %s refused: %s", peer.name, e
            )
            self._refuse(peer, message.nonce, Reason.BAD_REGISTRATION, str(e), now_s)
            return
        num_bytes = peer.layout.table_bytes(tables)
        if message.key not in peer.sending:
            detail = over_limit(peer, num_bytes, self._shop.limits)
            if detail:
                self._refuse(peer, message.nonce, Reason.BUSY, detail, now_s)
                return
        session = self._session(message.key)
        actions = session.on_register(
            peer.name,
            message,
            unit_tokens=peer.unit_tokens,
            num_consumers=peer.engine.num_consumers,
            engine=peer.engine.identity.incarnation,
            now_s=now_s,
        )
        leg = session.legs.get(peer.name)
        if leg is not None and leg.register is message:
            self._registered[message.key, peer.name] = tables
            if message.key not in peer.queued:
                peer.enqueue(message.key, num_bytes)
        self._do(session, actions, now_s)

    def _refuse(
        self, peer: PeerRank, nonce: int, reason: Reason, detail: str, now_s: float
    ) -> None:
        """No session has heard of this registration, and nothing will be written for it."""
        self._shop.counters.refusal(reason)
        self._shop.send(peer.name, Nack(nonce, reason, detail), now_s)
        self._shop.send(peer.name, CancelAck(nonce), now_s)

    def on_cancel(self, peer: PeerRank, message: Cancel, now_s: float) -> None:
        session = self._session(message.key)
        actions = session.on_cancel(
            peer.name,
            message,
            num_consumers=peer.engine.num_consumers,
            engine=peer.engine.identity.incarnation,
            now_s=now_s,
        )
        self._do(session, actions, now_s)

    def on_renew(self, peer: PeerRank, key: str, now_s: float) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        for action in session.on_renew(peer.name, now_s):
            if isinstance(action, Send):  # nothing else; no refusal that is new
                self._shop.send(action.peer, action.message, now_s)
        if not session.is_over:
            self._shop.timers.set(("p", key), session.deadline_s)

    def on_peer_lost(self, name: str, key: str, now_s: float) -> None:
        session = self._sessions.get(key)
        if session is not None:
            self._do(session, session.on_peer_lost(name, now_s), now_s)

    def on_timer(self, key: str, now_s: float) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        if session.is_over:
            del self._sessions[key]  # a tombstone has served its time
            return
        self._do(session, session.on_tick(now_s), now_s)

    def poll_writes(self, now_s: float) -> bool:
        """True if a WRITE ended. Also drives NIXL."""
        ended = self._flights.take_ended()
        for flight, state in ended:
            name, session = flight.peer.name, flight.session
            if state is WriteState.DONE:
                actions = session.on_write_done(name, flight.write_id)
            else:
                self._shop.counters.event("failed_write")
                detail = f"WRITE to {name} ended in an error"
                actions = session.on_write_failed(name, flight.write_id, detail)
            self._do(session, actions, now_s)
        if ended:
            return True
        for flight in self._flights.newly_stalled(now_s):
            name, stall_s = flight.peer.name, self._shop.limits.stall_timeout_s
            detail = f"a WRITE to {name} makes no progress for {stall_s:g} s"
            self._do(flight.session, flight.session.on_stall(name, detail), now_s)
        return False

    @property
    def stuck_since_s(self) -> float:
        """See :class:`Flights`."""
        return self._flights.stuck_since_s

    def take_over(self, old: Producing, now_s: float) -> None:
        """Go on with the requests of a loop whose agent is gone.

        Transfers that had a consumer fail; the others wait for theirs as before. Blocks that
        the old agent's WRITEs may still read go back after the quarantine.
        """
        self._sessions, self._prefills = old._sessions, old._prefills
        self._by_key, self._strangers = old._by_key, old._strangers
        self._registered = old._registered
        release_s = now_s + self._shop.limits.quarantine_s
        known = {(session.key, name, write_id) for _, session, name, write_id in old._ghosts}
        # What is in flight as the sessions see it: that a call to post it never returned does
        # not mean that it was not posted.
        self._ghosts = old._ghosts + [
            (release_s, session, leg.peer, write_id)
            for session in old._sessions.values()
            for leg in session.legs.values()
            for write_id in leg.in_flight
            if (session.key, leg.peer, write_id) not in known
        ]
        for drain in old._drains:
            drain.done.set()
        for session in list(self._sessions.values()):
            for name in session.open_peers():
                self._do(session, session.on_peer_lost(name, now_s), now_s)
            self._shop.timers.set(("p", session.key), session.deadline_s)
        self._set_ghost_timer()

    def on_ghost_timer(self, now_s: float) -> None:
        """The quarantine of an abandoned agent's WRITEs is over."""
        due = [ghost for ghost in self._ghosts if ghost[0] <= now_s]
        self._ghosts = [ghost for ghost in self._ghosts if ghost[0] > now_s]
        for _, session, name, write_id in due:
            self._do(session, session.on_write_done(name, write_id), now_s)
        self._set_ghost_timer()

    # ------------------------------------------------------------ inside

    def _set_ghost_timer(self) -> None:
        """To the end of the first quarantine; none when there is no ghost left."""
        ends_s = (ghost[0] for ghost in self._ghosts)
        self._shop.timers.set(("g", ""), min(ends_s, default=math.inf))

    def _session(self, key: str) -> ProducerSession:
        session = self._sessions.get(key)
        if session is None:
            limits = self._shop.limits
            session = ProducerSession(
                key, lease_s=limits.lease_s, patience_s=limits.request_timeout_s
            )
            self._sessions[key] = session
        return session

    def _do(self, session: ProducerSession, actions: list[Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, Nack):
                    self._shop.counters.refusal(action.message.reason)
                    logger.warning(
                        "transfer %s: refused to %s: %s: %s",
                        session.key,
                        action.peer,
                        action.message.reason.value,
                        action.message.detail,
                    )
                self._shop.send(action.peer, action.message, now_s)
            elif isinstance(action, Write):
                self._post(session, action, now_s)
            else:
                self._report(session, action, now_s)
        self._mark_open(session, now_s)
        deadline_s = session.deadline_s
        if session.is_over:
            self._by_key.pop(session.key, None)
            for leg in session.legs.values():
                self._registered.pop((session.key, leg.peer), None)
            # It stays as a tombstone, to answer what comes late.
            deadline_s = now_s + self._shop.limits.request_timeout_s
        self._shop.timers.set(("p", session.key), deadline_s)
        if self._drains:
            self._check_drains()

    def _mark_open(self, session: ProducerSession, now_s: float) -> None:
        """Peers learn whether their death would concern this transfer."""
        for leg in session.legs.values():
            peer = self._shop.peers.ranks.get(leg.peer)
            if peer is None:
                continue
            if leg.closed:
                peer.sending.pop(session.key, None)
            elif session.key not in peer.sending:
                peer.need(now_s)
                peer.sending[session.key] = None
            if peer.queued and leg.state is not PState.OPEN:
                peer.dequeue(session.key)

    def _post(self, session: ProducerSession, action: Write, now_s: float) -> None:
        peer = self._shop.peers.ranks.get(action.peer)
        prefill = self._by_key.get(session.key)
        try:
            if peer is None or prefill is None:
                raise AgentError(f"{action.peer} is not connected")
            register = session.legs[peer.name].register
            if register is None:
                raise AgentError(f"nothing was registered by {peer.name}")
            tables = self._registered[session.key, peer.name]
            posted = post_segment(
                self._shop, peer, register, action.segment, prefill.tables, tables
            )
        except (AgentError, PlanError) as e:
            self._shop.counters.event("failed_write")
            actions = session.on_write_failed(action.peer, action.write_id, str(e))
            self._do(session, actions, now_s)
            return
        prefill.num_bytes += posted.num_bytes
        prefill.num_descriptors += posted.num_descriptors
        prefill.num_segments += 1
        peer.last_sent_s = now_s
        if posted.handle is None:
            self._do(session, session.on_write_done(action.peer, action.write_id), now_s)
            return
        self._flights.add(Flight(posted.handle, peer, session, action.write_id, now_s))

    def _report(self, session: ProducerSession, action: Report, now_s: float) -> None:
        prefill = self._by_key.get(session.key)
        if prefill is None or action.outcome is not Outcome.SENT:
            return
        self._prefills.pop(prefill.request_id, None)
        self._shop.report(
            Result(
                prefill.request_id,
                Outcome.SENT,
                num_bytes=prefill.num_bytes,
                num_segments=prefill.num_segments,
                num_descriptors=prefill.num_descriptors,
                duration_s=now_s - prefill.begun_s,
            )
        )
        logger.debug(
            "transfer %s: request %s: pushed %d bytes in %d segments, %d descriptors, %.4f s",
            session.key,
            prefill.request_id,
            prefill.num_bytes,
            prefill.num_segments,
            prefill.num_descriptors,
            now_s - prefill.begun_s,
        )

    def _check_drains(self) -> None:
        for drain in self._drains:
            if not any(session.num_in_flight for session in drain.sessions):
                drain.done.set()
        self._drains = [drain for drain in self._drains if not drain.done.is_set()]
