"""The router between HTTP doubles: what each leg is sent."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import web

from tests.unit.router_fakes import (
    Call,
    answer,
    stack,
    streams,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


async def test_both_legs_are_in_flight_before_either_ends():
    async with stack() as s:
        both = asyncio.Barrier(2)

        async def meet(request: web.Request, call: Call) -> web.StreamResponse:
            await asyncio.wait_for(both.wait(), 3)
            return await answer(request, call)

        s.p.script = s.d.script = meet
        async with s.post() as response:
            assert response.status == 200
            assert await response.json() == {"choices": [{"text": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_of_both_legs(path: str):
    body = {
        "model": "served",
        "prompt": ["one", "two"],
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 7,
        "temperature": 0.10,
        "logprobs": 2,
        "kv_transfer_params": {"transfer_id": "mine", "remote_host": "evil"},
    }
    async with stack() as s:
        s.d.script = streams(b"data: [DONE]\n\n")
        async with s.post(body, path) as response:
            assert response.status == 200
        prefill, decode = await s.p.call(), await s.d.call()
        transfer_id = prefill.transfer_id
        assert re.fullmatch("[0-9a-f]{32}", transfer_id)
        unchanged = {key: body[key] for key in ("model", "prompt", "n", "temperature", "logprobs")}
        assert prefill.path == decode.path == path
        assert prefill.body == {
            **unchanged,
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            },
        }
        assert decode.body == {
            **body,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer_id,
                "remote_engine_id": "engine-p",
                "remote_host": "10.9.8.7",
                "remote_port": 5611,
                "tp_size": 4,
                "pp_size": 2,
                "remote_request_id": decode.headers["X-Request-Id"],
            },
        }


async def test_absent_limits_stay_absent_and_numbers_stay_exact():
    async with stack() as s:
        raw = b'{"prompt": [1, 2], "seed": 123456789012345678901234567890, "top_p": 0.30}'
        async with s.client.post(s.url + "/v1/completions", data=raw) as response:
            assert response.status == 200
        prefill, decode = await s.p.call(), await s.d.call()
        assert "max_completion_tokens" not in prefill.body
        assert set(decode.body) == {"prompt", "seed", "top_p", "kv_transfer_params"}
        for call in (prefill, decode):
            assert b"123456789012345678901234567890" in call.raw
            assert b"0.30" in call.raw


async def test_headers_of_both_legs():
    async with stack() as s:
        sent = {"X-Request-Id": "a.b-c_9", "traceparent": "00-1-2-01", "Authorization": "Bearer k"}
        async with s.post(headers={**sent, "Cookie": "c=1"}) as response:
            assert response.headers["X-Request-Id"] == "a.b-c_9"
        for call in (await s.p.call(), await s.d.call()):
            assert {name: call.headers[name] for name in sent} == sent
            assert "Cookie" not in call.headers


@pytest.mark.parametrize("given", [None, "has space", "x" * 129, "semi;colon"])
async def test_an_insane_request_id_is_replaced_on_both_legs(given: str | None):
    async with stack() as s:
        async with s.post(headers={"X-Request-Id": given} if given else {}) as response:
            used = response.headers["X-Request-Id"]
        assert re.fullmatch("[0-9a-f]{32}", used)
        assert (await s.p.call()).headers["X-Request-Id"] == used
        assert (await s.d.call()).headers["X-Request-Id"] == used


async def test_every_request_has_its_own_transfer_id():
    async with stack() as s:
        for _ in range(3):
            async with s.post(headers={"X-Request-Id": "same"}) as response:
                assert response.status == 200
        assert len({call.transfer_id for call in s.p.calls}) == 3


async def test_round_robin_over_each_role():
    async with stack(prefill=2, decode=3) as s:
        for _ in range(6):
            async with s.post() as response:
                assert response.status == 200
        assert [len(engine.calls) for engine in s.prefill] == [3, 3]
        assert [len(engine.calls) for engine in s.decode] == [2, 2, 2]
        asked = set(s.side.asked)
        assert asked == {("side-host", 5700), ("side-host", 5701)}
