"""Plans against a naive reference that copies entry by entry, and the cost of planning."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.core.layout import INT64_MAX, Allocation, KvLayout, Region
from neuron_push.core.plan import PairPlan, PlanError, Share, pair_ranks, same_shape
from tests.unit.kv_geometry import APART, FUSED, Group, Memory, entry_address, make_layout

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Engine:
    """One side: layouts of all ranks, one block table per group, the base token of the tables."""

    layouts: list[KvLayout]
    tables: list[Table]
    base_token: int


@dataclass(frozen=True)
class Scene:
    """A random transfer."""

    src: Engine
    dst: Engine
    first_token: int
    end_token: int


def head_ranges(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """Head ranges of all tensor parallel ranks: split evenly, or each head on several ranks."""
    split = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    copies = draw(st.integers(1, 3)) if split == total else 1
    heads = total // split
    return [(heads * (rank // copies), heads) for rank in range(split * copies)]


def spread_layers(draw: st.DrawFn, layers: list[str], num_groups: int) -> list[list[str]]:
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for layer in layers:
        groups[draw(st.integers(0, num_groups - 1))].append(layer)
    return groups


def draw_table(draw: st.DrawFn, length: int) -> Table:
    """Distinct ids from 1 up: contiguous, backwards, or shuffled in pieces."""
    kind = draw(st.sampled_from(["forwards", "backwards", "shuffled", "pieces"]))
    ids = np.arange(1, length + 3, dtype=np.int64)
    if kind == "backwards":
        ids = ids[::-1]
    elif kind == "shuffled":
        ids = ids[np.array(draw(st.permutations(range(ids.size))))]
    elif kind == "pieces":
        ids = np.roll(ids, draw(st.integers(0, ids.size)))
    return ids[:length].copy()


def draw_engine(
    draw: st.DrawFn, layers: list[str], styles: tuple[str, ...], total: int, item: int
) -> tuple[Engine, list[int]]:
    """An engine with empty tables, and the tokens per block of its groups."""
    num_groups = draw(st.integers(1, 2))
    groups = spread_layers(draw, layers, num_groups)
    tokens = [draw(st.sampled_from([1, 2, 4, 8])) for _ in groups]
    style = [draw(st.sampled_from(styles)) for _ in groups]
    cut = draw(st.integers(1, len(layers)))
    stages = [set(layers[:cut]), set(layers[cut:])] if cut < len(layers) else [set(layers)]
    layouts = []
    for pp, stage in enumerate(stages):
        for tp, (head_first, heads) in enumerate(head_ranges(draw, total)):
            members = [
                Group(tuple(n for n in names if n in stage), style[g], tokens[g], 50 + g + tp)
                for g, names in enumerate(groups)
            ]
            address = draw(st.sampled_from([4096, 1 << 40, (1 << 62) + 8]))
            layouts.append(
                make_layout(
                    members,
                    heads=heads,
                    head_first=head_first,
                    total_heads=total,
                    item=item,
                    ranks=(tp, pp),
                    address=address,
                )
            )
    return Engine(layouts, [], 0), tokens


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    layers = [f"layer.{n}" for n in range(draw(st.integers(1, 4)))]
    fused = draw(st.booleans())
    styles = FUSED if fused else APART
    total = 1 if fused else draw(st.sampled_from([1, 2, 3, 4, 6]))
    item = draw(st.sampled_from([1, 2, 5]))
    src, src_tokens = draw_engine(draw, layers, styles, total, item)
    dst, dst_tokens = draw_engine(draw, layers, styles, total, item)
    end = draw(st.integers(1, 40))
    first = draw(
        st.one_of(st.integers(0, 4).map(lambda n: n * max(dst_tokens)), st.integers(0, 40))
    )
    first = min(first, end)
    window = draw(st.one_of(st.just(0), st.integers(0, end)))
    kept = min(window // t * t for t in dst_tokens)
    src = fill_tables(draw, src, src_tokens, (first, end), kept)
    dst = fill_tables(draw, dst, dst_tokens, (first, end), window)
    return Scene(src, dst, first, end)


def fill_tables(
    draw: st.DrawFn, engine: Engine, tokens: list[int], span: tuple[int, int], window: int
) -> Engine:
    """Tables that cover the span; blocks wholly before the token `window` are null."""
    base = draw(st.integers(0, span[0] // max(tokens))) * max(tokens)
    tables = []
    for per_block in tokens:
        length = -(-(span[1] - base) // per_block) + draw(st.integers(0, 2))
        table = draw_table(draw, length)
        table[base + (np.arange(length) + 1) * per_block <= window] = 0
        tables.append(table)
    return replace(engine, tables=tables, base_token=base)


def find(layout: KvLayout, layer: str, part: str) -> Region:
    return next(r for r in layout.regions if (r.layer, r.part) == (layer, part))


def block_of(engine: Engine, region: Region, token: int) -> tuple[int, int]:
    """(block id, token inside the block)."""
    entry, inside = divmod(token - engine.base_token, region.tokens_per_block)
    return int(engine.tables[region.group][entry]), inside


def reference(
    scene: Scene,
    src: KvLayout,
    dst: KvLayout,
    shares: tuple[Share, ...],
    memory: tuple[Memory, Memory],
) -> int:
    """Copy entry by entry; returns how many bytes lie inside [first_token, end_token).

    The rule: tokens from first_token on, exactly; the end rounded up to a whole block of the
    smaller of the two block sizes; nothing where the destination has the null block.
    """
    exact_bytes = 0
    for layer, head_first, head_end in shares:
        for part in ("k", "v", "kv"):
            if (layer, part) not in {(r.layer, r.part) for r in src.regions}:
                continue
            one, other = find(src, layer, part), find(dst, layer, part)
            unit = min(one.tokens_per_block, other.tokens_per_block)
            end = -(-scene.end_token // unit) * unit
            for token in range(
                scene.first_token, end if scene.first_token < scene.end_token else 0
            ):
                src_block, src_inside = block_of(scene.src, one, token)
                dst_block, dst_inside = block_of(scene.dst, other, token)
                if dst_block == 0:
                    continue
                for head in range(head_first, head_end):
                    size = one.item_bytes
                    exact_bytes += size * (token < scene.end_token)
                    source = entry_address(one, src_block, head, src_inside)
                    target = entry_address(other, dst_block, head, dst_inside)
                    memory[1].read(target, size)[:] = memory[0].read(source, size)
    return exact_bytes


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_exactly_the_right_bytes_arrive_once(scene: Scene) -> None:
    src_memory = [Memory(layout, n) for n, layout in enumerate(scene.src.layouts)]
    dst_memory = [Memory(layout, 100 + n) for n, layout in enumerate(scene.dst.layouts)]
    expected = [Memory(layout, 100 + n) for n, layout in enumerate(scene.dst.layouts)]
    written = [np.zeros(memory.data.size, dtype=np.int64) for memory in dst_memory]
    span = scene.first_token, scene.end_token
    digests: list[tuple[PairPlan, int, int, int]] = []
    for pair in pair_ranks(scene.src.layouts, scene.dst.layouts):
        src, dst = scene.src.layouts[pair.src], scene.dst.layouts[pair.dst]
        plan = PairPlan(src, dst, pair.shares)
        copies = plan.copies(
            scene.src.tables, scene.dst.tables, *span,
            src_base_token=scene.src.base_token, dst_base_token=scene.dst.base_token,
        )  # fmt: skip
        target = dst_memory[pair.dst]
        for source, to, size in zip(*(column.tolist() for column in copies), strict=True):
            target.read(to, size)[:] = src_memory[pair.src].read(source, size)
            written[pair.dst][to - target.base : to - target.base + size] += 1
        exact = reference(scene, src, dst, pair.shares, (src_memory[pair.src], expected[pair.dst]))
        digests.append((plan, pair.src, pair.dst, exact))
    for got, want, times in zip(dst_memory, expected, written, strict=True):
        assert (got.data == want.data).all()
        assert times.max(initial=0) <= 1
    for plan, one, other, exact in digests:
        ranges = plan.ranges(
            "src", scene.src.tables, *span, base_token=scene.src.base_token,
            peer_blocks=scene.dst.tables, peer_base_token=scene.dst.base_token,
        )  # fmt: skip
        sent = src_memory[one].stream(*ranges)
        ranges = plan.ranges("dst", scene.dst.tables, *span, base_token=scene.dst.base_token)
        assert sent == dst_memory[other].stream(*ranges)
        assert len(sent) == exact


@settings(max_examples=100, deadline=None)
@given(scenes())
def test_every_head_of_every_layer_comes_from_exactly_one_rank(scene: Scene) -> None:
    pairs = pair_ranks(scene.src.layouts, scene.dst.layouts)
    for index, layout in enumerate(scene.dst.layouts):
        wanted = {(r.layer, h) for r in layout.regions for h in range(r.head_first, r.head_end)}
        given_heads = [
            (share.layer, head)
            for pair in pairs
            if pair.dst == index
            for share in pair.shares
            for head in range(share.head_first, share.head_end)
        ]
        assert sorted(given_heads) == sorted(wanted)
    assert [(p.dst, p.src) for p in pairs] == sorted({(p.dst, p.src) for p in pairs})


def two(src: Group, dst: Group, heads: int = 2, item: int = 64) -> PairPlan:
    return PairPlan(
        make_layout([src], heads=heads, item=item),
        make_layout([dst], heads=heads, item=item, address=1 << 40),
    )


LAYERS = tuple(f"layers.{n}" for n in range(4))


@pytest.mark.parametrize(
    ("src_style", "dst_style", "num_copies"),
    [
        ("kv_outer_hnd", "kv_outer_hnd", 8),  # one per layer and part
        ("packed_hnd", "packed_hnd", 1),  # all layers, all blocks
        ("cpu", "cpu", 4),  # K and V adjoin: one per layer
        ("block_outer_nhd", "block_outer_nhd", 4),
        ("token_outer", "token_outer", 4),
        ("kv_outer_hnd", "block_outer_hnd", 8 * 50),  # no runs on the destination
        ("packed_nhd", "block_outer_nhd", 4 * 50),
        ("kv_outer_hnd", "kv_outer_nhd", 8 * 50 * 2 * 16),  # one per head and token
        ("cpu", "kv_outer_hnd", 8 * 50 * 2),  # one per head
    ],
)
@pytest.mark.parametrize("step", [1, -1])
def test_number_of_copies_for_contiguous_blocks(
    src_style: str, dst_style: str, num_copies: int, step: int
) -> None:
    plan = two(Group(LAYERS, src_style, 16, 99), Group(LAYERS, dst_style, 16, 80))
    # Blocks freed together come back in reverse order: runs backwards merge as well.
    copies = plan.copies([np.arange(10, 60)[::step]], [np.arange(3, 53)[::step]], 0, 50 * 16 - 3)
    assert copies.num_copies == num_copies
    assert copies.total_bytes == 50 * plan.src.block_bytes(0)


def test_unequal_block_sizes_merge_where_tokens_are_outermost() -> None:
    plan = two(Group(LAYERS, "kv_outer_nhd", 32, 99), Group(LAYERS, "kv_outer_nhd", 16, 99))
    copies = plan.copies([np.arange(1, 11)], [np.arange(5, 25)], 0, 320)
    assert copies.num_copies == 8
    plan = two(Group(LAYERS, "kv_outer_hnd", 32, 99), Group(LAYERS, "kv_outer_hnd", 16, 99))
    copies = plan.copies([np.arange(1, 11)], [np.arange(5, 25)], 0, 320)
    assert copies.num_copies == 8 * 20 * 2  # half a head's tokens at a time


def odd_layout(*rows: tuple[int, int, int]) -> KvLayout:
    """Layers of 8-byte single-token blocks at (base, block stride, token stride), 4 blocks each."""
    regions = tuple(
        Region(f"l{n}", "kv", 0, base, 4, stride, 1, 1, 0, token_stride, INT64_MAX, 8, 0)
        for n, (base, stride, token_stride) in enumerate(rows)
    )
    layout = KvLayout(0, 0, 1, "uint8", "DRAM", (Allocation(1000, 1000, 0),), regions)
    layout.validate()
    return layout


def test_strides_over_a_single_token_do_not_matter() -> None:
    layout = odd_layout((1000, 16, 0), (1008, 16, INT64_MAX))
    copies = PairPlan(layout, layout).copies([[1, 2, 3]], [[1, 2, 3]], 0, 3)
    assert [column.tolist() for column in copies] == [[1016], [1016], [48]]


def test_regions_that_adjoin_in_one_block_only_do_not_merge() -> None:
    layout = odd_layout((1000, 16, 1), (1008, 32, 1))
    copies = PairPlan(layout, layout).copies([[1]], [[2]], 0, 1)
    assert sorted(copies.src_addr.tolist()) == [1016, 1040]
    assert sorted(copies.dst_addr.tolist()) == [1032, 1072]
    assert copies.num_bytes.tolist() == [8, 8]


def test_digest_ranges_stay_at_block_granularity() -> None:
    plan = two(Group(LAYERS, "kv_outer_hnd", 16, 99), Group(LAYERS, "kv_outer_hnd", 16, 99))
    blocks = [np.arange(1, 81, 2)]
    assert plan.ranges("src", blocks, 0, 640).addr.size == 8 * 40
    assert plan.ranges("src", [np.arange(1, 41)], 0, 640).addr.size == 8


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(1, 65_536), (32, 2_048)])
def test_scattered_blocks_are_planned_fast(num_layers: int, num_blocks: int) -> None:
    layers = tuple(f"l{n}" for n in range(num_layers))
    group = Group(layers, "kv_outer_hnd", 16, num_blocks + 1)
    plan = two(group, group)
    rng = np.random.default_rng(0)
    src, dst = (1 + rng.permutation(num_blocks) for _ in range(2))
    best_s = 9.0
    for _ in range(5):
        started = time.perf_counter()
        copies = plan.copies([src], [dst], 0, num_blocks * 16)
        best_s = min(best_s, time.perf_counter() - started)
    assert copies.num_copies > 2 * num_layers * num_blocks * 0.99
    assert best_s < 0.1


def test_preparing_does_not_depend_on_the_number_of_blocks() -> None:
    def best_s(num_blocks: int) -> float:
        group = Group(tuple(f"l{n}" for n in range(64)), "kv_outer_hnd", 16, num_blocks)
        src = make_layout([group], heads=8, item=256)
        best = 9.0
        for _ in range(5):
            started = time.perf_counter()
            PairPlan(src, src)
            best = min(best, time.perf_counter() - started)
        return best

    assert best_s(10_000_000) < 3 * best_s(10) + 0.01


@pytest.mark.parametrize(
    ("src", "dst", "first", "end", "says"),
    [
        (
            [1, 9],
            [1, 2],
            0,
            8,
            "block table of group 0 .src. holds block id 9; expected ids from 0 to 8",
        ),
        ([1, 2], [-1, 2], 0, 8, "consumer's .* .dst. holds block id -1; expected ids from 0 to 6"),
        ([1, 2], [2**63, 2**63 + 1], 0, 8, "holds block id 9223372036854775809"),
        ([1, 2], [2**80, 2], 0, 8, "expected a flat list of integer"),
        ([1, 2], [1.0, 2.0], 0, 8, "is an array of float64"),
        ([1, 2], [[1, 2]], 0, 8, "with 2 dimensions"),
        ([1, 0], [1, 2], 0, 8, "producer's .* has the null block for token 4"),
        ([1, 2], [2, 2], 0, 8, "consumer's .* lists block 2 twice"),
        ([1, 2], [1, 2], 0, 9, "covers tokens 0 to 7, but tokens 0 to 11 are to be moved"),
        ([1, 2], [1, 2], 5, 4, "Tokens 5 to 4 are no range"),
        ([1, 2], [1, 2], -1, 4, "Tokens -1 to 4 are no range"),
    ],
)
def test_refused_tables(src: list[int], dst: list[int], first: int, end: int, says: str) -> None:
    plan = two(Group(("a",), "cpu", 4, 9), Group(("a",), "cpu", 4, 7))
    with pytest.raises(PlanError, match=says):
        plan.copies([src], [dst], first, end)


def test_refused_bases_and_missing_tables() -> None:
    plan = two(Group(("a",), "cpu", 4, 9), Group(("a",), "cpu", 4, 9))
    with pytest.raises(PlanError, match="dst base token is 2; expected a multiple"):
        plan.copies([[1]], [[1]], 2, 4, dst_base_token=2)
    with pytest.raises(PlanError, match="covers tokens 4 to 7, but tokens 0 to 3"):
        plan.copies([[1]], [[1]], 0, 4, src_base_token=4)
    with pytest.raises(PlanError, match="group 0 is missing: 0 tables were given"):
        plan.ranges("dst", [], 0, 4)


def test_nothing_to_move_is_three_empty_arrays() -> None:
    plan = two(Group(("a",), "cpu", 4, 9), Group(("a",), "cpu", 4, 9))
    for copies in (plan.copies([[1]], [[1]], 3, 3), plan.copies([[0]], [[0]], 0, 4)):
        assert [(column.size, column.dtype) for column in copies] == [(0, np.int64)] * 3
    assert plan.ranges("src", [[0]], 0, 4).addr.size == 0


def test_packed_blocks_are_never_split() -> None:
    group = Group(("a",), "kv_outer_hnd", 4, 9)
    layout = make_layout([group], heads=2, packing="swizzled")
    plan = PairPlan(layout, layout)
    assert plan.copies([[1]], [[2]], 0, 3).total_bytes == layout.block_bytes(0)
    assert plan.ranges("src", [[1]], 0, 3).num_bytes.sum() == layout.block_bytes(0)
    with pytest.raises(PlanError, match="first token 1 lies inside a block of 4 tokens"):
        plan.copies([[1]], [[2]], 1, 3)


def test_a_share_that_a_side_lacks_is_refused() -> None:
    layout = make_layout([Group(("a",), "cpu", 4, 9)], heads=2, total_heads=4)
    with pytest.raises(PlanError, match="KV heads 1 to 2 of layer 'a' are not on both"):
        PairPlan(layout, layout, [Share("a", 1, 3)])
    with pytest.raises(PlanError, match="of layer 'b' are not on both"):
        PairPlan(layout, layout, [Share("b", 0, 1)])
    assert same_shape(layout, msgspec.structs.replace(layout, tp_rank=1)) is None
