"""The routers for vLLM's own connectors, between HTTP doubles of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from neuron_push.bench.baseline_router import FixedIdentity, make_config
from neuron_push.router.server import listen
from tests.unit.router_fakes import Call, FakeEngine, answer, refuse, streams

IDENTITY = FixedIdentity("engine-p", "10.9.8.7", 5611, tp_size=4, pp_size=2)
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "engine-p"}
STREAM = (b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n")


async def prefilled(request: web.Request, call: Call) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def router(mode: str) -> AsyncIterator[tuple[str, FakeEngine, FakeEngine]]:
    p, d = FakeEngine(answer), FakeEngine(answer)
    await p.start()
    await d.start()
    _, config = make_config(mode, p.url, d.url, IDENTITY)
    listener = listen("127.0.0.1", 0)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession() as client:
            for _ in range(200):
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.02)
        yield url, p, d
    finally:
        server.should_exit = True
        await serving
        await p.stop()
        await d.stop()


async def post(url: str, **more: Any) -> tuple[int, bytes]:
    body = {"model": "m", "prompt": "hello", "max_tokens": 8, **more}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.read()


@pytest.mark.asyncio
async def test_pull_waits_for_the_prefill_and_passes_its_parameters_on() -> None:
    async with router("vllm-pull") as (url, p, d):
        p.script, d.script = prefilled, streams(*STREAM)
        status, body = await post(url, stream=True)
        assert (status, body) == (200, b"".join(STREAM))
        asked, loaded = await p.call(), await d.call()
        assert asked.body["max_tokens"] == 1
        assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
        assert loaded.body["max_tokens"] == 8
        assert loaded.body["kv_transfer_params"] == PARAMS
        assert asked.headers["X-Request-Id"] == loaded.headers["X-Request-Id"]
        assert p.calls[0].ended.is_set()


@pytest.mark.asyncio
async def test_pull_tells_the_client_what_the_prefill_engine_refused() -> None:
    async with router("vllm-pull") as (url, p, d):
        p.script = refuse(400, {"error": {"message": "too long", "code": 400}})
        status, body = await post(url)
        assert status == 400
        assert b"too long" in body
        assert d.calls == []


@pytest.mark.asyncio
async def test_pull_needs_the_prefill_engines_parameters() -> None:
    async with router("vllm-pull") as (url, _, d):
        status, body = await post(url)
        assert status == 502
        assert b"kv_transfer_params" in body
        assert d.calls == []


@pytest.mark.asyncio
async def test_push_sends_both_legs_and_the_given_coordinates() -> None:
    async with router("vllm-push") as (url, p, d):
        d.script = streams(*STREAM)
        status, body = await post(url, stream=True)
        assert (status, body) == (200, b"".join(STREAM))
        params = (await d.call()).body["kv_transfer_params"]
        asked = await p.call()
        assert {name: params[name] for name in (
            "do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size",
            "pp_size", "remote_request_id")} == {
            "do_remote_prefill": True, "remote_engine_id": "engine-p",
            "remote_host": "10.9.8.7", "remote_port": 5611, "tp_size": 4, "pp_size": 2,
            "remote_request_id": asked.headers["X-Request-Id"]}  # fmt: skip
