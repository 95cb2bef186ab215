"""The consumer half of a transfer thread: registrations, and the segments that arrive."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neuron_push.core.coalesce import PlanError
from neuron_push.core.commands import (
    AbortConsumer,
    AnnounceConsumer,
    FailConsumer,
    OpenConsumer,
    Result,
    Target,
)
from neuron_push.core.consumer import ConsumerSession
from neuron_push.core.link import DialRequest
from neuron_push.core.messages import (
    Cancel,
    CancelAck,
    Identity,
    Message,
    Nack,
    Reason,
    Register,
    Segment,
    pack_blocks,
)
from neuron_push.core.peers import PeerEngine, PeerRank
from neuron_push.core.session import Action, CState, Outcome, Report, Send
from neuron_push.core.shop import Shop, window
from neuron_push.core.silent import SilentRanks

logger = logging.getLogger(__name__)

AskDial = Callable[[DialRequest], None]
"""Hands a DialRequest to the engine's side channel."""


ASK_AGAIN_S = 1.0
"""How often a producer that fell silent is asked for, while it might still write."""


@dataclass
class _Load:
    """One consumer request of the engine."""

    request_id: str
    target: Target
    session: ConsumerSession
    opened: OpenConsumer | None = None
    begun_s: float = 0.0
    num_bytes: int = 0
    verified: bool = True
    tables: tuple[npt.NDArray[np.int64], ...] = ()
    open_bytes: int = 0  # registered, and not given back yet
    silent: SilentRanks = field(default_factory=SilentRanks)
    next_ask_s: float = 0.0


class Consuming:
    """Owner: the transfer thread. ``ask`` passes a request for a connection to the engine."""

    def __init__(self, shop: Shop, ask: AskDial) -> None:
        self._shop = shop
        self._ask = ask
        self._loads: dict[str, _Load] = {}  # by request id
        self._by_nonce: dict[int, _Load] = {}
        self._waiting: dict[str, dict[str, None]] = {}  # engine id -> request ids
        self._unfenced: dict[str, _Load] = {}  # those with silent producers, by request id
        self._open_bytes = 0  # of all loads together
        self._max_open_bytes = shop.limits.max_open_bytes(shop.layout)

    @property
    def num_open(self) -> int:
        return len(self._loads)

    # ------------------------------------------------------------ the engine

    def announce(self, command: AnnounceConsumer, now_s: float) -> None:
        load = self._load(command.request_id, command.key, command.target, now_s)
        engine = self._shop.peers.find(command.target.engine_id)
        if engine is None or not engine.is_fresh(now_s):
            self._ask(_dial(command.target))
        else:
            self._introduce(load, engine, now_s)

    def open(self, command: OpenConsumer, now_s: float) -> None:
        load = self._load(command.request_id, command.key, command.target, now_s)
        load.opened = command
        load.begun_s = now_s
        engine = self._shop.peers.find(command.target.engine_id)
        if engine is not None and engine.is_fresh(now_s):
            self._register(load, engine, now_s)
            return
        self._waiting.setdefault(command.target.engine_id, {})[command.request_id] = None
        self._ask(_dial(command.target))
        # Longer than the side channel's own patience, whose sentence says more than ours.
        patience_s = 1.2 * self._shop.limits.handshake_timeout_s
        self._shop.timers.set(("h", command.request_id), now_s + patience_s)

    def fail(self, command: FailConsumer, now_s: float) -> None:
        """A load that cannot be: reported failed and released at once."""
        load = self._load(command.request_id, f"?{command.request_id}", Target("", 1, ""), now_s)
        self._do(load, load.session.on_fail(command.reason, command.detail, now_s), now_s)

    def abort(self, command: AbortConsumer, now_s: float) -> None:
        load = self._loads.get(command.request_id)
        if load is None:
            return
        self._do(load, load.session.on_abort(now_s), now_s)

    # ------------------------------------------------------------ connections

    def on_met(self, engine: PeerEngine, now_s: float) -> None:
        """An engine has been met, or has shown that it lives: what waited for it can go."""
        engine.confirmed_s = now_s
        for request_id in self._waiting.pop(engine.identity.engine_id, {}):
            load = self._loads.get(request_id)
            if load is not None:
                self._shop.timers.set(("h", request_id), math.inf)
                self._register(load, engine, now_s)
        for load in self._loads.values():
            if load.opened is None and load.target.engine_id == engine.identity.engine_id:
                self._introduce(load, engine, now_s)
        for load in list(self._unfenced.values()):
            cancel = Cancel(load.session.key, load.session.nonce)
            self._do(load, [Send(name, cancel) for name in load.silent.found(engine)], now_s)

    def on_identity(self, identity: Identity, now_s: float) -> None:
        """This process has the name now: an earlier one that had it is dead."""
        for load in list(self._unfenced.values()):
            self._bury(load, load.silent.dead(identity), now_s)

    def on_dead(self, address: str, now_s: float) -> None:
        """No process listens at this side channel any more."""
        for load in list(self._unfenced.values()):
            if load.target.address == address:
                self._bury(load, load.silent.all_dead(), now_s)

    def on_dial_failed(self, address: str, sentence: str, now_s: float) -> None:
        for engine_id, request_ids in list(self._waiting.items()):
            for request_id in list(request_ids):
                load = self._loads.get(request_id)
                if load is None or load.target.address == address:
                    del request_ids[request_id]
                    if load is not None:
                        self._fail_handshake(load, sentence, now_s)
            if not request_ids:
                del self._waiting[engine_id]

    def on_handshake_timer(self, request_id: str, now_s: float) -> None:
        load = self._loads.get(request_id)
        if load is None or load.session.legs:
            return
        self._waiting.get(load.target.engine_id, {}).pop(request_id, None)
        timeout_s = self._shop.limits.handshake_timeout_s
        sentence = f"no connection to {load.target.address} within {timeout_s:g} s"
        self._fail_handshake(load, sentence, now_s)

    def on_peer_silent(self, peer: PeerRank, request_id: str, now_s: float) -> None:
        """Fails the load at once. Its blocks stay taken until nothing can land in them.

        Forgetting a peer does not keep its WRITEs out: one that was only stopped, or cut off,
        goes on writing when it can. So: its process is dead, or it has answered our Cancel, or
        this rank's agent has been replaced.
        """
        load = self._loads.get(request_id)
        if load is None or peer.name not in load.session.legs:
            return
        load.silent.add(peer, now_s)
        self._unfenced[request_id] = load
        detail = f"producer rank {peer.name} is gone"
        self._do(load, load.session.on_fail(Reason.PEER_LOST, detail, now_s), now_s)

    def care(self, now_s: float) -> None:
        """Ask for producers that fell silent."""
        for load in list(self._unfenced.values()):
            if load.session.is_over or not load.silent:
                del self._unfenced[load.request_id]
            elif now_s >= load.next_ask_s:
                load.next_ask_s = now_s + ASK_AGAIN_S
                self._ask(_dial(load.target, is_suspect=True))

    @property
    def unfenced_since_s(self) -> float:
        """When the first of those producers fell silent; infinity without any."""
        return min((load.silent.since_s for load in self._unfenced.values()), default=math.inf)

    def take_over(self, old: Consuming, now_s: float) -> None:
        """Go on with the requests of a loop whose agent is gone: open loads fail by name."""
        self._loads, self._by_nonce = old._loads, old._by_nonce
        self._open_bytes = old._open_bytes
        for load in list(self._loads.values()):
            if load.opened is None:
                self._ask(_dial(load.target))
                continue
            if not load.session.legs:
                self.open(load.opened, now_s)  # it was still waiting for its producer
                continue
            load.silent = SilentRanks()
            names = list(load.session.legs)
            detail = "this rank's NIXL agent had to be given up"
            self._do(load, load.session.on_fail(Reason.NIXL_STUCK, detail, now_s), now_s)
            for name in names:
                self._do(load, load.session.on_peer_lost(name, now_s), now_s)

    # ------------------------------------------------------------ the wire

    def on_message(self, peer: PeerRank, message: Message, now_s: float) -> None:
        if not isinstance(message, Segment | Nack | CancelAck):
            return
        load = self._by_nonce.get(message.nonce)
        if load is None:
            return
        session = load.session
        if isinstance(message, Segment):
            mismatch = self._verify(load, peer, message)
            if mismatch:
                self._do(load, session.on_fail(Reason.DIGEST_MISMATCH, mismatch, now_s), now_s)
            self._do(load, session.on_segment(peer.name, message, now_s), now_s)
        elif isinstance(message, Nack):
            self._do(load, session.on_nack(peer.name, message, now_s), now_s)
        else:
            self._do(load, session.on_cancel_ack(peer.name, message, now_s), now_s)

    def on_timer(self, request_id: str, now_s: float) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            self._do(load, load.session.on_tick(now_s), now_s)

    # ------------------------------------------------------------ inside

    def _load(self, request_id: str, key: str, target: Target, now_s: float) -> _Load:
        load = self._loads.get(request_id)
        if load is not None:
            return load
        limits = self._shop.limits
        session = ConsumerSession(
            key,
            secrets.randbits(63),
            patience_s=limits.request_timeout_s,
            quarantine_s=limits.quarantine_s,
        )
        load = _Load(request_id, target, session, begun_s=now_s)
        self._loads[request_id] = load
        self._by_nonce[session.nonce] = load
        self._shop.timers.set(("c", request_id), session.deadline_s)
        return load

    def _introduce(self, load: _Load, engine: PeerEngine, now_s: float) -> None:
        """Renew leases for an announced request by heartbeat until it registers."""
        load.session.on_announce(tuple(peer.name for peer in engine.producers))
        for peer in engine.producers:
            peer.announced[load.session.key] = None

    def _register(self, load: _Load, engine: PeerEngine, now_s: float) -> None:
        command = load.opened
        if command is None:
            return
        load.tables = tuple(np.asarray(ids, dtype=np.int64) for ids in command.blocks)
        num_bytes = self._shop.layout.table_bytes(load.tables)
        over = self._over_limit(engine, num_bytes)
        if over:
            self._introduce(load, engine, now_s)  # so that it hears of the end
            self._do(load, load.session.on_fail(Reason.BUSY, over, now_s), now_s)
            return
        load.num_bytes = load.open_bytes = num_bytes
        self._open_bytes += num_bytes
        blocks = tuple(pack_blocks(ids) for ids in load.tables)
        nothing = (command.end_token, command.end_token, command.base_token)
        messages: dict[str, Register] = {}
        for peer in engine.producers:
            peer.announced.pop(load.session.key, None)
            first, end, base = (
                (command.first_token, command.end_token, command.base_token)
                if peer.incoming is not None
                else nothing
            )
            messages[peer.name] = Register(
                key=command.key,
                nonce=load.session.nonce,
                num_prompt_tokens=command.prompt.num_tokens,
                prompt_hash=command.prompt.digest,
                first_token=first,
                end_token=end,
                base_token=base,
                blocks=blocks if first < end else (),
                verify=self._shop.verify,
            )
        self._do(load, load.session.on_register(messages, now_s), now_s)

    def _over_limit(self, engine: PeerEngine, num_bytes: int) -> str:
        """Why no more may be registered with this engine now; empty when it may.

        The producer would refuse it too: this spares it the question. A load counts until its
        blocks are given back.
        """
        limit = self._shop.limits.max_open_per_peer
        for peer in engine.producers:
            if len(peer.loading) >= limit:
                return f"{len(peer.loading)} loads from {peer.name} are open: the limit"
        if self._open_bytes + num_bytes > self._max_open_bytes:
            return (
                f"open loads hold {self._open_bytes} bytes, and with {num_bytes} more it would be "
                f"over {self._max_open_bytes}: the limit, which is the size of this rank's KV "
                "memory"
            )
        return ""

    def _bury(self, load: _Load, names: list[str], now_s: float) -> None:
        for name in names:
            self._do(load, load.session.on_peer_lost(name, now_s), now_s)

    def _fail_handshake(self, load: _Load, sentence: str, now_s: float) -> None:
        self._do(load, load.session.on_fail(Reason.HANDSHAKE, sentence, now_s), now_s)

    def _verify(self, load: _Load, peer: PeerRank, segment: Segment) -> str:
        """A sentence when what arrived is not what was sent; empty when it is, or unknown."""
        command, plan = load.opened, peer.incoming
        if not segment.digest:
            load.verified = False
            return ""
        if command is None or plan is None:
            return "a segment arrived for a request that registered nothing"
        first, end = segment.first_token, segment.end_token
        try:
            tables, base = window(self._shop.layout, load.tables, command.base_token, first, end)
            ranges = plan.ranges("dst", tables, first, end, base_token=base)
        except PlanError as e:
            return f"segment {segment.index}: {e}"
        if self._shop.digest(ranges) != segment.digest:
            return (
                f"tokens {first} to {end - 1} arrived with other bytes than {peer.name} sent: "
                "memory was written by somebody else, or the layouts are not what the cards say"
            )
        return ""

    def _do(self, load: _Load, actions: list[Action], now_s: float) -> None:
        session = load.session
        for action in actions:
            if isinstance(action, Send):
                self._send(load, action, now_s)
            elif isinstance(action, Report):
                self._report(load, action, now_s)
        for leg in session.legs.values():
            peer = self._shop.peers.ranks.get(leg.peer)
            if peer is None:
                continue
            if leg.state not in (CState.OPEN, CState.FENCING):
                peer.loading.pop(load.request_id, None)
            elif load.request_id not in peer.loading:
                peer.need(now_s)
                peer.loading[load.request_id] = session.key
        self._shop.timers.set(("c", load.request_id), session.deadline_s)
        if session.is_over:
            self._loads.pop(load.request_id, None)
            self._by_nonce.pop(session.nonce, None)
            self._open_bytes -= load.open_bytes
            load.open_bytes = 0
            self._shop.timers.set(("h", load.request_id), math.inf)
            engine = self._shop.peers.find(load.target.engine_id)
            for peer in engine.producers if engine else ():
                peer.announced.pop(session.key, None)

    def _send(self, load: _Load, action: Send, now_s: float) -> None:
        agent, message = action.peer, action.message
        if isinstance(message, Cancel):
            logger.debug("transfer %s: cancel to %s", message.key, agent)
        is_sent = self._shop.send(agent, message, now_s)
        if not is_sent and isinstance(message, Register):
            # Nobody else would say so before the request's time is over. What was sent to other
            # ranks, or will be, they are asked to forget: a cancel may come first.
            self._fail_handshake(load, f"the registration could not be sent to {agent}", now_s)

    def _report(self, load: _Load, action: Report, now_s: float) -> None:
        session = load.session
        good = action.outcome is Outcome.RECEIVED
        if action.outcome is Outcome.FAILED:
            logger.warning(
                "transfer %s: request %s: load failed: %s: %s",
                session.key,
                load.request_id,
                action.reason.value if action.reason else "",
                action.detail,
            )
        if (
            load.opened is None
            and action.outcome is not Outcome.FAILED
            and action.reason is (Reason.CANCELLED)
        ):
            return  # aborted before it had blocks: the engine waits for nothing
        self._shop.report(
            Result(
                load.request_id,
                action.outcome,
                action.reason,
                action.detail,
                num_bytes=load.num_bytes if good else 0,
                num_segments=session.num_segments if good else 0,
                duration_s=now_s - load.begun_s,
                verified=good and load.verified and session.num_segments > 0,
            )
        )


def _dial(target: Target, *, is_suspect: bool = False) -> DialRequest:
    return DialRequest(target.host, target.port, target.engine_id, is_suspect)
