"""Every way in which a push connector is known to fail, each a test with its cause in its name.

Two engines in this process, over real NIXL; what goes wrong is planned (core/faulty.py), said by
the engine, or sent by a stranger.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from neuron_push.core.commands import AnnounceConsumer, FailProducer
from neuron_push.core.faulty import Fault, Kind
from neuron_push.core.messages import (
    Reason,
)
from neuron_push.core.session import Outcome
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
from tests.integration.engines import TOKENS_PER_BLOCK

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]
pytest.importorskip("nixl._api")

# ------------------------------------------------------------ WRITEs


@pytest.mark.parametrize(
    "fault",
    [Fault("post_write", Kind.RAISE), Fault("poll_write", Kind.FAILED)],
    ids=["cannot_be_posted", "ends_in_an_error"],
)
def test_write_fails(fault: Fault) -> None:
    with faulty() as (p, d, plan, _):
        serve(p, d)
        plan.add(fault)
        began_s = time.monotonic()
        transfer(p, d, "r")
        if fault.kind is Kind.RAISE:
            assert fails(d, "r", "WRITE cannot be posted", began_s, NACK_S).reason is (
                Reason.WRITE_FAILED
            )
        else:  # its bytes, and its notification, had arrived: either word is true
            d.wait("r", Outcome.RECEIVED)
        p.wait("r", Outcome.SENT, 2)
        assert len(plan.struck) == 1
        serve(p, d)


def test_handle_of_an_ended_write_cannot_be_released() -> None:
    with faulty() as (p, d, plan, _):
        plan.add(Fault("release", Kind.RAISE))
        serve(p, d)  # SENT comes all the same
        assert plan.struck == ["release raise"]


def test_write_makes_no_progress() -> None:
    with faulty() as (p, d, plan, _):
        serve(p, d)
        # 0.1 s a poll: neither stuck nor silent, but slow; the WRITE itself never ends in time.
        plan.add(Fault("poll_write", Kind.BLOCK, times=15, block_s=0.1))
        transfer(p, d, "r")
        p.wait("r", Outcome.SENT, 6)
        d.wait("r", Outcome.RECEIVED, 6)
        serve(p, d)


def test_nixl_call_of_the_producer_does_not_return() -> None:
    with faulty() as (p, d, plan, _):
        serve(p, d)
        plan.add(Fault("post_write", Kind.BLOCK, block_s=4))
        began_s = time.monotonic()
        transfer(p, d, "r")
        case = "NIXL call of P does not return"
        assert fails(d, "r", case, began_s, 4).reason is Reason.PEER_LOST
        p.wait("r", Outcome.SENT, 4)
        assert p.rank.num_abandoned == 1
        serve(p, d)
        record(case, "serves again", 6, time.monotonic() - began_s)


def test_nixl_call_of_the_consumer_does_not_return() -> None:
    with faulty() as (p, d, _, plan):
        serve(p, d)
        d.load("r", "r", p, PROMPT, TARGET)
        time.sleep(0.1)
        plan.add(Fault("notifications", Kind.BLOCK, block_s=4))
        began_s = time.monotonic()
        case = "NIXL call of D does not return"
        assert fails(d, "r", case, began_s, 4).reason is Reason.NIXL_STUCK
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        p.wait("r", Outcome.SENT, 4)
        assert d.rank.num_abandoned == 1
        serve(p, d)
        record(case, "serves again", 6, time.monotonic() - began_s)


def test_nixl_cannot_be_set_up_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with faulty() as (p, d, plan, _):
        serve(p, d)
        plan.add(
            Fault("notifications", Kind.BLOCK, block_s=2), Fault("register", Kind.RAISE, times=2)
        )
        end_s = time.monotonic() + 10
        while len(plan.struck) < 3 and time.monotonic() < end_s:
            time.sleep(0.05)
        assert plan.struck.count("register raise") == 2
        time.sleep(1.5)
        serve(p, d)
        said = [r.getMessage() for r in caplog.records if "cannot be set up again" in r.message]
        assert len(said) == 1  # not one traceback a try
        assert "a planned fault" in said[0]


def test_no_agent_for_long_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_push.core.transfer.SET_UP_SLOW_S", 0.5)
    with faulty() as (p, d, plan, _):
        serve(p, d)
        plan.add(
            Fault("notifications", Kind.BLOCK, block_s=2), Fault("register", Kind.BLOCK, block_s=2)
        )
        end_s = time.monotonic() + 6
        while "no NIXL agent for" not in caplog.text and time.monotonic() < end_s:
            time.sleep(0.05)
        assert "a NIXL call hangs" in caplog.text
        time.sleep(3)
        serve(p, d)


def test_peer_cannot_be_removed_from_nixl() -> None:
    """Loads from a peer that NIXL will not forget still end."""
    with faulty() as (p, d, _, plan):
        serve(p, d)
        d.load("r", "r", p, PROMPT, TARGET)
        time.sleep(0.1)
        plan.add(Fault("remove_peer", Kind.RAISE, times=10))
        p.close()
        began_s = time.monotonic()
        case = "P gone, NIXL does not forget it"
        assert fails(d, "r", case, began_s, 3).reason is Reason.PEER_LOST
        assert "remove_peer raise" in plan.struck


def test_an_agent_that_was_given_up_leaves_nothing_that_can_hang() -> None:
    with faulty() as (p, d, plan, _):
        serve(p, d)
        plan.add(Fault("notifications", Kind.BLOCK, block_s=1.5))
        end_s = time.monotonic() + 5
        while not p.rank.num_abandoned and time.monotonic() < end_s:
            time.sleep(0.05)
        link = p.rank._abandoned[0]._link
        while not link._context.closed and time.monotonic() < end_s:
            time.sleep(0.05)
        assert link._context.closed
        time.sleep(1.5)  # P calls its peers again; a load begun in that moment may fail
        serve(p, d)


# ------------------------------------------------------------ the producer's engine


@pytest.mark.parametrize("when", ["before_registration", "after_registration"])
def test_producer_aborted(when: str) -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        if when == "after_registration":
            d.load("r", "r", p, PROMPT, TARGET)
            time.sleep(0.1)
        p.prefill("r", "r", PROMPT, SOURCE, upto=TOKENS_PER_BLOCK)
        began_s = time.monotonic()
        p.rank.submit([FailProducer("r", "r", Reason.PRODUCER_ABORTED, "gone", True)])
        if when == "before_registration":
            time.sleep(0.1)
            began_s = time.monotonic()
            d.load("r", "r", p, PROMPT, TARGET)
        case = f"P aborted {when.replace('_', ' ')}"
        assert fails(d, "r", case, began_s, NACK_S).reason is Reason.PRODUCER_ABORTED
        p.wait("r", Outcome.SENT, 2)
        serve(p, d)


def test_prefill_never_comes() -> None:
    limits = replace(LIMITS, request_timeout_s=1.0)
    with faulty(limits=limits) as (p, d, _, _):
        serve(p, d)
        began_s = time.monotonic()
        d.load("r", "r", p, PROMPT, TARGET)
        failed = fails(d, "r", "prefill never comes", began_s, 3)
        assert failed.reason in (Reason.TIMEOUT, Reason.UNKNOWN_TRANSFER)


def test_lease_ends_before_registration() -> None:
    with faulty() as (p, d, _, _):
        serve(p, d)
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        began_s = time.monotonic()
        p.wait("r", Outcome.SENT, 5)
        record("nobody registers", "P's blocks come back", 3, time.monotonic() - began_s)
        began_s = time.monotonic()
        d.load("r", "r", p, PROMPT, TARGET)
        assert fails(d, "r", "lease over", began_s, NACK_S).reason is Reason.LEASE_OVER


def test_lease_ends_while_a_write_is_in_flight() -> None:
    """The blocks stay taken until the WRITE has ended."""
    with faulty(limits=replace(LIMITS, lease_s=0.3, stall_timeout_s=20)) as (p, d, plan, _):
        serve(p, d)
        plan.add(Fault("poll_write", Kind.BLOCK, times=4, block_s=0.25))
        transfer(p, d, "r")
        d.wait("r", Outcome.RECEIVED, 5)
        p.wait("r", Outcome.SENT, 5)
        assert (d.memory[:, :, TARGET] == p.memory[:, :, SOURCE]).all()
        assert [r.outcome for r in p.ended["r"]] == [Outcome.SENT]


def test_heartbeats_renew_the_lease_of_an_announced_request() -> None:
    with faulty(limits=replace(LIMITS, lease_s=0.8)) as (p, d, _, _):
        serve(p, d)
        p.prefill("r", "r", PROMPT, SOURCE)
        p.finish("r")
        d.rank.submit([AnnounceConsumer("r", "r", p.target)])
        time.sleep(2)
        d.load("r", "r", p, PROMPT, TARGET)
        d.wait("r", Outcome.RECEIVED)


# ------------------------------------------------------------ too much at once


def test_consumer_registers_more_bytes_than_its_memory_has() -> None:
    """Its own bound is taken away: the producer has one too, and only the last load pays."""
    limits = replace(LIMITS, always_open_bytes=0)
    with faulty(limits=limits, num_blocks=10) as (p, d, _, _):
        target = [1, 2, 3, 4]
        transfer(p, d, "first", target=target)
        d.wait("first", Outcome.RECEIVED)
        assert d.rank._loop is not None
        d.rank._loop._consuming._max_open_bytes = 1 << 60
        for name in ("r0", "r1"):
            d.load(name, name, p, PROMPT, target)
        time.sleep(0.1)
        began_s = time.monotonic()
        d.load("r2", "r2", p, PROMPT, target)
        case = "D registers more bytes than its memory has"
        assert fails(d, "r2", case, began_s, NACK_S).reason is Reason.BUSY
        for name in ("r0", "r1"):
            transfer_rest(p, name)
            d.wait(name, Outcome.RECEIVED)
            p.wait(name, Outcome.SENT)
        transfer(p, d, "r3", target=target)
        d.wait("r3", Outcome.RECEIVED)


def test_consumer_loads_more_bytes_than_its_memory_has() -> None:
    """It does not even ask: the load fails, and the producer's blocks come back."""
    limits = replace(LIMITS, always_open_bytes=0)
    with faulty(limits=limits, num_blocks=10) as (p, d, _, _):
        target = [1, 2, 3, 4]
        transfer(p, d, "first", target=target)
        d.wait("first", Outcome.RECEIVED)
        for name in ("r0", "r1"):
            d.load(name, name, p, PROMPT, target)
        transfer_rest(p, "r2")
        time.sleep(0.1)
        began_s = time.monotonic()
        d.load("r2", "r2", p, PROMPT, target)
        case = "D loads more bytes than its memory has"
        assert fails(d, "r2", case, began_s, NACK_S).reason is Reason.BUSY
        p.wait("r2", Outcome.SENT, 1.5)


# ------------------------------------------------------------ first contact


def test_handshake_refused_by_the_producers_nixl() -> None:
    with faulty() as (p, d, plan, _):
        plan.add(Fault("add_peer", Kind.RAISE))
        began_s = time.monotonic()
        transfer(p, d, "r")
        fails(d, "r", "P's NIXL refuses D", began_s, 4)
        p.wait("r", Outcome.SENT, 5)
        serve(p, d)


def test_handshake_refused_by_the_consumers_nixl() -> None:
    with faulty() as (p, d, _, plan):
        plan.add(Fault("add_peer", Kind.RAISE))
        began_s = time.monotonic()
        transfer(p, d, "r")
        case = "D's NIXL refuses P"
        assert fails(d, "r", case, began_s, 2).reason is Reason.HANDSHAKE
        p.wait("r", Outcome.SENT, 5)
        serve(p, d)


def test_producer_unreachable_before_registration() -> None:
    with faulty() as (p, d, _, _):
        p.close()
        began_s = time.monotonic()
        d.load("r", "r", p, PROMPT, TARGET)
        case = "P unreachable before registration"
        assert fails(d, "r", case, began_s, 3).reason is Reason.HANDSHAKE
