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
from dataclasses import dataclass

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from neuron_push.core.asking import SideChannelError
from neuron_push.core.contacts import Contacts, Judge, MakeCard, Remarks, address_of, no_remarks
from neuron_push.core.dialling import Dialler, Wish
from neuron_push.core.keys import SideKeys
from neuron_push.core.link import DialRequest, MeetPeer, PeerLost, Polling, RankUp, is_readable
from neuron_push.core.messages import (
    MAX_CARD_BYTES,
    EngineCard,
    Hello,
    IAm,
    Identity,
    MessageError,
    NotReady,
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
from neuron_push.core.rankdesk import RankDesk

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 2.0
"""How long a rank may take to confirm that it polls: one NIXL call, one Python step."""


@dataclass
class _Answer:
    """A caller waiting for our ranks to confirm that they poll."""

    caller: bytes
    hello: Hello
    secret: bytes
    deadline_s: float
    missing: set[int]


class SideChannel:
    """An engine's side channel. Its own thread owns all sockets and all state here.

    Other threads call :meth:`dial` and :meth:`close` only.

    identity: with the address to listen at, where peers and routers find us.
    link_path: where our ranks find us.
    make_card, judge, remarks: see :class:`Contacts`.
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
        remarks: Remarks = no_remarks,
    ) -> None:
        self._name = identity.engine_id
        self._quiet = OncePerMinute()
        self._contacts = Contacts(
            identity, make_card=make_card, judge=judge, remarks=remarks, quiet=self._quiet
        )
        self._answers: dict[int, _Answer] = {}  # by ack
        self._next_ack = 1
        self._stop = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._public = self._context.socket(zmq.ROUTER)
        self._public.setsockopt(zmq.LINGER, 0)
        self._public.setsockopt(zmq.MAXMSGSIZE, MAX_CARD_BYTES)
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=keys)
            keys.protect_server(self._public)
        where = f"tcp://{identity.host}:{identity.port}"
        try:
            self._public.bind(where)
            self._desk = RankDesk(
                self._context, link_path, num_ranks=num_ranks, engine_id=self._name
            )
        except zmq.ZMQError as e:
            self._close_public()
            raise SideChannelError(
                f"side channel of engine {self._name!r} cannot bind {where}: {e}. Is "
                "another engine using this port? Set side_channel_port to a free one, and "
                "side_channel_host to an address of this host."
            ) from e
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._poller = zmq.Poller()
        for readable in (self._public, self._desk.socket, self._wake_r):
            self._poller.register(readable, zmq.POLLIN)
        self._dialler = Dialler(
            self._contacts,
            context=self._context,
            poller=self._poller,
            keys=keys,
            timeout_s=handshake_timeout_s,
            tell_ranks=self._desk.tell,
            is_calling_us=self._is_calling_us,
            quiet=self._quiet,
        )
        self._thread = threading.Thread(target=self._run, name="np-sidechannel", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ other threads

    @property
    def identity(self) -> Identity:
        """Ours. Its incarnation is another when one of our ranks has a new agent."""
        return self._contacts.identity

    @property
    def card(self) -> EngineCard | None:
        """Ours, once all our ranks are up."""
        return self._contacts.card

    def dial(self, host: str, port: int, engine_id: str, *, keep_trying: bool = False) -> None:
        """Connect to the engine there unless that is done or under way. Returns at once.

        ``engine_id`` empty accepts whoever answers. With ``keep_trying`` the absence of a peer
        is no failure (it may start after us).
        """
        self._dialler.wish(Wish(host, port, engine_id, keep_trying))
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
        logger.info(
            "engine %s (incarnation %s): side channel on %s",
            self._name,
            self.identity.incarnation,
            address_of(self.identity),
        )
        while not self._stop:
            try:
                self._turn()
            except Exception:
                # Whatever a stranger sent: who comes after it must find somebody here.
                logger.exception("engine %s: side channel", self._name)
                time.sleep(0.1)
        self._dialler.close()
        self._desk.socket.close()
        self._close_public()

    def _turn(self) -> None:
        is_waiting = bool(self._answers or self._dialler.is_waiting)
        ready: dict[object, int] = dict(self._poller.poll(100 if is_waiting else 1000))
        if self._wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        if self._desk.socket in ready:
            self._receive_local()
        if self._public in ready:
            self._receive_public()
        self._dialler.turn(ready)
        now_s = time.monotonic()
        for ack, answer in list(self._answers.items()):
            if now_s >= answer.deadline_s:
                del self._answers[ack]
                self._say(
                    answer.caller,
                    NotReady(
                        f"ranks {sorted(answer.missing)} of engine {self._name!r} do not answer "
                        "their own engine"
                    ),
                )

    def _close_public(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._public.close()
        self._context.term()

    # ------------------------------------------------------------ our ranks

    def _receive_local(self) -> None:
        for message in self._desk.receive():
            if isinstance(message, RankUp):
                if (cards := self._desk.cards) is not None:
                    for peer in self._contacts.ranks_are(cards):
                        self._dialler.call(peer)
            elif isinstance(message, Polling):
                self._rank_polls(message)
            elif isinstance(message, DialRequest):
                self._dialler.on_request(message)
            elif self._contacts.forget(message.engine_id, message.incarnation):
                self._log_lost(message)

    def _log_lost(self, message: PeerLost) -> None:
        logger.warning(
            "engine %s: connection to engine %s (incarnation %s) lost: %s",
            self._name,
            message.engine_id,
            message.incarnation,
            message.sentence,
        )

    def _rank_polls(self, message: Polling) -> None:
        answer = self._answers.get(message.ack)
        if answer is None:
            return
        answer.missing.discard(message.rank)
        card = self._contacts.card
        if answer.missing or card is None:
            return
        del self._answers[message.ack]
        self._contacts.met(answer.hello.card)
        self._say(answer.caller, Welcome(card, answer.secret))

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
                    self._name,
                    e,
                )
                with contextlib.suppress(zmq.ZMQError):
                    self._say(frames[0], Refuse(f"this side channel speaks neuron_push: {e}"))
                continue
            if isinstance(message, WhoAreYou):
                is_ready = self._contacts.card is not None
                self._say(frames[0], IAm(msgspec.structs.replace(self.identity, ready=is_ready)))
            elif isinstance(message, WhichRails):
                self._say(frames[0], self._rails())
            elif isinstance(message, Hello):
                self._hello(frames[0], message)

    def _rails(self) -> SideMessage:
        card = self._contacts.card
        if card is None:
            return NotReady(f"engine {self._name!r} is starting")
        return TheseRails(card.identity, tuple(rank.rails for rank in card.ranks), time.time())

    def _hello(self, caller: bytes, hello: Hello) -> None:
        theirs = hello.card.identity
        card = self._contacts.card
        if card is None:
            self._say(caller, NotReady(f"engine {self._name!r} is starting"))
            return
        misfit = self._contacts.misfit(hello.card)
        if misfit is not None:
            self._quiet.warning(logger, theirs.engine_id, "refused a peer: %s", misfit)
            self._say(caller, Refuse(misfit))
            return
        # Both sides called at once: the caller with the larger name gives way.
        if self._name < theirs.engine_id and self._dialler.has_called(theirs):
            self._say(caller, NotReady("we are calling you"))
            return
        ack, self._next_ack = self._next_ack, self._next_ack + 1
        secret = secrets.token_bytes(32)
        deadline_s = time.monotonic() + POLL_TIMEOUT_S
        self._answers[ack] = _Answer(caller, hello, secret, deadline_s, self._desk.ranks)
        self._desk.tell(MeetPeer(card, hello.card, secret, hello.secret, ack))

    def _is_calling_us(self, address: str) -> bool:
        return any(address_of(a.hello.card.identity) == address for a in self._answers.values())

    def _say(self, caller: bytes, message: SideMessage) -> None:
        self._public.send_multipart([caller, encode_side(message)])
