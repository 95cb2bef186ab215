"""What clients may not send, and how they are told."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.unit.router_fakes import (
    Stack,
    stack,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


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


async def test_a_body_declared_too_large_is_not_waited_for():
    async with stack(max_body_mib=1) as s:
        body = b"x" * 2_000_000
        url = s.url + "/v1/completions"
        async with s.client.post(url, data=body, expect100=True) as response:
            assert response.status == 413


async def raw_exchange(s: Stack, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What the router answers to these bytes, until it closes the connection."""
    host, port = s.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def read() -> bytes:
        received = b""
        with contextlib.suppress(ConnectionError):  # a reset follows what was sent in vain
            while chunk := await reader.read(65536):
                received += chunk
        return received

    answer = asyncio.create_task(read())
    try:
        for piece in pieces:
            if not answer.done():
                writer.write(piece)
                await asyncio.sleep(pause_s)
        return await asyncio.wait_for(answer, 5)
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
@pytest.mark.parametrize(
    "headers",
    [{f"x-{i}": "v" for i in range(101)}, {f"x-{i}": "v" * 7000 for i in range(5)}],
    ids=["count", "bytes"],
)
async def test_a_head_too_large_is_431(path: str, headers: dict[str, str]):
    async with stack() as s:
        async with s.client.post(s.url + path, json={}, headers=headers) as response:
            assert response.status == 431
            assert "headers" in (await response.json())["error"]["message"]
        async with s.client.get(s.url + "/health?" + "q" * 40_000) as response:
            assert response.status == 431
        assert not s.p.calls


async def test_a_head_that_never_ends_is_431():
    async with stack() as s:
        pieces = [
            b"GET /health HTTP/1.1\r\n",
            *(b"x-y: " + b"z" * 9000 + b"\r\n" for _ in range(5)),
        ]
        answer = await raw_exchange(s, *pieces, pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_what_is_not_http_is_400():
    async with stack() as s:
        assert (await raw_exchange(s, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_slow_head_is_408_however_often_a_byte_comes():
    async with stack(receive_timeout_s=0.4) as s:
        pieces = [b"GET /health HTTP/1.1\r\n", *([b"x"] * 8)]
        answer = await raw_exchange(s, *pieces, pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_says_nothing_is_closed():
    async with stack(receive_timeout_s=0.3) as s:
        assert await raw_exchange(s) == b""


async def test_a_slow_body_is_408_however_often_a_byte_comes():
    async with stack(receive_timeout_s=0.4) as s:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n"
        answer = await raw_exchange(s, head, *([b" "] * 8), pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert not s.p.calls
        assert await s.metric("neuron_push_router_in_flight") == 0


async def test_a_slow_body_nobody_waits_for_ends_its_connection():
    async with stack(receive_timeout_s=0.4) as s:
        head = b"GET /nothing HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n"
        answer = await raw_exchange(s, head, *([b" "] * 8), pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 404 ")


async def test_a_kept_connection_serves_on_after_the_time_a_request_may_take():
    async with stack(receive_timeout_s=0.3) as s:
        for _ in range(3):
            async with s.client.get(s.url + "/health") as response:
                assert response.status == 200
            await asyncio.sleep(0.2)


async def test_an_engine_that_reads_nothing_is_504():
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(5)
        writer.close()

    async with stack(well=False, connect_timeout_s=0.2, idle_timeout_s=0.3) as s:
        server = await asyncio.start_server(stall, "127.0.0.1", 0)
        port = int(s.d.url.rsplit(":", 1)[1])
        await s.d.stop()
        server.close()
        server = await asyncio.start_server(stall, "127.0.0.1", port)
        async with s.post({"prompt": "x" * 20_000_000}) as response:
            assert response.status == 504
        server.close()
