"""Between an engine's side channel (in its scheduler process) and its own worker ranks.

The side channel speaks for the whole engine; the ranks own the NIXL agents. This link carries
rank cards up and peers down. It is a socket in a directory only this user can enter, so that
no other user of the host can pose as a rank, or hand a rank a false peer.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile

import msgspec
import zmq

from neuron_push.core.messages import EngineCard, MessageError, RankCard


class RankUp(msgspec.Struct, frozen=True, tag="rank_up"):
    """Worker -> engine: this rank has registered its memory and polls."""

    rank: int
    card: RankCard


class RankKnown(msgspec.Struct, frozen=True, tag="rank_known"):
    """Engine -> worker: RankUp has arrived; stop repeating it."""


class MeetPeer(msgspec.Struct, frozen=True, tag="meet"):
    """Engine -> worker: this engine is our peer from now on.

    Replaces an earlier connection to the same ``engine_id``. With ``ack`` not 0 the worker
    answers Polling first, so that the other side knows it can be added.
    """

    mine: EngineCard
    theirs: EngineCard
    my_secret: bytes
    their_secret: bytes
    ack: int = 0


class Polling(msgspec.Struct, frozen=True, tag="polling"):
    """Worker -> engine: alive a moment ago, and driving its NIXL agent."""

    rank: int
    ack: int


class DialRequest(msgspec.Struct, frozen=True, tag="dial"):
    """Worker -> engine: a request waits for this peer.

    Answered with MeetPeer or DialFailed; with Confirmed where the engine has met it before and
    it still is the same process. ``is_suspect``: it fell silent, and may be dead; if it is,
    Dead is answered too.
    """

    host: str
    port: int
    engine_id: str
    is_suspect: bool = False


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Engine -> worker: this incarnation answered on its side channel just now."""

    engine_id: str
    incarnation: str


class DialFailed(msgspec.Struct, frozen=True, tag="dial_failed"):
    """Engine -> worker: no connection to this address; the sentence says why."""

    address: str
    sentence: str
    temporary: bool = False


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """Engine -> worker: the host at this address answers, and no process listens there."""

    address: str


class PeerLost(msgspec.Struct, frozen=True, tag="lost"):
    """Worker -> engine: the connection to this incarnation is dead; the next dial is a new one."""

    engine_id: str
    incarnation: str
    sentence: str


Down = RankKnown | MeetPeer | DialFailed | Confirmed | Dead
Up = RankUp | Polling | DialRequest | PeerLost

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def encode(message: Up | Down) -> bytes:
    return _encoder.encode(message)


def decode_up(blob: bytes) -> Up:
    """Raises MessageError."""
    try:
        return _up.decode(blob)
    except msgspec.MsgspecError as e:
        raise MessageError(f"link message does not decode: {e}") from e


def link_path(engine_id: str, host: str, port: int) -> str:
    """The socket's path, the same in scheduler and workers, short enough for a socket.

    Raises PermissionError when the directory is not ours alone.
    """
    directory = os.path.join(tempfile.gettempdir(), f"neuron-push-{os.getuid()}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.lstat(directory)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(
            f"{directory} must be a directory that only this user can enter (mode 0700): "
            f"remove it, or set TMPDIR to a private place"
        )
    name = hashlib.blake2b(f"{engine_id}\0{host}\0{port}".encode(), digest_size=12).hexdigest()
    return f"ipc://{os.path.join(directory, name)}"


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; asking also lets ZeroMQ work."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


class WorkerLink:
    """The worker's end. Owner: the transfer thread; nothing here blocks."""

    REPEAT_S = 1.0

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(path)
        self._card: RankCard | None = None
        self._next_announce_s = 0.0

    def announce(self, card: RankCard) -> None:
        """Say RankUp until the engine has heard it."""
        self._card = card
        self._next_announce_s = 0.0

    def send(self, message: Up) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # The engine's process is gone or has not started; RankUp is repeated, and what
            # else would be said matters to nobody then.
            return

    def poll(self, now_s: float) -> list[Down]:
        """What the engine has said since the last call. Malformed messages raise MessageError."""
        if self._card is not None and now_s >= self._next_announce_s:
            self._next_announce_s = now_s + self.REPEAT_S
            self.send(RankUp(self.rank, self._card))
        messages: list[Down] = []
        while is_readable(self._socket):
            blob = self._socket.recv(zmq.NOBLOCK)
            try:
                message = _down.decode(blob)
            except msgspec.MsgspecError as e:
                raise MessageError(f"link message does not decode: {e}") from e
            if isinstance(message, RankKnown):
                self._card = None
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()
        self._context.term()
