"""One HTTP request to one engine, with every failure turned into a RouterError."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from neuron_push.router.errors import RouterError, from_engine_body
from neuron_push.router.opening import read_opening

_MAX_ERROR_BYTES = 256 * 1024
_NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
_PASSED_REPLY_HEADERS = ("content-type", "cache-control", "retry-after")


def open_session(connect_timeout_s: float, idle_timeout_s: float) -> aiohttp.ClientSession:
    """The session of all engines: no cookies, no proxies, no limit of its own.

    An idle connection is kept for 2 s only: vLLM closes them after 5 s, and a
    POST sent into a closing connection cannot be told from one that was lost.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(
            total=None,
            connect=connect_timeout_s,
            sock_connect=connect_timeout_s,
            sock_read=idle_timeout_s,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


def engine_error(err: BaseException, role: str) -> RouterError:
    """What a failed connection to an engine means to the client."""
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return RouterError(
            504, f"the {role} engine cannot be reached: time-out", outcome="unreachable"
        )
    if isinstance(err, TimeoutError):
        return RouterError(504, f"the {role} engine did not answer in time", outcome="timeout")
    if isinstance(err, aiohttp.ClientConnectorError):
        return RouterError(502, f"the {role} engine cannot be reached", outcome="unreachable")
    return RouterError(502, f"the connection to the {role} engine was lost", outcome="broken")


async def call_engine(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    role: str,
    *,
    headers: dict[str, str],
    body: bytes | None = None,
) -> aiohttp.ClientResponse:
    """The engine's response once its status is known to be a success.

    Raises RouterError. Cancelled, or failed, it leaves no connection behind.
    """
    data = None if body is None else io.BytesIO(body)
    try:
        # aiohttp's own time-outs begin when the whole body has been sent.
        async with asyncio.timeout(_head_timeout_s(session)):
            response = await session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            )
    except _NETWORK_ERRORS as err:
        raise engine_error(err, role) from err
    status = response.status
    if 200 <= status < 300:
        return response
    try:
        raw = await response.content.read(_MAX_ERROR_BYTES)
        while not response.content.at_eof() and len(raw) < _MAX_ERROR_BYTES:
            raw += await response.content.read(_MAX_ERROR_BYTES - len(raw))
    except _NETWORK_ERRORS:
        raw = b""
    finally:
        response.close()
    if status < 400:
        raise RouterError(502, f"the {role} engine answered {status}", outcome="broken")
    retry_after = response.headers.get("retry-after")
    raise from_engine_body(status, raw, f"the {role} engine", retry_after)


def _head_timeout_s(session: aiohttp.ClientSession) -> float:
    return (session.timeout.connect or 0.0) + (session.timeout.sock_read or 0.0)


@dataclass(frozen=True)
class Reply:
    """How a decode engine's answer begins: all of it, or a stream up to its first token."""

    status: int
    headers: dict[str, str]
    first: bytes
    streaming: bool


async def run_prefill(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: bytes
) -> None:
    """The whole P leg; what P answers is not needed. Raises RouterError."""
    response = await call_engine(session, "POST", url, "prefill", headers=headers, body=body)
    try:
        async for _ in response.content.iter_any():
            pass
    except _NETWORK_ERRORS as err:
        raise engine_error(err, "prefill") from err
    finally:
        if not response.content.at_eof():
            response.close()


class DecodeLeg:
    """The D leg: its first token, then the rest of its stream."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._response: aiohttp.ClientResponse | None = None
        self.finished = False

    async def open(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        """Waits for the first token (of a stream) or the whole body. Raises RouterError."""
        response = await call_engine(
            self._session, "POST", url, "decode", headers=headers, body=body
        )
        self._response = response
        passed = {
            name: response.headers[name]
            for name in _PASSED_REPLY_HEADERS
            if name in response.headers
        }
        streaming = response.content_type == "text/event-stream"
        try:
            if streaming:
                first = await read_opening(response.content.readany, "the decode engine")
            else:
                first = await response.read()
        except _NETWORK_ERRORS as err:
            raise engine_error(err, "decode") from err
        if streaming and not first:
            raise RouterError(502, "the decode engine's stream is empty", outcome="broken")
        self.finished = not streaming
        return Reply(response.status, passed, first, streaming)

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows the first bytes, as it arrives. Raises RouterError."""
        assert self._response is not None
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except _NETWORK_ERRORS as err:
            raise engine_error(err, "decode") from err
        self.finished = True

    def close(self) -> None:
        """Closes the connection unless the answer is complete; vLLM then aborts."""
        if self._response is not None and not self.finished:
            self._response.close()
