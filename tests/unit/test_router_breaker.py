"""The circuit breaker: alone, and before HTTP doubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from neuron_push.router import breaker as breaker_module
from neuron_push.router.breaker import Breaker
from tests.unit.router_fakes import Stack, answer, refuse, stack

pytestmark = [pytest.mark.timeout(20)]

BOOM = refuse(500, {"error": {"message": "boom", "code": 500}})


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(breaker_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def fail(breaker: Breaker, times: int = 1, *, refused: bool = False) -> None:
    for _ in range(times):
        ticket = breaker.enter()
        ticket.failed("boom", refused=refused)
        ticket.release()


def test_it_opens_after_failures_in_a_row_only(clock: Clock):
    breaker = Breaker("engine", 3)
    for _ in range(3):
        fail(breaker, 2)
        breaker.enter().succeeded()
    assert (breaker.state, breaker.admits) == ("closed", True)
    fail(breaker, 3)
    assert (breaker.state, breaker.admits) == ("open", False)
    assert breaker.times_opened == 1


def test_a_refused_connection_opens_it_at_once_and_a_probe_ends_that(clock: Clock):
    breaker = Breaker("engine", 3)
    fail(breaker, refused=True)
    assert breaker.state == "open"
    breaker.is_reachable()
    assert breaker.state == "half_open"


def test_a_probe_does_not_end_what_requests_found(clock: Clock):
    breaker = Breaker("engine", 1)
    fail(breaker)
    breaker.is_reachable()
    assert breaker.state == "open"


def test_half_open_lets_one_trial_through_at_a_time(clock: Clock):
    breaker = Breaker("engine", 1)
    fail(breaker)
    clock.now += 1.0
    assert (breaker.state, breaker.admits) == ("half_open", True)
    trial = breaker.enter()
    assert trial.trial
    assert not breaker.admits
    trial.release()  # the client hung up: nothing was learned
    assert breaker.admits
    breaker.enter().succeeded()
    assert (breaker.state, breaker.failures) == ("closed", 0)


def test_every_failed_trial_doubles_the_time_up_to_a_bound(clock: Clock):
    breaker = Breaker("engine", 1)
    fail(breaker)
    for open_s in (1, 2, 4, 8, 16, 30, 30):
        clock.now += open_s - 0.01
        assert breaker.state == "open"
        clock.now += 0.01
        assert breaker.state == "half_open"
        fail(breaker)
    clock.now += 30
    breaker.enter().succeeded()
    fail(breaker)
    clock.now += 1
    assert breaker.state == "half_open"


def test_what_began_before_a_change_says_nothing_after_it(clock: Clock):
    breaker = Breaker("engine", 1)
    early, late = breaker.enter(), breaker.enter()
    fail(breaker)
    early.succeeded()
    assert breaker.state == "open"
    clock.now += 1
    breaker.enter().succeeded()
    late.failed("boom", refused=True)
    assert breaker.state == "closed"


async def state(s: Stack, role: str, index: int = 0) -> str:
    async with s.client.get(s.url + "/health") as response:
        return (await response.json())[role][index]["breaker"]


@pytest.mark.asyncio
async def test_an_engine_that_fails_is_passed_over_tried_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(breaker_module, "OPEN_S", 0.4)
    async with stack(prefill=2, decode=2, breaker_failures=2) as s:
        s.d.script = BOOM
        for _ in range(4):
            async with s.post() as response:
                assert response.status == 200
        labels = f'{{engine="{s.d.url}",role="decode"}}'
        assert await state(s, "decode") == "open"
        assert await s.metric("neuron_push_router_breaker_state" + labels) == 2
        assert await s.metric("neuron_push_router_breaker_opened_total" + labels) == 1
        assert [await state(s, "prefill", i) for i in (0, 1)] == ["closed", "closed"]
        failed = len(s.d.calls)
        for _ in range(3):
            async with s.post() as response:
                assert response.status == 200
        assert len(s.d.calls) == failed
        s.d.script = answer
        await asyncio.sleep(0.5)
        assert await state(s, "decode") == "half_open"
        for _ in range(2):
            async with s.post() as response:
                assert response.status == 200
        assert await state(s, "decode") == "closed"
        assert len(s.d.calls) > failed


@pytest.mark.asyncio
async def test_a_bad_prefill_engine_is_told_from_the_decode_engines_that_suffer():
    async with stack(prefill=2, decode=2, engine_ids={5700: "bad"}, breaker_failures=3) as s:

        async def decode(request, call):
            bad = call.body["kv_transfer_params"]["remote_engine_id"] == "bad"
            return await (BOOM if bad else answer)(request, call)

        s.d.script = s.decode[1].script = decode
        for _ in range(8):
            async with s.post() as response:
                assert response.status == 200
        assert await state(s, "prefill", 0) in {"open", "half_open"}
        assert await state(s, "prefill", 1) == "closed"
        assert [await state(s, "decode", i) for i in (0, 1)] == ["closed", "closed"]


@pytest.mark.asyncio
async def test_a_role_with_every_breaker_open_is_still_served():
    async with stack(breaker_failures=1) as s:
        s.d.script = BOOM
        async with s.post() as response:
            assert response.status == 500
        assert await state(s, "decode") == "open"
        s.d.script = answer
        async with s.post() as response:
            assert response.status == 200
        assert await state(s, "decode") == "closed"


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [400, 503])
async def test_only_engine_faults_count(status: int):
    async with stack(breaker_failures=1) as s:
        s.d.script = refuse(status, {})
        async with s.post() as response:
            assert response.status == status
        assert await state(s, "decode") == ("closed" if status == 400 else "open")
