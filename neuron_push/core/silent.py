"""Producer ranks of one load that fell silent, and who can say that they will write no more.

A rank that was stopped, or cut off, goes on writing when it can. Its blocks may be given back
once its process is dead; or once somebody who knows acknowledges the cancel: the rank itself
when it is met again, or, where that process has built a new NIXL agent for the rank meanwhile,
the new agent, which answers for the WRITEs of the old one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuron_push.core.messages import Identity
from neuron_push.core.peers import PeerEngine, PeerRank


@dataclass(frozen=True)
class _Silent:
    identity: Identity
    index: int
    since_s: float


class SilentRanks:
    """Of one load, by the name of the leg: the agent it registered with. Owner: the transfer
    thread.
    """

    def __init__(self) -> None:
        self._silent: dict[str, _Silent] = {}
        self._heirs: dict[str, str] = {}  # leg -> the agent that answers for it

    def __bool__(self) -> bool:
        """Whether a rank is silent, and not known to be harmless."""
        return bool(self._silent)

    @property
    def since_s(self) -> float:
        """When the first of them fell silent; infinity without any."""
        return min((rank.since_s for rank in self._silent.values()), default=math.inf)

    def agent(self, leg: str) -> str:
        """Who answers for this leg."""
        return self._heirs.get(leg, leg)

    def leg(self, agent: str) -> str:
        """The leg this agent answers for."""
        for leg, heir in self._heirs.items():
            if heir == agent:
                return leg
        return agent

    def add(self, peer: PeerRank, now_s: float) -> None:
        self._silent[self.leg(peer.name)] = _Silent(peer.engine.identity, peer.index, now_s)

    def found(self, engine: PeerEngine) -> list[str]:
        """Legs whose rank, or its heir, is met: it can say itself when it will write no more."""
        legs: list[str] = []
        for peer in engine.producers:
            for leg, rank in list(self._silent.items()):
                if rank.index == peer.index and is_same_process(rank.identity, engine.identity):
                    del self._silent[leg]
                    self._heirs[leg] = peer.name
                    legs.append(leg)
        return legs

    def dead(self, identity: Identity) -> list[str]:
        """Legs whose process is dead, for this one has its name now."""
        legs = [
            leg
            for leg, rank in self._silent.items()
            if rank.identity.engine_id == identity.engine_id
            and not is_same_process(rank.identity, identity)
        ]
        for leg in legs:
            del self._silent[leg]
        return legs

    def all_dead(self) -> list[str]:
        """All of these legs, forgotten here."""
        legs = list(self._silent)
        self._silent.clear()
        return legs


def is_same_process(one: Identity, other: Identity) -> bool:
    """An incarnation names the process and, after a dot, how often it has rebuilt an agent."""
    return one.engine_id == other.engine_id and _process(one) == _process(other)


def _process(identity: Identity) -> str:
    return identity.incarnation.partition(".")[0]
