"""The endpoint of both completion routes: client in, two legs, client out.

Raw ASGI, because the client must be watched while nothing is sent yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from neuron_push.router.bodies import ClientRequest, parse_request, request_id_of
from neuron_push.router.dispatch import Dispatcher
from neuron_push.router.errors import RouterError
from neuron_push.router.metrics import RouterMetrics
from neuron_push.router.options import RouterOptions

_DISCARD_S = 5.0
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

_log = logging.getLogger("neuron_push.router")


class ClientGone(Exception):
    """The client hung up, or stopped reading."""


class CompletionProxy:
    """An ASGI application; made by the lifespan, with everything it needs."""

    def __init__(
        self, dispatcher: Dispatcher, metrics: RouterMetrics, options: RouterOptions
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at = time.monotonic()
        headers = _headers_of(scope)
        client = _Client(receive, send, request_id_of(headers), self._options)
        with self._metrics.in_flight.track_inprogress():
            try:
                body = await client.read_body(headers)
                request = parse_request(scope["path"], client.request_id, headers, body)
                await client.while_connected(self._serve(request, client, arrived_at))
            except RouterError as err:
                await client.fail(err)
            except ClientGone as err:
                _log.debug("request_id=%s: %s", client.request_id, err)
            except Exception:
                _log.exception("request_id=%s: the router failed", client.request_id)
                await client.fail(RouterError(500, "the router failed", outcome="http_5xx"))

    async def _serve(self, request: ClientRequest, client: _Client, arrived_at: float) -> None:
        attempt, reply = await self._dispatcher.dispatch(request)
        try:
            if not reply.streaming:
                await client.answer(reply.status, reply.headers, reply.first)
                return
            await client.begin(reply.status, reply.headers)
            self._metrics.ttft_s.observe(time.monotonic() - arrived_at)
            await client.write(reply.first)
            async for chunk in attempt.rest():
                await client.write(chunk)
            await client.write(b"", more=False)
        finally:
            self._dispatcher.end(attempt)


class _Client:
    """The client's side of one request."""

    def __init__(
        self, receive: Receive, send: Send, request_id: str, options: RouterOptions
    ) -> None:
        self.request_id = request_id
        self._receive = receive
        self._send = send
        self._options = options
        self._begun = False
        self._ended = False
        self._tail = b""

    async def read_body(self, headers: dict[str, str]) -> bytes:
        """Raises RouterError (413, 408) or ClientGone."""
        try:
            async with asyncio.timeout(self._options.receive_timeout_s):
                return await self._read_body(headers)
        except TimeoutError:
            raise RouterError(
                408, "the request body did not arrive in time", outcome="timeout"
            ) from None

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        limit = self._options.max_body_bytes
        too_large = RouterError(
            413, f"the request body is larger than {limit} bytes", outcome="http_4xx"
        )
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit and "expect" in headers:
            raise too_large  # before the client sends any of it
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._next_message()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > limit:
                if more:
                    await self._discard_body()
                raise too_large
        return b"".join(chunks)

    async def _discard_body(self) -> None:
        """A client that is still sending would see a reset instead of the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while (await self._next_message()).get("more_body", False):
                    pass

    async def while_connected(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs the work, cancelled at once when the client hangs up (ClientGone)."""
        work = asyncio.create_task(coroutine)
        gone = asyncio.create_task(self._wait_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._ended:
                raise ClientGone("the client hung up")
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self._begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        raw.append((b"x-request-id", self.request_id.encode()))
        await self._pass({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self._tail = (self._tail + body)[-4:]
        self._ended = not more
        await self._pass({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """A whole response."""
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.write(body, more=False)

    async def fail(self, error: RouterError) -> None:
        """An error response, or, in a stream that has begun, an error event and its end."""
        if self._ended:
            return
        try:
            if self._begun:
                torn = b"" if self._tail.endswith(_EVENT_ENDS) else b"\n\n"
                await self.write(torn + error.event(), more=False)
                return
            headers = {"content-type": "application/json"}
            if error.status in {408, 413}:
                headers["connection"] = "close"
            if error.retry_after is not None:
                headers["retry-after"] = error.retry_after
            await self.answer(error.status, headers, error.body())
        except ClientGone as err:
            _log.debug("request_id=%s: %s", self.request_id, err)

    async def _next_message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client hung up while sending")
        return message

    async def _wait_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _pass(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._options.idle_timeout_s):
                await self._send(message)
        except (OSError, TimeoutError) as err:
            raise ClientGone(f"the client does not read: {err or 'time-out'}") from err


def _headers_of(scope: Scope) -> dict[str, str]:
    """Lower-case names; of a repeated header the first counts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers
