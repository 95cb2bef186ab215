"""Wire messages: what goes in comes out, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.core import messages as wire
from neuron_push.core.layout import Allocation, KvLayout, Region
from neuron_push.core.messages import (
    MAX_BLOCKS,
    MAX_KEY_CHARS,
    MAX_NOTIFICATION_BYTES,
    WIRE_VERSION,
    Cancel,
    CancelAck,
    EngineCard,
    Heartbeat,
    Hello,
    IAm,
    Identity,
    Message,
    MessageError,
    ModelCard,
    Nack,
    NotReady,
    RankCard,
    Reason,
    Refuse,
    Register,
    Seal,
    Segment,
    SideMessage,
    TheseRails,
    Welcome,
    WhichRails,
    WhoAreYou,
    decode_side,
    encode_side,
    explain_misfit,
    pack_blocks,
    pair_key,
    unpack_blocks,
)

P_TO_D = b"p" * 32
D_TO_P = b"d" * 32
MAX_U64 = 2**64 - 1

REGISTER = Register("cmpl-1", 7, 100, b"h" * 16, 16, 96, 16, (pack_blocks([1, 2, 3]), b""), True)

NOTIFICATIONS: list[Message] = [
    REGISTER,
    Register("k" * MAX_KEY_CHARS, MAX_U64, 5, b"", 5, 5, 0, ()),
    Segment(7, 0, 0, 0, 16),
    Segment(MAX_U64, 3, 4, 48, 60, b"digest"),
    *(Nack(7, reason, "why: ü") for reason in Reason),
    Cancel("cmpl-1", 0),
    CancelAck(MAX_U64),
    Heartbeat(),
    Heartbeat(("cmpl-1", "cmpl-2")),
]


@dataclass
class Pair:
    producer: Seal
    consumer: Seal


@pytest.fixture
def pair() -> Pair:
    return Pair(Seal(P_TO_D, D_TO_P), Seal(D_TO_P, P_TO_D))


def sealed(body: bytes, counter: int = 1, key: bytes = P_TO_D) -> bytes:
    """A notification with any body and counter, as only the holder of the key can make."""
    number = counter.to_bytes(8, "little")
    return wire._MAGIC + number + wire._mac(key, number, body) + body


# ------------------------------------------------------------ seal and open


@pytest.mark.parametrize("message", NOTIFICATIONS, ids=lambda m: type(m).__name__)
def test_both_ends_understand_each_other(pair: Pair, message: Message) -> None:
    assert pair.consumer.open(pair.producer.seal(message)) == message
    assert pair.producer.open(pair.consumer.seal(message)) == message


def test_a_notification_sealed_with_another_key_is_refused(pair: Pair) -> None:
    blob = Seal(b"x" * 32, D_TO_P).seal(CancelAck(1))
    with pytest.raises(MessageError, match="MAC"):
        pair.consumer.open(blob)


def test_a_notification_sent_back_to_its_sender_is_refused(pair: Pair) -> None:
    blob = pair.producer.seal(CancelAck(1))
    with pytest.raises(MessageError, match="MAC"):
        pair.producer.open(blob)


def test_any_tampered_byte_is_noticed(pair: Pair) -> None:
    blob = pair.producer.seal(REGISTER)
    for i in range(len(blob)):
        tampered = bytearray(blob)
        tampered[i] ^= 1
        with pytest.raises(MessageError):
            pair.consumer.open(bytes(tampered))
    assert pair.consumer.open(blob) == REGISTER


def test_a_cut_or_prolonged_notification_is_refused(pair: Pair) -> None:
    blob = pair.producer.seal(REGISTER)
    for length in range(len(blob)):
        with pytest.raises(MessageError):
            pair.consumer.open(blob[:length])
    with pytest.raises(MessageError):
        pair.consumer.open(blob + b"\0")


def test_a_notification_is_accepted_once(pair: Pair) -> None:
    blob = pair.producer.seal(CancelAck(1))
    pair.consumer.open(blob)
    with pytest.raises(MessageError, match="replay"):
        pair.consumer.open(blob)


def test_a_forgery_does_not_use_up_the_counter(pair: Pair) -> None:
    blob = pair.producer.seal(CancelAck(1))
    forged = blob[:12] + bytes(16) + blob[28:]
    with pytest.raises(MessageError, match="MAC"):
        pair.consumer.open(forged)
    assert pair.consumer.open(blob) == CancelAck(1)


@given(st.permutations(range(24)))
def test_any_order_is_accepted_and_each_one_once(order: list[int]) -> None:
    producer, consumer = Seal(P_TO_D, D_TO_P), Seal(D_TO_P, P_TO_D)
    blobs = [producer.seal(CancelAck(i)) for i in range(len(order))]
    for i in order:
        assert consumer.open(blobs[i]) == CancelAck(i)
    for blob in blobs:
        with pytest.raises(MessageError, match="replay"):
            consumer.open(blob)


def test_the_window_is_as_wide_as_it_says(pair: Pair) -> None:
    blobs = [pair.producer.seal(CancelAck(i)) for i in range(Seal.WINDOW + 2)]
    pair.consumer.open(blobs[-2])
    assert pair.consumer.open(blobs[1]) == CancelAck(1)  # WINDOW - 1 behind
    with pytest.raises(MessageError, match="too old"):
        pair.consumer.open(blobs[0])
    pair.consumer.open(blobs[-1])
    with pytest.raises(MessageError, match="replay"):
        pair.consumer.open(blobs[-2])
    with pytest.raises(MessageError, match="too old"):
        pair.consumer.open(blobs[1])


def test_a_leap_of_the_counter_forgets_nothing_it_should_know(pair: Pair) -> None:
    early = pair.producer.seal(CancelAck(0))
    pair.consumer.open(early)
    pair.consumer.open(sealed(msgspec.msgpack.encode(CancelAck(1)), counter=MAX_U64))
    with pytest.raises(MessageError, match="too old"):
        pair.consumer.open(early)


def test_another_wire_version_is_named(pair: Pair) -> None:
    blob = pair.producer.seal(CancelAck(1))
    other = blob[:3] + bytes([WIRE_VERSION + 1]) + blob[4:]
    with pytest.raises(MessageError, match=f"wire version {WIRE_VERSION + 1}"):
        pair.consumer.open(other)


def test_notifications_of_other_software_are_refused(pair: Pair) -> None:
    with pytest.raises(MessageError, match="not a neuron_push"):
        pair.consumer.open(b"cmpl-0123456789-0123456789:1:2")
    with pytest.raises(MessageError, match="bytes"):
        pair.consumer.open(b"")
    with pytest.raises(MessageError, match="bytes"):
        pair.consumer.open(bytes(MAX_NOTIFICATION_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_our_own_words(blob: bytes) -> None:
    for data in (blob, wire._MAGIC + blob):
        with pytest.raises(MessageError):
            Seal(D_TO_P, P_TO_D).open(data)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), MAX_U64)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
TAGS = st.sampled_from(["reg", "seg", "nak", "can", "ack", "hb", "none", ""])


@given(
    st.binary(max_size=100)
    | ANYTHING.map(msgspec.msgpack.encode)
    | st.tuples(TAGS, st.lists(ANYTHING, max_size=9)).map(
        lambda tagged: msgspec.msgpack.encode([tagged[0], *tagged[1]])
    )
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_of_a_peer_is_a_message_or_refused(body: bytes) -> None:
    try:
        message = Seal(D_TO_P, P_TO_D).open(sealed(body))
    except MessageError:
        return
    assert isinstance(message, Message)


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa3ack\xa1\xff",  # text that is no UTF-8
        b"\x92\xa3can\xa1\xff",
        b"\x93\xa3ack\x01" + b"\x91" * 100_000 + b"\x00",  # nested beyond any stack
        b"\xdd\xff\xff\xff\xff",  # an array of four billion items that are not there
    ],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(MessageError):
        Seal(D_TO_P, P_TO_D).open(sealed(body))


# ------------------------------------------------------------ validate


def changed(message: Message, **fields: object) -> Message:
    return msgspec.structs.replace(message, **fields)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (changed(REGISTER, key=""), "key"),
        (changed(REGISTER, key="k" * (MAX_KEY_CHARS + 1)), "key"),
        (changed(REGISTER, nonce=-1), "nonce"),
        (changed(REGISTER, nonce=2**64), "nonce"),
        (changed(REGISTER, base_token=-1), "first_token"),
        (changed(REGISTER, base_token=17), "first_token"),
        (changed(REGISTER, first_token=97), "first_token"),
        (changed(REGISTER, first_token=15), "first_token"),
        (changed(REGISTER, end_token=101), "end_token"),
        (changed(REGISTER, num_prompt_tokens=95), "end_token"),
        (changed(REGISTER, num_prompt_tokens=2**31), "end_token"),
        (changed(REGISTER, prompt_hash=b"h" * 15), "prompt_hash"),
        (changed(REGISTER, prompt_hash=b"h" * 17), "prompt_hash"),
        (changed(REGISTER, blocks=(b"", b"123")), r"blocks\[1\]"),
        (changed(REGISTER, blocks=(bytes(4 * MAX_BLOCKS + 4),)), r"blocks\[0\]"),
        (Segment(-1, 0, 0, 0, 1), "nonce"),
        (Segment(7, -1, 0, 0, 1), "count"),
        (Segment(7, 2**20, 0, 0, 1), "count"),
        (Segment(7, 1, 1, 0, 1), "count"),
        (Segment(7, 1, 3, 0, 1), "count"),
        (Segment(7, 1, -1, 0, 1), "count"),
        (Segment(7, 0, 0, -1, 1), "first_token"),
        (Segment(7, 0, 0, 2, 1), "first_token"),
        (Nack(2**64, Reason.BUSY), "nonce"),
        (Cancel("", 7), "key"),
        (Cancel("cmpl-1", -1), "nonce"),
        (CancelAck(-1), "nonce"),
        (Heartbeat(("cmpl-1", "")), "key"),
        (Heartbeat(("k" * (MAX_KEY_CHARS + 1),)), "key"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(message: Message, names: str) -> None:
    with pytest.raises(MessageError, match=names):
        message.validate()


@pytest.mark.parametrize("message", NOTIFICATIONS, ids=lambda m: type(m).__name__)
def test_what_is_right_is_not_refused(message: Message) -> None:
    message.validate()


def test_what_was_opened_was_validated(pair: Pair) -> None:
    with pytest.raises(MessageError, match="first_token"):
        pair.consumer.open(pair.producer.seal(Segment(7, 0, 0, 2, 1)))


def test_an_unknown_reason_is_refused() -> None:
    body = msgspec.msgpack.encode(["nak", 7, "bad_weather", ""])
    with pytest.raises(MessageError, match="bad_weather"):
        Seal(D_TO_P, P_TO_D).open(sealed(body))


# ------------------------------------------------------------ block ids


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_blocks_survive(ids: list[int]) -> None:
    packed = pack_blocks(ids)
    assert len(packed) == 4 * len(ids)
    unpacked = unpack_blocks(packed)
    assert unpacked.dtype == np.int64
    assert unpacked.tolist() == ids


def test_blocks_are_little_endian_whatever_they_came_in() -> None:
    assert pack_blocks(np.array([1, 256], dtype=np.int64)) == b"\1\0\0\0\0\1\0\0"
    assert pack_blocks((1, 256)) == b"\1\0\0\0\0\1\0\0"


# ------------------------------------------------------------ keys of a pair


def test_both_ends_derive_the_same_key() -> None:
    a, b = b"a" * 32, b"b" * 32
    key = pair_key(a, b, "p/0", "d/0")
    assert len(key) == 32
    assert pair_key(b, a, "p/0", "d/0") == key


def test_each_direction_pair_and_secret_has_a_key_of_its_own() -> None:
    a, b = b"a" * 32, b"b" * 32
    keys = {
        pair_key(a, b, "p/0", "d/0"),
        pair_key(a, b, "d/0", "p/0"),
        pair_key(a, b, "p/0", "d/1"),
        pair_key(a, b, "p/1", "d/0"),
        pair_key(a, a, "p/0", "d/0"),
        pair_key(b, b, "p/0", "d/0"),
    }
    assert len(keys) == 6


# ------------------------------------------------------------ cards and the side channel


def layout(rank: int = 0) -> KvLayout:
    region = Region("model.layers.0.attn", "kv", 0, 4096, 8, 2048, 16, 2, 0, 64, 1024, 64, 0)
    return KvLayout(rank, 0, 2, "bfloat16", "DRAM", (Allocation(4096, 65536, 0),), (region,))


def identity(engine_id: str = "prefill-1", tp_size: int = 1, pp_size: int = 1) -> Identity:
    return Identity(engine_id, "3f2a", "10.0.0.1", 5600, tp_size, pp_size, "llama", "producer")


def card(engine_id: str = "prefill-1", num_ranks: int = 1, **fields: object) -> EngineCard:
    ranks = tuple(
        RankCard(f"{engine_id}/{i}", "UCX", b"\0nixl", layout(i)) for i in range(num_ranks)
    )
    whole = EngineCard(
        identity(engine_id, tp_size=num_ranks),
        WIRE_VERSION,
        "push",
        "0.32.0",
        ModelCard("llama", {"model": "llama", "dtype": "bfloat16"}),
        ranks,
    )
    return msgspec.structs.replace(whole, **fields)


SECRET = b"s" * 32
SIDE: list[SideMessage] = [
    Hello(card(), SECRET),
    Welcome(card(num_ranks=2), SECRET),
    Refuse("the models differ"),
    WhoAreYou(),
    IAm(identity()),
    WhichRails(),
    TheseRails(identity(tp_size=2), (b"\x80", b""), 1.5),
    NotReady("starting"),
]


@pytest.mark.parametrize("message", SIDE, ids=lambda m: type(m).__name__)
def test_side_messages_survive(message: SideMessage) -> None:
    assert decode_side(encode_side(message)) == message


@pytest.mark.parametrize("message", SIDE, ids=lambda m: type(m).__name__)
def test_a_cut_side_message_is_refused(message: SideMessage) -> None:
    blob = encode_side(message)
    for length in range(len(blob)):
        with pytest.raises(MessageError):
            decode_side(blob[:length])


@pytest.mark.parametrize(
    "message",
    [
        TheseRails(identity(), (b"", b"x" * 4097), 0.0),
        TheseRails(identity(), (b"",) * 4097, 0.0),
        Hello(
            card(ranks=(RankCard("p/0", "UCX", b"", layout(), b"x" * 4097),)),
            SECRET,
        ),
    ],
    ids=["one", "many", "hello"],
)
def test_rails_are_bounded(message: SideMessage) -> None:
    with pytest.raises(MessageError, match="rails"):
        decode_side(encode_side(message))


def test_a_card_of_a_release_without_rails_is_a_card() -> None:
    body = msgspec.msgpack.decode(encode_side(SIDE[0])[4:])
    for rank in body["card"]["ranks"]:
        del rank["rails"]
    blob = wire._SIDE_MAGIC + bytes([WIRE_VERSION]) + msgspec.msgpack.encode(body)
    message = decode_side(blob)
    assert isinstance(message, Hello)
    assert message.card.ranks[0].rails == b""


def test_a_side_message_of_another_version_is_refused() -> None:
    blob = encode_side(WhoAreYou())
    with pytest.raises(MessageError, match="wire version"):
        decode_side(blob[:3] + bytes([WIRE_VERSION + 1]) + blob[4:])


def test_notifications_and_side_messages_do_not_mix(pair: Pair) -> None:
    with pytest.raises(MessageError, match="side-channel"):
        decode_side(pair.producer.seal(CancelAck(1)))


def test_side_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_CARD_BYTES", 1000)
    with pytest.raises(MessageError, match="bytes"):
        decode_side(encode_side(Refuse("x" * 1000)))


@given(st.binary(max_size=200) | ANYTHING.map(msgspec.msgpack.encode))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_on_the_side_channel_are_a_message_or_refused(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode_side(body)
    try:
        message = decode_side(wire._SIDE_MAGIC + bytes([WIRE_VERSION]) + body)
    except MessageError:
        return
    assert isinstance(message, SideMessage)


@given(st.data())
def test_a_damaged_hello_is_a_hello_or_refused(data: st.DataObject) -> None:
    blob = bytearray(encode_side(SIDE[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(4, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode_side(bytes(blob))
    except MessageError:
        return
    assert isinstance(message, SideMessage)


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa4type\xa3iam\xa8identity\xa1\xff",
        b"\x82\xa4type\xa3who\xa1x" + b"\x91" * 100_000 + b"\x00",
        b"\x82\xa4type\xa6refuse\xa8sentence\xa1\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_hostile_side_messages_are_refused(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode_side(wire._SIDE_MAGIC + bytes([WIRE_VERSION]) + body)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (Hello(card(), b"short"), "secret"),
        (Welcome(card(), b"s" * 33), "secret"),
        (Hello(card(ranks=()), SECRET), r"card\.ranks"),
        (Hello(card(identity=identity(tp_size=2)), SECRET), r"card\.ranks"),
        (Hello(card(identity=identity(tp_size=-1, pp_size=-1)), SECRET), r"card\.identity"),
        (Hello(card(identity=identity(tp_size=0, pp_size=0), ranks=()), SECRET), "identity"),
        (
            Welcome(
                card(
                    ranks=(
                        RankCard("p/0", "UCX", b"", msgspec.structs.replace(layout(), dtype="")),
                    )
                ),
                SECRET,
            ),
            r"card\.ranks\[0\]\.layout: .*dtype",
        ),
    ],
)
def test_a_card_that_contradicts_itself_is_refused(message: SideMessage, names: str) -> None:
    with pytest.raises(MessageError, match=names):
        decode_side(encode_side(message))


# ------------------------------------------------------------ do two engines fit?


def test_engines_of_one_model_fit() -> None:
    assert explain_misfit(card("prefill-1"), card("decode-1", num_ranks=2)) is None


def test_releases_of_vllm_may_differ() -> None:
    assert explain_misfit(card(), card("decode-1", vllm_version="0.24.0")) is None


def test_a_misfit_names_the_engines_and_all_that_differs() -> None:
    other = card(
        "decode-1",
        wire_version=WIRE_VERSION + 1,
        model=ModelCard("llama", {"model": "llama", "dtype": "float16", "revision": "b1"}),
    )
    sentence = explain_misfit(card("prefill-1"), other)
    assert sentence is not None
    for words in (
        "engine 'prefill-1' and engine 'decode-1' do not fit",
        f"wire version: {WIRE_VERSION} here, {WIRE_VERSION + 1} there",
        "dtype: bfloat16 here, float16 there",
        "revision: (not given) here, b1 there",
    ):
        assert words in sentence
    assert "model: " not in sentence
    assert sentence.endswith(".")


def test_transfer_modes_have_to_agree() -> None:
    sentence = explain_misfit(card(), card("decode-1", transfer_mode="pull"))
    assert sentence is not None
    assert "transfer mode: push here, pull there" in sentence
