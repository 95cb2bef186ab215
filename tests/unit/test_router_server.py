"""The router as a process: SIGTERM lets running streams end, then exit code 0."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from router_fakes import Call, FakeEngine, answer, never, open_stream, streams

from neuron_push.router.options import OptionError
from neuron_push.router.server import listen

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

_CODE = """
import logging, sys
from types import SimpleNamespace
from neuron_push.router.options import check_options
from neuron_push.router.server import run_router

async def ask(host, port, timeout_s):
    return SimpleNamespace(engine_id="e", incarnation="i", host="h", port=1, tp_size=1,
                           pp_size=1, model="m", role="producer")

logging.basicConfig(level=logging.INFO)
run_router(check_options([sys.argv[1]], [sys.argv[2]], port=0, drain_s=sys.argv[3]), ask)
"""


class RouterProcess:
    def __init__(self, prefill: FakeEngine, decode: FakeEngine, drain_s: str) -> None:
        self._args = (prefill.url, decode.url, drain_s)
        self.url = ""

    async def __aenter__(self) -> RouterProcess:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CODE, *self._args), stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        while not self.url:
            line = (await asyncio.wait_for(self.process.stderr.readline(), 15)).decode()
            assert line, "the router ended early"
            if found := re.search(r"listens on (http://\S+):", line):
                self.url = found[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest_asyncio.fixture
async def engines():
    prefill, decode = FakeEngine(answer), FakeEngine(answer)
    await prefill.start()
    await decode.start()
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


async def accepts(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as client, client.get(url + "/health"):
            return True
    except aiohttp.ClientConnectorError:
        return False


async def test_sigterm_lets_a_stream_end(engines):
    prefill, decode = engines
    go_on = asyncio.Event()

    async def script(request: web.Request, call: Call) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: one\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    decode.script = script
    async with (
        RouterProcess(prefill, decode, "20") as router,
        aiohttp.ClientSession() as client,
        client.post(router.url + "/v1/completions", json={"stream": True}) as response,
    ):
        assert await response.content.readany() == b"data: one\n\n"
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while await accepts(router.url):
                await asyncio.sleep(0.05)
        go_on.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
        assert await asyncio.wait_for(router.process.wait(), 5) == 0


async def test_the_drain_is_bounded(engines):
    prefill, decode = engines
    decode.script = streams(b"data: one\n\n", then=never)
    async with (
        RouterProcess(prefill, decode, "1") as router,
        aiohttp.ClientSession() as client,
        client.post(router.url + "/v1/completions", json={"stream": True}) as response,
    ):
        await response.content.readany()
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 5) == 0
        call = await decode.call()
        await asyncio.wait_for(call.ended.wait(), 1)
        assert call.hung_up


async def test_an_address_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"--port: '127.0.0.1:{port}'"):
            listen("127.0.0.1", port)
