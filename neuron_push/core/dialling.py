"""Calls to other engines: to meet them, and to learn whether they still are who we met."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from neuron_push.core.contacts import Contacts, address_of
from neuron_push.core.keys import SideKeys
from neuron_push.core.knock import Knock
from neuron_push.core.link import Confirmed, Dead, DialFailed, DialRequest, MeetPeer
from neuron_push.core.messages import (
    MAX_CARD_BYTES,
    Hello,
    IAm,
    Identity,
    MessageError,
    NotReady,
    Refuse,
    SideMessage,
    Welcome,
    WhoAreYou,
    decode_side,
    encode_side,
)
from neuron_push.core.oncepermin import OncePerMinute

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0
ASK_AGAIN_S = 0.1


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


@dataclass(frozen=True)
class Wish:
    """Somebody wants us to know this engine. Empty ``engine_id``: whoever answers there.

    keep_trying: its absence is no failure (it may start after us).
    """

    host: str
    port: int
    engine_id: str
    keep_trying: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Dialler:
    """Owner: the side channel's thread. Other threads call :meth:`wish` only.

    poller: where sockets of calls under way are, so that an answer ends the thread's wait.
    tell_ranks: what our ranks learn of how a call ended.
    is_calling_us: whether the engine at an address waits for our answer this moment.
    """

    def __init__(
        self,
        contacts: Contacts,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        keys: SideKeys | None,
        timeout_s: float,
        tell_ranks: Callable[[MeetPeer | DialFailed | Confirmed | Dead], None],
        is_calling_us: Callable[[str], bool],
        quiet: OncePerMinute,
    ) -> None:
        self._contacts = contacts
        self._context = context
        self._poller = poller
        self._keys = keys
        self._timeout_s = timeout_s
        self._tell_ranks = tell_ranks
        self._is_calling_us = is_calling_us
        self._quiet = quiet
        self._wishes: deque[Wish] = deque()
        self._dials: dict[str, _Dial] = {}  # by address
        self._probes: dict[str, _Probe] = {}  # by engine id
        self._knocks: dict[str, Knock] = {}  # by address

    @property
    def is_waiting(self) -> bool:
        """Whether something here has a time limit."""
        return bool(self._dials or self._probes or self._knocks)

    def wish(self, wish: Wish) -> None:
        self._wishes.append(wish)

    def call(self, peer: Identity) -> None:
        self.wish(Wish(peer.host, peer.port, peer.engine_id))

    def on_request(self, request: DialRequest) -> None:
        """A rank needs this engine, or doubts that one we have met is still there."""
        address = f"{request.host}:{request.port}"
        if request.is_suspect and address not in self._knocks:
            self._knocks[address] = Knock(request.host, request.port)
        known = self._contacts.find(request.engine_id)
        if known is not None:
            self._start_probe(request, known)
        else:
            self.wish(Wish(request.host, request.port, request.engine_id))

    def has_called(self, theirs: Identity) -> bool:
        """Whether we have said Hello to this engine, and wait for its answer."""
        return any(
            dial.next_hello_s
            and (dial.engine_id == theirs.engine_id or dial.address == address_of(theirs))
            for dial in self._dials.values()
        )

    def turn(self, ready: dict[object, int]) -> None:
        """``ready``: what the poller has found readable."""
        while self._wishes:
            self._start_dial(self._wishes.popleft())
        now_s = time.monotonic()
        for dial in list(self._dials.values()):
            self._advance_dial(dial, dial.socket in ready, now_s)
        for probe in list(self._probes.values()):
            self._advance_probe(probe, probe.socket in ready, now_s)
        for knock in list(self._knocks.values()):
            self._advance_knock(knock, now_s)

    def close(self) -> None:
        for dial in self._dials.values():
            dial.socket.close()
        for probe in self._probes.values():
            probe.socket.close()
        for knock in self._knocks.values():
            knock.socket.close()

    def _open(self, address: str) -> zmq.Socket[bytes]:
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
        self._poller.register(socket, zmq.POLLIN)
        return socket

    # ------------------------------------------------------------ to meet

    def _start_dial(self, wish: Wish) -> None:
        address = wish.address
        if address in self._dials or self._contacts.is_met(wish.engine_id, address):
            return
        if self._is_calling_us(address):
            return
        try:
            socket = self._open(address)
        except zmq.ZMQError as e:
            self._tell_ranks(
                DialFailed(address, f"side channel address {address!r} cannot be used: {e}")
            )
            return
        deadline_s = time.monotonic() + self._timeout_s
        self._dials[address] = _Dial(
            wish.host,
            wish.port,
            wish.engine_id,
            socket,
            deadline_s,
            wish.keep_trying,
            secrets.token_bytes(32),
        )

    def _advance_dial(self, dial: _Dial, is_readable: bool, now_s: float) -> None:
        if self._contacts.is_met(dial.engine_id, dial.address):
            self._end_dial(dial)  # it called us in the meantime
            return
        if is_readable and self._answered(dial):
            return
        card = self._contacts.card
        if card is not None and now_s >= dial.next_hello_s:
            dial.socket.send(encode_side(Hello(card, dial.secret)))
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
            if card is None:
                word = "this engine's own ranks are not up yet"
            self._fail_dial(
                dial,
                f"no connection to the producer's side channel {dial.address} within "
                f"{self._timeout_s:g} s: {word}",
                temporary=True,
            )

    def _answered(self, dial: _Dial) -> bool:
        """True when the dial is over, well or badly."""
        blob = dial.socket.recv_multipart()[-1]
        mine = self._contacts.card
        try:
            message = decode_side(blob)
        except MessageError as e:
            self._fail_dial(dial, f"{dial.address} does not speak our side channel: {e}")
            return True
        if isinstance(message, NotReady):
            dial.last_word = message.sentence
            dial.next_hello_s = time.monotonic() + ASK_AGAIN_S
            return False
        if isinstance(message, Refuse):
            self._fail_dial(dial, message.sentence)
            return True
        if not isinstance(message, Welcome) or mine is None:
            return False
        theirs = message.card.identity
        sentence = self._contacts.misfit(message.card)
        if sentence:
            self._fail_dial(dial, sentence)
            return True
        # Whoever it is, it has met us by now, and speaks under the new secrets.
        self._contacts.met(message.card)
        self._tell_ranks(MeetPeer(mine, message.card, dial.secret, message.secret))
        if dial.engine_id and dial.engine_id != theirs.engine_id:
            self._fail_dial(
                dial,
                f"{dial.address} is engine {theirs.engine_id!r}, the request names "
                f"{dial.engine_id!r}: the router's identity of this producer is out of date",
            )
            return True
        self._end_dial(dial)
        return True

    def _fail_dial(self, dial: _Dial, sentence: str, *, temporary: bool = False) -> None:
        self._quiet.warning(
            logger, dial.address, "engine %s: %s", self._contacts.identity.engine_id, sentence
        )
        self._tell_ranks(DialFailed(dial.address, sentence, temporary))
        self._end_dial(dial)

    def _end_dial(self, dial: _Dial) -> None:
        self._poller.unregister(dial.socket)
        dial.socket.close()
        del self._dials[dial.address]

    # ------------------------------------------------------------ whether it is still there

    def _start_probe(self, request: DialRequest, known: Identity) -> None:
        if request.engine_id in self._probes:
            return
        try:
            socket = self._open(address_of(known))
        except zmq.ZMQError:
            # It called us, and its card gives an address that is none: the request's may do.
            self._contacts.forget(known.engine_id, known.incarnation)
            self.wish(Wish(request.host, request.port, request.engine_id))
            return
        socket.send(encode_side(WhoAreYou()))
        deadline_s = time.monotonic() + PROBE_TIMEOUT_S
        self._probes[request.engine_id] = _Probe(request, known.incarnation, socket, deadline_s)

    def _advance_probe(self, probe: _Probe, is_readable: bool, now_s: float) -> None:
        engine_id = probe.dial.engine_id
        answer: SideMessage | None = None
        if is_readable:
            with contextlib.suppress(MessageError):
                answer = decode_side(probe.socket.recv_multipart()[-1])
        elif now_s < probe.deadline_s:
            return
        self._poller.unregister(probe.socket)
        probe.socket.close()
        del self._probes[engine_id]
        if isinstance(answer, IAm) and answer.identity.incarnation == probe.incarnation:
            self._tell_ranks(Confirmed(engine_id, probe.incarnation))
            return
        self._contacts.forget(engine_id, probe.incarnation)
        logger.info(
            "engine %s: engine %s is another process now",
            self._contacts.identity.engine_id,
            engine_id,
        )
        self.wish(Wish(probe.dial.host, probe.dial.port, engine_id))

    def _advance_knock(self, knock: Knock, now_s: float) -> None:
        refused = knock.is_refused(now_s)
        if refused is None:
            return
        knock.socket.close()
        del self._knocks[knock.address]
        if refused:
            self._tell_ranks(Dead(knock.address))
