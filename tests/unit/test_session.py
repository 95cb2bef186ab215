"""The session machines, told as the cases they were made for.

Actions are compared as short lines: ``write d0 0:4``, ``write d0 8:10 last of 3``,
``nack d0 conflict``, ``ack d0``, ``cancel p0``, ``register p0``, ``failed timeout``.
"""

from __future__ import annotations

import math

import pytest

from neuron_push.core.consumer import RESEND_S, ConsumerSession
from neuron_push.core.messages import Cancel, CancelAck, Nack, Reason, Register, Segment
from neuron_push.core.producer import ProducerSession
from neuron_push.core.session import (
    CONSUMER_LEG,
    PRODUCER_LEG,
    Action,
    CEvent,
    CState,
    Local,
    PEvent,
    Prompt,
    PState,
    Report,
    Send,
    Write,
)

KEY = "cmpl-1"
HASH = bytes(range(16))
PROMPT = Prompt(10, HASH)
LEASE_S = 30.0
PATIENCE_S = 60.0
QUARANTINE_S = 5.0


def told(actions: list[Action]) -> list[str]:
    return [_line(action) for action in actions]


def _line(action: Action) -> str:
    if isinstance(action, Write):
        s = action.segment
        last = f" last of {s.count}" if s.count else ""
        return f"write {action.peer} {s.first_token}:{s.end_token}{last}"
    if isinstance(action, Report):
        reason = f" {action.reason.value}" if action.reason else ""
        return f"{action.outcome.value}{reason}"
    assert isinstance(action, Send)
    message = action.message
    if isinstance(message, Nack):
        return f"nack {action.peer} {message.reason.value}"
    verb = {CancelAck: "ack", Cancel: "cancel", Register: "register"}[type(message)]
    return f"{verb} {action.peer}"


def wants(
    first: int = 0, end: int = 10, *, nonce: int = 7, tokens: int = 10, digest: bytes = HASH
) -> Register:
    return Register(KEY, nonce, tokens, digest, first, end, 0, (b"\0\0\0\0",))


class Producer(ProducerSession):
    """A producer session whose calls return lines, with defaults where a case has no opinion."""

    def __init__(self) -> None:
        super().__init__(KEY, lease_s=LEASE_S, patience_s=PATIENCE_S)
        self.write_ids: list[tuple[str, int]] = []

    def do(self, actions: list[Action]) -> list[str]:
        self.write_ids += [(a.peer, a.write_id) for a in actions if isinstance(a, Write)]
        return told(actions)

    def register(
        self,
        message: Register,
        peer: str = "d0",
        *,
        unit: int = 4,
        of: int = 1,
        at: float = 0.0,
        engine: str = "",
    ) -> list[str]:
        return self.do(
            self.on_register(
                peer, message, unit_tokens=unit, num_consumers=of, now_s=at, engine=engine
            )
        )

    def cancel(
        self,
        peer: str = "d0",
        *,
        nonce: int = 7,
        of: int = 1,
        at: float = 0.0,
        engine: str = "",
    ) -> list[str]:
        cancel = Cancel(KEY, nonce)
        return self.do(self.on_cancel(peer, cancel, num_consumers=of, now_s=at, engine=engine))

    def begin(self, prompt: Prompt = PROMPT) -> list[str]:
        return self.do(self.on_begin(prompt, 0.0))

    def progress(self, final_tokens: int) -> list[str]:
        return self.do(self.on_progress(final_tokens, 0.0))

    def finish(self, at: float = 0.0) -> list[str]:
        return self.do(self.on_finish(at))

    def fail(
        self, reason: Reason = Reason.PRODUCER_ABORTED, *, held: bool = True, at: float = 0.0
    ) -> list[str]:
        return self.do(self.on_fail(reason, "", held=held, now_s=at))

    def lose(self, peer: str = "d0") -> list[str]:
        return self.do(self.on_peer_lost(peer, 0.0))

    def tick(self, at: float) -> list[str]:
        return self.do(self.on_tick(at))

    def renew(self, at: float = 0.0, peer: str = "d0") -> list[str]:
        return self.do(self.on_renew(peer, at))

    def written(self) -> list[str]:
        """The oldest WRITE in flight completes."""
        return self.do(self.on_write_done(*self.write_ids.pop(0)))

    def write_fails(self) -> list[str]:
        return self.do(self.on_write_failed(*self.write_ids.pop(0), "NIXL_ERR_BACKEND"))


def computing(*, final: int = 0) -> Producer:
    p = Producer()
    assert p.begin() == []
    assert p.progress(final) == []
    return p


# ------------------------------------------------------------ tables


def test_tables_answer_whatever_a_peer_does() -> None:
    for state in PState:
        for event in (PEvent.CANCEL, PEvent.FAIL, PEvent.PEER_LOST):
            assert (state, event) in PRODUCER_LEG
    for c_state in CState:
        for c_event in (CEvent.STOP, CEvent.CANCEL_ACK, CEvent.PEER_LOST):
            assert (c_state, c_event) in CONSUMER_LEG
    # Segments are counted in these states only, hence can complete a leg in them only.
    counting = {state for state, event in CONSUMER_LEG if event is CEvent.ALL_SEGMENTS}
    assert counting == {CState.OPEN, CState.FENCING}


@pytest.mark.parametrize("state", [PState.DONE, PState.STOPPED])
def test_no_way_out_of_a_closed_producer_leg(state: PState) -> None:
    assert {after for (before, _), after in PRODUCER_LEG.items() if before is state} == {state}


@pytest.mark.parametrize("state", [CState.COMPLETE, CState.FENCED])
def test_no_way_out_of_a_closed_consumer_leg(state: CState) -> None:
    assert {after for (before, _), after in CONSUMER_LEG.items() if before is state} == {state}


def test_every_state_is_reached_and_left_towards_an_end() -> None:
    _every_path_ends(PRODUCER_LEG, PState.OPEN, {PState.DONE, PState.STOPPED}, set(PState))
    _every_path_ends(CONSUMER_LEG, CState.OPEN, {CState.COMPLETE, CState.FENCED}, set(CState))


def _every_path_ends(table: dict, start: object, ends: set, states: set) -> None:
    def closure(seed: set, edges: set) -> set:
        seen: set = set()
        while seed - seen:
            seen |= seed
            seed = {b for a, b in edges if a in seen}
        return seen

    edges = {(before, after) for (before, _), after in table.items()}
    assert closure({start}, edges) == states
    assert closure(ends, {(b, a) for a, b in edges}) == states


def test_a_lost_producer_is_waited_for_until_its_quarantine_is_over() -> None:
    ways_out = {e for (s, e), after in CONSUMER_LEG.items() if s is CState.LOST and after is not s}
    assert ways_out == {CEvent.QUARANTINE_OVER}


# ------------------------------------------------------------ producer: the good life


def test_registration_first() -> None:
    p = Producer()
    assert p.register(wants()) == []
    assert p.local is Local.ABSENT
    assert p.begin() == []
    assert p.progress(10) == ["write d0 0:10 last of 1"]
    assert p.finish() == []
    assert p.written() == ["sent"]
    assert p.is_over


def test_prefill_first() -> None:
    p = computing(final=10)
    assert p.finish() == []
    assert p.register(wants()) == ["write d0 0:10 last of 1"]
    assert p.written() == ["sent"]


def test_progressive_segments_end_at_units_and_the_last_one_says_how_many() -> None:
    p = computing()
    assert p.register(wants(), unit=4) == []
    assert p.progress(3) == []
    assert p.progress(5) == ["write d0 0:4"]
    assert p.progress(7) == []
    assert p.progress(9) == ["write d0 4:8"]
    assert p.progress(10) == ["write d0 8:10 last of 3"]
    assert p.progress(10) == []


def test_the_last_progress_may_come_after_the_engine_has_finished() -> None:
    p = computing(final=0)
    p.register(wants())
    assert p.finish() == []
    assert p.progress(10) == ["write d0 0:10 last of 1"]
    assert p.written() == ["sent"]


def test_sent_waits_for_the_slowest_write_and_for_the_engine() -> None:
    p = computing()
    p.register(wants(), unit=4)
    p.progress(4)
    p.progress(10)
    assert p.written() == []
    assert p.written() == []  # still computing, as far as the engine has told
    assert p.finish() == ["sent"]


def test_writes_may_complete_out_of_order() -> None:
    p = computing()
    p.register(wants(), unit=4)
    p.progress(4)
    p.progress(10)
    p.finish()
    p.write_ids.reverse()
    assert p.written() == []
    assert p.num_in_flight == 1
    assert p.written() == ["sent"]


def test_a_prefix_that_the_consumer_holds_is_not_sent() -> None:
    p = computing()
    assert p.register(wants(first=6), unit=4) == []
    assert p.progress(5) == []
    assert p.progress(9) == ["write d0 6:8"]
    assert p.progress(10) == ["write d0 8:10 last of 2"]


def test_a_consumer_may_want_less_than_the_prompt() -> None:
    p = computing()
    p.register(wants(end=5), unit=4)
    assert p.progress(5) == ["write d0 0:5 last of 1"]
    assert p.progress(10) == []


@pytest.mark.parametrize("final", [0, 3, 10])
def test_an_empty_range_is_done_at_once_and_frees_the_blocks(final: int) -> None:
    p = computing(final=final)
    assert p.register(wants(first=10, end=10)) == []
    assert p.open_peers() == []
    assert p.finish() == ["sent"]


def test_an_empty_range_of_a_held_prompt_frees_the_blocks() -> None:
    p = computing(final=10)
    p.finish()
    assert p.register(wants(first=4, end=4)) == ["sent"]


def test_each_consumer_rank_has_segments_of_its_own() -> None:
    p = computing(final=4)
    assert p.register(wants(), "d0", unit=4, of=2) == ["write d0 0:4"]
    p.progress(10)
    p.finish()
    assert p.register(wants(first=2), "d1", unit=4, of=2) == ["write d1 2:10 last of 1"]
    assert p.written() == []
    assert p.written() == []
    assert p.written() == ["sent"]


def test_sent_waits_for_every_rank_of_the_consumer() -> None:
    p = computing(final=10)
    p.register(wants(), "d0", of=2)
    p.finish()
    assert p.written() == []
    assert p.local is Local.HELD


# ------------------------------------------------------------ producer: registrations


def test_an_equal_registration_changes_nothing() -> None:
    p = computing(final=4)
    assert p.register(wants()) == ["write d0 0:4"]
    assert p.register(wants()) == []
    assert p.progress(10) == ["write d0 4:10 last of 2"]


def test_an_equal_registration_of_a_stopped_leg_is_told_again() -> None:
    p = computing()
    p.register(wants())
    assert p.fail(held=False) == ["nack d0 producer_aborted", "ack d0"]
    assert p.register(wants()) == ["nack d0 producer_aborted", "ack d0"]


def test_a_second_registration_under_a_new_nonce_is_refused_and_the_first_one_kept() -> None:
    p = computing(final=4)
    p.register(wants(nonce=7))
    assert p.register(wants(nonce=8)) == ["nack d0 conflict", "ack d0"]
    assert p.progress(10) == ["write d0 4:10 last of 2"]


def test_a_different_registration_under_the_same_nonce_is_acknowledged_after_the_writes() -> None:
    p = computing(final=4)
    assert p.register(wants(nonce=7)) == ["write d0 0:4"]
    assert p.register(wants(first=2, nonce=7)) == ["nack d0 conflict"]
    assert p.progress(10) == []
    assert p.register(wants(first=2, nonce=7)) == []
    assert p.written() == ["ack d0"]
    assert p.register(wants(first=2, nonce=7)) == ["nack d0 conflict", "ack d0"]


def test_a_cancel_is_remembered_for_its_own_nonce() -> None:
    p = computing()
    assert p.cancel(nonce=7) == ["ack d0"]
    assert p.register(wants(nonce=7)) == ["nack d0 cancelled", "ack d0"]
    assert p.register(wants(nonce=8)) == ["nack d0 conflict", "ack d0"]


def test_a_second_engine_with_the_same_key_is_refused_and_cannot_release_blocks() -> None:
    p = computing(final=4)
    p.register(wants(nonce=7), "d0")
    assert p.register(wants(nonce=9), "x0") == ["nack x0 conflict", "ack x0"]
    assert p.cancel("x0", nonce=9) == ["ack x0"]
    assert p.lose("x0") == []
    assert p.progress(10) == ["write d0 4:10 last of 2"]


def test_a_second_engine_does_not_take_the_place_of_a_rank_that_is_still_to_come() -> None:
    p = computing(final=4)
    assert p.register(wants(), "d0", of=2, engine="d") == ["write d0 0:4"]
    assert p.cancel("x1", nonce=9, of=2, engine="x") == ["ack x1"]
    assert p.register(wants(nonce=9), "x0", of=2, engine="x") == ["nack x0 conflict", "ack x0"]
    assert p.register(wants(), "d1", of=2, engine="d") == ["write d1 0:4"]


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (wants(tokens=11), "10 tokens"),
        (wants(digest=bytes(16)), "differ in content"),
    ],
)
@pytest.mark.parametrize("registered_first", [True, False])
def test_a_prompt_mismatch_is_refused_by_name(
    message: Register, word: str, registered_first: bool
) -> None:
    p = Producer()
    if registered_first:
        assert p.register(message) == []
        actions = p.on_begin(PROMPT, 0.0)
    else:
        p.begin()
        actions = p.on_register("d0", message, unit_tokens=4, num_consumers=1, now_s=0.0)
    assert told(actions) == ["nack d0 prompt_mismatch", "ack d0"]
    assert word in actions[0].message.detail  # type: ignore[union-attr]
    assert p.progress(10) == []
    assert p.finish() == ["sent"]


def test_a_side_that_gives_no_hash_is_compared_by_count_alone() -> None:
    assert PROMPT.explain_mismatch(Prompt(10, b"")) is None
    assert PROMPT.explain_mismatch(Prompt(9, b"")) is not None


# ------------------------------------------------------------ producer: cancel


def test_cancel_before_register_is_remembered() -> None:
    p = computing(final=10)
    assert p.cancel() == ["ack d0"]
    assert p.register(wants()) == ["nack d0 cancelled", "ack d0"]
    assert p.finish() == ["sent"]


def test_cancel_before_register_frees_held_blocks() -> None:
    p = computing(final=10)
    p.finish()
    assert p.cancel("d0", of=2) == ["ack d0"]
    assert p.cancel("d1", of=2) == ["ack d1", "sent"]


def test_cancel_of_something_never_heard_of() -> None:
    p = Producer()
    assert p.cancel() == ["ack d0"]
    assert p.tick(PATIENCE_S) == []
    assert p.is_over


def test_cancel_mid_write_is_acknowledged_once_the_last_write_has_ended() -> None:
    p = computing()
    p.register(wants(), unit=4)
    p.progress(4)
    p.progress(8)
    assert p.cancel() == []
    assert p.cancel() == []
    assert p.progress(10) == []
    assert p.written() == []
    assert p.write_fails() == ["ack d0"]
    assert p.finish() == ["sent"]


def test_cancel_with_nothing_in_flight_is_acknowledged_at_once_and_again_when_repeated() -> None:
    p = computing()
    p.register(wants())
    assert p.cancel() == ["ack d0"]
    assert p.cancel() == ["ack d0"]
    assert p.progress(10) == []


def test_cancel_after_done() -> None:
    p = computing(final=10)
    p.register(wants())
    p.written()
    assert p.cancel() == ["ack d0"]
    assert p.finish() == ["sent"]
    assert p.cancel() == ["ack d0"]


def test_cancel_of_a_refused_nonce_does_not_touch_the_leg() -> None:
    p = computing(final=4)
    p.register(wants(nonce=7))
    assert p.cancel(nonce=8) == ["ack d0"]
    assert p.progress(10) == ["write d0 4:10 last of 2"]


# ------------------------------------------------------------ producer: failures


def test_abort_with_nothing_in_flight() -> None:
    p = computing()
    p.register(wants())
    assert p.fail() == ["nack d0 producer_aborted", "ack d0", "sent"]
    assert p.is_over


def test_abort_with_writes_in_flight_says_so_at_once_and_frees_late() -> None:
    p = computing()
    p.register(wants(), unit=4)
    p.progress(4)
    p.progress(8)
    assert p.fail() == ["nack d0 producer_aborted"]
    assert p.written() == []
    assert p.written() == ["ack d0", "sent"]


def test_abort_of_a_request_that_holds_no_blocks_reports_nothing() -> None:
    p = Producer()
    p.register(wants())
    assert p.fail(held=False) == ["nack d0 producer_aborted", "ack d0"]
    assert p.is_over


def test_a_registration_that_comes_after_the_abort_is_told() -> None:
    p = computing()
    assert p.fail(Reason.MAX_TOKENS) == ["sent"]
    assert p.register(wants()) == ["nack d0 max_tokens", "ack d0"]


def test_abort_twice_reports_once() -> None:
    p = computing(final=4)
    p.register(wants())
    assert p.fail() == ["nack d0 producer_aborted"]
    assert p.fail() == []
    assert p.written() == ["ack d0", "sent"]
    assert p.fail() == []


def test_a_failed_write_is_told_at_once_and_acknowledged_after_the_others() -> None:
    p = computing()
    p.register(wants(), unit=4)
    p.progress(4)
    p.progress(10)
    p.finish()
    assert p.write_fails() == ["nack d0 write_failed"]
    assert p.written() == ["ack d0", "sent"]


def test_a_failed_write_to_one_rank_leaves_the_others_alone() -> None:
    p = computing(final=4)
    p.register(wants(), "d0", of=2)
    p.register(wants(), "d1", of=2)
    assert p.write_fails() == ["nack d0 write_failed", "ack d0"]
    assert p.progress(10) == ["write d1 4:10 last of 2"]


def test_peer_lost_with_nothing_in_flight_frees_without_a_word() -> None:
    p = computing()
    p.register(wants())
    assert p.lose() == []
    assert p.finish() == ["sent"]


def test_peer_lost_mid_write_frees_once_the_write_has_ended() -> None:
    p = computing(final=4)
    p.register(wants())
    p.finish()
    assert p.lose() == []
    assert p.write_fails() == ["sent"]


def test_peer_lost_after_done_changes_nothing() -> None:
    p = computing(final=10)
    p.register(wants())
    p.written()
    assert p.lose() == []
    assert p.finish() == ["sent"]


# ------------------------------------------------------------ producer: preemption


def test_preempted_and_resumed() -> None:
    p = computing()
    p.register(wants(), unit=4)
    assert p.progress(5) == ["write d0 0:4"]
    p.on_suspend()
    assert p.num_in_flight == 1  # the owner waits for it before the blocks are overwritten
    assert p.written() == []
    assert p.begin() == []
    assert p.progress(3) == []  # computed again; the consumer has these already
    assert p.progress(9) == ["write d0 4:8"]
    assert p.progress(10) == ["write d0 8:10 last of 3"]


def test_a_registration_while_preempted_waits_for_the_resumption() -> None:
    p = computing(final=8)
    p.on_suspend()
    assert p.register(wants()) == []
    assert p.begin() == []
    assert p.progress(4) == ["write d0 0:4"]


def test_progress_from_before_the_preemption_is_not_believed_after_it() -> None:
    p = computing(final=4)
    p.on_suspend()
    assert p.progress(8) == []  # the completion marker of a step that ran before
    assert p.begin() == []
    assert p.register(wants()) == []
    assert p.progress(4) == ["write d0 0:4"]


# ------------------------------------------------------------ producer: time


def test_no_deadline_while_computing() -> None:
    p = Producer()
    assert p.deadline_s == math.inf
    p.register(wants(), at=1.0)
    assert p.deadline_s == 1.0 + PATIENCE_S
    p.begin()
    assert p.deadline_s == math.inf
    p.finish(at=2.0)
    assert p.deadline_s == 2.0 + LEASE_S


def test_lease_over_before_a_consumer_came() -> None:
    p = computing(final=10)
    p.finish(at=0.0)
    assert p.tick(LEASE_S - 0.1) == []
    assert p.tick(LEASE_S) == ["sent"]
    assert p.register(wants()) == ["nack d0 lease_over", "ack d0"]


def test_lease_over_mid_write_keeps_the_blocks_until_the_write_has_ended() -> None:
    p = computing(final=10)
    p.register(wants())
    p.finish(at=0.0)
    assert p.tick(LEASE_S) == ["nack d0 lease_over"]
    assert p.written() == ["ack d0", "sent"]


def test_lease_renewed_by_heartbeat() -> None:
    p = computing(final=10)
    p.finish(at=0.0)
    assert p.renew(20.0) == []
    assert p.tick(LEASE_S) == []
    assert p.tick(20.0 + LEASE_S) == ["sent"]


def test_patience_over_without_a_prefill() -> None:
    p = Producer()
    p.register(wants(), at=0.0)
    assert p.tick(PATIENCE_S) == ["nack d0 unknown_transfer", "ack d0"]
    assert p.is_over


def test_a_prefill_that_comes_after_patience_is_over_gets_its_blocks_back() -> None:
    p = Producer()
    p.register(wants(), at=0.0)
    p.tick(PATIENCE_S)
    assert p.begin() == []
    assert not p.is_over  # the engine still owes us its end
    assert p.progress(10) == []
    assert p.finish() == ["sent"]
    assert p.finish() == []
    assert p.is_over


def test_an_abort_that_comes_after_patience_is_over_gets_its_blocks_back() -> None:
    p = Producer()
    p.register(wants(), at=0.0)
    p.tick(PATIENCE_S)
    p.begin()
    assert p.fail(held=True) == ["sent"]
    assert p.fail(held=True) == []


def test_a_key_that_is_used_again_sends_nothing_but_gets_its_blocks_back() -> None:
    p = computing(final=10)
    p.register(wants(nonce=7))
    p.finish()
    assert p.written() == ["sent"]
    assert p.begin() == []
    assert p.progress(10) == []
    assert p.register(wants(nonce=8)) == ["nack d0 conflict", "ack d0"]
    assert p.finish() == ["sent"]


def test_patience_renewed_by_heartbeat() -> None:
    p = Producer()
    p.register(wants(), at=0.0)
    assert p.renew(50.0) == []
    assert p.tick(PATIENCE_S) == []
    assert p.tick(50.0 + PATIENCE_S) == ["nack d0 unknown_transfer", "ack d0"]


def test_heartbeats_do_not_revive_what_is_over() -> None:
    p = computing(final=10)
    p.finish()
    p.tick(LEASE_S)
    p.renew(LEASE_S)
    assert p.deadline_s == math.inf


def test_a_heartbeat_for_a_leg_that_has_stopped_is_told_so_again() -> None:
    """The refusal was lost: without it, the consumer would wait for the request's time-out."""
    p = computing(final=4)
    p.register(wants(), of=2)
    assert p.fail() == ["nack d0 producer_aborted"]
    assert p.renew() == []  # its WRITE has not ended: nothing may be acknowledged yet
    p.written()
    assert p.renew() == ["nack d0 producer_aborted", "ack d0"]
    assert p.renew(peer="d1") == []


def test_a_heartbeat_for_a_leg_that_is_open_or_done_is_not_answered() -> None:
    p = computing(final=4)
    p.register(wants())
    assert p.renew() == []
    p.progress(10)
    p.written()
    p.written()
    assert p.renew() == []


# ------------------------------------------------------------ consumer


class Consumer(ConsumerSession):
    def __init__(self) -> None:
        super().__init__(KEY, 7, patience_s=PATIENCE_S, quarantine_s=QUARANTINE_S)

    def segment(self, index: int, count: int = 0, peer: str = "p0") -> list[str]:
        segment = Segment(7, index, count, index * 4, index * 4 + 4)
        return told(self.on_segment(peer, segment, 0.0))

    def nack(self, reason: Reason, peer: str = "p0", at: float = 0.0) -> list[str]:
        return told(self.on_nack(peer, Nack(7, reason, "why"), at))

    def ack(self, peer: str = "p0", at: float = 0.0) -> list[str]:
        return told(self.on_cancel_ack(peer, CancelAck(7), at))

    def abort(self, at: float = 0.0) -> list[str]:
        return told(self.on_abort(at))

    def lose(self, peer: str = "p0", at: float = 0.0) -> list[str]:
        return told(self.on_peer_lost(peer, at))

    def tick(self, at: float) -> list[str]:
        return told(self.on_tick(at))


def registered(*peers: str) -> Consumer:
    c = Consumer()
    peers = peers or ("p0",)
    lines = told(c.on_register({peer: wants() for peer in peers}, 0.0))
    assert lines == [f"register {peer}" for peer in peers]
    return c


def test_received_once_every_segment_of_every_producer_is_there() -> None:
    c = registered("p0", "p1")
    assert c.segment(0) == []
    assert c.segment(1, 2) == []
    assert c.open_peers() == ["p1"]
    assert c.segment(0, 1, "p1") == ["received"]
    assert c.is_over
    assert c.deadline_s == math.inf


def test_segments_are_counted_not_inferred_from_the_last_one() -> None:
    c = registered()
    assert c.segment(2, 3) == []
    assert c.segment(0) == []
    assert c.segment(1) == ["received"]


def test_duplicated_segments_count_once() -> None:
    c = registered()
    assert c.segment(0) == []
    assert c.segment(0) == []
    assert c.segment(2, 3) == []
    assert c.segment(2, 3) == []
    assert c.num_segments == 2
    assert c.segment(1) == ["received"]
    assert c.segment(1) == []


def test_asking_for_nothing_is_told_and_received_at_once() -> None:
    c = Consumer()
    assert told(c.on_register({"p0": wants(first=10)}, 0.0)) == ["register p0", "received"]


def test_a_rank_that_is_asked_for_nothing_owes_nothing() -> None:
    c = Consumer()
    c.on_register({"p0": wants(), "p1": wants(first=10)}, 0.0)
    assert c.nack(Reason.UNKNOWN_TRANSFER, "p1") == []
    assert c.ack("p1") == []
    assert c.lose("p1") == []
    assert c.segment(0, 1) == ["received"]


def test_nack_fails_early_and_frees_late() -> None:
    c = registered("p0", "p1")
    assert c.nack(Reason.WRITE_FAILED) == ["failed write_failed", "cancel p0", "cancel p1"]
    assert c.ack("p0") == []
    assert c.ack("p1") == ["released write_failed"]
    assert c.is_over


def test_nack_then_late_segments() -> None:
    c = registered()
    assert c.nack(Reason.LEASE_OVER) == ["failed lease_over", "cancel p0"]
    assert c.segment(0) == []
    # All of it has arrived after all: failed it stays, but nothing can land any more.
    assert c.segment(1, 2) == ["released lease_over"]
    assert c.ack() == []


def test_a_second_nack_is_no_news() -> None:
    c = registered("p0", "p1")
    c.nack(Reason.WRITE_FAILED, "p0")
    assert c.nack(Reason.WRITE_FAILED, "p0") == []
    assert c.nack(Reason.LEASE_OVER, "p1") == []
    assert c.ack("p0") == []
    assert c.ack("p1") == ["released write_failed"]


def test_an_acknowledgement_that_overtook_its_nack_says_enough() -> None:
    c = registered()
    assert c.ack() == ["failed producer_aborted", "released producer_aborted"]
    assert c.nack(Reason.PRODUCER_ABORTED) == []


def test_abort_after_register_waits_for_the_acknowledgement() -> None:
    c = registered("p0", "p1")
    assert c.abort() == ["cancel p0", "cancel p1"]
    assert c.abort() == []
    assert c.ack("p0") == []
    assert c.ack("p0") == []
    assert c.ack("p1") == ["released cancelled"]


def test_abort_asks_only_the_producers_that_may_still_write() -> None:
    c = registered("p0", "p1")
    c.segment(0, 1, "p0")
    assert c.abort() == ["cancel p1"]
    assert c.ack("p1") == ["released cancelled"]


def test_abort_before_register_tells_those_who_hold_blocks_for_it() -> None:
    c = Consumer()
    c.on_announce(("p0", "p1"))
    assert c.abort() == ["cancel p0", "cancel p1", "released cancelled"]
    assert told(c.on_register({"p0": wants()}, 0.0)) == []


def test_abort_after_received_changes_nothing() -> None:
    c = registered()
    c.segment(0, 1)
    assert c.abort() == []
    assert c.lose() == []
    assert c.nack(Reason.LEASE_OVER) == []
    assert c.tick(1e6) == []


def test_abort_after_failed_still_releases_once() -> None:
    c = registered()
    c.nack(Reason.LEASE_OVER)
    assert c.abort() == []
    assert c.ack() == ["released lease_over"]


def test_cancel_is_sent_again_until_it_is_answered() -> None:
    c = registered()
    assert c.abort(at=10.0) == ["cancel p0"]
    assert c.deadline_s == 10.0 + RESEND_S
    assert c.tick(10.0 + RESEND_S / 2) == []
    assert c.tick(10.0 + RESEND_S) == ["cancel p0"]
    assert c.tick(10.0 + 2 * RESEND_S) == ["cancel p0"]
    assert c.ack() == ["released cancelled"]
    assert c.deadline_s == math.inf


def test_time_out() -> None:
    c = registered()
    assert c.deadline_s == PATIENCE_S
    assert c.tick(PATIENCE_S - 0.1) == []
    assert c.tick(PATIENCE_S) == ["failed timeout", "cancel p0"]
    assert c.ack() == ["released timeout"]


def test_no_time_out_before_registering() -> None:
    """How long a request waits for blocks is the engine's business."""
    c = Consumer()
    assert c.deadline_s == math.inf
    assert c.tick(PATIENCE_S) == []


def test_failing_before_registering_withdraws_the_announcement() -> None:
    c = Consumer()
    c.on_announce(("p0", "p1"))
    lines = told(c.on_fail(Reason.HANDSHAKE, "", 0.0))
    assert lines == ["failed handshake", "cancel p0", "cancel p1", "released handshake"]


def test_a_lost_producer_fails_at_once_and_is_quarantined() -> None:
    c = registered()
    assert c.lose(at=10.0) == ["failed peer_lost"]
    assert c.tick(10.0 + QUARANTINE_S - 0.1) == []
    assert c.segment(0, 1) == []
    assert c.ack() == []
    assert c.tick(10.0 + QUARANTINE_S) == ["released peer_lost"]


def test_the_producer_is_lost_while_its_acknowledgement_is_awaited() -> None:
    c = registered("p0", "p1")
    c.abort(at=1.0)
    assert c.ack("p1") == []
    assert c.lose("p0", at=2.0) == []
    assert c.tick(2.0 + QUARANTINE_S) == ["released cancelled"]


def test_losing_a_producer_that_has_delivered_everything_does_not_matter() -> None:
    c = registered("p0", "p1")
    c.segment(0, 1, "p0")
    assert c.lose("p0") == []
    assert c.segment(0, 1, "p1") == ["received"]


def test_quarantine_is_counted_from_the_first_report_of_the_loss() -> None:
    c = registered()
    c.lose(at=0.0)
    assert c.lose(at=4.0) == []
    assert c.tick(QUARANTINE_S) == ["released peer_lost"]


def test_a_failure_of_our_own_cancels_everywhere() -> None:
    c = registered("p0", "p1")
    lines = told(c.on_fail(Reason.DIGEST_MISMATCH, "block 3", 0.0))
    assert lines == ["failed digest_mismatch", "cancel p0", "cancel p1"]
    assert told(c.on_fail(Reason.TIMEOUT, "", 0.0)) == []


def test_words_from_ranks_that_were_never_asked_are_ignored() -> None:
    c = registered()
    assert c.segment(0, 1, "p9") == []
    assert c.nack(Reason.LEASE_OVER, "p9") == []
    assert c.ack("p9") == []
    assert c.lose("p9") == []
    assert c.outcome is None
