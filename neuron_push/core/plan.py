"""Two layouts and two block lists to copy runs.

    pairs = pair_ranks(producer_layouts, consumer_layouts)
    plan = PairPlan(producer_layouts[pair.src], consumer_layouts[pair.dst], pair.shares)
    src_addr, dst_addr, num_bytes = plan.copies(src_blocks, dst_blocks, first_token, end_token)

Everything that depends on the layouts alone is prepared once, at a cost that grows with layers but
not with blocks; a transfer costs array operations over its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from neuron_push.core.coalesce import (
    MAX_NUM_PIECES,
    Copies,
    Ints,
    Kind,
    Pieces,
    PlanError,
    Ranges,
    Rows,
    Span,
    Units,
    concatenate,
    count_pieces,
    cut,
    expand,
    merge_in_order,
    merge_pieces,
    spans,
)
from neuron_push.core.layout import KvLayout, Region
from neuron_push.core.pairing import (
    RankPair,
    Share,
    common_shares,
    explain_mismatch,
    pair_ranks,
    regions_by_layer,
    same_shape,
)

__all__ = [
    "BlockTables",
    "Copies",
    "PairPlan",
    "PlanError",
    "Ranges",
    "RankPair",
    "Share",
    "Side",
    "explain_mismatch",
    "pair_ranks",
    "same_shape",
]

Side = Literal["src", "dst"]
BlockTables = Sequence[Sequence[int] | Ints]
"""Block ids of one side, one table per KV cache group of that side, indexed by group."""

_SIDES: tuple[Side, Side] = ("src", "dst")
_WORDS = {"src": "producer", "dst": "consumer"}
_NULL_BLOCK = 0


class _Cell(NamedTuple):
    """All rows whose blocks come from one pair of groups. Pairs have the source first."""

    groups: tuple[int, int]
    tokens_per_block: tuple[int, int]
    num_blocks: tuple[int, int]
    unit_tokens: int
    rows: Rows
    kinds: list[Kind]

    @property
    def ratios(self) -> tuple[int, int]:
        """Units per block, source and destination."""
        src_tokens, dst_tokens = self.tokens_per_block
        return src_tokens // self.unit_tokens, dst_tokens // self.unit_tokens


class _Tables:
    """The block tables of one side in one call: checked, and turned into units."""

    def __init__(self, side: Side, blocks: BlockTables, base_token: int) -> None:
        self._side: Side = side
        self._index = _SIDES.index(side)
        self._blocks = blocks
        self._base_token = base_token
        self._checked: dict[int, Ints] = {}

    def units(self, cell: _Cell, span: Span) -> Units:
        """Block and offset of each unit of the span, int64[n]; null blocks are still in it."""
        tokens = cell.tokens_per_block[self._index]
        group = cell.groups[self._index]
        if self._base_token < 0 or self._base_token % tokens:
            raise PlanError(
                f"The {self._side} base token is {self._base_token}; expected a multiple of the "
                f"{_WORDS[self._side]}'s {tokens} tokens per block in group {group}."
            )
        table = self._table(cell)
        first = span.first_unit - self._base_token // cell.unit_tokens
        ratio = cell.ratios[self._index]
        if first < 0 or first + span.num_units > table.size * ratio:
            covered_end = self._base_token + table.size * tokens
            raise PlanError(
                f"The {_WORDS[self._side]}'s block table of group {group} covers tokens "
                f"{self._base_token} to {covered_end - 1}, but tokens "
                f"{span.first_unit * cell.unit_tokens + span.token_first} to "
                f"{(span.first_unit + span.num_units - 1) * cell.unit_tokens + span.token_end - 1} "
                "are to be moved; pass all blocks of the request."
            )
        if ratio == 1:
            block = table[first : first + span.num_units]
            return Units(block, np.zeros(block.size, dtype=np.int64))
        entry, offset = np.divmod(np.arange(first, first + span.num_units, dtype=np.int64), ratio)
        return Units(table[entry], offset)

    def _table(self, cell: _Cell) -> Ints:
        group, num_blocks = cell.groups[self._index], cell.num_blocks[self._index]
        if group in self._checked:
            return self._checked[group]
        who = f"The {_WORDS[self._side]}'s block table of group {group}"
        if group >= len(self._blocks):
            raise PlanError(
                f"{who} is missing: {len(self._blocks)} tables were given; pass one per KV cache "
                "group of that side."
            )
        raw = np.asarray(self._blocks[group])
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
            raise PlanError(
                f"{who} is an array of {raw.dtype} with {raw.ndim} dimensions; expected a flat "
                "list of integer block ids."
            )
        if raw.size:
            least, most = int(raw.min()), int(raw.max())
            if least < 0 or most >= num_blocks:
                raise PlanError(
                    f"{who} ({self._side}) holds block id {least if least < 0 else most}; expected "
                    f"ids from 0 to {num_blocks - 1}, the size of that pool."
                )
        table: Ints = raw.astype(np.int64, copy=False)
        if self._side == "dst":
            ordered = np.sort(table[table != _NULL_BLOCK])
            same = np.flatnonzero(ordered[1:] == ordered[:-1])
            if same.size:
                raise PlanError(
                    f"{who} lists block {int(ordered[same[0]])} twice; a block can hold one place "
                    "of a prompt only."
                )
        self._checked[group] = table
        return table


class PairPlan:
    """How to copy KV blocks of one producer rank into one consumer rank.

    src, dst: layouts that passed `validate`.
    shares: what this pair moves, as `pair_ranks` decided; everything in common when None.

    Raises PlanError with the sentence of `explain_mismatch`, or for shares either side lacks.
    """

    def __init__(self, src: KvLayout, dst: KvLayout, shares: Sequence[Share] | None = None) -> None:
        differs = explain_mismatch(src, dst)
        if differs:
            raise PlanError(differs)
        self.src = src
        self.dst = dst
        self.shares = common_shares(src, dst) if shares is None else tuple(sorted(shares))
        # Bytes swizzled inside a block have no tokens that could be told apart.
        self._whole_blocks = src.packing != "plain"
        self._cells: list[_Cell] = []
        self._order: list[tuple[int, int]] = []  # (cell, row in it) of each row, by layer and part
        self._prepare()

    @property
    def num_pieces(self) -> int:
        """Copies that a whole unit (a block of the smaller size) takes where no two units merge.

        One per layer and part, or fewer, where the orders inside the blocks agree; a large number
        warns of many small copies.
        """
        return sum(kind.addr.shape[1] for cell in self._cells for kind in cell.kinds)

    def copies(
        self,
        src_blocks: BlockTables,
        dst_blocks: BlockTables,
        first_token: int,
        end_token: int,
        *,
        src_base_token: int = 0,
        dst_base_token: int = 0,
    ) -> Copies:
        """The copies that move tokens [first_token, end_token), as few as the blocks allow.

        src_blocks, dst_blocks: one table per group of that side; entry i of a group with B
        tokens per block holds tokens [base + i * B, base + (i + 1) * B).

        The end is rounded out to a whole block of the smaller of the two block sizes, which keeps
        the last block in one piece; the start is exact. Destination entries that are the null block
        are skipped. No destination byte is written twice. The order of the copies means nothing.

        A transfer in several calls must end all but the last on such a whole block: else the
        rounded tail of one call and the tokens of the next go to the same bytes, in any order.

        Raises PlanError: an id out of range, a null block on the source only, a destination block
        listed twice, a table too short, a base that is no multiple of the block size.
        """
        src = _Tables("src", src_blocks, src_base_token)
        dst = _Tables("dst", dst_blocks, dst_base_token)
        parts: list[Copies] = []
        for cell in self._cells:
            for span in self._spans(cell, first_token, end_token, whole_end=True):
                units = _pair_units(cell, span, src.units(cell, span), dst.units(cell, span))
                if not units.block.size:
                    continue
                kinds = cell.kinds
                if span.token_end - span.token_first < cell.unit_tokens:
                    kinds = merge_pieces(cell.rows, cut(cell.rows, *span[2:]))
                parts += [expand(kind, units) for kind in kinds]
        return concatenate(parts)

    def ranges(
        self,
        side: Side,
        blocks: BlockTables,
        first_token: int,
        end_token: int,
        *,
        base_token: int = 0,
        peer_blocks: BlockTables | None = None,
        peer_base_token: int = 0,
    ) -> Ranges:
        """Byte ranges of tokens [first_token, end_token) on one side, in an order both sides share.

        The bytes read in this order are the same on both sides after a correct copy, so their
        digests compare. Order: layer name, part, unit of tokens, then head and token as far as the
        two layouts order them differently. Tokens are exact (not rounded), except that packed
        blocks are whole.

        Null blocks are left out. The source may still hold blocks where the destination
        does not (sliding windows): pass the destination's tables as `peer_blocks` there.
        Raises PlanError as `copies` does.
        """
        index = _SIDES.index(side)
        tables = _Tables(side, blocks, base_token)
        peer: _Tables | None = None
        if peer_blocks is not None:
            peer = _Tables(_SIDES[1 - index], peer_blocks, peer_base_token)
        # Per cell and span: the units of this side, the pieces, and where each row's pieces begin.
        prepared: list[list[tuple[Units, Pieces, Ints]]] = []
        for cell in self._cells:
            of_cell: list[tuple[Units, Pieces, Ints]] = []
            for span in self._spans(cell, first_token, end_token, self._whole_blocks):
                units = tables.units(cell, span)
                keep = units.block != _NULL_BLOCK
                if peer is not None:
                    keep &= peer.units(cell, span).block != _NULL_BLOCK
                pieces = cut(cell.rows, *span[2:])
                starts = np.searchsorted(pieces.row, np.arange(cell.rows.item_bytes.size + 1))
                of_cell.append((Units(units.block[keep], units.offset[keep]), pieces, starts))
            prepared.append(of_cell)
        addrs: list[Ints] = [np.empty(0, dtype=np.int64)]
        lengths: list[Ints] = [np.empty(0, dtype=np.int64)]
        for cell_index, row in self._order:
            rows = self._cells[cell_index].rows
            for units, pieces, starts in prepared[cell_index]:
                shifts = units.block * rows.block_stride[index, row]
                shifts += units.offset * rows.unit_stride[index, row]
                mine = slice(int(starts[row]), int(starts[row + 1]))
                addrs.append((shifts[:, None] + pieces.addr[index, mine]).reshape(-1))
                lengths.append(np.tile(pieces.num_bytes[mine], shifts.size))
        return merge_in_order(np.concatenate(addrs), np.concatenate(lengths))

    def _spans(self, cell: _Cell, first: int, end: int, whole_end: bool) -> list[Span]:
        if not 0 <= first <= end:
            raise PlanError(f"Tokens {first} to {end} are no range; expected 0 <= first <= end.")
        if self._whole_blocks and first % cell.unit_tokens:
            raise PlanError(
                f"The first token {first} lies inside a block of {cell.unit_tokens} tokens, which "
                f"packing {self.src.packing!r} does not allow to be split; start at a block's edge."
            )
        return spans(first, end, cell.unit_tokens, whole_end)

    def _prepare(self) -> None:
        src_layers, dst_layers = regions_by_layer(self.src), regions_by_layer(self.dst)
        found: dict[tuple[int, int], list[tuple[Region, Region, Share]]] = {}
        where: list[tuple[tuple[int, int], int]] = []
        for share in self.shares:
            sources, targets = src_layers.get(share.layer, {}), dst_layers.get(share.layer, {})
            for part in sorted(sources) or [""]:
                pair = sources.get(part), targets.get(part)
                one, other = pair
                if one is None or other is None or not _holds(share, one, other):
                    raise PlanError(
                        f"KV heads {share.head_first} to {share.head_end - 1} of layer "
                        f"{share.layer!r} are not on both the producer's {self.src.where} and the "
                        f"consumer's {self.dst.where}; take the shares from pair_ranks."
                    )
                rows = found.setdefault((one.group, other.group), [])
                where.append(((one.group, other.group), len(rows)))
                rows.append((one, other, share))
        numbers = {groups: number for number, groups in enumerate(found)}
        self._order = [(numbers[groups], row) for groups, row in where]
        num_pieces = 0
        for groups, members in found.items():
            one, other, _ = members[0]
            tokens = one.tokens_per_block, other.tokens_per_block
            unit = min(tokens)
            rows_array = _rows(members, unit)
            num_pieces += count_pieces(rows_array, unit)
            if num_pieces > MAX_NUM_PIECES:
                raise PlanError(
                    f"Each block would be cut into more than {MAX_NUM_PIECES} pieces, because "
                    "heads and tokens are ordered differently on the two sides; give both engines "
                    "the same KV cache layout."
                )
            kinds = merge_pieces(rows_array, cut(rows_array, 0, unit))
            pools = one.num_blocks, other.num_blocks
            self._cells.append(_Cell(groups, tokens, pools, unit, rows_array, kinds))


def _holds(share: Share, one: Region, other: Region) -> bool:
    first = max(one.head_first, other.head_first)
    end = min(one.head_end, other.head_end)
    return first <= share.head_first < share.head_end <= end


def _rows(members: list[tuple[Region, Region, Share]], unit_tokens: int) -> Rows:
    def pairs(column: list[tuple[int, int]]) -> Ints:
        return np.array(column, dtype=np.int64).T

    def base(region: Region, share: Share) -> int:
        return region.base_address + (share.head_first - region.head_first) * region.head_stride

    def unit_stride(region: Region) -> int:
        return unit_tokens * region.token_stride if region.tokens_per_block > unit_tokens else 0

    return Rows(
        base=pairs([(base(one, share), base(other, share)) for one, other, share in members]),
        block_stride=pairs([(one.block_stride, other.block_stride) for one, other, _ in members]),
        unit_stride=pairs([(unit_stride(one), unit_stride(other)) for one, other, _ in members]),
        head_stride=pairs([(one.head_stride, other.head_stride) for one, other, _ in members]),
        token_stride=pairs([(one.token_stride, other.token_stride) for one, other, _ in members]),
        num_heads=np.array([s.head_end - s.head_first for _, _, s in members], dtype=np.int64),
        item_bytes=np.array([one.item_bytes for one, _, _ in members], dtype=np.int64),
    )


def _pair_units(cell: _Cell, span: Span, src: Units, dst: Units) -> Units:
    """Both sides' units, null destinations left out, ordered by destination so that runs show."""
    keep = dst.block != _NULL_BLOCK
    block = np.stack((src.block, dst.block))[:, keep]
    offset = np.stack((src.offset, dst.offset))[:, keep]
    if (block[0] == _NULL_BLOCK).any():
        unit = span.first_unit + int(np.flatnonzero(keep)[np.argmin(block[0])])
        raise PlanError(
            f"The producer's block table of group {cell.groups[0]} has the null block for token "
            f"{unit * cell.unit_tokens}, which the consumer's group {cell.groups[1]} wants; ask "
            "only for tokens whose blocks the producer still holds."
        )
    position = block[1] * cell.ratios[1] + offset[1]
    if (np.diff(position) < 0).any():
        order = np.argsort(position)
        block, offset = block[:, order], offset[:, order]
    return Units(block, offset)
