"""The Starlette application: routes, and the life of everything behind them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neuron_push.router.bodies import passed_headers
from neuron_push.router.dispatch import Dispatcher
from neuron_push.router.engines import Engine
from neuron_push.router.errors import RouterError, error_body
from neuron_push.router.http1 import HeadLimit
from neuron_push.router.identity import AskIdentity
from neuron_push.router.legs import call_engine, engine_error, open_session
from neuron_push.router.metrics import RouterMetrics
from neuron_push.router.options import RouterOptions
from neuron_push.router.pool import EnginePool
from neuron_push.router.proxy import CompletionProxy


def create_app(options: RouterOptions, ask_identity: AskIdentity) -> Starlette:
    """The router as an ASGI application. `ask_identity` is asked who a P engine is."""
    metrics = RouterMetrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_session(options.connect_timeout_s, options.idle_timeout_s) as session:
            pool = EnginePool(options, ask_identity, session)
            metrics.watch([*pool.prefill, *pool.decode])
            dispatcher = Dispatcher(
                pool, session, metrics, decode_recomputes=options.decode_recomputes
            )
            app.state.session = session
            app.state.pool = pool
            app.state.proxy = CompletionProxy(dispatcher, metrics, options)
            pool.start()
            try:
                yield
            finally:
                await dispatcher.close()
                await pool.close()

    async def exposition(request: Request) -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/completions", _Completions(), methods=["POST"]),
            Route("/v1/chat/completions", _Completions(), methods=["POST"]),
            Route("/v1/models", _models),
            Route("/health", _health),
            Route("/metrics", exposition),
        ],
        middleware=[Middleware(HeadLimit)],
        exception_handlers={HTTPException: _http_exception},
        lifespan=lifespan,
    )


class _Completions:
    """A route's endpoint must be an object for Starlette to treat it as raw ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["app"].state.proxy(scope, receive, send)


async def _models(request: Request) -> Response:
    state = request.app.state
    engine = state.pool.next_decode()
    headers = passed_headers(dict(request.headers))
    try:
        response = await call_engine(
            state.session, "GET", f"{engine.url}/v1/models", "decode", headers=headers
        )
        try:
            body = await response.read()
        except (OSError, TimeoutError) as err:
            raise engine_error(err, "decode") from err
    except RouterError as err:
        return Response(err.body(), err.status, media_type="application/json")
    return Response(body, media_type="application/json")


async def _health(request: Request) -> Response:
    pool: EnginePool = request.app.state.pool
    groups: dict[str, list[Engine]] = {"prefill": [*pool.prefill], "decode": [*pool.decode]}
    well = all(any(engine.up for engine in engines) for engines in groups.values())
    content: dict[str, Any] = {"status": "ok" if well else "unavailable"}
    for role, engines in groups.items():
        content[role] = [engine.describe() for engine in engines]
    return JSONResponse(content, 200 if well else 503)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(error.status_code, message)
    return Response(body, error.status_code, error.headers, media_type="application/json")
