"""The opening of a decode engine's stream: everything before its first token.

vLLM has answered 200 by the time a load of KV fails, and says so in an event
`data: {"error": ...}`, in a chat after an event that carries the role alone.
Held back until something with content follows, such a stream is still a failed
request with a status, and can be tried again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec

from neuron_push.router.errors import RouterError, from_event

# A role event may carry the token ids of the whole prompt.
_LONGEST_OPENING_BYTES = 8 * 1024 * 1024
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Chunk)
_EMPTY_VALUES = (b"null", b'""', b"[]", b"{}")


async def read_opening(read: Callable[[], Awaitable[bytes]], who: str) -> bytes:
    """A stream's bytes until content is among them; b"" if it ends before its first byte.

    Raises the RouterError that an event of the opening says.
    """
    held = bytearray()
    at = 0
    while chunk := await read():
        scan_from = max(at, len(held) - 3)
        held += chunk
        while end := _EVENT_END.search(held, scan_from):
            if _has_content(bytes(held[at : end.start()]), who):
                return bytes(held)
            at = scan_from = end.end()
        if len(held) > _LONGEST_OPENING_BYTES:
            break
    _has_content(bytes(held[at:]), who)  # an error without the blank line after it
    return bytes(held)


def _has_content(event: bytes, who: str) -> bool:
    """False for comments and for chunks that only say who speaks."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b":")]
    if len(lines) != 1 or not lines[0].startswith(b"data:"):
        return bool(lines)
    data = lines[0][5:].strip()
    error: RouterError | None = from_event(data, who)
    if error is not None:
        raise error
    try:
        chunk = _DECODER.decode(data)
    except msgspec.DecodeError:
        return True
    return not chunk.choices or any(_says_something(choice) for choice in chunk.choices)


def _says_something(choice: _Choice) -> bool:
    if choice.delta is None or choice.finish_reason is not None:
        return True
    return any(
        bytes(value) not in _EMPTY_VALUES for name, value in choice.delta.items() if name != "role"
    )
