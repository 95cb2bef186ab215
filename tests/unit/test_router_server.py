"""The router as a process: SIGTERM lets running streams end, then exit code 0."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from aiohttp import web

from neuron_push.core.messages import IAm, Identity, encode_side
from neuron_push.router.options import OptionError
from neuron_push.router.server import listen
from tests.unit.router_fakes import Call, FakeEngine, answer, never, open_stream, streams

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

_CODE = """
import logging, sys
from types import SimpleNamespace
from neuron_push.router.options import check_options
from neuron_push.router.server import run_router

async def ask(host, port, timeout_s):
    return SimpleNamespace(engine_id="e", incarnation="i", host="h", port=1, tp_size=1,
                           pp_size=1, model="m", role="producer", ready=True)

logging.basicConfig(level=logging.INFO)
run_router(check_options([sys.argv[1]], [sys.argv[2]], port=0, drain_s=sys.argv[3]), ask)
"""


class RouterProcess:
    """A router in a process of its own, once it listens."""

    def __init__(self, *args: str) -> None:
        self._args = args
        self.url = ""

    async def __aenter__(self) -> RouterProcess:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._args), stderr=asyncio.subprocess.PIPE
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
        RouterProcess("-c", _CODE, prefill.url, decode.url, "20") as router,
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
        RouterProcess("-c", _CODE, prefill.url, decode.url, "1") as router,
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


async def test_the_command_asks_a_side_channel_and_serves(engines):
    prefill, decode = engines
    side = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    port = side.bind_to_random_port("tcp://127.0.0.1")
    identity = Identity("engine-7", "one", "10.1.2.3", 5600, 2, 1, "tiny", "producer")

    async def answer_all() -> None:
        while True:
            peer, *_ = await side.recv_multipart()
            await side.send_multipart([peer, encode_side(IAm(identity))])

    answering = asyncio.create_task(answer_all())
    args = ("--prefill", f"{prefill.url},side=127.0.0.1:{port}", "--decode", decode.url)
    try:
        async with (
            RouterProcess("-m", "neuron_push.cli", "router", *args, "--port", "0") as router,
            aiohttp.ClientSession() as client,
            client.post(router.url + "/v1/completions", json={"prompt": "x"}) as response,
        ):
            assert response.status == 200
            params = (await decode.call()).body["kv_transfer_params"]
            assert params["remote_engine_id"] == "engine-7"
            assert params["remote_host"] == "10.1.2.3"
            router.process.send_signal(signal.SIGTERM)
            await response.read()
            assert await asyncio.wait_for(router.process.wait(), 8) == 0
    finally:
        answering.cancel()
        side.close(0)
