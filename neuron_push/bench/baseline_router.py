"""A router for vLLM's own NIXL connectors, on the HTTP stack of ours.

Ours asks a prefill engine's side channel who it is; theirs has none, so engine id, host and port
are given. ``vllm-push`` needs both legs at once, as ours does. ``vllm-pull`` needs the prefill
leg's answer first: its ``kv_transfer_params`` tell the decode engine what to read.

    python -m neuron_push.bench.baseline_router --mode vllm-pull --prefill URL --decode URL
        --engine-id ID --kv-host HOST --kv-port PORT --port PORT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neuron_push.router.bodies import ClientRequest, prefill_body
from neuron_push.router.dispatch import Dispatcher
from neuron_push.router.errors import RouterError
from neuron_push.router.identity import EngineIdentity
from neuron_push.router.legs import DecodeLeg, Reply, call_engine, open_session
from neuron_push.router.metrics import RouterMetrics
from neuron_push.router.options import RouterOptions, check_options
from neuron_push.router.proxy import CompletionProxy
from neuron_push.router.server import listen, server_config


@dataclass(frozen=True)
class FixedIdentity:
    """A prefill engine's coordinates, as the command line gave them."""

    engine_id: str
    host: str
    port: int
    incarnation: str = "fixed"
    tp_size: int = 1
    pp_size: int = 1
    model: str = ""
    role: str = "producer"
    ready: bool = True


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


class PullAttempt:
    """Prefill, then decode. The interface is that of router.attempt.Attempt."""

    def __init__(
        self, request: ClientRequest, prefill: str, decode: str, session: aiohttp.ClientSession
    ) -> None:
        self._request = request
        self._prefill = prefill
        self._decode_url = decode
        self._session = session
        self._decode = DecodeLeg(session)

    async def start(self) -> Reply:
        request = self._request
        response = await call_engine(
            self._session, "POST", self._prefill + request.path, "prefill",
            headers=request.headers, body=prefill_body(request, request.request_id),
        )  # fmt: skip
        try:
            answer = msgspec.json.decode(await response.read(), type=_Answer)
        except msgspec.MsgspecError as err:
            raise RouterError(
                502, f"the prefill engine's answer has no kv_transfer_params: {err}",
                outcome="broken",
            ) from err  # fmt: skip
        finally:
            if not response.content.at_eof():
                response.close()
        fields = {**request.fields, "kv_transfer_params": answer.kv_transfer_params}
        return await self._decode.open(
            self._decode_url + request.path, request.headers, msgspec.json.encode(fields)
        )

    def rest(self) -> AsyncIterator[bytes]:
        return self._decode.rest()

    def close(self) -> None:
        self._decode.close()


class PullDispatcher(Dispatcher):
    """In the place of router.attempt.Dispatcher."""

    def __init__(self, prefill: str, decode: str, session: aiohttp.ClientSession) -> None:
        self._prefill = prefill
        self._decode = decode
        self._session = session

    async def dispatch(self, request: ClientRequest) -> tuple[PullAttempt, Reply]:  # type: ignore[override]
        attempt = PullAttempt(request, self._prefill, self._decode, self._session)
        try:
            return attempt, await attempt.start()
        except BaseException:
            attempt.close()
            raise

    def end(self, attempt: PullAttempt) -> None:  # type: ignore[override]
        attempt.close()

    async def close(self) -> None:
        """Nothing is left behind: a leg ends with its request."""


def pull_app(options: RouterOptions) -> Starlette:
    prefill, decode = options.prefill[0].url, options.decode[0]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_session(options.connect_timeout_s, options.idle_timeout_s) as session:
            dispatcher = PullDispatcher(prefill, decode, session)
            app.state.proxy = CompletionProxy(dispatcher, RouterMetrics(), options)
            yield

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    endpoint = _Completions()
    return Starlette(
        routes=[
            Route("/v1/completions", endpoint, methods=["POST"]),
            Route("/v1/chat/completions", endpoint, methods=["POST"]),
            Route("/health", health),
        ],
        lifespan=lifespan,
    )


class _Completions:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["app"].state.proxy(scope, receive, send)


def make_config(
    mode: str, prefill: str, decode: str, identity: FixedIdentity, port: int = 0
) -> tuple[RouterOptions, uvicorn.Config]:
    """For ``vllm-push``: our router itself, told what it would have asked."""
    side = f"{prefill},side={identity.host}:{identity.port}"
    options = check_options([side], [decode], port=port, drain_s=5)

    async def ask(host: str, port: int, timeout_s: float) -> EngineIdentity:
        return identity

    config = server_config(options, ask)
    if mode == "vllm-pull":
        config.app = pull_app(options)
    return options, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("vllm-push", "vllm-pull"), required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--kv-host", required=True)
    parser.add_argument("--kv-port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    identity = FixedIdentity(
        options.engine_id, options.kv_host, options.kv_port,
        tp_size=options.tp_size, pp_size=options.pp_size,
    )  # fmt: skip
    checked, config = make_config(
        options.mode, options.prefill, options.decode, identity, options.port
    )
    listener = listen(options.host, checked.port)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
