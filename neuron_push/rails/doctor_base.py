"""What a check of the doctor gets, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from .card import RailCard
from .log_parser import LogReport
from .select import Selection
from .topology import Topology
from .watch import Snapshot

LEVELS = ("fail", "warn", "unknown", "info")


class Finding(msgspec.Struct):
    """What is wrong, why it matters, and the command or change that mends it.

    `check` is a stable id: R.. as in the table of docs/rails.md, D.. for checks of our own. `level`
    is fail, warn, unknown (could not look) or info.
    """

    check: str
    level: str
    what: str
    why: str
    mend: str


class Situation(msgspec.Struct):
    """All that the checks look at. None means that nobody asked for it."""

    selection: Selection
    topology: Topology
    log: LogReport | None = None
    counters: Snapshot | None = None
    """Totals since the driver was loaded."""
    own_card: RailCard | None = None
    peer_card: RailCard | None = None
    peer: str | None = None
    """host:port of the other end's side channel."""
    peer_error: str | None = None
    """Why the peer could not be reached; None if it could, or if nobody tried."""
    tensor_parallel: int = 1
    hwloc_xml: bytes | None = None
    """Content of HWLOC_XMLFILE, if it is set here; empty if the file cannot be read."""


Check = Callable[[Situation], Iterator[Finding]]


def version_tuple(text: str | None) -> tuple[int, ...] | None:
    """`2.5.1` to (2, 5, 1); None where there is no number."""
    if text is None:
        return None
    numbers = []
    for part in text.split("-")[0].split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or None


def some(names: list[str], limit: int = 6) -> str:
    """A list for a sentence, cut where it grows long."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
