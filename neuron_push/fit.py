"""Whether two engines can exchange KV at all, and what slows them: judged when they meet."""

from __future__ import annotations

from neuron_push.core.messages import EngineCard, explain_misfit
from neuron_push.core.pairing import same_shape
from neuron_push.rails.card import compare_cards, decode_card
from neuron_push.rails.errors import RailsError


def explain_cards(mine: EngineCard, theirs: EngineCard) -> str | None:
    """One sentence saying why not, or None.

    Only equal shapes are let through: the planner knows unequal tensor-parallel and block
    sizes, but no end-to-end proof of them exists yet.
    """
    misfit = explain_misfit(mine, theirs)
    if misfit is not None:
        return misfit
    us, them = mine.identity, theirs.identity
    for what, a, b in (
        ("tensor-parallel size", us.tp_size, them.tp_size),
        ("pipeline-parallel size", us.pp_size, them.pp_size),
    ):
        if a != b:
            return (
                f"engine {us.engine_id!r} has {what} {a}, engine {them.engine_id!r} has {b}: "
                "this release moves KV between equal sizes only. Start both with the same."
            )
    for index, (our_rank, their_rank) in enumerate(zip(mine.ranks, theirs.ranks, strict=True)):
        if our_rank.backend != their_rank.backend:
            return (
                f"engine {us.engine_id!r} uses NIXL backend {our_rank.backend}, engine "
                f"{them.engine_id!r} {their_rank.backend}: set the same `backends` on both"
            )
        differs = same_shape(our_rank.layout, their_rank.layout)
        if differs is not None:
            return f"engines {us.engine_id!r} and {them.engine_id!r}, rank {index}: {differs}"
    return None


def remark_on_rails(mine: EngineCard, theirs: EngineCard) -> list[str]:
    """What makes KV between the two slow, one sentence for each kind of difference.

    Ranks are compared with the ranks of the same number. A rank without a rails card, or with
    one that does not decode, is passed over: this is advice.
    """
    found: dict[str, str] = {}
    for ours, other in {(a.rails, b.rails) for a, b in zip(mine.ranks, theirs.ranks, strict=False)}:
        try:
            differences = compare_cards(decode_card(ours), decode_card(other))
        except RailsError:
            continue
        for one in differences:
            if one.level != "info":
                found.setdefault(one.check, f"{one.words}: {one.why}. Mend: {one.mend}")
    return list(found.values())
