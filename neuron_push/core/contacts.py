"""Who our engine is, which engines it has met, and which it would not meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from neuron_push.core.messages import EngineCard, Identity, RankCard
from neuron_push.core.oncepermin import OncePerMinute

logger = logging.getLogger(__name__)

MakeCard = Callable[[Identity, tuple[RankCard, ...]], EngineCard]
Judge = Callable[[EngineCard, EngineCard], str | None]
Remarks = Callable[[EngineCard, EngineCard], Sequence[str]]


def no_remarks(mine: EngineCard, theirs: EngineCard) -> Sequence[str]:
    return ()


def address_of(identity: Identity) -> str:
    return f"{identity.host}:{identity.port}"


class Contacts:
    """Owner: the side channel's thread.

    make_card: our card, from the cards of all our ranks.
    judge: (mine, theirs) -> why the two do not fit, or None.
    remarks: (mine, theirs) -> what fits, but an operator should know; logged as warnings.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        make_card: MakeCard,
        judge: Judge,
        remarks: Remarks,
        quiet: OncePerMinute,
    ) -> None:
        self.identity = identity
        self.card: EngineCard | None = None  # until all our ranks are up
        self._make_card = make_card
        self._judge = judge
        self._remarks = remarks
        self._quiet = quiet
        self._met: dict[str, Identity] = {}  # by engine id
        self._rebirths = 0

    # ------------------------------------------------------------ ourselves

    def ranks_are(self, ranks: tuple[RankCard, ...]) -> list[Identity]:
        """All our ranks are up. Returns whom we must call again, since a rank has a new agent.

        For our peers that is a new incarnation of this engine.
        """
        if self.card is None:
            self.card = self._make_card(self.identity, ranks)
            logger.info("engine %s: all %d ranks are up", self.identity.engine_id, len(ranks))
            return []
        if ranks == self.card.ranks:
            return []
        self._rebirths += 1
        base = self.identity.incarnation.partition(".")[0]
        self.identity = msgspec.structs.replace(
            self.identity, incarnation=f"{base}.{self._rebirths}"
        )
        self.card = self._make_card(self.identity, ranks)
        known = list(self._met.values())
        self._met.clear()
        logger.warning(
            "engine %s: a rank has a new NIXL agent (incarnation %s): calling %d peers again",
            self.identity.engine_id,
            self.identity.incarnation,
            len(known),
        )
        return known

    # ------------------------------------------------------------ others

    def misfit(self, theirs: EngineCard) -> str | None:
        """Why this engine and ours cannot work together. Our ranks must be up."""
        assert self.card is not None
        return self._judge(self.card, theirs)

    def find(self, engine_id: str) -> Identity | None:
        return self._met.get(engine_id)

    def is_met(self, engine_id: str, address: str) -> bool:
        """This engine or, if it is not named, whoever is at the address."""
        if engine_id:
            return engine_id in self._met
        return any(address_of(peer) == address for peer in self._met.values())

    def met(self, card: EngineCard) -> None:
        assert self.card is not None
        theirs = card.identity
        self._met[theirs.engine_id] = theirs
        logger.info(
            "engine %s: met engine %s (incarnation %s, %s)",
            self.identity.engine_id,
            theirs.engine_id,
            theirs.incarnation,
            address_of(theirs),
        )
        for sentence in self._remarks(self.card, card):
            self._quiet.warning(
                logger,
                f"{theirs.engine_id} {sentence}",
                "engine %s and engine %s: %s",
                self.identity.engine_id,
                theirs.engine_id,
                sentence,
            )

    def forget(self, engine_id: str, incarnation: str) -> bool:
        """False if it is not this incarnation that we know."""
        known = self._met.get(engine_id)
        if known is None or known.incarnation != incarnation:
            return False
        del self._met[engine_id]
        return True
