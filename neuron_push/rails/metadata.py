"""Which rails NIXL chose, read from its metadata: no log needed, and it works for a peer's too.

The blob of `get_agent_metadata()` is `nixlSerDes|` and records of tag, 64-bit little-endian length,
payload and `|`. LIBFABRIC's connection record holds an address per rail (on EFA it begins with the
NIC's GID), its descriptors a key per rail, where 2^64-1 means 'not this rail'. The format is
internal to NIXL and was checked on 1.4.1: anything unexpected ends in RailsError, which callers
treat as 'unknown'.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from .errors import RailsError

MAGIC = b"nixlSerDes|"
NO_KEY = 2**64 - 1
EFA_ADDRESS_BYTES = 56
GID_BYTES = 16
_DEVICE_MEMORY = 1


class MemoryRails(msgspec.Struct):
    """One registered buffer and the numbers of the rails that carry it."""

    memory: str
    device: int
    address: int
    length_bytes: int
    rails: list[int]


class AgentRails(msgspec.Struct):
    """One agent's metadata. `gids` has one entry per rail; None where it is no EFA address."""

    agent: str
    num_rails: int
    gids: list[str | None]
    buffers: list[MemoryRails]


def parse_metadata(blob: bytes, backend: str = "LIBFABRIC") -> AgentRails:
    """Read an agent's metadata. RailsError if it is not laid out as expected."""
    try:
        return _parse(blob, backend)
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise RailsError(f"NIXL's metadata is laid out in an unknown way: {error}") from None


def _records(blob: bytes) -> Iterator[tuple[str, bytes]]:
    """(tag, payload) of every record. ValueError on bad framing."""
    if not blob.startswith(MAGIC):
        raise ValueError("it does not begin with nixlSerDes")
    position = len(MAGIC)
    while position < len(blob):
        # A tag has no length of its own: it ends where a length begins whose payload is followed
        # by '|'. Tags are short, so the first fit is taken.
        for tag_bytes in range(64):
            start = position + tag_bytes + 8
            if start > len(blob):
                raise ValueError("a record is cut off")
            (length,) = struct.unpack_from("<Q", blob, position + tag_bytes)
            end = start + length
            if end < len(blob) and blob[end : end + 1] == b"|":
                tag = blob[position : position + tag_bytes]
                if all(32 <= byte < 127 for byte in tag):
                    yield tag.decode(), blob[start:end]
                    position = end + 1
                    break
        else:
            raise ValueError("a record's tag does not end")


def _parse(blob: bytes, backend: str) -> AgentRails:
    found = AgentRails(agent="", num_rails=0, gids=[], buffers=[])
    kind = ""
    in_backend = False
    memory_type = -1
    remaining = 0
    for tag, payload in _records(blob):
        if tag == "Agent":
            found.agent = payload.decode(errors="replace")
        elif tag == "t" and not kind.startswith("section"):
            in_backend = payload.decode(errors="replace") == backend
        elif tag == "c" and in_backend:
            found.num_rails, found.gids = _connection(payload)
        elif tag == "nixlSecElms":
            kind = "section"
        elif tag == "bknd":
            kind = "section"
            in_backend = payload.decode(errors="replace") == backend
        elif tag == "t":
            (memory_type,) = struct.unpack("<I", payload)
        elif tag == "n" and kind.startswith("section"):
            (remaining,) = struct.unpack("<Q", payload)
        elif tag == "" and remaining > 0:
            remaining -= 1
            if in_backend:
                found.buffers.append(_buffer(payload, memory_type))
    return found


def _connection(blob: bytes) -> tuple[int, list[str | None]]:
    records = dict(_records(blob))
    num_rails = int(records["num_rails"])
    gids: list[str | None] = []
    for rail in range(num_rails):
        address = records[f"dest_data_ep_{rail}"]
        gid = address[:GID_BYTES]
        is_efa = len(address) == EFA_ADDRESS_BYTES and gid.startswith(b"\xfe\x80")
        gids.append(_gid_text(gid) if is_efa else None)
    return num_rails, gids


def _buffer(payload: bytes, memory_type: int) -> MemoryRails:
    address, length_bytes, device = struct.unpack_from("<QQQ", payload)
    rails = []
    for tag, value in _records(payload[24:]):
        if tag.startswith("key_"):
            (key,) = struct.unpack("<Q", value)
            if key != NO_KEY:
                rails.append(int(tag.removeprefix("key_")))
    memory = "device" if memory_type == _DEVICE_MEMORY else "host"
    return MemoryRails(memory, device, address, length_bytes, sorted(rails))


def _gid_text(gid: bytes) -> str:
    """As sysfs writes it: eight groups of four hexadecimal digits."""
    return ":".join(gid[at : at + 2].hex() for at in range(0, GID_BYTES, 2))
