"""From a KV tensor's strides to regions: the arithmetic that backends share."""

from __future__ import annotations

from neuron_push.core.layout import Region
from neuron_push.devices.base import CacheFacts, DeviceError, TensorLike


def attention_regions(tensor: TensorLike, facts: CacheFacts, device_id: int) -> tuple[Region, ...]:
    """Regions of one layer's KV tensor, from its strides and vLLM's spec, never from a guess.

    Understood, with B blocks, H heads, N tokens, K and V bytes of one head of one token:
    ``(2, B, H, N, D)`` and ``(B, 2, H, N, D)`` (K and V apart), ``(B, H, N, K+V)`` with either
    interior, and anything at all as an opaque block when its first dimension is B.
    Raises DeviceError when the numbers do not fit the spec.
    """
    item = tensor.element_size()
    shape = tuple(tensor.shape)
    strides = tuple(stride * item for stride in tensor.stride())
    base = tensor.data_ptr()
    if base == 0:
        raise DeviceError(f"layer {facts.layer!r}: the KV tensor has no address (data_ptr is 0)")

    def region(
        part: str, offset: int, block: int, head: int, token: int, size: int, heads: int
    ) -> Region:
        return Region(
            layer=facts.layer,
            part=part,  # type: ignore[arg-type]
            group=facts.group,
            base_address=base + offset,
            num_blocks=facts.num_blocks,
            block_stride=block,
            tokens_per_block=facts.tokens_per_block,
            num_heads=heads,
            head_first=facts.head_first,
            token_stride=token,
            head_stride=head,
            item_bytes=size,
            device_id=device_id,
        )

    heads, tokens = facts.num_heads, facts.tokens_per_block
    k, v = facts.key_bytes, facts.value_bytes
    if facts.kind == "attention" and len(shape) == 5 and 2 in shape[:2]:
        two = 0 if shape[0] == 2 and shape[1] == facts.num_blocks else 1
        blocks = 1 - two
        if shape[two] == 2 and shape[blocks] == facts.num_blocks and k == v:
            order = _heads_and_tokens(shape[2:4], heads, tokens)
            if order is not None and shape[4] * item == k and strides[4] == item:
                head, token = strides[2 + order[0]], strides[2 + order[1]]
                return (
                    region("k", 0, strides[blocks], head, token, k, heads),
                    region("v", strides[two], strides[blocks], head, token, v, heads),
                )
    if facts.kind == "attention" and len(shape) == 4 and shape[0] == facts.num_blocks:
        order = _heads_and_tokens(shape[1:3], heads, tokens)
        if order is not None and shape[3] * item == k + v and strides[3] == item:
            head, token = strides[1 + order[0]], strides[1 + order[1]]
            if facts.interior == "cpu":
                if token != k + v:
                    raise DeviceError(
                        f"layer {facts.layer!r}: a head of {tokens} tokens is not contiguous "
                        f"(token stride {token}, expected {k + v}): a layout of CPU attention "
                        "that this release does not know"
                    )
                return (
                    region("k", 0, strides[0], head, k, k, heads),
                    region("v", tokens * k, strides[0], head, v, v, heads),
                )
            return (
                region("k", 0, strides[0], head, token, k, heads),
                region("v", k, strides[0], head, token, v, heads),
            )
    if facts.kind == "latent" and len(shape) == 3 and shape[:2] == (facts.num_blocks, tokens):
        return (region("kv", 0, strides[0], shape[2] * item, strides[1], shape[2] * item, 1),)
    return (_opaque(facts, shape, strides, item, region),)


def _heads_and_tokens(sizes: tuple[int, ...], heads: int, tokens: int) -> tuple[int, int] | None:
    """(position of heads, position of tokens); heads first where both numbers are equal."""
    if sizes == (heads, tokens):
        return 0, 1
    if sizes == (tokens, heads):
        return 1, 0
    return None


def _opaque(facts, shape, strides, item, region) -> Region:  # type: ignore[no-untyped-def]
    """A block as one run of bytes, movable between equal engines only.

    It counts as one head, whatever heads are in it.
    """
    span = item
    is_dense = True
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda s: s[1]):
        is_dense &= size == 1 or stride == span
        span *= size
    # Kernel blocks may subdivide the manager's: a block is that many of them in a row.
    ratio, rest = divmod(shape[0], facts.num_blocks)
    per_token, gap = divmod(span * ratio, facts.tokens_per_block)
    if not is_dense or rest or gap or per_token == 0:
        raise DeviceError(
            f"layer {facts.layer!r}: KV tensor of shape {shape}, strides {strides} bytes is "
            f"none that this release understands ({facts})"
        )
    if ratio > 1 and strides[0] != span:
        raise DeviceError(
            f"layer {facts.layer!r}: {ratio} kernel blocks a block do not adjoin "
            f"(stride {strides[0]} bytes, expected {span})"
        )
    return region("kv", 0, strides[0] * ratio, span * ratio, per_token, per_token, 1)
