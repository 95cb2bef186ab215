"""The second try: when there is one, with whom, and when there is none."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from tests.unit.router_fakes import (
    Call,
    Identity,
    Script,
    Stack,
    answer,
    drop,
    hung_up,
    never,
    open_stream,
    refuse,
    stack,
    streams,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
BOOM = refuse(500, {"error": {"message": "boom", "code": 500}})
STREAM = {"stream": True}


def calls(s: Stack) -> dict[str, list[int]]:
    return {
        "prefill": [len(engine.calls) for engine in s.prefill],
        "decode": [len(engine.calls) for engine in s.decode],
    }


async def retries(s: Stack, leg: str, outcome: str, result: str) -> float:
    labels = f'leg="{leg}",outcome="{outcome}",result="{result}"'
    return await s.metric(f"neuron_push_router_retries_total{{{labels}}}")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (BOOM, "http_5xx"),
        (refuse(503, {"detail": "busy"}), "http_5xx"),
        (drop, "broken"),
        (streams(ERROR, DONE), "http_5xx"),
        (streams(ROLE, ERROR, DONE), "http_5xx"),
        (streams(ROLE[:20], ROLE[20:] + ERROR[:9], ERROR[9:]), "http_5xx"),
        (streams(ROLE, then=drop), "broken"),
        (streams(), "broken"),
    ],
    ids=[
        "500",
        "503",
        "dropped",
        "first_event",
        "after_role",
        "torn",
        "dropped_after_role",
        "empty",
    ],
)
async def test_a_failed_decode_leg_is_tried_again_elsewhere(script: Script, outcome: str):
    async with stack(prefill=2, decode=2) as s:
        s.p.script = never
        s.d.script, s.decode[1].script = script, streams(ROLE, TOKEN, DONE)
        async with s.post(STREAM) as response:
            assert response.status == 200
            assert await response.read() == ROLE + TOKEN + DONE
        first, second = await s.d.call(), await s.decode[1].call()
        assert first.transfer_id != second.transfer_id
        assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"]
        assert await hung_up(s.p.calls[0])
        # A 5xx may be a load that failed because of P; a lost connection cannot.
        assert calls(s)["prefill"] == ([1, 1] if outcome == "http_5xx" else [2, 0])
        assert await retries(s, "decode", outcome, "ok") == 1


@pytest.mark.parametrize(
    ("script", "outcome"), [(BOOM, "http_5xx"), (drop, "broken")], ids=["500", "dropped"]
)
async def test_a_failed_prefill_leg_ends_the_decode_leg_and_both_are_sent_again(
    script: Script, outcome: str
):
    async with stack(prefill=2) as s:
        s.p.script = script

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            return await (never if len(s.d.calls) == 1 else answer)(request, call)

        s.d.script = decode
        async with s.post() as response:
            assert response.status == 200
        first, second = s.d.calls
        assert await hung_up(first)
        assert s.p.calls[0].transfer_id == first.transfer_id
        assert s.prefill[1].calls[0].transfer_id == second.transfer_id != first.transfer_id
        assert calls(s) == {"prefill": [1, 1], "decode": [2]}
        assert await retries(s, "prefill", outcome, "ok") == 1


async def test_an_unreachable_prefill_engine_is_replaced():
    async with stack(prefill=2) as s:
        await s.p.stop()
        async with s.post() as response:
            assert response.status == 200
        assert await retries(s, "prefill", "unreachable", "ok") == 1


async def test_a_prefill_engine_that_does_not_say_who_it_is_is_replaced():
    async with stack(prefill=2, well=False, connect_timeout_s=0.1) as s:
        s.side.mute_ports = {5700}
        while len(s.side.asked) < 2:
            await asyncio.sleep(0.02)
        async with s.post() as response:
            assert response.status == 200
        assert calls(s)["prefill"] == [0, 1]


async def test_there_is_one_second_try_and_no_third():
    async with stack(prefill=3, decode=3) as s:
        for engine in s.decode:
            engine.script = BOOM
        async with s.post() as response:
            assert response.status == 500
        assert sum(calls(s)["decode"]) == 2
        assert await retries(s, "decode", "http_5xx", "failed") == 1


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 404, 429])
async def test_a_4xx_is_never_tried_again(leg: str, status: int):
    async with stack(prefill=2, decode=2) as s:
        for engine in s.prefill + s.decode:
            engine.script = never
        for engine in getattr(s, leg):
            engine.script = refuse(status, {"detail": "no"})
        async with s.post() as response:
            assert response.status == status
        assert sum(calls(s)["prefill"]) == sum(calls(s)["decode"]) == 1


@pytest.mark.parametrize("then", [drop, streams(ERROR)], ids=["dropped", "error"])
async def test_nothing_is_tried_again_after_the_first_token(then: Script):
    async with stack(prefill=2, decode=2) as s:

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            response = await open_stream(request)
            await response.write(ROLE + TOKEN)
            if then is drop:
                return await drop(request, call)
            await response.write(ERROR)
            return response

        s.d.script = s.decode[1].script = decode
        async with s.post(STREAM) as response:
            assert response.status == 200
            text = await response.read()
        assert text.startswith(ROLE + TOKEN)
        assert json.loads(text.split(b"\n\n")[2].removeprefix(b"data: "))["error"]
        assert calls(s)["decode"] == [1, 0]


async def test_an_answer_that_timed_out_is_not_tried_again():
    async with stack(prefill=2, decode=2, idle_timeout_s=0.3) as s:
        s.d.script = never
        async with s.post() as response:
            assert response.status == 504
        assert calls(s)["decode"] == [1, 0]


async def test_no_second_try_for_a_client_that_is_gone():
    async with stack(prefill=2, decode=2) as s:
        go_on = asyncio.Event()

        async def fails_later(request: web.Request, call: Call) -> web.StreamResponse:
            await go_on.wait()
            return await BOOM(request, call)

        s.d.script = s.decode[1].script = fails_later
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.post(), 0.3)
        assert await hung_up(await s.d.call())
        go_on.set()
        await asyncio.sleep(0.2)
        assert calls(s)["decode"] == [1, 0]


async def test_a_client_that_leaves_during_the_second_try_ends_both_its_legs():
    async with stack(prefill=2, decode=2) as s:
        s.d.script, s.decode[1].script, s.prefill[1].script = BOOM, never, never
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.post(), 0.5)
        assert await hung_up(await s.decode[1].call())
        assert await hung_up(await s.prefill[1].call())
        assert await retries(s, "decode", "http_5xx", "cancelled") == 1


async def test_without_another_engine_a_5xx_is_the_clients():
    async with stack() as s:
        s.d.script = BOOM
        async with s.post() as response:
            assert response.status == 500
        assert calls(s)["decode"] == [1]


async def test_a_restarted_prefill_engine_is_another_one():
    async with stack() as s:
        s.side.identity = Identity(engine_id="engine-p", incarnation="two")

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            return await (BOOM if len(s.d.calls) == 1 else answer)(request, call)

        s.d.script = decode
        async with s.post() as response:
            assert response.status == 200
        assert calls(s) == {"prefill": [2], "decode": [2]}


async def test_a_broken_connection_is_tried_again_with_the_same_pair_if_there_is_no_other():
    async with stack() as s:

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            return await (drop if len(s.d.calls) == 1 else answer)(request, call)

        s.d.script = decode
        async with s.post() as response:
            assert response.status == 200
        assert len({call.transfer_id for call in s.d.calls}) == 2


async def test_an_engine_known_to_be_down_gets_no_second_try():
    async with stack(decode=2) as s:
        await s.decode[1].stop()
        async with s.post(), s.post() as response:  # one of them meets it
            assert response.status == 200
        s.d.script = BOOM
        async with s.post() as response:
            assert response.status == 500


@pytest.mark.parametrize("script", [BOOM, drop], ids=["500", "dropped"])
async def test_a_decode_engine_that_recomputes_answers_without_prefill(script: Script):
    async with stack(decode_recomputes=True) as s:
        s.p.script = script

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            await (await s.p.call()).ended.wait()
            await asyncio.sleep(0.2)
            return await answer(request, call)

        s.d.script = decode
        async with s.post() as response:
            assert response.status == 200
        assert calls(s) == {"prefill": [1], "decode": [1]}
        health = await (await s.client.get(s.url + "/health")).json()
        assert health["prefill"][0]["failures_in_a_row"] == 1
        assert health["decode"][0]["failures_in_a_row"] == 0
