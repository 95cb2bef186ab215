"""Strangers stay out; restarted engines are met anew; a call that does not return costs little."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nixl._api")

from neuron_push.core.agent import NixlAgent
from neuron_push.core.asking import SideChannelError, ask_identity
from neuron_push.core.keys import load_keys, make_keys
from neuron_push.core.messages import Reason
from neuron_push.core.session import Outcome, Prompt
from tests.integration.engines import LIMITS, Engine, engines
from tests.integration.test_push import fill, meet

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]

PROMPT = Prompt(40, b"h" * 16)


def push(p: Engine, d: Engine, name: str, timeout_s: float = 10) -> None:
    """One transfer from end to end, contents compared."""
    fill(p)
    p.prefill(f"p{name}", name, PROMPT, [1, 2, 3])
    p.finish(f"p{name}")
    d.load(f"d{name}", name, p, PROMPT, [7, 8, 9])
    assert d.wait(f"d{name}", Outcome.RECEIVED, timeout_s).verified
    p.wait(f"p{name}", Outcome.SENT)
    assert (d.memory[:, :, [7, 8, 9]] == p.memory[:, :, [1, 2, 3]]).all()


def test_with_keys(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    assert load_keys(tmp_path / "keys") == keys
    with engines(keys=keys) as (p, d):
        push(p, d, "k")
        identity = asyncio.run(ask_identity(p.host, p.port, 3, keys))
        assert identity.engine_id == p.name


def test_without_the_key_nobody_answers(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path / "a"), make_keys(tmp_path / "b")
    p = Engine("p-keys", keys=keys)
    d = Engine("d-keys", keys=others)
    try:
        for stranger in (None, others):
            with pytest.raises(SideChannelError):
                asyncio.run(ask_identity(p.host, p.port, 0.5, stranger))
        d.load("rd", "k", p, PROMPT, [1, 2, 3])
        assert d.wait("rd", Outcome.FAILED).reason is Reason.HANDSHAKE
        assert asyncio.run(ask_identity(p.host, p.port, 3, keys)).engine_id == "p-keys"
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_restart_under_the_same_name_costs_no_request(who: str) -> None:
    p, d = Engine("p-again"), Engine("d-again")
    try:
        push(p, d, "one")
        old = p if who == "producer" else d
        old.close()
        new = Engine(old.name, port=old.port)
        p, d = (new, d) if who == "producer" else (p, new)
        time.sleep(1.1)  # what was heard of the old one is no proof of life any more
        push(p, d, "two")
        push(p, d, "three")
    finally:
        d.close()
        p.close()


class Stuck(NixlAgent):
    """A real agent whose next ``add_peer`` does not return until it is let go."""

    hold = threading.Event()
    armed = False

    def add_peer(self, metadata: bytes) -> str:
        if Stuck.armed:
            Stuck.armed = False
            self._call = ("add_remote_agent", time.monotonic())
            Stuck.hold.wait(30)
        return super().add_peer(metadata)


def test_a_call_that_does_not_return_costs_its_agent_only(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LIMITS.__class__(**{**vars(LIMITS), "nixl_call_timeout_s": 0.5})
    monkeypatch.setattr("tests.integration.engines.NixlAgent", Stuck)
    Stuck.hold.clear()
    with engines(limits=limits) as (p, d):
        push(p, d, "before")
        other = Engine("p-other", limits=limits)
        try:
            Stuck.armed = True
            started_s = time.monotonic()
            d.load("rd", "k", other, PROMPT, [1, 2, 3])
            while d.rank.num_abandoned + other.rank.num_abandoned == 0:
                assert time.monotonic() - started_s < 3
                time.sleep(0.01)
            push(p, d, "after", timeout_s=5)
            assert time.monotonic() - started_s < 8
            time.sleep(1.5)  # the one who had to give up its agent calls its peers again
            push(other, d, "with-the-cause", timeout_s=8)
        finally:
            Stuck.hold.set()
            other.close()


def test_preemption_waits_for_writes_and_goes_on_after_it() -> None:
    with engines() as (p, d):
        meet(p, d)
        fill(p)
        d.load("rd", "k", p, PROMPT, [7, 8, 9])
        p.prefill("rp", "k", PROMPT, [1, 2, 3], 16)
        assert p.rank.suspend(("rp",), 5)
        p.memory[:, :, [1, 2, 3]] = 0  # somebody else's now
        fill(p)
        p.memory[:, :, 4] = d.memory[:, :, 7]  # recomputed: the same values
        p.prefill("rp", "k", PROMPT, [4, 5, 6], 40)
        p.finish("rp")
        d.wait("rd", Outcome.RECEIVED)
        assert (d.memory[:, :, [8, 9]] == p.memory[:, :, [5, 6]]).all()
        p.wait("rp", Outcome.SENT)


def test_over_the_limit_of_open_transfers_the_answer_is_busy() -> None:
    limits = LIMITS.__class__(**{**vars(LIMITS), "max_open_per_peer": 2})
    with engines(limits=limits) as (p, d):
        meet(p, d)
        for i in range(3):
            d.load(f"d{i}", f"k{i}", p, PROMPT, [3 * i + 1, 3 * i + 2, 3 * i + 3])
        failed = d.wait("d2", Outcome.FAILED, 3)
        assert failed.reason is Reason.BUSY
        d.wait("d2", Outcome.RELEASED, 3)
        for i in range(2):
            p.prefill(f"p{i}", f"k{i}", PROMPT, [1, 2, 3])
            p.finish(f"p{i}")
            d.wait(f"d{i}", Outcome.RECEIVED)


def test_both_sides_call_at_once() -> None:
    with engines() as (p, d):
        p.side.dial(d.host, d.port, "", keep_trying=True)
        d.side.dial(p.host, p.port, "", keep_trying=True)
        time.sleep(0.3)
        push(p, d, "one")
        time.sleep(0.5)
        push(p, d, "two")
        assert p.rank.counters.events["lost_peer"] == d.rank.counters.events["lost_peer"] == 0
        assert p.rank.counters.events["dropped_notification"] == 0
        assert d.rank.counters.events["dropped_notification"] == 0
