"""From a KV tensor's strides to regions: the arithmetic that backends share."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal, NamedTuple

from neuron_push.core.layout import Part, Region
from neuron_push.devices.base import CacheFacts, DeviceError, KvCache, TensorLike, tensors_of

Order = Literal["heads_first", "tokens_first"]


class _View(NamedTuple):
    """A tensor in plain numbers: sizes, strides in bytes, bytes per element, address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    base: int


class _Grid(NamedTuple):
    """Strides in bytes from block to block, head to head and token to token."""

    block: int
    head: int
    token: int


def attention_regions(
    cache: KvCache, facts: CacheFacts, device_id: int, order: Order = "heads_first"
) -> tuple[Region, ...]:
    """Regions of one layer's KV cache, from its strides and vLLM's spec, never from a guess.

    Understood, with B blocks, H heads, N tokens, K and V bytes of one head of one token, in any
    stride order (which is what NHD and HND, and vLLM's LBHNC to BHLNC, differ in):

    - ``(2, B, ., ., D)`` and ``(B, 2, ., ., D)``, K and V apart. Sizes tell which of the two dots
      is heads; where H = N, `order` does, which follows from the device's attention kernels;
    - ``(B, H, N, K+V)`` with either interior (vLLM 0.28 on), or heads and tokens the other way;
    - a key and a value tensor apart, each ``(B, H, N, D)``, ``(B, N, H, D)`` or, with tokens in
      tiles, ``(B, tiles, N / tiles, H, D)``;
    - MLA ``(B, N, C)`` and ``(B, 1, N, C)``;
    - kernel blocks that subdivide vLLM's, where the tokens of a block stay evenly spaced;
    - anything at all as an opaque block when its first dimension is B.

    Raises DeviceError when the numbers do not fit the spec, or there is no address.
    """
    views = [_view(tensor, facts) for tensor in tensors_of(cache)]
    if len(views) == 2 and facts.kind == "attention":
        key = _one_of_two(views[0], facts, facts.key_bytes)
        value = _one_of_two(views[1], facts, facts.value_bytes)
        return (
            _region(facts, "k", views[0].base, key, facts.key_bytes, device_id),
            _region(facts, "v", views[1].base, value, facts.value_bytes, device_id),
        )
    if len(views) != 1:
        raise DeviceError(
            f"layer {facts.layer!r} has a KV cache of {len(views)} tensors; expected one, or a "
            "key and a value tensor of attention"
        )
    view = views[0]
    if facts.kind == "attention" and len(view.shape) == 5:
        found = _apart(view, facts, device_id, order)
        if found is not None:
            return found
    if facts.kind == "attention" and len(view.shape) == 4:
        found = _side_by_side(view, facts, device_id)
        if found is not None:
            return found
    if facts.kind == "latent":
        latent = _latent(view, facts)
        if latent is not None:
            size = view.shape[-1] * view.item
            return (_region(facts, "kv", view.base, latent, size, device_id),)
    return (_opaque(view, facts, device_id),)


def _view(tensor: TensorLike, facts: CacheFacts) -> _View:
    base = tensor.data_ptr()
    if base == 0:
        raise DeviceError(f"layer {facts.layer!r}: the KV tensor has no address (data_ptr is 0)")
    item = tensor.element_size()
    return _View(tuple(tensor.shape), tuple(s * item for s in tensor.stride()), item, base)


def _region(
    facts: CacheFacts, part: Part, base: int, grid: _Grid, size: int, device_id: int
) -> Region:
    return Region(
        layer=facts.layer,
        part=part,
        group=facts.group,
        base_address=base,
        num_blocks=facts.num_blocks,
        block_stride=grid.block,
        tokens_per_block=facts.tokens_per_block,
        num_heads=facts.num_heads,
        head_first=facts.head_first,
        token_stride=grid.token,
        head_stride=grid.head,
        item_bytes=size,
        device_id=device_id,
    )


def _grid(view: _View, axes: tuple[int, int, int], facts: CacheFacts) -> _Grid | None:
    """Strides along the (block, head, token) axes, or None where the sizes do not fit.

    The block axis may be cut finer than vLLM's blocks, if tokens run on evenly across the cuts.
    """
    blocks, heads, tokens = (view.shape[axis] for axis in axes)
    block_stride, head_stride, token_stride = (view.strides[axis] for axis in axes)
    ratio, rest = divmod(blocks, facts.num_blocks)
    if rest or ratio == 0 or heads != facts.num_heads or tokens * ratio != facts.tokens_per_block:
        return None
    if ratio > 1 and tokens > 1 and block_stride != tokens * token_stride:
        return None
    if ratio > 1 and tokens == 1:
        token_stride = block_stride
    return _Grid(ratio * block_stride, head_stride, token_stride)


def _apart(
    view: _View, facts: CacheFacts, device_id: int, order: Order
) -> tuple[Region, ...] | None:
    """(2, B, ., ., D) or (B, 2, ., ., D): K and V under an axis of their own."""
    size = view.shape[4] * view.item
    if not (size == facts.key_bytes == facts.value_bytes and view.strides[4] == view.item):
        return None
    orders = ((2, 3), (3, 2)) if order == "heads_first" else ((3, 2), (2, 3))
    for two, blocks, inner in ((t, 1 - t, i) for t in (0, 1) for i in orders):
        grid = _grid(view, (blocks, *inner), facts) if view.shape[two] == 2 else None
        if grid is not None:
            return (
                _region(facts, "k", view.base, grid, size, device_id),
                _region(facts, "v", view.base + view.strides[two], grid, size, device_id),
            )
    return None


def _side_by_side(view: _View, facts: CacheFacts, device_id: int) -> tuple[Region, ...] | None:
    """(B, H, N, K+V): each token's key and value adjoin, or each head's (CPU attention).

    Heads before tokens where they are equally many: that is how vLLM shows every such cache.
    """
    k, v, tokens = facts.key_bytes, facts.value_bytes, facts.tokens_per_block
    if view.shape[3] * view.item != k + v or view.strides[3] != view.item:
        return None
    grid = _grid(view, (0, 1, 2), facts) or _grid(view, (0, 2, 1), facts)
    if grid is None:
        return None
    if facts.interior == "plain":
        return (
            _region(facts, "k", view.base, grid, k, device_id),
            _region(facts, "v", view.base + k, grid, v, device_id),
        )
    if view.shape[0] != facts.num_blocks or (tokens > 1 and grid.token != k + v):
        raise DeviceError(
            f"layer {facts.layer!r}: a head of {tokens} tokens is not contiguous (token stride "
            f"{grid.token}, expected {k + v}): a layout of CPU attention that this release does "
            "not know"
        )
    keys, values = grid._replace(token=k), grid._replace(token=v)
    return (
        _region(facts, "k", view.base, keys, k, device_id),
        _region(facts, "v", view.base + tokens * k, values, v, device_id),
    )


def _one_of_two(view: _View, facts: CacheFacts, size: int) -> _Grid:
    """A key or value tensor by itself; spare blocks at its end are allowed.

    Raises DeviceError, also where heads and tokens are equally many and laid out differently
    depending on which is which.
    """
    if len(view.shape) == 5:  # tokens in tiles: the tiles of a block run on evenly, or not at all
        tiles, rows = view.shape[1:3]
        if view.strides[1] == rows * view.strides[2]:
            view = view._replace(
                shape=(view.shape[0], tiles * rows, *view.shape[3:]),
                strides=(view.strides[0], *view.strides[2:]),
            )
    right = len(view.shape) == 4 and view.shape[3] * view.item == size
    if right and view.strides[3] == view.item and view.shape[0] >= facts.num_blocks:
        cut = view._replace(shape=(facts.num_blocks, *view.shape[1:]))
        grids = {_grid(cut, axes, facts) for axes in ((0, 1, 2), (0, 2, 1))} - {None}
        if len(grids) == 1:
            found = grids.pop()
            assert found is not None
            return found
        if len(grids) == 2:
            raise DeviceError(
                f"layer {facts.layer!r}: {facts.num_heads} heads and as many tokens a block: which "
                f"axis of {view.shape} is which cannot be told; choose another --block-size"
            )
    raise DeviceError(
        f"layer {facts.layer!r}: a key or value tensor of shape {view.shape}, strides "
        f"{view.strides} bytes is none that this release understands ({facts})"
    )


def _latent(view: _View, facts: CacheFacts) -> _Grid | None:
    """MLA: one vector per token."""
    one_head = view
    if len(view.shape) == 4 and view.shape[1] == 1:
        one_head = view._replace(
            shape=(view.shape[0], *view.shape[2:]), strides=(view.strides[0], *view.strides[2:])
        )
    if len(one_head.shape) != 3 or one_head.strides[2] != view.item:
        return None
    size = one_head.shape[2] * view.item
    as_four = one_head._replace(
        shape=(one_head.shape[0], 1, *one_head.shape[1:]),
        strides=(one_head.strides[0], size, *one_head.strides[1:]),
    )
    return _grid(as_four, (0, 1, 2), facts) if facts.num_heads == 1 else None


def _opaque(view: _View, facts: CacheFacts, device_id: int) -> Region:
    """A block as one run of bytes, movable between equal engines only.

    It counts as one head, whatever heads are in it.
    """
    shape, strides = view.shape, view.strides
    span = view.item
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda s: s[1]):
        if size > 1 and stride != span:
            break
        span *= size
    ratio, rest = divmod(shape[0], facts.num_blocks)
    whole = span == view.item * prod(shape[1:])
    per_token, odd = divmod(span * ratio, facts.tokens_per_block)
    if rest or not whole or per_token == 0 or odd:
        raise DeviceError(
            f"layer {facts.layer!r}: KV tensor of shape {shape}, strides {strides} bytes is none "
            f"that this release understands ({facts})"
        )
    # Kernel blocks may subdivide vLLM's: a block is that many of them in a row.
    if ratio > 1 and strides[0] != span:
        raise DeviceError(
            f"layer {facts.layer!r}: {ratio} kernel blocks a block do not adjoin "
            f"(stride {strides[0]} bytes, expected {span})"
        )
    grid = _Grid(ratio * strides[0], span * ratio, per_token)
    return _region(replace(facts, num_heads=1), "kv", view.base, grid, per_token, device_id)
