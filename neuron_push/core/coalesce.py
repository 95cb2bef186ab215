"""The arithmetic under a plan: cutting blocks into pieces and merging pieces into few copies.

A unit is a run of as many tokens as the smaller block of the two sides holds; every unit lies
inside one block on either side. A row is a pair of regions, or a range of their heads. A piece is
bytes of one unit that are contiguous on both sides. Pieces are the same for every unit but for a
shift, so they are computed once; per transfer only the shifts are.

Arrays whose first axis has length 2 hold the source in index 0 and the destination in index 1.
All arrays are int64, all addresses, strides and lengths bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_NUM_PIECES = 1 << 22
MAX_NUM_COPIES = 1 << 26


class PlanError(ValueError):
    """Two layouts, or two block tables, cannot be mapped; the message says what and how to mend."""


class Copies(NamedTuple):
    """Copies of `num_bytes[i]` bytes from `src_addr[i]` to `dst_addr[i]`; three int64[n].

    `len()` is that of a 3-tuple; use `num_copies`.
    """

    src_addr: Ints
    dst_addr: Ints
    num_bytes: Ints

    @property
    def num_copies(self) -> int:
        """How many copies there are."""
        return int(self.num_bytes.size)

    @property
    def total_bytes(self) -> int:
        """Bytes of all copies together."""
        return int(self.num_bytes.sum())


class Ranges(NamedTuple):
    """Byte ranges of one side in order; two int64[n]."""

    addr: Ints
    num_bytes: Ints


class Rows(NamedTuple):
    """Region pairs, one per index of the last axis (length R).

    base: int64[2, R], address of the row's first head and first token in block 0.
    block_stride, unit_stride, head_stride, token_stride: int64[2, R]; unit_stride leads from one
    unit of a block to the next and is 0 where a block is one unit.
    num_heads, item_bytes: int64[R].
    """

    base: Ints
    block_stride: Ints
    unit_stride: Ints
    head_stride: Ints
    token_stride: Ints
    num_heads: Ints
    item_bytes: Ints


class Pieces(NamedTuple):
    """Bytes of unit 0 of block 0 contiguous on both sides: row int64[p], addr int64[2, p],
    num_bytes int64[p]; ordered by row, then head, then token.
    """

    row: Ints
    addr: Ints
    num_bytes: Ints


class Kind(NamedTuple):
    """Pieces that share strides and length, so that their units merge alike.

    addr: int64[2, p]; block_stride, unit_stride: int64[2].
    """

    addr: Ints
    num_bytes: int
    block_stride: Ints
    unit_stride: Ints


class Units(NamedTuple):
    """Where n units lie: block id and index of the unit in the block, int64[2, n] each."""

    block: Ints
    offset: Ints


class Span(NamedTuple):
    """`num_units` units from `first_unit`, of each the tokens [token_first, token_end)."""

    first_unit: int
    num_units: int
    token_first: int
    token_end: int


def spans(first_token: int, end_token: int, unit_tokens: int, whole_end: bool) -> list[Span]:
    """Tokens [first_token, end_token) as at most three spans: a partial head, whole units, a tail.

    whole_end: round the end out to a whole unit. The start is never rounded: what lies before it
    is valid already on the destination.
    """
    if first_token >= end_token:
        return []
    unit, token_first = divmod(first_token, unit_tokens)
    last_unit = (end_token - 1) // unit_tokens
    token_end = unit_tokens if whole_end else end_token - last_unit * unit_tokens
    if unit == last_unit:
        return [Span(unit, 1, token_first, token_end)]
    found: list[Span] = []
    if token_first:
        found.append(Span(unit, 1, token_first, unit_tokens))
        unit += 1
    end_unit = last_unit + (token_end == unit_tokens)
    if end_unit > unit:
        found.append(Span(unit, end_unit - unit, 0, unit_tokens))
    if end_unit == last_unit:
        found.append(Span(last_unit, 1, 0, token_end))
    return found


def _contiguous(rows: Rows, num_tokens: int) -> tuple[Ints, Ints, Ints]:
    """(piece bytes, heads, tokens) left per row once what is contiguous on both sides is joined."""
    chunk = rows.item_bytes.copy()
    heads = rows.num_heads.copy()
    tokens = np.full_like(heads, num_tokens)
    # Tokens before heads before tokens again: a third round can join nothing new.
    for counts, stride in (
        (tokens, rows.token_stride),
        (heads, rows.head_stride),
        (tokens, rows.token_stride),
    ):
        joins = (counts == 1) | ((stride[0] == chunk) & (stride[1] == chunk))
        chunk[joins] *= counts[joins]
        counts[joins] = 1
    return chunk, heads, tokens


def count_pieces(rows: Rows, num_tokens: int) -> int:
    """How many pieces `cut` makes of `num_tokens` tokens of a unit, all rows together."""
    _, heads, tokens = _contiguous(rows, num_tokens)
    return int((heads.astype(np.float64) * tokens).sum())


def cut(rows: Rows, token_first: int, token_end: int) -> Pieces:
    """Cut the tokens [token_first, token_end) of a unit into pieces as large as can be."""
    chunk, heads, tokens = _contiguous(rows, token_end - token_first)
    per_row = heads * tokens
    row = np.repeat(np.arange(per_row.size, dtype=np.int64), per_row)
    index = np.arange(row.size, dtype=np.int64) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    head = index // tokens[row]
    token = index - head * tokens[row]
    base = rows.base
    if token_first:  # else a stride over one single token, which may be anything, would count
        base = base + token_first * rows.token_stride
    # A joined dimension leaves index 0 only, so that its stride does not count either.
    addr = base[:, row] + head * rows.head_stride[:, row] + token * rows.token_stride[:, row]
    return Pieces(row, addr, chunk[row])


def merge_pieces(rows: Rows, pieces: Pieces) -> list[Kind]:
    """Merge pieces that adjoin on both sides (K with V, layers packed in one block), by kind."""
    if not pieces.row.size:
        return []
    strides = np.concatenate((rows.block_stride, rows.unit_stride)).T
    unique, key_of_row = np.unique(strides, axis=0, return_inverse=True)
    key = key_of_row.reshape(-1)[pieces.row]
    order = np.lexsort((pieces.addr[0], key))
    key, addr, num_bytes = key[order], pieces.addr[:, order], pieces.num_bytes[order]
    joins = (np.diff(addr) == num_bytes[:-1]).all(axis=0) & (np.diff(key) == 0)
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    key, addr = key[starts], addr[:, starts]
    num_bytes = np.add.reduceat(num_bytes, starts)
    order = np.lexsort((num_bytes, key))
    key, addr, num_bytes = key[order], addr[:, order], num_bytes[order]
    breaks = np.flatnonzero((np.diff(key) != 0) | (np.diff(num_bytes) != 0)) + 1
    kinds: list[Kind] = []
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), key.size], strict=True):
        stride = unique[key[first]]
        kinds.append(Kind(addr[:, first:end], int(num_bytes[first]), stride[:2], stride[2:]))
    return kinds


def shift(units: Units, block_stride: Ints, unit_stride: Ints) -> Ints:
    """How far each unit lies from unit 0 of block 0: int64[2, n]; the strides are int64[2]."""
    return units.block * block_stride[:, None] + units.offset * unit_stride[:, None]


def expand(kind: Kind, units: Units) -> Copies:
    """Every piece at every unit, units adjoining on both sides merged."""
    shifts = shift(units, kind.block_stride, kind.unit_stride)
    breaks = (np.diff(shifts) != kind.num_bytes).any(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    run_bytes = np.diff(np.append(starts, shifts.shape[1])) * kind.num_bytes
    num_pieces, num_runs = kind.addr.shape[1], starts.size
    if num_pieces * num_runs > MAX_NUM_COPIES:
        raise PlanError(
            f"This plan needs {num_pieces * num_runs} copies of {kind.num_bytes} bytes, more than "
            f"{MAX_NUM_COPIES}; give both engines the same KV cache layout (head order and block "
            "size), or plan fewer tokens at a time."
        )
    addr = kind.addr[:, :, None] + shifts[:, None, starts]
    num_bytes = np.broadcast_to(run_bytes, (num_pieces, num_runs)).reshape(-1)
    return Copies(addr[0].reshape(-1), addr[1].reshape(-1), num_bytes)


def concatenate(parts: Sequence[Copies]) -> Copies:
    """One Copies of many; three empty arrays of none."""
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, dtype=np.int64)
    src, dst, num_bytes = (
        np.concatenate([empty, *(part[column] for part in parts)]) for column in range(3)
    )
    return Copies(src, dst, num_bytes)


def merge_in_order(addr: Ints, num_bytes: Ints) -> Ranges:
    """Join ranges that follow each other both in the sequence and in memory."""
    if not addr.size:
        return Ranges(addr, num_bytes)
    breaks = addr[:-1] + num_bytes[:-1] != addr[1:]
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    return Ranges(addr[starts], np.add.reduceat(num_bytes, starts))
