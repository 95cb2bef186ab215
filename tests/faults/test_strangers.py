"""Registrations that must not be served, prompts that differ, and what strangers send."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq

from neuron_push.core.agent import NixlAgent
from neuron_push.core.commands import AbortConsumer
from neuron_push.core.faulty import Fault, Kind
from neuron_push.core.messages import (
    Hello,
    MessageError,
    Reason,
    Seal,
    Segment,
    WhoAreYou,
    decode_side,
    encode_side,
)
from neuron_push.core.session import Outcome, Prompt
from tests.faults.harness.inprocess import (
    LIMITS,
    NACK_S,
    PROMPT,
    SOURCE,
    TARGET,
    fails,
    faulty,
    serve,
    transfer,
    transfer_rest,
)
from tests.faults.harness.report import record
from tests.integration.engines import BLOCK_BYTES, TOKENS_PER_BLOCK, Engine, engines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]
pytest.importorskip("nixl._api")

# ------------------------------------------------------------ registrations


def test_retry_with_the_same_id_after_the_first_was_served() -> None:
    with faulty() as (p, d, _, _):
        transfer(p, d, "r")
        d.wait("r", Outcome.RECEIVED)
        p.wait("r", Outcome.SENT)
        d.memory[:] = 0
        began_s = time.monotonic()
        d.load("r2", "r", p, PROMPT, TARGET)
        failed = fails(d, "r2", "retry with the same id", began_s, 8)
        assert failed.reason in (Reason.CONFLICT, Reason.LEASE_OVER, Reason.UNKNOWN_TRANSFER)
        assert not d.memory.any()


def test_registration_of_a_first_attempt_does_not_serve_the_second() -> None:
    """D gave up attempt one; the prefill of attempt two must not write into its blocks."""
    with faulty() as (p, d, _, _):
        serve(p, d)
        d.memory[:] = 0
        d.load("one", "r/1", p, PROMPT, TARGET)
        time.sleep(0.1)
        d.rank.submit([AbortConsumer("one")])
        d.wait("one", Outcome.RELEASED, 2)
        d.load("two", "r/2", p, PROMPT, [21, 22, 23, 24])
        p.prefill("two", "r/2", PROMPT, SOURCE)
        p.finish("two")
        d.wait("two", Outcome.RECEIVED)
        assert not d.memory[:, :, TARGET].any()


def test_two_registrations_for_one_key() -> None:
    with faulty() as (p, d, _, _), engines(limits=LIMITS, verify=False) as (_, other):
        serve(p, d)
        serve(p, other)
        other.memory[:] = 0
        d.load("r", "r", p, PROMPT, TARGET)
        time.sleep(0.1)
        began_s = time.monotonic()
        other.load("r", "r", p, PROMPT, TARGET)
        case = "two registrations for one key"
        assert fails(other, "r", case, began_s, NACK_S).reason is Reason.CONFLICT
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        d.wait("r", Outcome.RECEIVED)
        assert not other.memory.any()


def test_key_given_to_two_prefills() -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        p.prefill("one", "r", PROMPT, SOURCE)
        p.prefill("two", "r", PROMPT, [5, 6, 7, 8])
        p.finish("one")
        p.finish("two")
        p.wait("two", Outcome.SENT, 2)
        d.load("r", "r", p, PROMPT, TARGET)
        d.wait("r", Outcome.RECEIVED)
        assert (d.memory[:, :, TARGET] == p.memory[:, :, SOURCE]).all()
        p.wait("one", Outcome.SENT, 2)


def test_more_open_registrations_than_allowed() -> None:
    with faulty(limits=replace(LIMITS, max_open_per_peer=2)) as (p, d, _, _):
        serve(p, d)
        for i in range(2):
            d.load(f"r{i}", f"r{i}", p, PROMPT, TARGET)
        time.sleep(0.1)
        began_s = time.monotonic()
        d.load("r2", "r2", p, PROMPT, TARGET)
        assert fails(d, "r2", "too many at once", began_s, NACK_S).reason is Reason.BUSY


@pytest.mark.parametrize("kind", [Kind.DUPLICATE, Kind.REORDER, Kind.DROP])
@pytest.mark.parametrize("side", ["P", "D"])
def test_notification_is_lost_or_comes_twice_or_late(kind: Kind, side: str) -> None:
    with faulty() as (p, d, plan_p, plan_d):
        serve(p, d)
        (plan_p if side == "P" else plan_d).add(Fault("notifications", kind))
        d.load("r", "r", p, PROMPT, TARGET)
        time.sleep(0.1)
        p.prefill("r", "r", PROMPT, SOURCE, upto=TOKENS_PER_BLOCK)  # two segments
        transfer_rest(p, "r")
        if kind is Kind.DROP:  # the registration, or the word that all has arrived
            d.wait("r", Outcome.FAILED, LIMITS.request_timeout_s + 2)
            d.wait("r", Outcome.RELEASED, 3)
        else:
            d.wait("r", Outcome.RECEIVED, 8)
        p.wait("r", Outcome.SENT, LIMITS.lease_s + LIMITS.request_timeout_s + 2)
        serve(p, d)


# ------------------------------------------------------------ prompts


def test_full_prefix_hit() -> None:
    with faulty() as (p, d, _, _):
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        began_s = time.monotonic()
        d.load("r", "r", p, PROMPT, [], first=63, end=63)
        p.wait("r", Outcome.SENT, 1.5)
        record("D has the whole prompt", "P's blocks come back", 1.5, time.monotonic() - began_s)


@pytest.mark.parametrize(
    "theirs", [Prompt(63, b"h" * 16), Prompt(64, b"x" * 16)], ids=["length", "content"]
)
def test_prompts_differ(theirs: Prompt) -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        d.memory[:] = 0
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        began_s = time.monotonic()
        d.load("r", "r", p, theirs, TARGET)
        case = "prompts of P and D differ"
        assert fails(d, "r", case, began_s, NACK_S).reason is Reason.PROMPT_MISMATCH
        p.wait("r", Outcome.SENT, 2)
        assert not d.memory.any()


# ------------------------------------------------------------ strangers


class Stranger:
    """A NIXL agent that has got hold of both engines' metadata, but of no keys."""

    def __init__(self, *victims: Engine) -> None:
        self.agent = NixlAgent("stranger-" + secrets.token_hex(4), "UCX")
        self.memory = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        self.names = [
            self.agent.add_peer(v.rank._loop.agent.metadata())  # type: ignore[union-attr]
            for v in victims
        ]

    def tell(self, blob: bytes) -> None:
        for name in self.names:
            self.agent.notify(name, blob)
        self.agent.notifications()


def stranger_says(blobs: list[bytes]) -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        d.load("r", "r", p, PROMPT, TARGET)
        time.sleep(0.1)
        stranger = Stranger(p, d)
        for blob in blobs:
            stranger.tell(blob)
        end_s = time.monotonic() + 3
        while (
            d.rank.counters.events["dropped_notification"] < len(blobs) and time.monotonic() < end_s
        ):
            stranger.agent.notifications()
            time.sleep(0.01)
        assert d.rank.counters.events["dropped_notification"] >= len(blobs)
        assert "r" not in d.ended
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        d.wait("r", Outcome.RECEIVED)
        p.wait("r", Outcome.SENT)


def test_malformed_notifications() -> None:
    stranger_says([b"x", b"\xff" * 40, b"NPW\x01" + os.urandom(60), b"PUSH_REG:" + b"\x81" * 9])


def test_forged_completion() -> None:
    seal = Seal(b"k" * 32, b"k" * 32)
    stranger_says([seal.seal(Segment(nonce, 0, 1, 0, 63)) for nonce in range(8)])


def test_replayed_completion() -> None:
    """A true notification, recorded and sent again, completes nothing."""
    send, receive = Seal(b"a" * 32, b"b" * 32), Seal(b"b" * 32, b"a" * 32)
    blob = send.seal(Segment(7, 0, 1, 0, 63))
    receive.open(blob)
    with pytest.raises(MessageError, match="replay"):
        receive.open(blob)


def side_socket(engine: Engine) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://{engine.host}:{engine.port}")
    return socket


def test_garbage_to_the_side_channel() -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        socket = side_socket(p)
        try:
            good = encode_side(WhoAreYou())
            frames = [b"", b"\0" * 9, os.urandom(100), good[:5], good + b"x", b"NPS\x01\xc1"]
            for frame in frames:
                socket.send(frame)
                socket.send_multipart([b"", frame, os.urandom(8)])
            socket.send(good)
            end_s = time.monotonic() + 5
            while time.monotonic() < end_s:
                assert socket.poll(5000)
                if b"iam" in socket.recv():
                    break
            else:
                pytest.fail("the side channel does not answer any more")
        finally:
            socket.close()
        serve(p, d)


def test_hello_with_a_card_that_lies() -> None:
    """An address that is none, another's name: the engine stays up, and serves the others."""
    with faulty() as (p, d, _, _):
        serve(p, d)
        card = d.side.card
        assert card is not None
        socket = side_socket(p)
        try:
            for change in (
                {"host": "", "engine_id": "liar"},
                {"host": "\0::", "port": 0, "engine_id": "liar"},
                {"host": "300.1.1.1", "port": 10**6, "engine_id": p.name},
            ):
                identity = msgspec.structs.replace(card.identity, **change)
                rank = msgspec.structs.replace(card.ranks[0], nixl_metadata=b"junk")
                lie = msgspec.structs.replace(card, identity=identity, ranks=(rank,))
                socket.send(encode_side(Hello(lie, b"s" * 32)))
                if socket.poll(2500):
                    decode_side(socket.recv())
            p.load("x", "x", replace_target(d, "liar"), PROMPT, TARGET)
            assert p.wait("x", Outcome.FAILED, 4).reason is Reason.HANDSHAKE
        finally:
            socket.close()
        serve(p, d)


def replace_target(engine: Engine, name: str) -> Engine:
    """An engine by another's name at this one's address, as a router could give it."""

    class Named:
        target = msgspec.structs.replace(engine.target, engine_id=name)

    return Named()  # type: ignore[return-value]
