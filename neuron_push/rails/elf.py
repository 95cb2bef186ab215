"""What a shared library needs and offers, read from its ELF headers without loading it."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec

_DYNAMIC, _VERSIONS_DEFINED, _VERSIONS_NEEDED = 6, 0x6FFFFFFD, 0x6FFFFFFE
_DT_NEEDED = 1
MAX_ENTRIES = 4096


class ElfFacts(msgspec.Struct):
    """Empty tuples where the file is no 64-bit little-endian ELF library."""

    needed: tuple[str, ...] = ()
    needed_versions: tuple[str, ...] = ()
    """`library:VERSION`."""
    defined_versions: tuple[str, ...] = ()


def read_elf(path: Path) -> ElfFacts:
    """Read a library's facts. Anything unexpected gives empty facts, never an error."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except (OSError, ValueError, struct.error, IndexError):
        return ElfFacts()


def contains(path: Path, text: bytes) -> bool:
    """Whether a file holds these bytes anywhere."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text) >= 0
    except (OSError, ValueError):
        return False


class _Section(msgspec.Struct):
    kind: int
    offset: int
    size: int
    link: int


def _read(data: mmap.mmap) -> ElfFacts:
    if data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
        return ElfFacts()
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    sections = []
    for index in range(min(count, MAX_ENTRIES)):
        _, kind, _, _, offset, size, link = struct.unpack_from(
            "<IIQQQQI", data, table + index * entry_size
        )
        sections.append(_Section(kind, offset, size, link))
    facts = ElfFacts()
    for section in sections:
        if section.kind in (_DYNAMIC, _VERSIONS_DEFINED, _VERSIONS_NEEDED):
            strings = sections[section.link].offset
            if section.kind == _DYNAMIC:
                facts.needed = _needed(data, section, strings)
            elif section.kind == _VERSIONS_NEEDED:
                facts.needed_versions = _needed_versions(data, section, strings)
            else:
                facts.defined_versions = _defined_versions(data, section, strings)
    return facts


def _string(data: mmap.mmap, position: int) -> str:
    return data[position : data.find(b"\0", position)].decode(errors="replace")


def _needed(data: mmap.mmap, section: _Section, strings: int) -> tuple[str, ...]:
    found = []
    for position in range(section.offset, section.offset + section.size, 16):
        tag, value = struct.unpack_from("<qQ", data, position)
        if tag == _DT_NEEDED:
            found.append(_string(data, strings + value))
    return tuple(found)


def _needed_versions(data: mmap.mmap, section: _Section, strings: int) -> tuple[str, ...]:
    found = []
    position = section.offset
    for _ in range(MAX_ENTRIES):
        _, count, file_name, first, following = struct.unpack_from("<HHIII", data, position)
        library = _string(data, strings + file_name)
        entry = position + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            found.append(f"{library}:{_string(data, strings + name)}")
            entry += step
        if following == 0:
            break
        position += following
    return tuple(found)


def _defined_versions(data: mmap.mmap, section: _Section, strings: int) -> tuple[str, ...]:
    found = []
    position = section.offset
    for _ in range(MAX_ENTRIES):
        _, _, _, _, _, first, following = struct.unpack_from("<HHHHIII", data, position)
        (name,) = struct.unpack_from("<I", data, position + first)
        found.append(_string(data, strings + name))
        if following == 0:
            break
        position += following
    return tuple(found)
