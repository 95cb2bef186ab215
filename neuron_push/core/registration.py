"""What a consumer may register with us: tables that fit its pools, and no more than it can hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neuron_push.core.messages import MessageError, Register, unpack_blocks
from neuron_push.core.peers import PeerRank
from neuron_push.core.shop import Limits

Tables = list[npt.NDArray[np.int64]]
"""One of block ids for each KV cache group."""


def checked_tables(peer: PeerRank, message: Register) -> Tables:
    """The registration's block tables, every id within the peer's own pools.

    Raises MessageError.
    """
    wants_something = message.first_token < message.end_token
    if not wants_something:
        return []
    layout = peer.layout
    if peer.outgoing is None:
        raise MessageError("this rank holds no KV that the registering rank could use")
    if len(message.blocks) != layout.num_groups:
        raise MessageError(
            f"{len(message.blocks)} block tables, expected one for each of the "
            f"{layout.num_groups} KV cache groups"
        )
    tables: Tables = []
    for group, packed in enumerate(message.blocks):
        ids = unpack_blocks(packed)
        tokens, limit = layout.tokens_per_block(group), layout.num_blocks(group)
        if message.base_token % tokens:
            raise MessageError(
                f"base token {message.base_token} is no multiple of the {tokens} tokens of a "
                f"block of group {group}"
            )
        needed = -(-(message.end_token - message.base_token) // tokens)
        if len(ids) < needed:
            raise MessageError(
                f"group {group}: {len(ids)} blocks for {needed} blocks' worth of tokens"
            )
        if len(ids) and int(ids.max()) >= limit:
            raise MessageError(
                f"group {group}: block id {int(ids.max())} is outside the pool of {limit}"
            )
        tables.append(ids)
    return tables


def over_limit(peer: PeerRank, num_bytes: int, limits: Limits) -> str:
    """Why this rank may not register so much more now; empty when it may.

    Bytes count until the last segment is posted: only then can the consumer have received
    all, and have given the blocks to its next load.
    """
    if len(peer.sending) >= limits.max_open_per_peer:
        return f"{len(peer.sending)} transfers to this rank are open: the limit"
    max_bytes = limits.max_open_bytes(peer.layout)
    if peer.queued_bytes + num_bytes > max_bytes:
        return (
            f"{peer.queued_bytes} bytes wait to be written to this rank, and with "
            f"{num_bytes} more it would have over {max_bytes}: the limit, which is the size "
            "of its KV memory"
        )
    return ""
