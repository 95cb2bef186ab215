"""Which layouts fit, in sentences, and who writes into whom."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from neuron_push.core.layout import KvLayout
from neuron_push.core.plan import (
    PairPlan,
    PlanError,
    RankPair,
    Share,
    explain_mismatch,
    pair_ranks,
    same_shape,
)
from tests.unit.kv_geometry import Group, make_layout


def layout(  # one group of plain layers
    layers: tuple[str, ...] = ("a", "b"), style: str = "kv_outer_hnd", tokens: int = 16, *,
    heads: int = 2, head_first: int = 0, total: int = 8, item: int = 64, packing: str = "plain",
    ranks: tuple[int, int] = (0, 0),
) -> KvLayout:  # fmt: skip
    return make_layout(
        [Group(layers, style, tokens, 9)], heads=heads, head_first=head_first,
        total_heads=total, item=item, packing=packing, ranks=ranks,
    )  # fmt: skip


def split(
    num_ranks: int, total: int, layers: tuple[str, ...] = ("a",), pp: int = 0
) -> list[KvLayout]:
    """Tensor parallel ranks over `total` heads; more ranks than heads hold each head repeatedly."""
    heads = max(1, total // num_ranks)
    copies = max(1, num_ranks // total)
    return [
        layout(
            layers, heads=heads, head_first=rank // copies * heads, total=total, ranks=(rank, pp)
        )
        for rank in range(num_ranks)
    ]


BASE = layout()
MISMATCHES = [
    (
        msgspec.structs.replace(BASE, dtype="float16"),
        "dtype is bfloat16 on the producer but float16",
    ),
    (layout(packing="fp8"), "packing is plain on the producer but fp8 on the consumer"),
    (layout(total=4), "number of KV heads in the model is 8 on the producer but 4"),
    (layout(item=32), "'a' part 'k' has 64 bytes per token and head .* but 32 on the consumer"),
    (layout(tokens=24), "has 16 tokens per block on the producer but 24 .* integer multiple"),
    (layout(("c", "d", "e", "f", "g")), "no layer in common: 'a', 'b' against 'c', 'd', 'e' and 2"),
    (layout(heads=1, style="mla"), "parts k, v on the producer but kv .* cannot be told apart"),
    (
        layout(head_first=2),
        "no KV head in common: layer 'a' has KV heads 0 to 1 there and .* 2 to 3",
    ),
]


@pytest.mark.parametrize(("dst", "says"), MISMATCHES)
def test_mismatch_is_one_sentence(dst: KvLayout, says: str) -> None:
    sentence = explain_mismatch(BASE, dst)
    assert sentence is not None
    with pytest.raises(PlanError, match=says) as caught:
        PairPlan(BASE, dst)
    assert str(caught.value) == sentence
    assert sentence.endswith(".")
    assert same_shape(BASE, dst) is not None


def test_mismatch_where_only_k_is_there() -> None:
    half = msgspec.structs.replace(BASE, regions=BASE.regions[:1])
    assert "parts k on the producer but k, v on the consumer" in str(explain_mismatch(half, BASE))


def test_mismatch_of_packed_blocks() -> None:
    packed = layout(packing="fp8")
    assert explain_mismatch(packed, packed) is None
    says = explain_mismatch(packed, layout(packing="fp8", tokens=32))
    assert "whole blocks only, but layer 'a' has 16 tokens per block" in str(says)
    says = explain_mismatch(packed, layout(packing="fp8", style="kv_outer_nhd"))
    assert "has 64 bytes every 128 on the consumer; use a layout with heads outside" in str(says)


@pytest.mark.parametrize(
    ("dst", "says"),
    [
        (layout(tokens=32), "has 16 tokens per block on the producer but 32 on the consumer"),
        (layout(heads=4), "KV heads 0 to 1 on the producer's rank tp 0 pp 0 but KV heads 0 to 3"),
        (layout(head_first=2), "KV heads 0 to 1 on the producer's .* but KV heads 2 to 3"),
        (layout(("a",)), "The consumer lacks 1 layers that the other side has: 'b'"),
        (layout(("a", "b", "c")), "The producer lacks 1 layers that the other side has: 'c'"),
    ],
)
def test_same_shape_is_stricter(dst: KvLayout, says: str) -> None:
    assert re.search(says, str(same_shape(BASE, dst)))


@pytest.mark.parametrize("style", ["cpu", "packed_nhd", "padded", "token_outer"])
def test_same_shape_allows_other_strides(style: str) -> None:
    assert same_shape(BASE, layout(style=style)) is None


def test_too_many_pieces_are_refused() -> None:
    layers = tuple(f"l{n}" for n in range(40))
    one = layout(layers, "kv_outer_hnd", 65_536, heads=2, item=1)
    other = layout(layers, "kv_outer_nhd", 65_536, heads=2, item=1)
    with pytest.raises(PlanError, match="same KV cache layout"):
        PairPlan(one, other)
    assert PairPlan(one, one).num_pieces == 80


def brief(pairs: list[RankPair]) -> list[tuple[int, int, int, int]]:
    """(src, dst, first head, end head) for plans of a single layer."""
    return [(p.src, p.dst, p.shares[0].head_first, p.shares[0].head_end) for p in pairs]


@pytest.mark.parametrize(
    ("num_src", "num_dst", "total", "expected"),
    [
        (2, 2, 4, [(0, 0, 0, 2), (1, 1, 2, 4)]),
        (1, 2, 4, [(0, 0, 0, 2), (0, 1, 2, 4)]),
        (4, 2, 4, [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 2, 3), (3, 1, 3, 4)]),
        # Four producers hold two heads twice: each consumer takes another copy.
        (4, 2, 2, [(0, 0, 0, 1), (3, 1, 1, 2)]),
        (4, 4, 2, [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 1, 2), (3, 3, 1, 2)]),
        # One latent on all ranks: spread over the producers.
        (2, 4, 1, [(0, 0, 0, 1), (1, 1, 0, 1), (0, 2, 0, 1), (1, 3, 0, 1)]),
    ],
)
def test_pairs_by_heads(
    num_src: int, num_dst: int, total: int, expected: list[tuple[int, int, int, int]]
) -> None:
    src, dst = split(num_src, total), split(num_dst, total)
    assert brief(pair_ranks(src, dst)) == expected


def test_pairs_by_pipeline_stage() -> None:
    src = split(2, 4, ("a", "b")) + split(2, 4, ("c",), pp=1)
    pairs = pair_ranks(src, split(1, 4, ("a", "b", "c")))
    assert [(p.src, p.dst) for p in pairs] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert pairs[1].shares == (Share("a", 2, 4), Share("b", 2, 4))
    assert pairs[3].shares == (Share("c", 2, 4),)


def test_overlapping_head_ranges_are_cut() -> None:
    src = [layout(("a",), heads=3, total=4), layout(("a",), heads=2, head_first=2, total=4)]
    pairs = pair_ranks(src, [layout(("a",), heads=4, total=4)] * 2)
    assert brief(pairs) == [(0, 0, 0, 3), (1, 0, 3, 4), (0, 1, 0, 2), (1, 1, 2, 4)]


def refuse(src: list[KvLayout], dst: list[KvLayout]) -> Callable[[], list[RankPair]]:
    return lambda: pair_ranks(src, dst)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (refuse([], [BASE]), "There are 0 producer and 1 consumer ranks"),
        (refuse([BASE], [layout(("z",))]), "No producer rank holds layer 'z' of the consumer's"),
        (
            refuse([BASE], [layout(heads=8)]),
            "No producer rank holds KV heads 2 to 7 of layer 'a', which the consumer's rank tp 0",
        ),
    ],
)
def test_what_nobody_holds_is_named(call: Callable[[], list[RankPair]], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        call()
