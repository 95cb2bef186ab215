"""Wire messages: what producer and consumer ranks say to each other, and how it is sealed.

Two channels carry them. *Notifications* (this file's first part) travel through NIXL between
two ranks, sealed with a key that only this pair knows. *Cards* and their envelope (second
part) travel over the side channel between two engines when they meet.

Nothing here decides anything: encode, decode, check the form. A message that does not decode
raises :class:`MessageError`, never anything else, whatever the bytes were.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from neuron_push.core.layout import KvLayout

WIRE_VERSION: Final = 1
"""Our own version number: P and D may run different vLLM releases, not different wires."""

MAX_NOTIFICATION_BYTES: Final = 4 << 20
MAX_CARD_BYTES: Final = 64 << 20
MAX_RAILS_BYTES: Final = 4096
MAX_RANKS: Final = 4096
MAX_KEY_CHARS: Final = 256
MAX_BLOCKS: Final = 1 << 20
"""Blocks one registration may name per group: 16 million tokens at 16 tokens a block."""

_MAGIC: Final = b"NPW" + bytes([WIRE_VERSION])
_MAC_BYTES: Final = 16
_HEADER_BYTES: Final = len(_MAGIC) + 8 + _MAC_BYTES


class MessageError(ValueError):
    """Bytes that are not one of our messages. The text says what is wrong with them."""


class Reason(enum.StrEnum):
    """Why a transfer failed; the word that appears in logs, metrics and HTTP errors."""

    PROMPT_MISMATCH = "prompt_mismatch"
    MAX_TOKENS = "max_tokens"
    PRODUCER_ABORTED = "producer_aborted"
    LEASE_OVER = "lease_over"
    WRITE_FAILED = "write_failed"
    BAD_REGISTRATION = "bad_registration"
    CONFLICT = "conflict"
    UNKNOWN_TRANSFER = "unknown_transfer"
    SHUTTING_DOWN = "shutting_down"
    PEER_LOST = "peer_lost"
    HANDSHAKE = "handshake"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BAD_PARAMS = "bad_params"
    DIGEST_MISMATCH = "digest_mismatch"
    BUSY = "busy"
    STALLED = "stalled"
    NIXL_STUCK = "nixl_stuck"
    FAULT = "fault"


# ------------------------------------------------------------------ notifications


class Register(msgspec.Struct, frozen=True, array_like=True, tag="reg"):
    """Consumer rank -> producer rank: write the KV of these tokens into these blocks.

    ``blocks[g]`` are little-endian uint32 block ids of the consumer's KV cache group ``g``;
    entry ``i`` holds tokens from ``base_token + i * tokens_per_block`` on. The tokens wanted
    are ``[first_token, end_token)``; an empty range asks for nothing and lets the producer
    free its blocks.
    """

    key: str
    nonce: int
    num_prompt_tokens: int
    prompt_hash: bytes
    first_token: int
    end_token: int
    base_token: int
    blocks: tuple[bytes, ...]
    verify: bool = False

    def validate(self) -> None:
        """Raises MessageError naming the field that cannot be right whatever the layout."""
        _check_key(self.key)
        _check_nonce(self.nonce)
        if not 0 <= self.base_token <= self.first_token <= self.end_token:
            raise MessageError(
                f"Register.first_token: tokens [{self.first_token}, {self.end_token}) from base "
                f"{self.base_token} are no range"
            )
        if not self.end_token <= self.num_prompt_tokens < 2**31:
            raise MessageError(
                f"Register.end_token: {self.end_token} is beyond the prompt's "
                f"{self.num_prompt_tokens} tokens"
            )
        if len(self.prompt_hash) not in (0, 16):
            raise MessageError(
                f"Register.prompt_hash: {len(self.prompt_hash)} bytes, expected 16 or none"
            )
        for group, ids in enumerate(self.blocks):
            if len(ids) % 4 or len(ids) // 4 > MAX_BLOCKS:
                raise MessageError(
                    f"Register.blocks[{group}]: {len(ids)} bytes are no list of uint32 ids "
                    f"of at most {MAX_BLOCKS} blocks"
                )


class Segment(msgspec.Struct, frozen=True, array_like=True, tag="seg"):
    """Producer rank -> consumer rank, attached to a WRITE: these tokens have arrived.

    ``count`` is 0 on all but the last segment, which says how many there are. Fabrics may
    reorder: a transfer is complete when that many different indexes were seen.
    """

    nonce: int
    index: int
    count: int
    first_token: int
    end_token: int
    digest: bytes = b""

    def validate(self) -> None:
        _check_nonce(self.nonce)
        if not 0 <= self.index < 2**20 or not (self.count == 0 or self.count == self.index + 1):
            raise MessageError(f"Segment.count: {self.count} does not fit index {self.index}")
        if not 0 <= self.first_token <= self.end_token:
            raise MessageError(
                f"Segment.first_token: [{self.first_token}, {self.end_token}) is no range"
            )


class Nack(msgspec.Struct, frozen=True, array_like=True, tag="nak"):
    """Producer rank -> consumer rank: this transfer has failed; a CancelAck will follow."""

    nonce: int
    reason: Reason
    detail: str = ""

    def validate(self) -> None:
        _check_nonce(self.nonce)


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="can"):
    """Consumer rank -> producer rank: stop, and say when nothing more will be written."""

    key: str
    nonce: int

    def validate(self) -> None:
        _check_key(self.key)
        _check_nonce(self.nonce)


class CancelAck(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Producer rank -> consumer rank: nothing more will ever be written for this nonce."""

    nonce: int

    def validate(self) -> None:
        _check_nonce(self.nonce)


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="hb"):
    """Either way, only while transfers are open: the sender lives and still wants these.

    From a consumer, ``open_keys`` renews the producer's leases; from a producer it is empty.
    """

    open_keys: tuple[str, ...] = ()

    def validate(self) -> None:
        for key in self.open_keys:
            _check_key(key)


Message = Register | Segment | Nack | Cancel | CancelAck | Heartbeat

_encoder = msgspec.msgpack.Encoder()
# msgspec skips unknown fields recursively, and gives up on deep ones with a RecursionError.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise MessageError(f"key: {len(key)} characters, expected 1 to {MAX_KEY_CHARS}")


def _check_nonce(nonce: int) -> None:
    if not 0 <= nonce < 2**64:
        raise MessageError(f"nonce: {nonce} is no unsigned 64-bit number")


def pack_blocks(block_ids: npt.ArrayLike) -> bytes:
    """Block ids (any integer sequence) as little-endian uint32 bytes."""
    return np.asarray(block_ids, dtype="<u4").tobytes()


def unpack_blocks(packed: bytes) -> npt.NDArray[np.int64]:
    """The inverse of :func:`pack_blocks`, as int64."""
    return np.frombuffer(packed, dtype="<u4").astype(np.int64)


class Seal:
    """Seals and opens the notifications of one ordered pair of ranks.

    Not thread-safe: the transfer thread owns it. Each notification carries a counter and a
    keyed BLAKE2b MAC; a counter seen before, or older than the last ``WINDOW``, is refused,
    so that a recorded notification cannot be played again. The counter window is as wide as
    fabrics are known to reorder, many times over.
    """

    WINDOW: ClassVar[int] = 4096

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._highest = 0
        self._seen = 0  # bit i: counter (highest - i) was accepted

    def seal(self, message: Message) -> bytes:
        self._sent += 1
        body = _encoder.encode(message)
        counter = self._sent.to_bytes(8, "little")
        return b"".join((_MAGIC, counter, _mac(self._send_key, counter, body), body))

    def open(self, blob: bytes) -> Message:
        """Raises MessageError for a foreign, forged, replayed or malformed notification."""
        if len(blob) < _HEADER_BYTES or len(blob) > MAX_NOTIFICATION_BYTES:
            raise MessageError(f"notification of {len(blob)} bytes")
        if blob[:3] != _MAGIC[:3]:
            raise MessageError("not a neuron_push notification")
        if blob[3] != WIRE_VERSION:
            raise MessageError(f"wire version {blob[3]}, this side speaks {WIRE_VERSION}")
        counter_bytes = blob[4:12]
        mac = blob[12:_HEADER_BYTES]
        body = blob[_HEADER_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._receive_key, counter_bytes, body)):
            raise MessageError("the MAC does not fit: forged, or sealed for another connection")
        self._accept(int.from_bytes(counter_bytes, "little"))
        try:
            message = _decoder.decode(body)
        except _DECODE_ERRORS as e:
            raise MessageError(f"body does not decode: {e}") from e
        message.validate()
        return message

    def _accept(self, counter: int) -> None:
        ahead = counter - self._highest
        if ahead > 0:
            keep = (1 << self.WINDOW) - 1
            self._seen = ((self._seen << min(ahead, self.WINDOW)) | 1) & keep
            self._highest = counter
            return
        if -ahead >= self.WINDOW or self._seen >> -ahead & 1:
            raise MessageError(f"counter {counter} was seen before or is too old: a replay")
        self._seen |= 1 << -ahead


def _mac(key: bytes, counter: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(counter, digest_size=_MAC_BYTES, key=key)
    digest.update(body)
    return digest.digest()


def pair_key(secret_a: bytes, secret_b: bytes, sender: str, receiver: str) -> bytes:
    """The key for notifications from agent ``sender`` to agent ``receiver``.

    ``secret_a`` and ``secret_b`` are the two engines' shares from the card exchange, in any
    order; both ends derive the same 32 bytes, and each direction has a key of its own.
    """
    low, high = sorted((secret_a, secret_b))
    material = b"\0".join((sender.encode(), receiver.encode()))
    digest = hashlib.blake2b(digest_size=32, person=b"neuron_push_pair")
    digest.update(low + high + material)
    return digest.digest()


# ------------------------------------------------------------------ cards


class RankCard(msgspec.Struct, frozen=True):
    """One worker rank: how to reach its NIXL agent and what its KV memory looks like."""

    agent_name: str
    backend: str
    nixl_metadata: bytes
    layout: KvLayout
    rails: bytes = b""
    """What the rank says of its NICs and fabric, in the words of neuron_push.rails; may be
    missing. Carried here, not read."""


class ModelCard(msgspec.Struct, frozen=True):
    """What must be equal on both sides for KV to mean the same thing.

    ``fingerprint`` maps a property's name to its value, so that a refusal can name what
    differs instead of showing two hashes.
    """

    name: str
    fingerprint: dict[str, str]


class Identity(msgspec.Struct, frozen=True):
    """Who an engine is: what a router needs to tell a consumer where its producer is."""

    engine_id: str
    incarnation: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    model: str
    role: str
    ready: bool = True


class EngineCard(msgspec.Struct, frozen=True):
    """An engine as its peers see it: identity, model and all its ranks."""

    identity: Identity
    wire_version: int
    transfer_mode: str
    vllm_version: str
    model: ModelCard
    ranks: tuple[RankCard, ...]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Caller's card, and its share of the pair's secret."""

    card: EngineCard
    secret: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Callee's answer, sent once each of its ranks has said that it is polling."""

    card: EngineCard
    secret: bytes


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The callee will not connect; the sentence is for the operator of either side."""

    sentence: str


class WhoAreYou(msgspec.Struct, frozen=True, tag="who"):
    """A router, or the doctor, asks for the Identity."""


class IAm(msgspec.Struct, frozen=True, tag="iam"):
    identity: Identity


class WhichRails(msgspec.Struct, frozen=True, tag="which_rails"):
    """The doctor asks for every rank's rails card."""


class TheseRails(msgspec.Struct, frozen=True, tag="rails"):
    """``cards[rank]`` is that rank's :attr:`RankCard.rails`; ``time_s`` the callee's clock now."""

    identity: Identity
    cards: tuple[bytes, ...]
    time_s: float


class NotReady(msgspec.Struct, frozen=True, tag="notready"):
    """The engine is still starting; ask again."""

    sentence: str


SideMessage = Hello | Welcome | Refuse | WhoAreYou | IAm | WhichRails | TheseRails | NotReady

_side_decoder: msgspec.msgpack.Decoder[SideMessage] = msgspec.msgpack.Decoder(SideMessage)
_SIDE_MAGIC: Final = b"NPS"


def encode_side(message: SideMessage) -> bytes:
    return _SIDE_MAGIC + bytes([WIRE_VERSION]) + _encoder.encode(message)


def decode_side(blob: bytes) -> SideMessage:
    """Raises MessageError for anything that is not a side-channel message of our version."""
    if len(blob) > MAX_CARD_BYTES:
        raise MessageError(f"side-channel message of {len(blob)} bytes")
    if blob[:3] != _SIDE_MAGIC:
        raise MessageError("not a neuron_push side-channel message")
    if blob[3:4] != bytes([WIRE_VERSION]):
        raise MessageError(f"wire version {blob[3:4].hex()}, this side speaks {WIRE_VERSION}")
    try:
        message = _side_decoder.decode(blob[4:])
    except _DECODE_ERRORS as e:
        raise MessageError(f"side-channel message does not decode: {e}") from e
    if isinstance(message, Hello | Welcome):
        _validate_card(message.card, message.secret)
    elif isinstance(message, TheseRails):
        if len(message.cards) > MAX_RANKS:
            raise MessageError(f"rails of {len(message.cards)} ranks, expected {MAX_RANKS} at most")
        for i, rails in enumerate(message.cards):
            _check_rails(f"rails.cards[{i}]", rails)
    return message


def _check_rails(where: str, rails: bytes) -> None:
    if len(rails) > MAX_RAILS_BYTES:
        raise MessageError(f"{where}: {len(rails)} bytes, expected {MAX_RAILS_BYTES} at most")


def _validate_card(card: EngineCard, secret: bytes) -> None:
    if len(secret) != 32:
        raise MessageError(f"secret: {len(secret)} bytes, expected 32")
    identity = card.identity
    if identity.tp_size < 1 or identity.pp_size < 1:
        raise MessageError(
            f"card.identity: tp_size {identity.tp_size}, pp_size {identity.pp_size}; expected 1 "
            "or more"
        )
    if len(card.ranks) != identity.tp_size * identity.pp_size:
        raise MessageError(
            f"card.ranks: {len(card.ranks)} ranks, expected tp_size {identity.tp_size} x "
            f"pp_size {identity.pp_size}"
        )
    for i, rank in enumerate(card.ranks):
        _check_rails(f"card.ranks[{i}].rails", rank.rails)
        try:
            rank.layout.validate()
        except ValueError as e:
            raise MessageError(f"card.ranks[{i}].layout: {e}") from e


def explain_misfit(mine: EngineCard, theirs: EngineCard) -> str | None:
    """One sentence saying why two engines cannot exchange KV, or None when they can.

    Shapes are not compared here: see plan.py.
    """
    pairs = {
        "wire version": (str(mine.wire_version), str(theirs.wire_version)),
        "transfer mode": (mine.transfer_mode, theirs.transfer_mode),
    }
    names = mine.model.fingerprint.keys() | theirs.model.fingerprint.keys()
    for name in sorted(names):
        pairs[name] = (
            mine.model.fingerprint.get(name, "(not given)"),
            theirs.model.fingerprint.get(name, "(not given)"),
        )
    differing = [f"{name}: {a} here, {b} there" for name, (a, b) in pairs.items() if a != b]
    if not differing:
        return None
    return (
        f"engine {mine.identity.engine_id!r} and engine {theirs.identity.engine_id!r} do not fit: "
        f"{'; '.join(differing)}. Start both with the same model, dtype and neuron_push release."
    )
