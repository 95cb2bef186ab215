"""Which layouts fit each other, and which producer rank writes what into which consumer rank.

Both sides compute all of this from the same layouts and must come to the same answer, so nothing
here depends on anything but the arguments and their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from neuron_push.core.coalesce import PlanError
from neuron_push.core.layout import KvLayout, Region

_MAX_NAMES = 3


class Share(NamedTuple):
    """Heads [head_first, head_end) of one layer, counted over the whole model."""

    layer: str
    head_first: int
    head_end: int


class RankPair(NamedTuple):
    """Producer layout `src` writes `shares` into consumer layout `dst`; both are list indices."""

    src: int
    dst: int
    shares: tuple[Share, ...]


class _Holder(NamedTuple):
    src: int
    head_first: int
    head_end: int


def regions_by_layer(layout: KvLayout) -> dict[str, dict[str, Region]]:
    """layer -> part -> region."""
    layers: dict[str, dict[str, Region]] = {}
    for region in layout.regions:
        layers.setdefault(region.layer, {})[region.part] = region
    return layers


def common_shares(src: KvLayout, dst: KvLayout) -> tuple[Share, ...]:
    """Everything that `src` could deliver to `dst`, ordered by layer name."""
    src_layers, dst_layers = regions_by_layer(src), regions_by_layer(dst)
    shares: list[Share] = []
    for layer in sorted(src_layers.keys() & dst_layers.keys()):
        one, other = _any(src_layers[layer]), _any(dst_layers[layer])
        head_first = max(one.head_first, other.head_first)
        head_end = min(one.head_end, other.head_end)
        if head_first < head_end:
            shares.append(Share(layer, head_first, head_end))
    return tuple(shares)


def explain_mismatch(src: KvLayout, dst: KvLayout) -> str | None:
    """None where blocks of `src` can be written into `dst`, else a sentence saying what differs.

    Looks at the layers both have: with pipeline stages a rank holds only some of them, and
    `pair_ranks` is what checks that none is missing. Both layouts must have passed `validate`.
    """
    differs = _explain_model(src, dst)
    if differs:
        return differs
    src_layers, dst_layers = regions_by_layer(src), regions_by_layer(dst)
    common = sorted(src_layers.keys() & dst_layers.keys())
    if not common:
        return (
            f"The producer's {src.where} and the consumer's {dst.where} have no layer in common: "
            f"{_some(src_layers)} against {_some(dst_layers)}; serve the same model on both sides, "
            "under the same layer names."
        )
    for layer in common:
        differs = _explain_parts(layer, src_layers[layer], dst_layers[layer])
        if differs:
            return differs
        for part, one in src_layers[layer].items():
            other = dst_layers[layer][part]
            differs = _explain_regions(one, other, src.packing)
            if differs:
                return differs
    if not common_shares(src, dst):
        one, other = _any(src_layers[common[0]]), _any(dst_layers[common[0]])
        return (
            f"The producer's {src.where} and the consumer's {dst.where} have no KV head in common: "
            f"layer {common[0]!r} has {_heads(one)} there and {_heads(other)} here; pair the ranks "
            "by pair_ranks."
        )
    return None


def same_shape(src: KvLayout, dst: KvLayout) -> str | None:
    """None where the two ranks hold the same heads of the same layers in equally large blocks.

    Strides inside a block, addresses and pools may differ. Else a sentence saying what differs.
    """
    src_layers, dst_layers = regions_by_layer(src), regions_by_layer(dst)
    differs = _explain_model(src, dst)
    if differs:
        return differs
    for missing, who in (
        (src_layers.keys() - dst_layers.keys(), "consumer"),
        (dst_layers.keys() - src_layers.keys(), "producer"),
    ):
        if missing:
            return (
                f"The {who} lacks {len(missing)} layers that the other side has: {_some(missing)}; "
                "use the same model and the same pipeline split on both sides."
            )
    for layer in sorted(src_layers):
        differs = _explain_parts(layer, src_layers[layer], dst_layers[layer])
        if differs:
            return differs
        for part, one in src_layers[layer].items():
            other = dst_layers[layer][part]
            differs = _explain_regions(one, other, src.packing)
            if differs:
                return differs
            if one.tokens_per_block != other.tokens_per_block:
                return _differ(one, "tokens per block", one.tokens_per_block, other)
            if (one.head_first, one.num_heads) != (other.head_first, other.num_heads):
                return (
                    f"Layer {layer!r} has {_heads(one)} on the producer's {src.where} but "
                    f"{_heads(other)} on the consumer's {dst.where}; use the same tensor parallel "
                    "size on both sides."
                )
    return None


def pair_ranks(src: Sequence[KvLayout], dst: Sequence[KvLayout]) -> list[RankPair]:
    """Which producer ranks write what into which consumer rank, by layers and head ranges.

    Every (layer, head) of a consumer rank comes from exactly one producer rank. Where several hold
    it (replicated KV heads), consumer rank i takes the (i mod n)-th of the n, in list order: both
    sides must list the ranks in the same order.

    Returns pairs ordered by (dst, src). Raises PlanError naming the first layer and heads that no
    producer rank holds, or for an empty list.
    """
    if not src or not dst:
        raise PlanError(
            f"There are {len(src)} producer and {len(dst)} consumer ranks; expected at least one "
            "of each: exchange the layouts of all ranks first."
        )
    holders = _holders(src)
    pairs: list[RankPair] = []
    for dst_index, layout in enumerate(dst):
        shares: dict[int, list[Share]] = {}
        # Most layers of a rank have the same heads on the same holders: answer each case once.
        known: dict[tuple[int, int, int], list[_Holder]] = {}
        for layer, parts in sorted(regions_by_layer(layout).items()):
            region = _any(parts)
            of_layer = holders.get(layer, ())
            key = (id(of_layer), region.head_first, region.head_end)
            if key not in known:
                known[key] = _cover(region, of_layer, dst_index, layout)
            for holder in known[key]:
                share = Share(layer, holder.head_first, holder.head_end)
                shares.setdefault(holder.src, []).append(share)
        pairs += [RankPair(index, dst_index, tuple(shares[index])) for index in sorted(shares)]
    return pairs


def _holders(src: Sequence[KvLayout]) -> dict[str, tuple[_Holder, ...]]:
    """layer -> the producer ranks that hold it, in list order; equal tuples are one object."""
    found: dict[str, list[_Holder]] = {}
    for index, layout in enumerate(src):
        for layer, parts in regions_by_layer(layout).items():
            region = _any(parts)
            found.setdefault(layer, []).append(_Holder(index, region.head_first, region.head_end))
    interned: dict[tuple[_Holder, ...], tuple[_Holder, ...]] = {}
    return {
        layer: interned.setdefault(tuple(holders), tuple(holders))
        for layer, holders in found.items()
    }


def _cover(
    region: Region, holders: tuple[_Holder, ...], dst_index: int, layout: KvLayout
) -> list[_Holder]:
    """Cut the region's heads where a holder begins or ends, and choose one holder for each cut."""
    if not holders:
        raise PlanError(
            f"No producer rank holds layer {region.layer!r} of the consumer's {layout.where}; "
            "serve the same model on both sides, and connect all pipeline stages of the producer."
        )
    inside = range(region.head_first + 1, region.head_end)
    edges = {edge for holder in holders for edge in holder[1:] if edge in inside}
    cuts = [region.head_first, *sorted(edges), region.head_end]
    chosen: list[_Holder] = []
    for first, end in pairwise(cuts):
        able = [h.src for h in holders if h.head_first <= first and end <= h.head_end]
        if not able:
            raise PlanError(
                f"No producer rank holds KV heads {first} to {end - 1} of layer {region.layer!r}, "
                f"which the consumer's {layout.where} needs; connect all tensor parallel ranks of "
                "the producer and check that both sides count KV heads over the whole model."
            )
        index = able[dst_index % len(able)]
        if chosen and chosen[-1].src == index:  # the cut was another holder's edge
            chosen[-1] = chosen[-1]._replace(head_end=end)
        else:
            chosen.append(_Holder(index, first, end))
    return chosen


def _explain_model(src: KvLayout, dst: KvLayout) -> str | None:
    for what, one, other, mend in (
        ("dtype", src.dtype, dst.dtype, "set the same --kv-cache-dtype on both sides"),
        ("packing", src.packing, dst.packing, "switch the packing on or off on both sides"),
        (
            "number of KV heads in the model",
            src.total_kv_heads,
            dst.total_kv_heads,
            "serve the same model on both sides",
        ),
    ):
        if one != other:
            return (
                f"The KV cache's {what} is {one} on the producer but {other} on the consumer; "
                f"{mend}."
            )
    return None


def _explain_parts(layer: str, one: dict[str, Region], other: dict[str, Region]) -> str | None:
    if one.keys() == other.keys():
        return None
    mend = "use the same attention backend on both sides"
    if ("kv" in one) != ("kv" in other):
        mend = "K and V in one opaque entry cannot be told apart: " + mend
    return (
        f"Layer {layer!r} has the parts {', '.join(sorted(one))} on the producer but "
        f"{', '.join(sorted(other))} on the consumer; {mend}."
    )


def _explain_regions(one: Region, other: Region, packing: str) -> str | None:
    if one.item_bytes != other.item_bytes:
        return _differ(one, "bytes per token and head", one.item_bytes, other)
    small, large = sorted((one.tokens_per_block, other.tokens_per_block))
    if large % small:
        return _differ(one, "tokens per block", one.tokens_per_block, other, multiple=True)
    if packing == "plain":
        return None
    if small != large:
        return (
            f"Packing {packing!r} allows whole blocks only, but layer {one.layer!r} has "
            f"{one.tokens_per_block} tokens per block on the producer and {other.tokens_per_block} "
            "on the consumer; set the same --block-size on both sides."
        )
    for region, who in ((one, "producer"), (other, "consumer")):
        if region.tokens_per_block > 1 and region.token_stride != region.item_bytes:
            return (
                f"Packing {packing!r} needs each head's tokens to adjoin within a block, but layer "
                f"{one.layer!r} has {region.item_bytes} bytes every {region.token_stride} on the "
                f"{who}; use a layout with heads outside tokens (HND) there."
            )
    return None


def _differ(one: Region, what: str, value: int, other: Region, multiple: bool = False) -> str:
    theirs = other.item_bytes if what.startswith("bytes") else other.tokens_per_block
    if what.startswith("bytes"):
        mend = "serve the same model with the same --kv-cache-dtype on both sides"
    elif multiple:
        mend = "set --block-size so that one is an integer multiple of the other"
    else:
        mend = "set the same --block-size on both sides"
    return (
        f"Layer {one.layer!r} part {one.part!r} has {value} {what} on the producer but {theirs} on "
        f"the consumer; {mend}."
    )


def _any(parts: dict[str, Region]) -> Region:
    return next(iter(parts.values()))  # all parts of a layer have the same heads: `validate`


def _heads(region: Region) -> str:
    return f"KV heads {region.head_first} to {region.head_end - 1}"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(repr(name) for name in ordered[:_MAX_NAMES]) + more
