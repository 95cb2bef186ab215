"""Layouts: what `validate` accepts and refuses, sizes, fingerprint, wire form."""

from __future__ import annotations

import contextlib
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_push.core.layout import (
    INT64_MAX,
    MAX_NUM_REGIONS,
    Allocation,
    KvLayout,
    LayoutError,
    Region,
)
from tests.unit.kv_geometry import APART, FUSED, Group, make_layout

GROUP = Group(("a", "b"), "kv_outer_hnd", 16, 8)
LAYOUT = make_layout([GROUP], heads=2, head_first=2, total_heads=8)


def changed(field: str, value: object, region: int = 0) -> KvLayout:
    regions = list(LAYOUT.regions)
    regions[region] = msgspec.structs.replace(regions[region], **{field: value})
    return msgspec.structs.replace(LAYOUT, regions=tuple(regions))


def refused(layout: KvLayout) -> str:
    with pytest.raises(LayoutError) as caught:
        layout.validate()
    return str(caught.value)


@pytest.mark.parametrize("style", [*APART, *FUSED])
def test_layouts_in_use_are_valid(style: str) -> None:
    heads = 1 if style in FUSED else 3
    make_layout([Group(("a", "b"), style, 4, 5), Group(("c",), style, 8, 5)], heads=heads)


def test_sizes_by_group() -> None:
    layout = make_layout(
        [Group(("a", "b"), "cpu", 16, 8), Group(("c",), "padded", 4, 9)], heads=2, item=32
    )
    assert layout.num_groups == 2
    assert (layout.tokens_per_block(0), layout.num_blocks(0)) == (16, 8)
    assert (layout.tokens_per_block(1), layout.num_blocks(1)) == (4, 9)
    assert layout.block_bytes(0) == 2 * 2 * 2 * 16 * 32
    assert layout.block_bytes(1) == 2 * 2 * 4 * 32  # padding is no payload
    with pytest.raises(LayoutError, match="no region in KV cache group 7"):
        layout.tokens_per_block(7)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("layer", "", "layer is ''; expected a name"),
        ("layer", "a\nb", "printable"),
        ("layer", "x" * 5000, "layer is 'xxx"),
        ("part", "q", "part is 'q'; expected 'k', 'v' or 'kv'"),
        ("part", "v", "part 'v' .* appears twice"),
        ("part", "kv", "described both as 'kv'"),
        ("group", -1, "group is -1"),
        ("base_address", 0, "base_address is 0"),
        ("base_address", 1, "not inside one allocation of device 0"),
        ("num_blocks", 0, "num_blocks is 0"),
        ("num_blocks", 7, "num_blocks is 8 but 7"),
        ("num_blocks", 1 << 62, "not inside one allocation"),
        (
            "block_stride",
            127,
            "block_stride is 127, so that entries overlap; expected at least 128",
        ),
        ("block_stride", 1 << 70, "block_stride is"),
        ("tokens_per_block", 0, "tokens_per_block is 0"),
        ("tokens_per_block", 8, "tokens_per_block is 16 but 8"),
        ("tokens_per_block", 1 << 40, "tokens_per_block is"),
        ("num_heads", 9, "num_heads is 9; expected an integer from 1 to 8"),
        ("num_heads", 1, "num_heads is 2 but 1"),
        ("head_first", 7, "head_first is 7; expected an integer from 0 to 6"),
        ("token_stride", 3, "token_stride is 3, so that entries overlap"),
        ("token_stride", -4, "token_stride is -4"),
        ("head_stride", 4, "head_stride is 4, so that entries overlap|token_stride is 4, so that"),
        ("item_bytes", 0, "item_bytes is 0"),
        ("item_bytes", 5, "so that entries overlap; expected at least 5"),
        ("item_bytes", True, "item_bytes is True"),
        ("device_id", 1, "not inside one allocation of device 1"),
        pytest.param("num_blocks", 10**5000, "num_blocks is a huge integer", id="huge"),
    ],
)
def test_refused_region(field: str, value: object, says: str) -> None:
    message = refused(changed(field, value))
    assert re.search(says, message)
    assert "Region " in message
    assert "rank tp 0 pp 0" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tp_rank", -1, "tp_rank is -1"),
        ("pp_rank", 1 << 20, "pp_rank is 1048576"),
        ("total_kv_heads", 0, "total_kv_heads is 0"),
        ("dtype", "", "dtype is ''"),
        ("packing", "\x1b[31m", "packing is"),
        ("memory_type", "FILE", "memory_type is 'FILE'"),
        ("allocations", (), "has 0 allocations"),
        ("regions", (), "has 0 regions"),
        ("regions", LAYOUT.regions[:1] * (MAX_NUM_REGIONS + 1), "has 65537 regions"),
        ("allocations", (Allocation(0, 10, 0),), "allocation 0: address is 0"),
        ("allocations", (Allocation(1, 0, 0),), "allocation 0: num_bytes is 0"),
        ("allocations", (Allocation(1, INT64_MAX, 0),), "allocation 0: num_bytes is"),
        ("allocations", (Allocation(1, 10, -1),), "allocation 0: device_id is -1"),
        ("allocations", (Allocation(1, 10, 0), Allocation(10, 1, 0)), "overlaps the one at 0x1"),
    ],
)
def test_refused_layout(field: str, value: object, says: str) -> None:
    assert says in refused(msgspec.structs.replace(LAYOUT, **{field: value}))


def test_a_region_may_not_span_two_adjoining_allocations() -> None:
    whole = LAYOUT.allocations[0]
    halves = (
        Allocation(whole.address, 100, 0),
        Allocation(whole.address + 100, whole.num_bytes - 100, 0),
    )
    layout = msgspec.structs.replace(LAYOUT, allocations=halves + LAYOUT.allocations[1:])
    assert "not inside one allocation" in refused(layout)


def test_the_last_byte_counts() -> None:
    last = LAYOUT.allocations[-1]
    short = Allocation(last.address, last.num_bytes - 1, 0)
    layout = msgspec.structs.replace(LAYOUT, allocations=(*LAYOUT.allocations[:-1], short))
    assert "'b' part 'v'" in refused(layout)


def test_a_stride_over_a_single_entry_is_free() -> None:
    regions = (Region("a", "kv", 0, 64, 4, 8, 1, 1, 0, 0, INT64_MAX, 8, 0),)
    layout = msgspec.structs.replace(LAYOUT, regions=regions, allocations=(Allocation(64, 32, 0),))
    layout.validate()


def test_fingerprint_ignores_addresses_devices_pools_and_order() -> None:
    other = make_layout(
        [Group(("a", "b"), "kv_outer_hnd", 16, 99)],
        heads=2, head_first=2, total_heads=8, address=1 << 50,
    )  # fmt: skip
    other = msgspec.structs.replace(other, regions=other.regions[::-1])
    assert other.shape_fingerprint() == LAYOUT.shape_fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer", "z"), ("group", 1), ("block_stride", 1), ("head_first", 0), ("item_bytes", 2)],
)
def test_fingerprint_sees_the_shape(field: str, value: object) -> None:
    assert changed(field, value).shape_fingerprint() != LAYOUT.shape_fingerprint()


@pytest.mark.parametrize(("field", "value"), [("tp_rank", 1), ("dtype", "x"), ("packing", "p")])
def test_fingerprint_sees_the_rank(field: str, value: object) -> None:
    other = msgspec.structs.replace(LAYOUT, **{field: value})
    assert other.shape_fingerprint() != LAYOUT.shape_fingerprint()


def test_wire_form_is_compact_and_strict() -> None:
    data = msgspec.msgpack.encode(LAYOUT)
    assert msgspec.msgpack.decode(data, type=KvLayout) == LAYOUT
    assert len(data) < 40 * len(LAYOUT.regions) + 60
    fields = msgspec.msgpack.decode(data)
    for index, value in ((0, "0"), (2, 1.5), (4, "FILE"), (6, None)):
        broken = [*fields[:index], value, *fields[index + 1 :]]
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=KvLayout)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, 1]), type=KvLayout)


EDGES = [-1, 0, 1, 2, 16, 2**31, 2**32, 2**62, INT64_MAX, 2**63, 2**64, 10**30]
numbers = st.one_of(st.integers(), st.sampled_from(EDGES), st.integers(0, 64))
words = st.one_of(st.text(max_size=5), st.sampled_from(["k", "v", "kv", "DRAM", "VRAM", "plain"]))
small = st.one_of(st.just(0), numbers)
regions = st.builds(Region, words, words, *[numbers] * 11)
allocations = st.builds(Allocation, numbers, numbers, numbers)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        KvLayout, small, small, numbers, words, words,
        st.lists(allocations, max_size=3).map(tuple),
        st.lists(regions, max_size=3).map(tuple),
        words,
    )
)  # fmt: skip
def test_hostile_layouts_raise_nothing_but_layout_error(layout: KvLayout) -> None:
    with contextlib.suppress(LayoutError):
        layout.validate()


FIELDS = [name for name in Region.__struct_fields__ if name not in ("layer", "part")]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FIELDS), numbers), max_size=3))
def test_bent_layouts_are_refused_or_stay_inside(changes: list[tuple[int, str, int]]) -> None:
    bent = list(LAYOUT.regions)
    for index, field, value in changes:
        bent[index] = msgspec.structs.replace(bent[index], **{field: value})
    layout = msgspec.structs.replace(LAYOUT, regions=tuple(bent))
    try:
        layout.validate()
    except LayoutError:
        return
    for region in layout.regions:
        seen: set[int] = set()
        for block in range(region.num_blocks):
            for head in range(region.num_heads):
                for token in range(region.tokens_per_block):
                    first = (
                        region.base_address
                        + block * region.block_stride
                        + head * region.head_stride
                        + token * region.token_stride
                    )
                    entry = set(range(first, first + region.item_bytes))
                    assert not entry & seen
                    seen |= entry
        inside = [
            a for a in layout.allocations
            if a.address <= min(seen) and max(seen) < a.address + a.num_bytes
        ]  # fmt: skip
        assert len(inside) == 1
        assert inside[0].device_id == region.device_id
