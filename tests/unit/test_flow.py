"""How much a consumer may have open: counted by the producer, and by the consumer itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from neuron_push.core.agent import Memory, WriteState
from neuron_push.core.commands import (
    AbortConsumer,
    BeginProducer,
    Counters,
    FinishProducer,
    OpenConsumer,
    Progress,
    Result,
    Target,
)
from neuron_push.core.consuming import Consuming
from neuron_push.core.layout import KvLayout
from neuron_push.core.link import DialRequest, MeetPeer
from neuron_push.core.messages import (
    WIRE_VERSION,
    Cancel,
    CancelAck,
    EngineCard,
    Identity,
    Message,
    ModelCard,
    Nack,
    RankCard,
    Reason,
    Register,
    Segment,
    pack_blocks,
)
from neuron_push.core.oncepermin import OncePerMinute
from neuron_push.core.peers import PeerRank, PeerTable
from neuron_push.core.plan import Copies
from neuron_push.core.producing import Producing
from neuron_push.core.session import Outcome, Prompt
from neuron_push.core.shop import Limits, Shop
from neuron_push.core.timers import Timers
from tests.integration.engines import BLOCK_BYTES, TOKENS_PER_BLOCK, make_memory

NUM_BLOCKS = 8
LAYERS = 2
PER_BLOCK = LAYERS * 2 * BLOCK_BYTES
PROMPT = Prompt(4 * TOKENS_PER_BLOCK, b"h" * 16)
LIMITS = Limits(
    lease_s=30,
    request_timeout_s=20,
    peer_timeout_s=3,
    handshake_timeout_s=3,
    quarantine_s=1,
    always_open_bytes=0,
)


class Agent:
    """Moves nothing: WRITEs end when the test says so."""

    backend = "none"

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = False
        self.num_writes = 0

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_peer(self, peer: str) -> None: ...

    def notify(self, peer: str, notification: bytes) -> None: ...

    def post_write(
        self, peer: str, copies: Copies, local: Memory, remote: Memory, notification: bytes
    ) -> object:
        self.num_writes += 1
        return object()

    def poll_write(self, handle: object) -> WriteState:
        return WriteState.DONE if self.ended else WriteState.BUSY

    def release(self, handle: object) -> None: ...


class Sent(Shop):
    """A shop whose messages the test reads before they are sealed."""

    messages: list[Message]
    is_deaf: bool = False

    def send(self, name: str, message: Message, now_s: float) -> bool:
        if not self.is_deaf:
            self.messages.append(message)
        return not self.is_deaf


class Rank:
    """One half of a transfer thread, that has met one peer."""

    def __init__(self, name: str, peer: str, limits: Limits = LIMITS) -> None:
        self.memory, self.layout = make_memory(LAYERS, NUM_BLOCKS)
        self.agent = Agent(name)
        self.results: list[Result] = []
        self.asked: list[DialRequest] = []
        self.shop = Sent(
            agent=self.agent,  # type: ignore[arg-type]
            layout=self.layout,
            peers=PeerTable(self.agent, 0),  # type: ignore[arg-type]
            limits=limits,
            timers=Timers(),
            counters=Counters(),
            quiet=OncePerMinute(),
            read_memory=lambda address, num_bytes: b"",
            report=self.results.append,
            verify=False,
        )
        self.shop.messages = []
        mine, theirs = (card(each, self.layout) for each in (name, peer))
        self.shop.peers.meet(MeetPeer(mine, theirs, b"a" * 32, b"b" * 32), 0.0)
        self.peer: PeerRank = self.shop.peers.ranks[peer]

    def said(self, *kinds: type[Message]) -> list[Message]:
        said = [message for message in self.shop.messages if isinstance(message, kinds)]
        self.shop.messages.clear()
        return said


def card(name: str, layout: KvLayout) -> EngineCard:
    identity = Identity(name, "0", "127.0.0.1", 1, 1, 1, "none", "both")
    rank = RankCard(name, "none", name.encode(), layout)
    return EngineCard(identity, WIRE_VERSION, "push", "none", ModelCard("none", {}), (rank,))


# ------------------------------------------------------------ the producer


def registration(key: str, *blocks: int) -> Register:
    end = len(blocks) * TOKENS_PER_BLOCK
    packed = (pack_blocks(blocks),)
    return Register(key, hash(key) & 0xFFFF, PROMPT.num_tokens, PROMPT.digest, 0, end, 0, packed)


class Producer(Rank):
    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__("p", "d", limits)
        self.half = Producing(self.shop)

    def register(self, key: str, *blocks: int) -> Reason | None:
        """Registers; the reason if it is refused."""
        self.half.on_register(self.peer, registration(key, *blocks), 1.0)
        nacks = self.said(Nack)
        return nacks[0].reason if nacks else None  # type: ignore[union-attr]

    def prefill(self, key: str, tokens: int = PROMPT.num_tokens) -> None:
        self.half.begin(BeginProducer(key, key, PROMPT), 1.0)
        self.half.progress(Progress(key, ((1, 2, 3, 4),), True, tokens), 1.0)


def test_a_consumer_rank_may_register_all_of_its_memory_and_no_more() -> None:
    p = Producer()
    assert p.register("one", 1, 2, 3, 4) is None
    assert p.register("two", 5, 6, 7) is None
    assert p.peer.queued_bytes == 7 * PER_BLOCK
    assert p.register("three", 1, 2) is Reason.BUSY
    assert "three" not in p.peer.sending
    assert p.register("three", 1) is None
    assert p.shop.counters.refusals == {"busy": 1}


def test_a_registration_that_is_refused_is_acknowledged() -> None:
    p = Producer()
    p.half.on_register(p.peer, registration("one", 1, 2, 3, 4), 1.0)
    p.half.on_register(p.peer, registration("two", 1, 2, 3, 4), 1.0)
    p.said()
    refused = registration("three", 1, 2, 3, 4)
    p.half.on_register(p.peer, refused, 1.0)
    nack, ack = p.said(Nack, CancelAck)
    assert isinstance(nack, Nack)
    assert f"over {p.layout.pool_bytes}: the limit" in nack.detail
    assert ack == CancelAck(refused.nonce)


def test_a_repeated_registration_counts_once() -> None:
    p = Producer()
    for _ in range(3):
        assert p.register("one", 1, 2, 3, 4) is None
    assert p.peer.queued_bytes == 4 * PER_BLOCK


def test_bytes_count_until_the_last_segment_is_posted() -> None:
    """Then the consumer may have received all, and have given its blocks to another load."""
    p = Producer()
    assert p.register("one", 1, 2, 3, 4) is None
    assert p.register("two", 5, 6, 7) is None
    p.prefill("one", TOKENS_PER_BLOCK)
    assert p.agent.num_writes == 1
    assert p.register("three", 1, 2, 3, 4) is Reason.BUSY
    p.prefill("one")
    assert p.half.num_flights == p.agent.num_writes == 2
    assert p.register("four", 1, 2, 3, 4) is None
    assert p.peer.queued_bytes == 7 * PER_BLOCK


def test_bytes_of_a_cancelled_or_refused_registration_do_not_count() -> None:
    p = Producer()
    assert p.register("one", 1, 2, 3, 4) is None
    p.half.on_cancel(p.peer, Cancel("one", registration("one").nonce), 1.0)
    assert p.peer.queued_bytes == 0
    p.half.begin(BeginProducer("two", "two", Prompt(3, b"")), 1.0)
    assert p.register("two", 1, 2, 3, 4) is Reason.PROMPT_MISMATCH
    assert p.peer.queued_bytes == 0
    assert not p.peer.queued


def test_null_blocks_hold_nothing() -> None:
    p = Producer()
    assert p.register("one", 0, 0, 0, 1) is None
    assert p.peer.queued_bytes == PER_BLOCK


def test_a_small_memory_may_be_asked_for_more_than_it_has() -> None:
    """Ten thousand transfers of a few kilobytes are nobody's harm."""
    p = Producer(replace(LIMITS, always_open_bytes=12 * PER_BLOCK))
    assert [p.register(str(i), 1, 2, 3, 4) for i in range(4)] == [None, None, None, Reason.BUSY]


# ------------------------------------------------------------ the consumer


class Consumer(Rank):
    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__("d", "p", limits)
        self.half = Consuming(self.shop, self.asked.append)

    def load(self, name: str, *blocks: int) -> None:
        end = len(blocks) * TOKENS_PER_BLOCK
        target = Target("127.0.0.1", 1, "p")
        self.half.open(OpenConsumer(name, name, target, PROMPT, 0, end, 0, (blocks,)), 0.5)

    def outcomes(self, name: str) -> list[tuple[Outcome, Reason | None]]:
        return [(r.outcome, r.reason) for r in self.results if r.request_id == name]


BUSY = [(Outcome.FAILED, Reason.BUSY), (Outcome.RELEASED, Reason.BUSY)]


def test_a_consumer_asks_for_no_more_loads_than_its_producer_allows() -> None:
    d = Consumer(replace(LIMITS, max_open_per_peer=2))
    for name in ("one", "two"):
        d.load(name, 1)
    d.said()
    d.load("three", 2)
    assert d.outcomes("three") == BUSY
    assert [type(message) for message in d.said(Register, Cancel)] == [
        Cancel
    ]  # the producer need not wait
    assert d.half.num_open == 2


def test_a_consumer_asks_for_no_more_bytes_than_it_has() -> None:
    d = Consumer()
    d.load("one", 1, 2, 3, 4)
    d.load("two", 5, 6, 7)
    d.load("three", 1, 2)
    assert d.outcomes("three") == BUSY
    assert "the limit, which is the size of this rank's KV memory" in d.results[0].detail
    assert len(d.said(Register)) == 2


def test_bytes_of_a_load_count_until_its_blocks_are_given_back() -> None:
    d = Consumer()
    d.load("one", 1, 2, 3, 4)
    d.load("two", 5, 6, 7)
    (one, _) = d.said(Register)
    assert isinstance(one, Register)
    d.half.abort(AbortConsumer("one"), 1.0)
    d.load("three", 1, 2, 3, 4)
    assert d.outcomes("three") == BUSY
    d.half.on_message(d.peer, CancelAck(one.nonce), 1.0)
    d.load("four", 1, 2, 3, 4)
    assert d.outcomes("four") == []
    (four,) = d.said(Register)
    assert isinstance(four, Register)
    d.half.on_message(d.peer, Segment(four.nonce, 0, 1, 0, four.end_token), 1.0)
    assert d.outcomes("four") == [(Outcome.RECEIVED, None)]
    d.load("five", 1, 2, 3, 4)
    assert d.outcomes("five") == []


def test_bytes_stay_counted_when_the_agent_is_replaced() -> None:
    d = Consumer()
    d.load("one", 1, 2, 3, 4)
    new = Consumer()
    new.half.take_over(d.half, 1.0)
    new.load("two", 5, 6, 7)
    new.load("three", 1, 2)
    assert new.outcomes("three") == BUSY
    new.half.on_timer("one", 3.0)  # quarantine
    new.load("four", 1, 2)
    assert new.outcomes("four") == []


def test_a_registration_that_cannot_be_sent_fails_its_load_at_once() -> None:
    d = Consumer()
    d.shop.is_deaf = True
    d.load("one", 1, 2)
    assert d.outcomes("one") == [(Outcome.FAILED, Reason.HANDSHAKE)]
    assert "one" in d.peer.loading  # its silence, or its word, gives the blocks back
    d.shop.is_deaf = False
    d.half.on_timer("one", 2.0)
    (cancel,) = d.said(Cancel)
    assert isinstance(cancel, Cancel)
    d.half.on_message(d.peer, CancelAck(cancel.nonce), 2.0)
    assert d.outcomes("one")[1:] == [(Outcome.RELEASED, Reason.HANDSHAKE)]


def test_a_heartbeat_does_not_keep_a_tombstone_for_ever() -> None:
    p = Producer()
    assert p.register("one", 1) is None
    p.half.on_cancel(p.peer, Cancel("one", registration("one", 1).nonce), 1.0)
    p.half.begin(BeginProducer("one", "one", PROMPT), 1.0)
    p.half.finish(FinishProducer("one"), 1.0)
    p.half.on_renew(p.peer, "one", 1.5)
    (name,) = p.shop.timers.due(1.0 + LIMITS.request_timeout_s + 0.1)
    assert name == ("p", "one")


def test_all_blocks_of_a_table_are_bytes() -> None:
    _, layout = make_memory(LAYERS, NUM_BLOCKS)
    assert layout.table_bytes([np.array([1, 2, 0])]) == 2 * layout.block_bytes(0)
    assert layout.pool_bytes == NUM_BLOCKS * PER_BLOCK
