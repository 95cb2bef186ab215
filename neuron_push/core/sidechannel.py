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
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from neuron_push.core.link import (
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
    Welcome,
    WhoAreYou,
    decode_side,
    encode_side,
)
from neuron_push.core.oncepermin import OncePerMinute

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 2.0
"""How long a rank may take to confirm that it polls: one NIXL call, one Python step."""


class SideChannelError(Exception):
    """Nobody there, or somebody else. The text is a sentence for an operator."""


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
class _Answer:
    """A caller waiting for our ranks to confirm that they poll."""

    caller: bytes
    hello: Hello
    secret: bytes
    deadline_s: float
    missing: set[int] = field(default_factory=set)


MakeCard = Callable[[tuple[RankCard, ...]], EngineCard]
Judge = Callable[[EngineCard, EngineCard], str | None]


class SideChannel:
    """An engine's side channel. Its own thread owns all sockets and all state here.

    Other threads call :meth:`dial` and :meth:`close` only.

    bind_host, port: where peers and routers find us.
    link_path: where our ranks find us.
    make_card: the engine's card, once all ``num_ranks`` rank cards are there.
    judge: (mine, theirs) -> why the two do not fit, or None.
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
    ) -> None:
        self.identity = identity
        self._num_ranks = num_ranks
        self._make_card = make_card
        self._judge = judge
        self._timeout_s = handshake_timeout_s
        self._rank_cards: dict[int, RankCard] = {}
        self._rank_routes: dict[int, bytes] = {}
        self._card: EngineCard | None = None
        self._dials: dict[str, _Dial] = {}
        self._answers: dict[int, _Answer] = {}
        self._connected: dict[str, str] = {}  # engine_id -> incarnation
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
        where = f"tcp://{identity.host}:{identity.port}"
        try:
            self._public.bind(where)
            self._local.bind(link_path)
        except zmq.ZMQError as e:
            self._public.close()
            self._local.close()
            self._context.term()
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
            waiting = bool(self._dials or self._answers)
            ready = dict(poller.poll(100 if waiting else 1000))
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if self._local in ready:
                self._receive_local()
            if self._public in ready:
                self._receive_public()
            while self._requests:
                self._start_dial(*self._requests.popleft(), poller=poller)
            now_s = time.monotonic()
            for dial in list(self._dials.values()):
                self._advance_dial(dial, dial.socket in ready, now_s, poller)
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
        for dial in self._dials.values():
            dial.socket.close()
        self._public.close()
        self._local.close()
        self._context.term()

    # ------------------------------------------------------------ our ranks

    def _receive_local(self) -> None:
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
                self._requests.append((message.host, message.port, message.engine_id, False))
            elif isinstance(message, PeerLost):
                if self._connected.get(message.engine_id) == message.incarnation:
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
        is_news = self._card is None
        self._card = self._make_card(tuple(self._rank_cards[i] for i in sorted(self._rank_cards)))
        if is_news:
            name = self.identity.engine_id
            logger.info("engine %s: all %d ranks are up", name, self._num_ranks)

    def _tell_ranks(self, message: MeetPeer | DialFailed) -> None:
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
        theirs = answer.hello.card.identity
        self._met(theirs)
        self._say(answer.caller, Welcome(self._card, answer.secret))

    def _met(self, theirs: Identity) -> None:
        self._connected[theirs.engine_id] = theirs.incarnation
        logger.info(
            "engine %s: met engine %s (incarnation %s, %s:%d)",
            self.identity.engine_id,
            theirs.engine_id,
            theirs.incarnation,
            theirs.host,
            theirs.port,
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
                self._say(frames[0], IAm(identity if ready else _not_ready(identity)))
            elif isinstance(message, Hello):
                self._hello(frames[0], message)

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
        if address in self._dials or (engine_id and engine_id in self._connected):
            return
        if any(_address(a.hello.card.identity) == address for a in self._answers.values()):
            return  # it is calling us this very moment
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CARD_BYTES)
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as e:
            socket.close()
            self._tell_ranks(
                DialFailed(address, f"side channel address {address!r} cannot be used: {e}")
            )
            return
        poller.register(socket, zmq.POLLIN)
        deadline_s = time.monotonic() + self._timeout_s
        self._dials[address] = _Dial(
            host, port, engine_id, socket, deadline_s, keep_trying, secrets.token_bytes(32)
        )

    def _advance_dial(self, dial: _Dial, readable: bool, now_s: float, poller: zmq.Poller) -> None:
        if dial.engine_id and dial.engine_id in self._connected:
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
                "nothing answers there; is the engine up, is the port its side channel's, and "
                "does it run NeuronPushConnector rather than another connector?"
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
        if dial.engine_id and dial.engine_id != theirs.engine_id:
            sentence = (
                f"{dial.address} is engine {theirs.engine_id!r}, the request names "
                f"{dial.engine_id!r}: the router's identity of this producer is out of date"
            )
        else:
            sentence = self._judge(self._card, message.card) or ""
        if sentence:
            self._fail_dial(dial, sentence, poller)
            return True
        self._met(theirs)
        self._tell_ranks(MeetPeer(self._card, message.card, dial.secret, message.secret))
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


def _not_ready(identity: Identity) -> Identity:
    return Identity(
        **{name: getattr(identity, name) for name in identity.__struct_fields__ if name != "ready"},
        ready=False,
    )


async def ask_identity(host: str, port: int, timeout_s: float) -> Identity:
    """Who is the engine at this side channel? Raises SideChannelError with a sentence."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
    try:
        try:
            socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError as e:
            raise SideChannelError(f"side channel address {host}:{port} cannot be used: {e}") from e
        await socket.send(encode_side(WhoAreYou()))
        if not await socket.poll(int(timeout_s * 1000)):
            raise SideChannelError(
                f"no neuron_push engine answers on side channel {host}:{port} within "
                f"{timeout_s:g} s: is it up, and does it run NeuronPushConnector?"
            )
        frames = await socket.recv_multipart()
        try:
            message = decode_side(frames[-1])
        except MessageError as e:
            raise SideChannelError(f"{host}:{port} is no neuron_push side channel: {e}") from e
        if not isinstance(message, IAm):
            raise SideChannelError(f"{host}:{port} answered {type(message).__name__}, not IAm")
        return message.identity
    finally:
        socket.close()
