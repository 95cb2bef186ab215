"""What clients may send: limits of a request's head, and the time it may take to arrive.

uvicorn's httptools protocol bounds neither, so the router always uses h11, whose
protocol bounds a head that is incomplete; a complete one is measured as ASGI.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from neuron_push.router.errors import error_body

MAX_HEADERS = 100
MAX_HEAD_BYTES = 32 * 1024
_TOO_LARGE = f"the request has more than {MAX_HEADERS} headers, or over {MAX_HEAD_BYTES} bytes"
_BUSY_CHECK_S = 1.0


class HeadLimit:
    """ASGI middleware: 431 for a head with too many headers or bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _too_large(scope):
            body = error_body(431, _TOO_LARGE)
            headers = {"connection": "close"}
            response = Response(body, 431, headers, media_type="application/json")
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _too_large(scope: Scope) -> bool:
    headers = scope["headers"]
    target = len(scope["raw_path"]) + len(scope["query_string"])
    size = target + sum(len(name) + len(value) + 4 for name, value in headers)
    return len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES


def bounded_protocol(receive_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's h11 protocol with a bound on how long a request may take to arrive."""
    return type("BoundedH11Protocol", (_BoundedH11,), {"receive_timeout_s": receive_timeout_s})


class _BoundedH11(H11Protocol):
    """Closes connections whose request does not arrive in time.

    While the application waits for the body it keeps the time itself, and
    answers; here it is the head, and a body that nobody waits for any more.
    """

    receive_timeout_s: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._arm(self.receive_timeout_s)
        super().data_received(data)
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._disarm()

    def send_400_response(self, msg: str) -> None:
        """Whatever is wrong with the bytes received; h11 does not pass its reason on."""
        if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
        else:
            self._refuse(400, "this is not valid HTTP")

    def _arm(self, after_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(after_s, self._overdue)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._refuse(408, "the request did not arrive in time")
            else:
                self.transport.close()
        elif self.cycle.response_complete:
            self.transport.close()
        else:
            self._arm(_BUSY_CHECK_S)

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(status, message)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        try:
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer has begun already: nothing can be said any more
        self.transport.close()
