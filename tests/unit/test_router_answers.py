"""The router between HTTP doubles: what the client gets."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from tests.unit.router_fakes import (
    Call,
    drop,
    hung_up,
    never,
    open_stream,
    refuse,
    stack,
    streams,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


async def test_a_stream_arrives_chunk_by_chunk():
    async with stack() as s:
        go_on = asyncio.Event()

        async def script(request: web.Request, call: Call) -> web.StreamResponse:
            response = await open_stream(request)
            await response.write(b"data: one\n\n")
            await go_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        s.d.script = script
        async with s.post({"stream": True}) as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readany() == b"data: one\n\n"
            assert await s.metric("neuron_push_router_in_flight") == 1
            go_on.set()
            assert await response.content.read() == b"data: [DONE]\n\n"
        assert await s.metric("neuron_push_router_ttft_seconds_count") == 1
        for leg in ("decode", "prefill"):
            line = f'neuron_push_router_requests_total{{leg="{leg}",outcome="ok"}}'
            assert await s.metric(line) == 1
        assert await s.metric("neuron_push_router_in_flight") == 0


async def test_a_prefill_4xx_is_the_clients_and_ends_the_decode_leg():
    async with stack() as s:
        error = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
        s.p.script, s.d.script = refuse(400, error), never
        async with s.post() as response:
            assert response.status == 400
            assert await response.json() == error
        assert await hung_up(await s.d.call())


async def test_a_prefill_4xx_wins_over_a_silent_decode_stream():
    async with stack() as s:
        s.d.script = streams(then=never)  # status 200 already sent, as vLLM does
        s.p.script = refuse(422, {"detail": "no such field"})
        async with s.post({"stream": True}) as response:
            assert response.status == 422
            assert (await response.json())["error"]["message"] == "no such field"
        assert await hung_up(await s.d.call())


async def test_a_prefill_5xx_is_a_bad_gateway():
    async with stack() as s:
        s.p.script, s.d.script = refuse(500, {"error": {"message": "out of memory"}}), never
        async with s.post() as response:
            assert response.status == 502
            assert "out of memory" in (await response.json())["error"]["message"]
        assert await hung_up(await s.d.call())


async def test_a_decode_500_is_the_clients_and_ends_the_prefill_leg():
    async with stack() as s:
        s.p.script, s.d.script = never, refuse(500, {"error": {"message": "boom", "code": 500}})
        async with s.post() as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "boom"
        assert await hung_up(await s.p.call())
        line = 'neuron_push_router_requests_total{leg="decode",outcome="http_5xx"}'
        assert await s.metric(line) == 1


async def test_a_plain_text_error_becomes_openai_style():
    async with stack() as s:

        async def script(request: web.Request, call: Call) -> web.StreamResponse:
            return web.Response(status=503, text="busy", headers={"Retry-After": "7"})

        s.d.script = script
        async with s.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
            error = (await response.json())["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert "busy" in error["message"]


async def test_an_error_as_first_event_is_a_status():
    async with stack() as s:
        event = {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}
        s.d.script = streams(b"data: " + json.dumps(event).encode() + b"\n\n", b"data: [DONE]\n\n")
        async with s.post({"stream": True}) as response:
            assert response.status == 500
            assert await response.json() == event


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_unreachable_engine_is_502(role: str):
    async with stack() as s:
        other = s.d if role == "prefill" else s.p
        other.script = never
        await getattr(s, role)[0].stop()
        async with s.post() as response:
            assert response.status == 502
            error = (await response.json())["error"]
        assert role in error["message"]
        assert error["code"] == 502
        line = f'neuron_push_router_requests_total{{leg="{role}",outcome="unreachable"}}'
        assert await s.metric(line) == 1
        if other.calls:
            assert await hung_up(other.calls[0])


async def test_a_silent_engine_is_504():
    async with stack(idle_timeout_s=0.3) as s:
        s.d.script = never
        async with s.post() as response:
            assert response.status == 504
            assert "decode" in (await response.json())["error"]["message"]


async def test_a_failure_in_mid_stream_is_an_error_event():
    async with stack() as s:
        s.d.script = streams(b"data: one\n\n", b'data: {"torn', then=drop)
        async with s.post({"stream": True}) as response:
            assert response.status == 200
            text = await response.text()
        events = text.split("\n\n")
        assert events[:2] == ["data: one", 'data: {"torn']
        error = json.loads(events[2].removeprefix("data: "))["error"]
        assert error["code"] == 502
        assert "[DONE]" not in text


async def test_a_late_prefill_failure_does_not_touch_a_running_stream():
    async with stack() as s:
        begun = asyncio.Event()

        async def prefill(request: web.Request, call: Call) -> web.StreamResponse:
            await begun.wait()
            return web.json_response({"error": {"message": "late"}}, status=500)

        async def decode(request: web.Request, call: Call) -> web.StreamResponse:
            response = await open_stream(request)
            await response.write(b"data: one\n\n")
            await (await s.p.call()).ended.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        s.p.script, s.d.script = prefill, decode
        async with s.post({"stream": True}) as response:
            assert await response.content.readany() == b"data: one\n\n"
            begun.set()
            assert await response.content.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_hangs_up_ends_both_legs(begun: bool):
    async with stack() as s:
        s.p.script = never
        s.d.script = streams(b"data: one\n\n", then=never) if begun else never
        if begun:
            response = await s.post({"stream": True})
            await response.content.readany()
            response.close()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(s.post(), 0.3)
        assert await hung_up(await s.p.call())
        assert await hung_up(await s.d.call())
        for leg in ("decode", "prefill"):
            line = f'neuron_push_router_requests_total{{leg="{leg}",outcome="cancelled"}}'
            assert await s.metric(line) == 1
        assert await s.metric("neuron_push_router_in_flight") == 0


async def test_a_prefill_leg_does_not_outlive_the_answer_for_long():
    async with stack() as s:
        s.p.script = never
        async with s.post() as response:
            assert response.status == 200
        call = await s.p.call()
        await asyncio.wait_for(call.ended.wait(), 3)
        assert call.hung_up


async def test_no_response_waits_for_a_delayed_acknowledgement():
    async with stack() as s:
        started_at = time.monotonic()
        for _ in range(20):
            async with s.post() as response:
                await response.read()
        assert (time.monotonic() - started_at) / 20 < 0.03  # 0.045 with Nagle's algorithm
