"""KV memory as plain byte arrays in the tensor layouts in use, for tests of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neuron_push.core.layout import Allocation, KvLayout, Part, Region

Bytes = npt.NDArray[np.uint8]

APART = (
    "kv_outer_hnd",  # [2][block][head][token][dim]: Neuron
    "kv_outer_nhd",
    "block_outer_hnd",  # [block][2][head][token][dim]
    "block_outer_nhd",
    "cpu",  # [block][head][K tokens, V tokens][dim]
    "token_outer",  # [block][token][2][head][dim]
    "padded",  # [block][2][token][head][dim + 3 bytes of padding], and padding after each block
    "packed_hnd",  # [block][layer][2][head][token][dim]
    "packed_nhd",
)
FUSED = ("mla", "mla_packed")  # [block][token][latent] and [block][layer][token][latent]


@dataclass
class Builder:
    """Collects regions and allocations at rising fake addresses."""

    next_address: int
    regions: list[Region] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        address = self.next_address
        self.allocations.append(Allocation(address, num_bytes, 0))
        self.next_address += num_bytes + 64  # a gap, so that allocations never merge by accident
        return address


@dataclass(frozen=True)
class Group:
    """One KV cache group of a rank."""

    layers: tuple[str, ...]
    style: str
    tokens: int
    num_blocks: int


def add_group(
    build: Builder, index: int, group: Group, *, heads: int, head_first: int, item: int
) -> None:
    """Lay out all layers of the group."""
    tokens, blocks = group.tokens, group.num_blocks
    half = heads * tokens * item
    nhd, hnd = (heads * item, item), (item, tokens * item)

    def add(layer: str, part: Part, base: int, stride: int, inner: tuple[int, int]) -> None:
        build.regions.append(
            Region(
                layer, part, index, base, blocks, stride, tokens, heads, head_first,
                inner[0], inner[1], item, 0,
            )
        )  # fmt: skip

    style = group.style
    inner = nhd if style.endswith("nhd") else hnd
    packed = style in ("packed_hnd", "packed_nhd", "mla_packed")
    parts: tuple[Part, ...] = ("kv",) if style in FUSED else ("k", "v")
    block = len(parts) * half
    base = build.allocate(blocks * block * len(group.layers)) if packed else 0
    for number, layer in enumerate(group.layers):
        for which, part in enumerate(parts):
            if packed:
                at = base + number * block + which * half
                add(layer, part, at, block * len(group.layers), inner)
                continue
            if style == "padded":
                wide, tail = item + 3, 11
                block = 2 * tokens * heads * wide + tail
            if which == 0:
                base = build.allocate(blocks * block)
            if style.startswith("kv_outer"):
                add(layer, part, base + which * blocks * half, half, inner)
            elif style == "cpu":
                add(layer, part, base + which * tokens * item, block, (item, 2 * tokens * item))
            elif style == "token_outer":
                add(layer, part, base + which * heads * item, block, (2 * heads * item, item))
            elif style == "padded":
                at = base + which * tokens * heads * wide
                add(layer, part, at, block, (heads * wide, wide))
            else:
                add(layer, part, base + which * half, block, inner)


def make_layout(
    groups: Sequence[Group],
    *,
    heads: int = 1,
    head_first: int = 0,
    total_heads: int | None = None,
    item: int = 4,
    ranks: tuple[int, int] = (0, 0),
    address: int = 1 << 32,
    packing: str = "plain",
) -> KvLayout:
    """A validated layout; `ranks` is (tp, pp)."""
    build = Builder(address)
    for index, group in enumerate(groups):
        if group.layers:
            add_group(build, index, group, heads=heads, head_first=head_first, item=item)
    layout = KvLayout(
        ranks[0],
        ranks[1],
        heads if total_heads is None else total_heads,
        "bfloat16",
        "DRAM",
        tuple(build.allocations),
        tuple(build.regions),
        packing,
    )
    layout.validate()
    return layout


class Memory:
    """The bytes behind a layout, gaps between allocations included."""

    def __init__(self, layout: KvLayout, seed: int) -> None:
        self.base = min(a.address for a in layout.allocations)
        end = max(a.address + a.num_bytes for a in layout.allocations)
        self.data: Bytes = np.random.default_rng(seed).integers(
            0, 256, end - self.base, dtype=np.uint8
        )

    def read(self, address: int, num_bytes: int) -> Bytes:
        start = address - self.base
        assert start >= 0
        assert start + num_bytes <= self.data.size
        return self.data[start : start + num_bytes]

    def stream(self, addr: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]) -> bytes:
        return b"".join(
            self.read(a, n).tobytes()
            for a, n in zip(addr.tolist(), num_bytes.tolist(), strict=True)
        )


def entry_address(region: Region, block: int, head: int, token: int) -> int:
    """Address of one entry; `head` counts over the whole model, `token` inside the block."""
    local = head - region.head_first
    assert 0 <= local < region.num_heads
    assert 0 <= block < region.num_blocks
    return (
        region.base_address
        + block * region.block_stride
        + local * region.head_stride
        + token * region.token_stride
    )
