"""Ports for servers that take seconds to listen."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 18_000, 31_999
"""Below the range (Linux: from 32768) from which outgoing connections take theirs meanwhile."""


def quiet_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and that no outgoing connection will be given."""
    chosen: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, _LAST + 1), 500):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise OSError(f"no {count} free ports between {_FIRST} and {_LAST}")
