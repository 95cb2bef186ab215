"""Who answers for a producer rank that fell silent, and when its WRITEs are known to be over."""

from __future__ import annotations

import math

import msgspec

from neuron_push.core.commands import OpenConsumer, Target
from neuron_push.core.consuming import Consuming
from neuron_push.core.link import MeetPeer
from neuron_push.core.messages import Cancel, CancelAck, EngineCard, Reason, Register
from neuron_push.core.peers import PeerRank
from neuron_push.core.session import Outcome
from neuron_push.core.silent import is_same_process
from tests.integration.engines import TOKENS_PER_BLOCK
from tests.unit.test_flow import LIMITS, PROMPT, Rank, card


def reborn(old: EngineCard, agent: str, incarnation: str) -> EngineCard:
    """The same engine, one rank of which has this agent now."""
    identity = msgspec.structs.replace(old.identity, incarnation=incarnation)
    rank = msgspec.structs.replace(old.ranks[0], agent_name=agent, nixl_metadata=agent.encode())
    return msgspec.structs.replace(old, identity=identity, ranks=(rank,))


class Consumer(Rank):
    """A consumer whose producer ``p`` fell silent in the middle of load ``r``."""

    def __init__(self) -> None:
        super().__init__("d", "p", LIMITS)
        self.half = Consuming(self.shop, self.asked.append)
        end = 2 * TOKENS_PER_BLOCK
        target = Target("127.0.0.1", 1, "p")
        self.half.open(OpenConsumer("r", "r", target, PROMPT, 0, end, 0, ((1, 2),)), 0.5)
        (register,) = self.said(Register)
        assert isinstance(register, Register)
        self.nonce = register.nonce
        self.lose()

    def lose(self) -> None:
        self.shop.peers.drop(self.peer.engine)
        self.half.on_peer_silent(self.peer, "r", 1.0)

    def meet(self, agent: str, incarnation: str) -> PeerRank:
        """As RankLoop does."""
        mine, theirs = card("d", self.layout), card("p", self.layout)
        theirs = reborn(theirs, agent, incarnation)
        self.half.on_identity(theirs.identity, 2.0)
        engine = self.shop.peers.meet(MeetPeer(mine, theirs, b"a" * 32, b"b" * 32), 2.0)
        self.half.on_met(engine, 2.0)
        self.peer = self.shop.peers.ranks[agent]
        return self.peer

    @property
    def outcomes(self) -> list[Outcome]:
        return [result.outcome for result in self.results]


def test_the_load_fails_at_once_and_keeps_its_blocks() -> None:
    d = Consumer()
    assert d.outcomes == [Outcome.FAILED]
    assert d.results[0].reason is Reason.PEER_LOST
    assert d.half.unfenced_since_s == 1.0


def test_the_rank_itself_is_asked_again_and_answers() -> None:
    d = Consumer()
    d.said()
    rank = d.meet("p", "0")
    assert d.said(Cancel) == [Cancel("r", d.nonce)]
    assert d.half.unfenced_since_s == math.inf
    d.half.on_message(rank, CancelAck(d.nonce), 2.5)
    assert d.outcomes == [Outcome.FAILED, Outcome.RELEASED]


def test_a_new_agent_of_the_same_process_cannot_answer_for_the_old_one() -> None:
    """What the old agent posted may be under way for long: a slow network was seen to carry it."""
    d = Consumer()
    d.said()
    other = d.meet("p-again", "0.1")
    assert d.said(Cancel) == []
    assert d.half.unfenced_since_s == 1.0  # this rank's own agent is replaced, in time
    d.half.on_message(other, CancelAck(d.nonce), 4.5)
    assert d.outcomes == [Outcome.FAILED]


def test_another_process_under_the_name_says_that_the_old_one_is_dead() -> None:
    d = Consumer()
    d.said()
    stranger = d.meet("p-again", "7")
    assert d.said(Cancel) == []
    assert stranger.loading == {}
    assert d.outcomes == [Outcome.FAILED]
    d.half.on_timer("r", 2.0 + LIMITS.quarantine_s)
    assert d.outcomes == [Outcome.FAILED, Outcome.RELEASED]


def test_incarnations_of_one_process() -> None:
    one = card("p", Consumer().layout).identity
    assert is_same_process(one, msgspec.structs.replace(one, incarnation="0.3"))
    assert not is_same_process(one, msgspec.structs.replace(one, incarnation="1"))
    assert not is_same_process(one, msgspec.structs.replace(one, engine_id="q"))
