"""Producer ranks of one load that fell silent, and when they are known to write no more.

A rank that was stopped, or cut off, goes on writing when it can. Its blocks may be given back
once its process is dead, or once the rank is met again and acknowledges the cancel. Where that
process has built a new NIXL agent for the rank meanwhile, nobody can say so: WRITEs that the old
agent had posted can be under way in its connections for as long as the network is slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuron_push.core.messages import Identity
from neuron_push.core.peers import PeerEngine, PeerRank


@dataclass(frozen=True)
class _Silent:
    identity: Identity
    since_s: float


class SilentRanks:
    """Of one load, by agent name. Owner: the transfer thread."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silent] = {}

    def __bool__(self) -> bool:
        """Whether a rank is silent, and not known to be harmless."""
        return bool(self._silent)

    @property
    def since_s(self) -> float:
        """When the first of them fell silent; infinity without any."""
        return min((rank.since_s for rank in self._silent.values()), default=math.inf)

    def add(self, peer: PeerRank, now_s: float) -> None:
        self._silent[peer.name] = _Silent(peer.engine.identity, now_s)

    def found(self, engine: PeerEngine) -> list[str]:
        """Ranks that are met again: each can say itself when it will write no more."""
        names = [peer.name for peer in engine.producers if peer.name in self._silent]
        for name in names:
            del self._silent[name]
        return names

    def dead(self, identity: Identity) -> list[str]:
        """Ranks whose process is dead, for this one has its name now."""
        names = [
            name
            for name, rank in self._silent.items()
            if rank.identity.engine_id == identity.engine_id
            and not is_same_process(rank.identity, identity)
        ]
        for name in names:
            del self._silent[name]
        return names

    def all_dead(self) -> list[str]:
        """All of these ranks, forgotten here."""
        names = list(self._silent)
        self._silent.clear()
        return names


def is_same_process(one: Identity, other: Identity) -> bool:
    """An incarnation names the process and, after a dot, how often it has rebuilt an agent."""
    return one.engine_id == other.engine_id and _process(one) == _process(other)


def _process(identity: Identity) -> str:
    return identity.incarnation.partition(".")[0]
