"""The router between HTTP doubles: what each leg is sent, what the client gets."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
from aiohttp import web

from tests.unit.router_fakes import (
    Call,
    Identity,
    answer,
    drop,
    never,
    open_stream,
    refuse,
    stack,
    streams,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


async def hung_up(call: Call) -> bool:
    """Whether the router closed this call's connection, waited for up to 1 s."""
    await asyncio.wait_for(call.ended.wait(), 1.0)
    return call.hung_up


# What the legs are sent


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


# What the client gets


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


# What is refused


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"prompt": ', b"nonsense"])
async def test_a_body_that_is_no_object_is_400(raw: bytes):
    async with stack() as s:
        async with s.client.post(s.url + "/v1/completions", data=raw) as response:
            assert response.status == 400
            assert "JSON object" in (await response.json())["error"]["message"]
        assert not s.p.calls
        assert not s.d.calls


@pytest.mark.parametrize("kib", [1100, 5000])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_too_large_is_413(kib: int, declared: bool):
    async with stack(max_body_mib=1) as s:
        body = b'{"prompt": "' + b"x" * (kib * 1024) + b'"}'

        async def pieces():
            for start in range(0, len(body), 65536):
                yield body[start : start + 65536]

        data = body if declared else pieces()
        async with s.client.post(s.url + "/v1/completions", data=data) as response:
            assert response.status == 413
            assert "larger" in (await response.json())["error"]["message"]
        assert not s.p.calls


async def test_unknown_paths_and_methods_are_openai_style():
    async with stack() as s:
        async with s.client.get(s.url + "/v1/completions") as response:
            assert response.status == 405
            assert (await response.json())["error"]["code"] == 405
        async with s.client.get(s.url + "/nothing") as response:
            assert response.status == 404
            assert "/nothing" in (await response.json())["error"]["message"]


# Identities, health, models


async def test_a_prefill_engine_that_does_not_tell_who_it_is_is_502():
    async with stack(well=False) as s:
        s.side.error = RuntimeError("the side channel is shut")
        async with s.post() as response:
            assert response.status == 502
            assert "side channel is shut" in (await response.json())["error"]["message"]
        assert not s.d.calls


async def test_a_failed_leg_makes_the_identity_be_asked_again():
    async with stack() as s:
        async with s.post() as response:
            assert response.status == 200
        asked = len(s.side.asked)
        s.d.script = refuse(500, {})
        s.side.identity = Identity(engine_id="engine-p2", incarnation="two")
        async with s.post() as response:
            assert response.status == 500
        s.d.script = answer
        async with s.post() as response:
            assert response.status == 200
        assert len(s.side.asked) > asked
        ids = [call.body["kv_transfer_params"]["remote_engine_id"] for call in s.d.calls]
        assert ids == ["engine-p", "engine-p", "engine-p2"]


async def test_identity_is_cached_over_many_requests():
    async with stack() as s:
        for _ in range(5):
            async with s.post() as response:
                assert response.status == 200
        assert len(s.side.asked) <= 2


async def test_health():
    async with stack() as s:
        async with s.client.get(s.url + "/health") as response:
            assert response.status == 200
            health = await response.json()
        assert health["status"] == "ok"
        assert health["prefill"][0]["engine_id"] == "engine-p"
        assert health["decode"][0]["url"] == s.d.url
        s.d.well = False
        s.d.script = refuse(500, {})
        async with s.post():  # the failure has the engine probed at once
            pass
        for _ in range(100):
            async with s.client.get(s.url + "/health") as response:
                health = await response.json()
            if response.status == 503:
                break
            await asyncio.sleep(0.02)
        assert health["status"] == "unavailable"
        assert "503" in health["decode"][0]["error"]


async def test_an_engine_known_to_be_down_is_passed_over():
    async with stack(decode=2) as s:
        await s.d.stop()
        statuses = []
        for _ in range(6):
            async with s.post() as response:
                statuses.append(response.status)
            await asyncio.sleep(0.1)
        assert statuses.count(502) == 1


async def test_models_come_from_a_decode_engine():
    async with stack() as s:
        headers = {"Authorization": "Bearer k"}
        async with s.client.get(s.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
            card = (await response.json())["data"][0]
        assert card == {"id": "served", "root": "tiny", "authorization": "Bearer k"}
        await s.d.stop()
        async with s.client.get(s.url + "/v1/models") as response:
            assert response.status == 502


async def test_model_check_refuses_a_pair_of_different_models():
    async with stack(model_check=True) as s:
        async with s.post() as response:
            assert response.status == 200
        s.side.identity = Identity(model="other", incarnation="two")
        s.d.script = refuse(500, {})
        async with s.post():
            pass
        async with s.post() as response:
            assert response.status == 503
            assert "'other'" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity(role="kv_consumer"), "is a decode engine"),
        (Identity(ready=False), "still starting"),
    ],
)
async def test_an_engine_that_cannot_prefill_is_not_used(identity: Identity, says: str):
    async with stack(well=False) as s:
        s.side.identity = identity
        async with s.post() as response:
            assert response.status == 502
            assert says in (await response.json())["error"]["message"]
        s.side.identity = Identity()
        async with s.post() as response:
            assert response.status == 200


async def test_a_body_declared_too_large_is_not_waited_for():
    async with stack(max_body_mib=1) as s:
        body = b"x" * 2_000_000
        url = s.url + "/v1/completions"
        async with s.client.post(url, data=body, expect100=True) as response:
            assert response.status == 413


async def test_no_response_waits_for_a_delayed_acknowledgement():
    async with stack() as s:
        started_at = time.monotonic()
        for _ in range(20):
            async with s.post() as response:
                await response.read()
        assert (time.monotonic() - started_at) / 20 < 0.03  # 0.045 with Nagle's algorithm
