"""What a rank's KV memory looks like: regions with strides inside registered allocations.

A layout is made once by the rank that owns the memory and travels to its peers, so `validate`
trusts nothing in it. After `validate` every address that a plan can form lies inside one allocation
and fits a signed 64-bit integer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Part = Literal["k", "v", "kv"]
MemoryType = Literal["DRAM", "VRAM"]

MAX_NUM_REGIONS = 65_536
MAX_NUM_ALLOCATIONS = 65_536
MAX_NUM_GROUPS = 1_024
MAX_NUM_HEADS = 65_536
MAX_TOKENS_PER_BLOCK = 1 << 20
MAX_RANK = 65_535
MAX_DEVICE_ID = (1 << 31) - 1
MAX_NAME_CHARS = 512
INT64_MAX = (1 << 63) - 1


class LayoutError(ValueError):
    """A layout contradicts itself or is out of bounds; the message names the region and field."""


class Allocation(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One memory registration: bytes [address, address + num_bytes) on device `device_id`."""

    address: int
    num_bytes: int
    device_id: int


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One (layer, part) of a rank's KV memory.

    The entry of token t and head h (both counted inside the block and rank) of block b occupies
    `item_bytes` bytes from
    `base_address + b * block_stride + h * head_stride + t * token_stride`. Strides are bytes.

    layer: the name by which both sides know the layer.
    part: "k" or "v"; "kv" where the two cannot be told apart (MLA latent, opaque state).
    group: index of the rank's own KV cache group whose block ids address this region.
    head_first: global index of this rank's first KV head.
    """

    layer: str
    part: Part
    group: int
    base_address: int
    num_blocks: int
    block_stride: int
    tokens_per_block: int
    num_heads: int
    head_first: int
    token_stride: int
    head_stride: int
    item_bytes: int
    device_id: int

    @property
    def head_end(self) -> int:
        """Global index one past this rank's last KV head."""
        return self.head_first + self.num_heads

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block of this region, gaps between entries not counted."""
        return self.num_heads * self.tokens_per_block * self.item_bytes


class KvLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All KV memory of one rank.

    total_kv_heads: KV heads of the whole model (its largest layer), over all ranks; 1 for MLA.
    dtype: element type by torch's short name, such as "bfloat16".
    packing: "plain", or a name both sides must share for bytes swizzled inside a head's block.
    """

    tp_rank: int
    pp_rank: int
    total_kv_heads: int
    dtype: str
    memory_type: MemoryType
    allocations: tuple[Allocation, ...]
    regions: tuple[Region, ...]
    packing: str = "plain"

    @property
    def where(self) -> str:
        """The rank in words, for error sentences."""
        return f"rank tp {self.tp_rank} pp {self.pp_rank}"

    @property
    def num_groups(self) -> int:
        """One more than the largest group index in use; how many block tables a plan is given."""
        return max((region.group for region in self.regions), default=-1) + 1

    def tokens_per_block(self, group: int) -> int:
        """Tokens per block of `group`. Raises LayoutError if no region belongs to it."""
        return self._of_group(group)[0].tokens_per_block

    def num_blocks(self, group: int) -> int:
        """Blocks in the pool of `group`. Raises LayoutError if no region belongs to it."""
        return self._of_group(group)[0].num_blocks

    def block_bytes(self, group: int) -> int:
        """Payload bytes of one block of `group`, all its regions together.

        Raises LayoutError if no region belongs to the group.
        """
        return sum(region.block_bytes for region in self._of_group(group))

    def table_bytes(self, tables: Sequence[npt.NDArray[np.int64]]) -> int:
        """Payload bytes of all blocks in one table of ids per group; null blocks hold nothing."""
        sizes = [0] * len(tables)
        for region in self.regions:
            if region.group < len(sizes):
                sizes[region.group] += region.block_bytes
        return sum(
            int(np.count_nonzero(ids)) * size for ids, size in zip(tables, sizes, strict=True)
        )

    @property
    def pool_bytes(self) -> int:
        """All registered memory of the rank."""
        return sum(allocation.num_bytes for allocation in self.allocations)

    def shape_fingerprint(self) -> bytes:
        """32 bytes that are equal for layouts equal but for addresses, devices and block counts.

        Neither the order of the regions nor a stride over a single head or token matters.
        """
        rows = sorted(
            (
                r.layer,
                r.part,
                r.group,
                r.block_stride,
                r.tokens_per_block,
                r.num_heads,
                r.head_first,
                r.token_stride if r.tokens_per_block > 1 else 0,
                r.head_stride if r.num_heads > 1 else 0,
                r.item_bytes,
            )
            for r in self.regions
        )
        rank = (self.tp_rank, self.pp_rank, self.total_kv_heads)
        kind = (self.dtype, self.packing, self.memory_type)
        return hashlib.sha256(msgspec.msgpack.encode((rank, kind, rows))).digest()

    def validate(self) -> None:
        """Check everything a plan relies on; O(regions log allocations).

        Raises LayoutError with a sentence that names the region and the field. A layer that shares
        another layer's memory (cross-layer KV sharing) must be left out by whoever makes the
        layout: regions are not checked against each other, because groups of a hybrid cache
        legitimately share memory.
        """
        # First of all: the other sentences quote the rank, and a huge integer cannot be printed.
        _check_int("The layout", "tp_rank", self.tp_rank, 0, MAX_RANK)
        _check_int("The layout", "pp_rank", self.pp_rank, 0, MAX_RANK)
        here = f"The layout of {self.where}"
        _check_int(here, "total_kv_heads", self.total_kv_heads, 1, MAX_NUM_HEADS)
        _check_name(here, "dtype", self.dtype)
        _check_name(here, "packing", self.packing)
        if self.memory_type not in ("DRAM", "VRAM"):
            raise LayoutError(
                f"{here}: memory_type is {_quote(self.memory_type)}; expected 'DRAM' or 'VRAM'."
            )
        _check_count(here, "allocations", len(self.allocations), MAX_NUM_ALLOCATIONS)
        _check_count(here, "regions", len(self.regions), MAX_NUM_REGIONS)
        allocations = _checked_allocations(self.allocations, here)
        by_layer: dict[str, list[Region]] = {}
        by_group: dict[int, Region] = {}
        for region in self.regions:
            name = _check_region(region, self)
            _check_inside(region, name, allocations)
            first = by_group.setdefault(region.group, region)
            for field in ("tokens_per_block", "num_blocks"):
                _check_equal(name, field, region, first, f"group {region.group}")
            parts = by_layer.setdefault(region.layer, [])
            if any(other.part == region.part for other in parts):
                raise LayoutError(
                    f"{name} appears twice; list every (layer, part) once and leave out layers "
                    "that share another layer's memory."
                )
            parts.append(region)
        for parts in by_layer.values():
            _check_parts(parts, self)

    def _of_group(self, group: int) -> list[Region]:
        regions = [region for region in self.regions if region.group == group]
        if not regions:
            raise LayoutError(
                f"The layout of {self.where} has no region in KV cache group {group}; its groups "
                f"are {sorted({region.group for region in self.regions})}."
            )
        return regions


def _quote(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # CPython refuses to print integers of more than 4300 digits
        return "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."


def region_name(layout: KvLayout, region: Region) -> str:
    """The region in words, for error sentences; long or hostile names are cut."""
    return f"Region {_quote(region.layer)} part {_quote(region.part)} of {layout.where}"


def _check_int(where: str, field: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise LayoutError(
            f"{where}: {field} is {_quote(value)}; expected an integer from {least} to {most}. "
            "Derive it from the tensor's strides and the layer's KV cache spec."
        )


def _check_name(where: str, field: str, value: str) -> None:
    # Printable: names end up in log lines of the peer.
    fine = isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and value.isprintable()
    if not fine:
        raise LayoutError(
            f"{where}: {field} is {_quote(value)}; expected a name of 1 to {MAX_NAME_CHARS} "
            "printable characters."
        )


def _check_count(where: str, field: str, count: int, most: int) -> None:
    if not 0 < count <= most:
        raise LayoutError(f"{where} has {count} {field}; expected 1 to {most}.")


def _check_equal(name: str, field: str, region: Region, other: Region, scope: str) -> None:
    mine, theirs = getattr(region, field), getattr(other, field)
    if mine != theirs:
        raise LayoutError(
            f"{name}: {field} is {mine} but {theirs} in region {_quote(other.layer)} part "
            f"{_quote(other.part)}; all regions of {scope} must agree."
        )


def _check_parts(parts: list[Region], layout: KvLayout) -> None:
    """K and V of one layer travel together, so they must agree on group and heads."""
    first = parts[0]
    name = region_name(layout, first)
    if len(parts) > 1 and any(region.part == "kv" for region in parts):
        raise LayoutError(
            f"{name}: the layer is described both as 'kv' and as 'k' or 'v' apart; give one or "
            "the other."
        )
    for region in parts[1:]:
        for field in ("group", "num_heads", "head_first"):
            _check_equal(region_name(layout, region), field, region, first, "one layer")


def _checked_allocations(
    allocations: tuple[Allocation, ...], here: str
) -> dict[int, tuple[list[int], list[int]]]:
    """Per device the sorted start addresses and the ends; LayoutError where two overlap."""
    for index, allocation in enumerate(allocations):
        where = f"{here}, allocation {index}"
        _check_int(where, "address", allocation.address, 1, INT64_MAX)
        _check_int(where, "num_bytes", allocation.num_bytes, 1, INT64_MAX - allocation.address)
        _check_int(where, "device_id", allocation.device_id, 0, MAX_DEVICE_ID)
    by_device: dict[int, tuple[list[int], list[int]]] = {}
    for allocation in sorted(allocations, key=lambda a: (a.device_id, a.address)):
        starts, ends = by_device.setdefault(allocation.device_id, ([], []))
        if ends and allocation.address < ends[-1]:
            raise LayoutError(
                f"{here}: the allocation at address {allocation.address:#x} on device "
                f"{allocation.device_id} overlaps the one at {starts[-1]:#x}; register each byte "
                "once."
            )
        starts.append(allocation.address)
        ends.append(allocation.address + allocation.num_bytes)
    return by_device


def _check_region(region: Region, layout: KvLayout) -> str:
    """Check one region by itself; returns its name for further sentences."""
    name = region_name(layout, region)
    _check_name(name, "layer", region.layer)
    if region.part not in ("k", "v", "kv"):
        raise LayoutError(f"{name}: part is {_quote(region.part)}; expected 'k', 'v' or 'kv'.")
    _check_int(name, "group", region.group, 0, MAX_NUM_GROUPS - 1)
    _check_int(name, "base_address", region.base_address, 1, INT64_MAX)
    _check_int(name, "num_blocks", region.num_blocks, 1, INT64_MAX)
    _check_int(name, "tokens_per_block", region.tokens_per_block, 1, MAX_TOKENS_PER_BLOCK)
    _check_int(name, "num_heads", region.num_heads, 1, layout.total_kv_heads)
    _check_int(name, "head_first", region.head_first, 0, layout.total_kv_heads - region.num_heads)
    _check_int(name, "item_bytes", region.item_bytes, 1, INT64_MAX)
    _check_int(name, "device_id", region.device_id, 0, MAX_DEVICE_ID)
    # A stride over a single entry is never used; torch leaves anything there.
    for field in ("block_stride", "token_stride", "head_stride"):
        _check_int(name, field, getattr(region, field), 0, INT64_MAX)
    return name


def _dimensions(region: Region) -> list[tuple[int, int, str]]:
    """(stride, count, field) of every dimension with more than one entry, innermost first."""
    dimensions = [
        (region.block_stride, region.num_blocks, "block_stride"),
        (region.token_stride, region.tokens_per_block, "token_stride"),
        (region.head_stride, region.num_heads, "head_stride"),
    ]
    return sorted(dimension for dimension in dimensions if dimension[1] > 1)


def _check_inside(
    region: Region, name: str, allocations: dict[int, tuple[list[int], list[int]]]
) -> None:
    """Entries apart from each other, and all of them inside one allocation of the device.

    Dimensions have to nest (each stride clears all of the dimension below it). That is stricter
    than "no two entries overlap", but every tensor in use nests.
    """
    extent_bytes = region.item_bytes
    for stride, count, field in _dimensions(region):
        if stride < extent_bytes:
            raise LayoutError(
                f"{name}: {field} is {stride}, so that entries overlap; expected at least "
                f"{extent_bytes} bytes, what lies inside one step."
            )
        extent_bytes += stride * (count - 1)
    starts, ends = allocations.get(region.device_id, ([], []))
    index = bisect_right(starts, region.base_address) - 1
    if index < 0 or region.base_address + extent_bytes > ends[index]:
        raise LayoutError(
            f"{name}: base_address {region.base_address:#x} and the {_quote(extent_bytes)} bytes "
            f"from there are not inside one allocation of device {region.device_id}; register the "
            "whole tensor or correct num_blocks and the strides."
        )
