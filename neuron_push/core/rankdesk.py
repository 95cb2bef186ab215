"""The engine's end of the links to its own ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

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
from neuron_push.core.messages import MessageError, RankCard

logger = logging.getLogger(__name__)


class RankDesk:
    """Owner: the side channel's thread. ``engine_id`` is for the log.

    Raises ZMQError if ``link_path`` cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        link_path: str,
        *,
        num_ranks: int,
        engine_id: str,
    ) -> None:
        self._num_ranks = num_ranks
        self._engine_id = engine_id
        self._cards: dict[int, RankCard] = {}
        self._routes: dict[int, bytes] = {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(link_path)
        except zmq.ZMQError:
            self.socket.close()
            raise

    @property
    def ranks(self) -> set[int]:
        """Those that are up."""
        return set(self._routes)

    @property
    def cards(self) -> tuple[RankCard, ...] | None:
        """Of all ranks, in their order; None until all are up."""
        if len(self._cards) < self._num_ranks:
            return None
        return tuple(self._cards[rank] for rank in sorted(self._cards))

    def receive(self) -> Iterator[RankUp | Polling | DialRequest | PeerLost]:
        """What ranks have said. A rank that has come up is known, and told so, by then."""
        while is_readable(self.socket):
            route, *frames = self.socket.recv_multipart()
            try:
                message = decode_up(frames[0] if frames else b"")
            except MessageError as e:
                logger.warning("engine %s: from a rank: %s", self._engine_id, e)
                continue
            if isinstance(message, RankUp):
                self._routes[message.rank] = route
                self._cards[message.rank] = message.card
                self.socket.send_multipart([route, encode(RankKnown())])
            yield message

    def tell(self, message: MeetPeer | DialFailed | Confirmed | Dead) -> None:
        """To every rank."""
        blob = encode(message)
        for route in self._routes.values():
            self.socket.send_multipart([route, blob])
