"""The side channel: where engines meet, exchange cards, and tell routers who they are.

One per engine, in its scheduler process, on one TCP port. First contact is two-sided: the
caller's card goes over, the callee's ranks confirm that they are polling, the callee's card
comes back, and only then do the ranks on both sides add each other to NIXL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from neuron_push.core.asking import SideChannelError
from neuron_push.core.keys import SideKeys
from neuron_push.core.knock import Knock
from neuron_push.core.link import (
    Confirmed,
    Dead,
    DialFailed,
    DialRequest,
    MeetPeer,
    PeerLost,
    Polling,
    RankKnown,
    RankUp,
    decode_up,
    encode,
    is_readable,
)
from neuron_push.core.messages import (
    MAX_CARD_BYTES,
    EngineCard,
    Hello,
    IAm,
    Identity,
    MessageError,
    NotReady,
    RankCard,
    Refuse,
    SideMessage,
    TheseRails,
    Welcome,
    WhichRails,
    WhoAreYou,
    decode_side,
    encode_side,
)
from neuron_push.core.oncepermin import OncePerMinute

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 2.0
"""How long a rank may take to confirm that it polls: one NIXL call, one Python step."""

PROBE_TIMEOUT_S = 1.0


@dataclass
class _Dial:
    """A connection being made: we are the caller."""

    host: str
    port: int
    engine_id: str
    socket: zmq.Socket[bytes]
    deadline_s: float
    keep_trying: bool
    secret: bytes
    next_hello_s: float = 0.0
    last_word: str = ""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class _Probe:
    """A peer that we have met is asked whether it still is the same process."""

    dial: DialRequest
    incarnation: str
    socket: zmq.Socket[bytes]
    deadline_s: float


@dataclass
class _Answer:
    """A caller waiting for our ranks to confirm that they poll."""

    caller: bytes
    hello: Hello
    secret: bytes
    deadline_s: float
    missing: set[int] = field(default_factory=set)


MakeCard = Callable[[Identity, tuple[RankCard, ...]], EngineCard]
Judge = Callable[[EngineCard, EngineCard], str | None]
Remarks = Callable[[EngineCard, EngineCard], Sequence[str]]


def _no_remarks(mine: EngineCard, theirs: EngineCard) -> Sequence[str]:
    return ()


class SideChannel:
    """An engine's side channel. Its own thread owns all sockets and all state here.

    Other threads call :meth:`dial` and :meth:`close` only.

    bind_host, port: where peers and routers find us.
    link_path: where our ranks find us.
    make_card: the engine's card, once all ``num_ranks`` rank cards are there.
    judge: (mine, theirs) -> why the two do not fit, or None.
    remarks: (mine, theirs) -> what fits, but an operator should know; logged as warnings.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        link_path: str,
        num_ranks: int,
        make_card: MakeCard,
        judge: Judge,
        handshake_timeout_s: float,
        keys: SideKeys | None = None,
        remarks: Remarks = _no_remarks,
    ) -> None:
        self.identity = identity
        self._remarks = remarks
        self._keys = keys
        self._num_ranks = num_ranks
        self._make_card = make_card
        self._judge = judge
        self._timeout_s = handshake_timeout_s
        self._rank_cards: dict[int, RankCard] = {}
        self._rank_routes: dict[int, bytes] = {}
        self._card: EngineCard | None = None
        self._dials: dict[str, _Dial] = {}
        self._answers: dict[int, _Answer] = {}
        self._connected: dict[str, Identity] = {}  # by engine id
        self._probes: dict[str, _Probe] = {}  # by engine id
        self._knocks: dict[str, Knock] = {}  # by address
        self._rebirths = 0
        self._next_ack = 1
        self._quiet = OncePerMinute()
        self._requests: deque[tuple[str, int, str, bool]] = deque()
        self._stop = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._public = self._context.socket(zmq.ROUTER)
        self._local = self._context.socket(zmq.ROUTER)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        for sock in (self._public, self._local):
            sock.setsockopt(zmq.LINGER, 0)
        self._public.setsockopt(zmq.MAXMSGSIZE, MAX_CARD_BYTES)
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=keys)
            keys.protect_server(self._public)
        where = f"tcp://{identity.host}:{identity.port}"
        try:
            self._public.bind(where)
            self._local.bind(link_path)
        except zmq.ZMQError as e:
            self._close_sockets()
            raise SideChannelError(
                f"side channel of engine {identity.engine_id!r} cannot bind {where}: {e}. Is "
                "another engine using this port? Set side_channel_port to a free one, and "
                "side_channel_host to an address of this host."
            ) from e
        self._thread = threading.Thread(target=self._run, name="np-sidechannel", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ other threads

    def dial(self, host: str, port: int, engine_id: str, *, keep_trying: bool = False) -> None:
        """Connect to the engine there unless that is done or under way. Returns at once.

        ``engine_id`` empty accepts whoever answers. With ``keep_trying`` the absence of a peer
        is no failure (it may start after us).
        """
        self._requests.append((host, port, engine_id, keep_trying))
        os.write(self._wake_w, b"x")

    def close(self) -> None:
        """Once more is harmless."""
        if self._stop:
            return
        self._stop = True
        os.write(self._wake_w, b"x")
        self._thread.join(timeout=5)
        os.close(self._wake_r)
        os.close(self._wake_w)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._public, zmq.POLLIN)
        poller.register(self._local, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        logger.info(
            "engine %s (incarnation %s): side channel on %s:%d",
            self.identity.engine_id,
            self.identity.incarnation,
            self.identity.host,
            self.identity.port,
        )
        while not self._stop:
            try:
                self._turn(poller)
            except Exception:
                # Whatever a stranger sent: who comes after it must find somebody here.
                logger.exception("engine %s: side channel", self.identity.engine_id)
                time.sleep(0.1)
        for dial in self._dials.values():
            dial.socket.close()
        for probe in self._probes.values():
            probe.socket.close()
        for knock in self._knocks.values():
            knock.socket.close()
        self._close_sockets()

    def _turn(self, poller: zmq.Poller) -> None:
        waiting = bool(self._dials or self._answers or self._probes or self._knocks)
        ready = dict(poller.poll(100 if waiting else 1000))
        if self._wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        if self._local in ready:
            self._receive_local(poller)
        if self._public in ready:
            self._receive_public()
        while self._requests:
            self._start_dial(*self._requests.popleft(), poller=poller)
        now_s = time.monotonic()
        for dial in list(self._dials.values()):
            self._advance_dial(dial, dial.socket in ready, now_s, poller)
        for probe in list(self._probes.values()):
            self._advance_probe(probe, probe.socket in ready, now_s, poller)
        for knock in list(self._knocks.values()):
            self._advance_knock(knock, now_s)
        for ack, answer in list(self._answers.items()):
            if now_s >= answer.deadline_s:
                del self._answers[ack]
                self._say(
                    answer.caller,
                    NotReady(
                        f"ranks {sorted(answer.missing)} of engine "
                        f"{self.identity.engine_id!r} do not answer their own engine"
                    ),
                )

    def _close_sockets(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._public.close()
        self._local.close()
        self._context.term()

    # ------------------------------------------------------------ our ranks

    def _receive_local(self, poller: zmq.Poller) -> None:
        while is_readable(self._local):
            route, *frames = self._local.recv_multipart()
            try:
                message = decode_up(frames[0] if frames else b"")
            except MessageError as e:
                logger.warning("engine %s: from a rank: %s", self.identity.engine_id, e)
                continue
            if isinstance(message, RankUp):
                self._rank_up(route, message)
            elif isinstance(message, Polling):
                self._rank_polls(message)
            elif isinstance(message, DialRequest):
                address = f"{message.host}:{message.port}"
                if message.is_suspect and address not in self._knocks:
                    self._knocks[address] = Knock(message.host, message.port)
                if message.engine_id in self._connected:
                    self._start_probe(message, poller)
                else:
                    self._requests.append((message.host, message.port, message.engine_id, False))
            elif isinstance(message, PeerLost):
                known = self._connected.get(message.engine_id)
                if known is not None and known.incarnation == message.incarnation:
                    del self._connected[message.engine_id]
                    logger.warning(
                        "engine %s: connection to engine %s (incarnation %s) lost: %s",
                        self.identity.engine_id,
                        message.engine_id,
                        message.incarnation,
                        message.sentence,
                    )

    def _rank_up(self, route: bytes, message: RankUp) -> None:
        self._rank_routes[message.rank] = route
        self._rank_cards[message.rank] = message.card
        self._local.send_multipart([route, encode(RankKnown())])
        if len(self._rank_cards) < self._num_ranks:
            return
        ranks = tuple(self._rank_cards[i] for i in sorted(self._rank_cards))
        if self._card is None:
            self._card = self._make_card(self.identity, ranks)
            name = self.identity.engine_id
            logger.info("engine %s: all %d ranks are up", name, self._num_ranks)
        elif ranks != self._card.ranks:
            self._be_reborn(ranks)

    def _be_reborn(self, ranks: tuple[RankCard, ...]) -> None:
        """A rank has a new NIXL agent: for our peers that is a new incarnation of this engine."""
        self._rebirths += 1
        base = self.identity.incarnation.partition(".")[0]
        self.identity = msgspec.structs.replace(
            self.identity, incarnation=f"{base}.{self._rebirths}"
        )
        self._card = self._make_card(self.identity, ranks)
        known = list(self._connected.values())
        self._connected.clear()
        logger.warning(
            "engine %s: a rank has a new NIXL agent (incarnation %s): calling %d peers again",
            self.identity.engine_id,
            self.identity.incarnation,
            len(known),
        )
        for peer in known:
            self._requests.append((peer.host, peer.port, peer.engine_id, False))

    def _tell_ranks(self, message: MeetPeer | DialFailed | Confirmed | Dead) -> None:
        blob = encode(message)
        for route in self._rank_routes.values():
            self._local.send_multipart([route, blob])

    def _rank_polls(self, message: Polling) -> None:
        answer = self._answers.get(message.ack)
        if answer is None:
            return
        answer.missing.discard(message.rank)
        if answer.missing or self._card is None:
            return
        del self._answers[message.ack]
        self._met(self._card, answer.hello.card)
        self._say(answer.caller, Welcome(self._card, answer.secret))

    def _met(self, mine: EngineCard, card: EngineCard) -> None:
        theirs = card.identity
        self._connected[theirs.engine_id] = theirs
        logger.info(
            "engine %s: met engine %s (incarnation %s, %s:%d)",
            self.identity.engine_id,
            theirs.engine_id,
            theirs.incarnation,
            theirs.host,
            theirs.port,
        )
        for sentence in self._remarks(mine, card):
            self._quiet.warning(
                logger,
                f"{theirs.engine_id} {sentence}",
                "engine %s and engine %s: %s",
                self.identity.engine_id,
                theirs.engine_id,
                sentence,
            )

    # ------------------------------------------------------------ callers

    def _receive_public(self) -> None:
        while is_readable(self._public):
            frames = self._public.recv_multipart()
            try:
                message = decode_side(frames[-1])
            except MessageError as e:
                self._quiet.warning(
                    logger,
                    "garbage",
                    "engine %s: side channel got bytes it does not understand: %s",
                    self.identity.engine_id,
                    e,
                )
                with contextlib.suppress(zmq.ZMQError):
                    self._say(frames[0], Refuse(f"this side channel speaks neuron_push: {e}"))
                continue
            if isinstance(message, WhoAreYou):
                ready = self._card is not None
                identity = self._card.identity if self._card else self.identity
                self._say(frames[0], IAm(msgspec.structs.replace(identity, ready=ready)))
            elif isinstance(message, WhichRails):
                self._say(frames[0], self._rails())
            elif isinstance(message, Hello):
                self._hello(frames[0], message)

    def _rails(self) -> SideMessage:
        if self._card is None:
            return NotReady(f"engine {self.identity.engine_id!r} is starting")
        cards = tuple(rank.rails for rank in self._card.ranks)
        return TheseRails(self._card.identity, cards, time.time())

    def _hello(self, caller: bytes, hello: Hello) -> None:
        theirs = hello.card.identity
        if self._card is None:
            self._say(caller, NotReady(f"engine {self.identity.engine_id!r} is starting"))
            return
        misfit = self._judge(self._card, hello.card)
        if misfit is not None:
            self._quiet.warning(logger, theirs.engine_id, "refused a peer: %s", misfit)
            self._say(caller, Refuse(misfit))
            return
        for dial in list(self._dials.values()):
            # Both sides called at once: the caller with the larger name gives way.
            called = dial.engine_id == theirs.engine_id or dial.address == _address(theirs)
            if called and dial.next_hello_s:
                if self.identity.engine_id < theirs.engine_id:
                    self._say(caller, NotReady("we are calling you"))
                    return
                break
        ack, self._next_ack = self._next_ack, self._next_ack + 1
        secret = secrets.token_bytes(32)
        deadline_s = time.monotonic() + POLL_TIMEOUT_S
        self._answers[ack] = _Answer(caller, hello, secret, deadline_s, set(self._rank_routes))
        self._tell_ranks(MeetPeer(self._card, hello.card, secret, hello.secret, ack))

    def _say(self, caller: bytes, message: SideMessage) -> None:
        self._public.send_multipart([caller, encode_side(message)])

    # ------------------------------------------------------------ dialling

    def _start_dial(
        self, host: str, port: int, engine_id: str, keep_trying: bool, *, poller: zmq.Poller
    ) -> None:
        address = f"{host}:{port}"
        if address in self._dials or self._is_connected(engine_id, address):
            return
        if any(_address(a.hello.card.identity) == address for a in self._answers.values()):
            return  # it is calling us this very moment
        try:
            socket = self._call(address, poller)
        except zmq.ZMQError as e:
            self._tell_ranks(
                DialFailed(address, f"side channel address {address!r} cannot be used: {e}")
            )
            return
        deadline_s = time.monotonic() + self._timeout_s
        self._dials[address] = _Dial(
            host, port, engine_id, socket, deadline_s, keep_trying, secrets.token_bytes(32)
        )

    def _is_connected(self, engine_id: str, address: str) -> bool:
        """To this engine or, if it is not named, to whoever is at the address."""
        if engine_id:
            return engine_id in self._connected
        return any(_address(peer) == address for peer in self._connected.values())

    def _call(self, address: str, poller: zmq.Poller) -> zmq.Socket[bytes]:
        """A socket to another side channel. Raises ZMQError for an address that is none."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CARD_BYTES)
        if self._keys is not None:
            self._keys.protect_client(socket)
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            socket.close()
            raise
        poller.register(socket, zmq.POLLIN)
        return socket

    def _start_probe(self, request: DialRequest, poller: zmq.Poller) -> None:
        if request.engine_id in self._probes:
            return
        known = self._connected[request.engine_id]
        try:
            socket = self._call(_address(known), poller)
        except zmq.ZMQError:
            # It called us, and its card gives an address that is none: the request's may do.
            del self._connected[request.engine_id]
            self._requests.append((request.host, request.port, request.engine_id, False))
            return
        socket.send(encode_side(WhoAreYou()))
        deadline_s = time.monotonic() + PROBE_TIMEOUT_S
        self._probes[request.engine_id] = _Probe(request, known.incarnation, socket, deadline_s)

    def _advance_probe(
        self, probe: _Probe, readable: bool, now_s: float, poller: zmq.Poller
    ) -> None:
        engine_id = probe.dial.engine_id
        answer: SideMessage | None = None
        if readable:
            with contextlib.suppress(MessageError):
                answer = decode_side(probe.socket.recv_multipart()[-1])
        elif now_s < probe.deadline_s:
            return
        poller.unregister(probe.socket)
        probe.socket.close()
        del self._probes[engine_id]
        if isinstance(answer, IAm) and answer.identity.incarnation == probe.incarnation:
            self._tell_ranks(Confirmed(engine_id, probe.incarnation))
            return
        known = self._connected.get(engine_id)
        if known is not None and known.incarnation == probe.incarnation:
            del self._connected[engine_id]
        logger.info(
            "engine %s: engine %s is another process now", self.identity.engine_id, engine_id
        )
        self._requests.append((probe.dial.host, probe.dial.port, engine_id, False))

    def _advance_knock(self, knock: Knock, now_s: float) -> None:
        refused = knock.is_refused(now_s)
        if refused is None:
            return
        knock.socket.close()
        del self._knocks[knock.address]
        if refused:
            self._tell_ranks(Dead(knock.address))

    def _advance_dial(self, dial: _Dial, readable: bool, now_s: float, poller: zmq.Poller) -> None:
        if self._is_connected(dial.engine_id, dial.address):
            self._end_dial(dial, poller)  # it called us in the meantime
            return
        if readable and self._answered(dial, poller):
            return
        if self._card is not None and now_s >= dial.next_hello_s:
            dial.socket.send(encode_side(Hello(self._card, dial.secret)))
            # Asked again only after an answer: NotReady sets a new time.
            dial.next_hello_s = float("inf")
        if now_s >= dial.deadline_s:
            if dial.keep_trying:
                dial.deadline_s = now_s + self._timeout_s
                return
            word = dial.last_word or (
                "nothing answers there; is the engine up, is the port its side channel's, does it "
                "run NeuronPushConnector rather than another connector, and has it the same key "
                "file?"
            )
            if self._card is None:
                word = "this engine's own ranks are not up yet"
            self._fail_dial(
                dial,
                f"no connection to the producer's side channel {dial.address} within "
                f"{self._timeout_s:g} s: {word}",
                poller,
                temporary=True,
            )

    def _answered(self, dial: _Dial, poller: zmq.Poller) -> bool:
        """True when the dial is over, well or badly."""
        blob = dial.socket.recv_multipart()[-1]
        try:
            message = decode_side(blob)
        except MessageError as e:
            self._fail_dial(dial, f"{dial.address} does not speak our side channel: {e}", poller)
            return True
        if isinstance(message, NotReady):
            dial.last_word = message.sentence
            dial.next_hello_s = time.monotonic() + 0.1
            return False
        if isinstance(message, Refuse):
            self._fail_dial(dial, message.sentence, poller)
            return True
        if not isinstance(message, Welcome) or self._card is None:
            return False
        theirs = message.card.identity
        sentence = self._judge(self._card, message.card)
        if sentence:
            self._fail_dial(dial, sentence, poller)
            return True
        # Whoever it is, it has met us by now, and speaks under the new secrets.
        self._met(self._card, message.card)
        self._tell_ranks(MeetPeer(self._card, message.card, dial.secret, message.secret))
        if dial.engine_id and dial.engine_id != theirs.engine_id:
            self._fail_dial(
                dial,
                f"{dial.address} is engine {theirs.engine_id!r}, the request names "
                f"{dial.engine_id!r}: the router's identity of this producer is out of date",
                poller,
            )
            return True
        self._end_dial(dial, poller)
        return True

    def _fail_dial(
        self, dial: _Dial, sentence: str, poller: zmq.Poller, *, temporary: bool = False
    ) -> None:
        self._quiet.warning(
            logger, dial.address, "engine %s: %s", self.identity.engine_id, sentence
        )
        self._tell_ranks(DialFailed(dial.address, sentence, temporary))
        self._end_dial(dial, poller)

    def _end_dial(self, dial: _Dial, poller: zmq.Poller) -> None:
        poller.unregister(dial.socket)
        dial.socket.close()
        del self._dials[dial.address]


def _address(identity: Identity) -> str:
    return f"{identity.host}:{identity.port}"
