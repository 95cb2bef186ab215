"""A router on loopback between HTTP doubles of vLLM, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from neuron_push.router.options import check_options
from neuron_push.router.server import listen, server_config

Script = Callable[[web.Request, "Call"], Awaitable[web.StreamResponse]]


@dataclass
class Identity:
    engine_id: str = "engine-p"
    incarnation: str = "one"
    host: str = "10.9.8.7"
    port: int = 5611
    tp_size: int = 4
    pp_size: int = 2
    model: str = "tiny"
    role: str = "producer"
    ready: bool = True


@dataclass
class Call:
    """One request as the double saw it; `ended` is set when its handler is over."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def transfer_id(self) -> str:
        return self.body["kv_transfer_params"]["transfer_id"]


class FakeEngine:
    """An HTTP double of vLLM whose completion routes run `script`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.came = asyncio.Condition()
        self.well = True
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def call(self, count: int = 1) -> Call:
        """The latest call, once there have been `count`."""
        async with self.came:
            await asyncio.wait_for(self.came.wait_for(lambda: len(self.calls) >= count), 5)
        return self.calls[count - 1]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, request.headers.copy(), await request.read())
        async with self.came:
            self.calls.append(call)
            self.came.notify_all()
        try:
            return await self.script(request, call)
        except (asyncio.CancelledError, ConnectionError):
            call.hung_up = True
            raise
        finally:
            call.ended.set()

    async def _models(self, request: web.Request) -> web.Response:
        authorization = request.headers.get("Authorization", "")
        card = {"id": "served", "root": "tiny", "authorization": authorization}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.well else 503)


async def answer(request: web.Request, call: Call) -> web.StreamResponse:
    """A complete JSON answer at once."""
    return web.json_response({"choices": [{"text": "hi"}]})


async def never(request: web.Request, call: Call) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def refuse(status: int, payload: object) -> Script:
    async def script(request: web.Request, call: Call) -> web.StreamResponse:
        return web.json_response(payload, status=status)

    return script


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def streams(*chunks: bytes, then: Script | None = None) -> Script:
    """A stream of these chunks; afterwards `then`, or its end."""

    async def script(request: web.Request, call: Call) -> web.StreamResponse:
        response = await open_stream(request)
        for chunk in chunks:
            await response.write(chunk)
        if then is not None:
            return await then(request, call)
        await response.write_eof()
        return response

    return script


async def drop(request: web.Request, call: Call) -> web.StreamResponse:
    """The engine dies: its connection is reset."""
    assert request.transport is not None
    await asyncio.sleep(0.05)
    request.transport.abort()
    await asyncio.sleep(0.05)
    raise ConnectionResetError


async def hung_up(call: Call) -> bool:
    """Whether the router closed this call's connection, waited for up to 1 s."""
    await asyncio.wait_for(call.ended.wait(), 1.0)
    return call.hung_up


class FakeSideChannel:
    """Answers `ask_identity`, and remembers whom it was asked for."""

    def __init__(self) -> None:
        self.identity = Identity()
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []
        self.mute_ports: set[int] = set()
        self.engine_ids: dict[int, str] = {}

    async def __call__(self, host: str, port: int, timeout_s: float) -> Identity:
        self.asked.append((host, port))
        if self.error is not None:
            raise self.error
        if port in self.mute_ports:
            await asyncio.Event().wait()
        engine_id = self.engine_ids.get(port, self.identity.engine_id)
        return replace(self.identity, engine_id=engine_id)


@dataclass
class Stack:
    url: str
    client: aiohttp.ClientSession
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    side: FakeSideChannel

    @property
    def p(self) -> FakeEngine:
        return self.prefill[0]

    @property
    def d(self) -> FakeEngine:
        return self.decode[0]

    def post(
        self,
        body: object = None,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
    ) -> Any:
        body = {"model": "served", "prompt": "hello"} if body is None else body
        return self.client.post(self.url + path, json=body, headers=headers)

    async def wait_well(self) -> None:
        """Until every engine has been probed once."""
        for _ in range(200):
            async with self.client.get(self.url + "/health") as response:
                health = await response.json()
            if all(engine["up"] for role in ("prefill", "decode") for engine in health[role]):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(health)

    async def metric(self, line: str) -> float:
        async with self.client.get(self.url + "/metrics") as response:
            for text in (await response.text()).splitlines():
                if text.startswith(line + " "):
                    return float(text.rsplit(" ", 1)[1])
        return 0.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def stack(
    prefill: int = 1,
    decode: int = 1,
    *,
    well: bool = True,
    engine_ids: dict[int, str] | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """A running router with that many doubles; `options` go to check_options."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = [FakeEngine(answer) for _ in range(prefill + decode)]
        for engine in engines:
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        side = FakeSideChannel()
        side.engine_ids = engine_ids or {}
        checked = check_options(
            [
                f"{engine.url},side=side-host:{5700 + i}"
                for i, engine in enumerate(engines[:prefill])
            ],
            [engine.url for engine in engines[prefill:]],
            **{"drain_s": 1, **options},
        )
        listener = listen("127.0.0.1", 0)
        config = server_config(checked, side)
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))

        async def end() -> None:
            await client.close()
            server.should_exit = True
            await serving

        cleanup.push_async_callback(end)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = Stack(url, client, engines[:prefill], engines[prefill:], side)
        if well:
            await running.wait_well()
        yield running
