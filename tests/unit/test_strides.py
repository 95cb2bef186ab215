"""Regions against the tensors they describe: every address reads the bytes it claims to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from neuron_push.core.layout import KvLayout, Region
from neuron_push.devices.base import CacheFacts, DeviceError, find_backend
from neuron_push.devices.host import HostDevice, request_amx_permission
from neuron_push.devices.strides import attention_regions

torch = pytest.importorskip("torch")

B, H, N, D = 5, 3, 8, 4  # blocks, heads, tokens per block, elements per head
ITEM = 2  # bytes of a bfloat16

FACTS = CacheFacts(
    layer="model.layers.0.attn",
    group=0,
    num_blocks=B,
    tokens_per_block=N,
    num_heads=H,
    head_first=0,
    key_bytes=D * ITEM,
    value_bytes=D * ITEM,
)


def filled(*shape: int) -> torch.Tensor:
    """Random bits, so that no two entries are equal by accident."""
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    return bits.view(torch.bfloat16)


def raw(part: torch.Tensor) -> bytes:
    return bytes(part.contiguous().view(torch.int16).numpy().tobytes())


def read(region: Region, block: int, head: int, token: int) -> bytes:
    return HostDevice().read_memory(
        region.base_address
        + block * region.block_stride
        + head * region.head_stride
        + token * region.token_stride,
        region.item_bytes,
    )


def regions_of(tensor: torch.Tensor, facts: CacheFacts = FACTS) -> dict[str, Region]:
    """By part; the layout they make must be one that peers accept."""
    device = HostDevice()
    regions = device.regions(tensor, facts)
    layout = KvLayout(
        0, 0, facts.head_first + facts.num_heads, "bfloat16", device.memory_type,
        device.allocations(tensor), regions,
    )  # fmt: skip
    layout.validate()
    return {region.part: region for region in regions}


def check(regions: dict[str, Region], expected: dict[str, Callable[[int, int, int], bytes]]) -> int:
    """``expected[part](block, head, token)``. Returns the payload bytes of one block."""
    assert regions.keys() == expected.keys()
    for part, region in regions.items():
        for block in range(region.num_blocks):
            for head in range(region.num_heads):
                for token in range(region.tokens_per_block):
                    want = expected[part](block, head, token)
                    assert read(region, block, head, token) == want, (part, block, head, token)
    return sum(region.block_bytes for region in regions.values())


@dataclass(frozen=True)
class Apart:
    """K and V apart: where the 2 stands, and whether heads or tokens are outside in memory."""

    two: int
    memory: str  # order of the dimensions after blocks and the 2, as bytes lie
    shape: str  # the same as the tensor's shape shows it


@pytest.mark.parametrize("two", [0, 1])
@pytest.mark.parametrize("memory", ["HND", "NHD"])
@pytest.mark.parametrize("shape", ["HND", "NHD"])
@pytest.mark.parametrize("padding", [0, 3])
def test_keys_and_values_apart(two: int, memory: str, shape: str, padding: int) -> None:
    sizes = {"H": H, "N": N, "D": D + padding}
    outer = (2, B) if two == 0 else (B, 2)
    tensor = filled(*outer, *(sizes[name] for name in memory))[..., :D]
    if memory != shape:
        tensor = tensor.transpose(2, 3)

    def entry(part: int) -> Callable[[int, int, int], bytes]:
        def of(block: int, head: int, token: int) -> bytes:
            inner = (head, token) if shape == "HND" else (token, head)
            where = (part, block) if two == 0 else (block, part)
            return raw(tensor[(*where, *inner)])

        return of

    assert check(regions_of(tensor), {"k": entry(0), "v": entry(1)}) == 2 * H * N * D * ITEM


@pytest.mark.parametrize("shape", ["HND", "NHD"])
@pytest.mark.parametrize("memory", ["HND", "NHD"])
@pytest.mark.parametrize("value_size", [D, D // 2])
def test_keys_and_values_in_one_entry(shape: str, memory: str, value_size: int) -> None:
    """4 dimensions, the last one K and then V, of equal or unequal size."""
    sizes = {"H": H, "N": N}
    tensor = filled(B, *(sizes[name] for name in memory[:2]), D + value_size)
    if memory != shape:
        tensor = tensor.transpose(1, 2)
    facts = replace(FACTS, value_bytes=value_size * ITEM)

    def entry(elements: slice) -> Callable[[int, int, int], bytes]:
        def of(block: int, head: int, token: int) -> bytes:
            inner = (head, token) if shape == "HND" else (token, head)
            return raw(tensor[(block, *inner)][elements])

        return of

    expected = {"k": entry(slice(0, D)), "v": entry(slice(D, None))}
    assert check(regions_of(tensor, facts), expected) == H * N * (D + value_size) * ITEM


def test_cpu_interior() -> None:
    """vLLM's CPU attention: per head all keys of the block, then all its values."""
    tensor = filled(B, H, N, 2 * D)
    facts = replace(FACTS, interior="cpu")

    def keys(block: int, head: int, token: int) -> bytes:
        return raw(tensor[block, head].reshape(-1)[token * D : (token + 1) * D])

    def values(block: int, head: int, token: int) -> bytes:
        return raw(tensor[block, head].reshape(-1)[(N + token) * D : (N + token + 1) * D])

    assert check(regions_of(tensor, facts), {"k": keys, "v": values}) == 2 * H * N * D * ITEM


def test_cpu_interior_in_an_order_of_tokens_and_heads_is_refused() -> None:
    tensor = filled(B, N, H, 2 * D).transpose(1, 2)
    with pytest.raises(DeviceError, match="a head of 8 tokens is not contiguous"):
        regions_of(tensor, replace(FACTS, interior="cpu"))


def test_latent() -> None:
    """MLA: one vector a token, no heads, no values apart."""
    latent = 9
    tensor = filled(B, N, latent + 2)[..., :latent]
    facts = replace(FACTS, kind="latent", num_heads=1, key_bytes=latent * ITEM)
    got = check(regions_of(tensor, facts), {"kv": lambda b, h, t: raw(tensor[b, t])})
    assert got == N * latent * ITEM


def opaque(region: Region) -> list[bytes]:
    """Each block's bytes; they are one run."""
    assert (region.part, region.num_heads) == ("kv", 1)
    assert region.token_stride == region.item_bytes
    return [
        b"".join(read(region, block, 0, token) for token in range(region.tokens_per_block))
        for block in range(region.num_blocks)
    ]


@pytest.mark.parametrize("shape", [(B, 7, N), (B, N * 6), (B, 2, N, H, 1, D), (B, H, N, 2 * D)])
@pytest.mark.parametrize("padding", [0, 5])
def test_opaque_blocks_are_whole(shape: tuple[int, ...], padding: int) -> None:
    flat = filled(B, math.prod(shape[1:]) + padding)
    tensor = flat[:, : math.prod(shape[1:])].unflatten(1, shape[1:])
    regions = regions_of(tensor, replace(FACTS, kind="opaque", head_first=H))
    assert opaque(regions["kv"]) == [raw(tensor[block]) for block in range(B)]


@pytest.mark.parametrize("inner", [(2, N // 4, H, D), (2, H, N // 4, D), (H, N // 4, 2 * D)])
def test_kernel_blocks_that_subdivide_the_managers(inner: tuple[int, ...]) -> None:
    """A manager's block of 8 tokens is 4 kernel blocks of 2 in a row."""
    tensor = filled(4 * B, *inner)
    regions = regions_of(tensor)
    assert opaque(regions["kv"]) == [raw(tensor[4 * b : 4 * b + 4]) for b in range(B)]


def test_memory_order_of_an_opaque_block_is_not_the_shapes() -> None:
    tensor = filled(B, N, 6).transpose(1, 2)
    regions = regions_of(tensor, replace(FACTS, kind="opaque"))
    assert opaque(regions["kv"]) == [raw(tensor[b].transpose(0, 1)) for b in range(B)]


def test_as_many_heads_as_tokens() -> None:
    """Which is which cannot be told, and need not: blocks are moved whole, end rounded up."""
    tensor = filled(2, B, N, N, D)
    regions = regions_of(tensor, replace(FACTS, num_heads=N))
    for number, part in enumerate("kv"):
        got = {read(regions[part], 1, a, b) for a in range(N) for b in range(N)}
        assert got == {raw(tensor[number, 1, a, b]) for a in range(N) for b in range(N)}


def test_two_blocks_with_keys_and_values_outermost() -> None:
    tensor = filled(2, 2, H, N, D)
    regions = regions_of(tensor, replace(FACTS, num_blocks=2))
    assert read(regions["v"], 0, 2, 3) == raw(tensor[1, 0, 2, 3])


@pytest.mark.parametrize(
    ("tensor", "facts"),
    [
        (filled(B + 1, H, N, 2 * D), FACTS),  # not the number of blocks vLLM says
        (filled(2, 4 * B, H, N // 4, D), FACTS),  # kernel blocks whose tokens are not in a row
        (filled(4 * B, 2, N // 4, H, D + 1)[..., :D], FACTS),  # padding inside a block
        (filled(B, 1), FACTS),  # less than a byte a token
        (filled(B, 1, N, D).expand(B, H, N, D), replace(FACTS, kind="opaque")),
    ],
    ids=["blocks", "kernel blocks apart", "padding", "tiny", "expanded"],
)
def test_what_is_not_understood_is_refused_in_a_sentence(
    tensor: torch.Tensor, facts: CacheFacts
) -> None:
    with pytest.raises(DeviceError, match=r"layer 'model.layers.0.attn': .* none that this"):
        regions_of(tensor, facts)


def test_kernel_blocks_apart_are_refused() -> None:
    tensor = filled(4 * B, 2 * H * N * D)[:, : 2 * H * 2 * D].unflatten(1, (2, H, 2, D))
    with pytest.raises(DeviceError, match="4 kernel blocks a block do not adjoin"):
        regions_of(tensor)


# ------------------------------------------------------------ fakes: no torch behind them


def fake(shape: Sequence[int], strides: Sequence[int], pointer: int = 1 << 40) -> SimpleNamespace:
    return SimpleNamespace(
        shape=tuple(shape),
        stride=lambda: tuple(strides),
        data_ptr=lambda: pointer,
        element_size=lambda: ITEM,
    )


def test_device_memory_is_not_touched() -> None:
    """Addresses come from numbers alone: nothing could read this pointer."""
    k, v = attention_regions(
        fake((2, B, H, N, D), (B * H * N * D, H * N * D, N * D, D, 1)), FACTS, device_id=3
    )
    assert (k.base_address, v.base_address) == (1 << 40, (1 << 40) + B * H * N * D * ITEM)
    assert (k.block_stride, k.head_stride, k.token_stride) == (
        H * N * D * ITEM, N * D * ITEM, D * ITEM,
    )  # fmt: skip
    assert k.device_id == v.device_id == 3


def test_a_tensor_without_an_address_is_refused() -> None:
    with pytest.raises(DeviceError, match="no address"):
        attention_regions(fake((B, H, N, 2 * D), (1, 1, 1, 1), pointer=0), FACTS, 0)


def test_a_last_dimension_with_gaps_is_no_key() -> None:
    strides = (2 * H * N * D * 2, H * N * D * 2, N * D * 2, D * 2, 2)
    with pytest.raises(DeviceError, match="none that this release understands"):
        attention_regions(fake((B, 2, H, N, D), strides), FACTS, 0)


# ------------------------------------------------------------ the host backend


def test_layers_of_one_storage_share_one_allocation() -> None:
    whole = filled(3, B, H, N, 2 * D)
    device = HostDevice()
    allocations = {a for layer in whole for a in device.allocations(layer)}
    assert len(allocations) == 1
    allocation = allocations.pop()
    assert allocation.address == whole.data_ptr()
    assert allocation.num_bytes == whole.numel() * ITEM


def test_memory_that_is_none_is_refused() -> None:
    with pytest.raises(DeviceError, match="no memory behind it"):
        HostDevice().allocations(torch.empty(0))


def test_host_backend_is_found_and_says_what_it_takes() -> None:
    device = find_backend("cpu")
    assert isinstance(device, HostDevice)
    device.prepare()
    assert device.marker().done()
    assert find_backend("cpu", "host").name == "host"
    with pytest.raises(DeviceError, match="does not take KV tensors on torch device 'cuda'"):
        find_backend("cuda", "host")
    with pytest.raises(DeviceError, match=r"device: value 'tpu' is not allowed: one of \['auto'"):
        find_backend("cpu", "tpu")
    with pytest.raises(DeviceError, match="no device backend takes KV tensors on torch device"):
        find_backend("abacus")


def test_asking_for_amx_twice_harms_nothing() -> None:
    assert request_amx_permission() == request_amx_permission()
