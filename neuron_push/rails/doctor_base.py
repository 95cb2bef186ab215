"""What a check of the doctor gets, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from .card import RailCard
from .errors import RailsError
from .log_parser import LogReport
from .select import Selection
from .topology import Topology
from .watch import Snapshot

LEVELS = ("fail", "warn", "unknown", "info")
NOTHING = "nothing"
"""What mends a finding that needs no mending; such a line is not printed."""


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


class PeerRails(msgspec.Struct):
    """What an engine told of its rails; by rank, and why not for ranks that told nothing."""

    engine: str
    time_s: float
    cards: dict[int, RailCard] = {}
    gaps: dict[int, str] = {}


class PeerSilence(RailsError):
    """A side channel gave no rails cards. `kind`: starting, old (another release), or silent."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Reach(msgspec.Struct):
    """What trying a TCP port has shown."""

    error: str | None = None
    """Why there is no connection."""
    speaks: str = "nothing"
    """zmq, nothing (within a second), or the first bytes of another protocol."""
    wants_keys: bool = False
    address: str | None = None
    """IP address of the other end."""
    is_here: bool = False
    """Whether that is an address of this host."""


class Peer(msgspec.Struct):
    """What `--peer` asked for, and what came of it."""

    name: str
    """HOST:PORT of the other end's side channel."""
    reach: Reach
    rails: PeerRails | None = None
    silence: tuple[str, str] | None = None
    """Kind and sentence of a PeerSilence."""
    has_gateway: bool | None = None
    """Whether a gateway lies between; None where the routes do not tell."""


class Situation(msgspec.Struct):
    """All that the checks look at. None means that nobody asked for it."""

    selection: Selection
    topology: Topology
    log: LogReport | None = None
    counters: Snapshot | None = None
    """Totals since the driver was loaded."""
    pairs: list[tuple[RailCard, RailCard]] = []
    """Cards to compare: what an engine here would tell, and what the other end tells."""
    peer: Peer | None = None
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
