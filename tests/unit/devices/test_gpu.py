"""GPUs without GPUs: which one this is, MIG, ways to the NIC, layouts, events, descriptors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from neuron_push_gpu.device import CudaDevice
from neuron_push_gpu.nvml import Gpu, list_gpus, normal_address, visible_gpus

from neuron_push.core.layout import KvLayout
from neuron_push.core.plan import PairPlan
from neuron_push.devices import near
from neuron_push.devices.base import DeviceError
from neuron_push.devices.checks import first_failure
from neuron_push.devices.neuron import NeuronDevice
from tests.unit.devices import fakes
from tests.unit.devices.fakes import DIM, H100, HEADS, ITEM, TOKENS, Shape, facts

FOUR = [
    Gpu(n, f"0000:{bus}:00.0", "NVIDIA H100", f"GPU-{n}{n}{n}{n}", False)
    for n, bus in enumerate(("53", "64", "75", "86"))
]
BLOCKS = 6


# ------------------------------------------------------------ NVML


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, works: bool = True, mig: int | None = 0) -> None:
        self.works, self.mig, self.open = works, mig, 0

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:5{handle}:00.0".encode())

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.mig is None:
            raise self.NVMLError("Not Supported")
        return [self.mig, self.mig]


@pytest.mark.parametrize(("mig", "enabled"), [(None, False), (0, False), (1, True)])
def test_gpus_by_nvml(mig: int | None, enabled: bool) -> None:
    nvml = FakeNvml(mig=mig)
    assert list_gpus(lambda _: nvml) == [
        Gpu(n, f"0000:5{n}:00.0", "NVIDIA H100", f"GPU-{n}", enabled) for n in (0, 1)
    ]
    assert nvml.open == 0


def test_no_nvml() -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    with pytest.raises(DeviceError, match=r"pip install 'neuron-push\[gpu\]'"):
        list_gpus(missing)
    with pytest.raises(DeviceError, match=r"Driver Not Loaded.*--gpus all"):
        list_gpus(lambda _: FakeNvml(works=False))


@pytest.mark.parametrize(
    ("selected", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-33,1", [3, 1]),
        ("1,1", [1]),  # CUDA stops at what stands there twice
        ("1,9,2", [1]),  # and at what does not exist
        ("-1", []),
        ("", []),
        ("GPU-", []),  # not unique
    ],
)
def test_cuda_visible_devices(selected: str | None, indices: list[int]) -> None:
    environ = {} if selected is None else {"CUDA_VISIBLE_DEVICES": selected}
    assert [gpu.index for gpu in visible_gpus(FOUR, environ)] == indices


def test_a_mig_slice_is_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match="no PCI function of its own"):
        visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})


def test_gpus_of_several_kinds_need_an_order() -> None:
    mixed = [*FOUR[:2], replace(FOUR[2], name="NVIDIA L4")]
    with pytest.raises(DeviceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(mixed, {})
    assert visible_gpus(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == mixed
    assert visible_gpus(mixed, {"CUDA_VISIBLE_DEVICES": "GPU-22"}) == [mixed[2]]


def test_spellings_of_a_pci_address() -> None:
    assert normal_address("00000000:AB:00.0") == "0000:ab:00.0"
    with pytest.raises(DeviceError, match=r"expected 00000000:59:00\.0"):
        normal_address("59")


# ------------------------------------------------------------ preflight


def caches(index: int = 0, **changes: Any) -> dict[str, Any]:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return {"model.layers.0.self_attn.attn": Shape(shape, index=index, **changes)}


def preflight(machine: Any, tensors: Any = None) -> Any:
    return CudaDevice(machine).preflight(tensors or caches())


def test_the_order_of_checks(tmp_path: Path) -> None:
    checks = preflight(fakes.gpu_box(tmp_path, nic="efa", module="efa_nv_peermem"))
    assert [(c.name, c.outcome) for c in checks] == [
        (name, "ok")
        for name in ("driver", "mapping", "mig", "one_gpu", "address", "allocator", "rdma")
    ]


def test_mig_stops_the_start(tmp_path: Path) -> None:
    failure = first_failure(preflight(fakes.gpu_box(tmp_path, [replace(H100, mig_enabled=True)])))
    assert failure is not None
    assert failure.name == "mig"
    assert "no PCI function of its own" in failure.says


@pytest.mark.parametrize(
    ("box", "outcome", "words"),
    [
        ({}, "note", "no RDMA NIC"),
        ({"nic": "mlx5_core", "module": "nvidia_peermem"}, "ok", "nvidia_peermem"),
        ({"nic": "efa"}, "ok", "dma-buf"),
        ({"nic": "efa", "open_driver": False}, "failed", "cannot read GPU memory"),
        ({"nic": "efa", "kernel": "5.4.0-1103-aws"}, "failed", "kernel 5.12 (here 5.4.0"),
    ],
)
def test_ways_from_the_nic_to_the_memory(
    box: dict[str, Any], outcome: str, words: str, tmp_path: Path
) -> None:
    check = preflight(fakes.gpu_box(tmp_path, **box))[-1]
    assert (check.name, check.outcome) == ("rdma", outcome)
    assert words in check.says


def test_memory_that_is_mapped_piecewise_is_refused(tmp_path: Path) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    failure = first_failure(preflight(fakes.gpu_box(tmp_path, environ=environ)))
    assert failure is not None
    assert failure.name == "allocator"


def test_one_process_per_gpu(tmp_path: Path) -> None:
    two = caches(0) | {"model.layers.1.self_attn.attn": Shape((BLOCKS, 1, 1, 1), index=1)}
    failure = first_failure(preflight(fakes.gpu_box(tmp_path, FOUR), two))
    assert failure is not None
    assert "one worker process per GPU" in failure.mend
    failure = first_failure(preflight(fakes.gpu_box(tmp_path / "b"), caches(3)))
    assert failure is not None
    assert "cuda:3" in failure.says


def test_the_gpu_of_this_process_by_its_pci_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def environment_of(address: str | None) -> dict[str, str]:
        asked.append(address)
        return {"FI_PROVIDER": "efa", "SET": "1"}

    monkeypatch.setattr(near, "environment_of", environment_of)
    environ = {"CUDA_VISIBLE_DEVICES": "3,2", "SET": "0"}
    device = CudaDevice(fakes.gpu_box(tmp_path, FOUR, environ))
    device.preflight(caches(1))
    assert device.environment() == {"FI_PROVIDER": "efa"}
    assert asked == ["0000:75:00.0"]


# ------------------------------------------------------------ layouts


def strided(order: str, num_layers: int = 1, **sizes: int) -> tuple[tuple[int, ...], list[int]]:
    """Shape (B, H, N, C) of one layer, and strides where the dimensions lie in `order`."""
    size = {"L": num_layers, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM} | sizes
    stride, strides = 1, {}
    for name in reversed(order):
        strides[name] = stride
        stride *= size[name]
    return tuple(size[n] for n in "BHNC"), [strides[n] for n in "BHNC"]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_layouts_from_0_28_on(order: str) -> None:
    shape, strides = strided(order, num_layers=4)
    k, v = CudaDevice().regions(Shape(shape, strides), facts(BLOCKS))
    assert (k.block_stride, k.head_stride, k.token_stride) == tuple(s * ITEM for s in strides[:3])
    assert v.base_address - k.base_address == DIM * ITEM
    assert v.block_stride == k.block_stride


@pytest.mark.parametrize("two_first", [True, False])
def test_before_0_28_tokens_stand_before_heads_also_where_they_are_equally_many(
    two_first: bool,
) -> None:
    n = 4
    shape = (2, BLOCKS, n, n, DIM) if two_first else (BLOCKS, 2, n, n, DIM)
    cache = facts(BLOCKS, num_heads=n, tokens_per_block=n)
    k, _ = CudaDevice().regions(Shape(shape), cache)
    assert (k.token_stride, k.head_stride) == (n * DIM * ITEM, DIM * ITEM)
    k, _ = NeuronDevice().regions(Shape(shape, device_type="neuron"), cache)
    assert (k.token_stride, k.head_stride) == (DIM * ITEM, n * DIM * ITEM)


def test_kernel_blocks_with_tokens_in_a_row() -> None:
    """vLLM's block of 8 tokens is 2 kernel blocks of 4, NHD: keys and values stay apart."""
    k, v = CudaDevice().regions(
        Shape((2, 2 * BLOCKS, TOKENS, HEADS, DIM)), facts(BLOCKS, tokens_per_block=2 * TOKENS)
    )
    assert (k.part, v.part) == ("k", "v")
    assert k.block_stride == 2 * TOKENS * HEADS * DIM * ITEM


@pytest.mark.parametrize("shape", [(BLOCKS, TOKENS, 24), (BLOCKS, 1, TOKENS, 24)])
@pytest.mark.parametrize("layers", [1, 5])
def test_mla(shape: tuple[int, ...], layers: int) -> None:
    whole = Shape(shape)
    strides = [whole.stride()[0] * layers, *whole.stride()[1:]]  # layers side by side in a block
    cache = facts(BLOCKS, kind="latent", num_heads=1, key_bytes=24 * ITEM)
    (region,) = CudaDevice().regions(Shape(shape, strides), cache)
    assert (region.part, region.item_bytes, region.token_stride) == ("kv", 48, 48)
    assert region.block_stride == layers * TOKENS * 48


# ------------------------------------------------------------ events


def test_a_mark_is_an_event_on_the_compute_stream() -> None:
    cuda = fakes.FakeCuda()
    device = CudaDevice(torch=cuda)
    first, second = device.marker(), device.marker()
    cuda.finished = 1
    assert first.done()
    assert not second.done()
    assert not second.wait(0.01)


def test_what_errors_mean() -> None:
    device = CudaDevice()
    for text, words in (
        ("cuda_ipc: unable to open handle", "one host"),
        ("ibv_reg_mr(address=0x7f) failed: Bad address", "nvidia_peermem"),
        ("createBackend: unsupported backend 'LIBFABRIC'", "libfabric.so.1"),
    ):
        assert words in (device.explain(text) or "")


# ------------------------------------------------------------ descriptors


LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16  # as Llama 3.1 8B
PROMPT_BLOCKS = 64


def big_layout(kind: str, base: int) -> KvLayout:
    """Addresses only. kind: a layout's name, "apart NHD"/"apart HND", or "neuron"."""
    num_blocks = 1024
    size = {"B": num_blocks, "H": KV_HEADS, "N": BLOCK, "C": 2 * HEAD_DIM}
    page = KV_HEADS * BLOCK * 2 * HEAD_DIM
    regions, allocations = [], []
    device: Any = NeuronDevice() if kind == "neuron" else CudaDevice()
    for layer in range(LAYERS):
        wanted = facts(
            num_blocks, layer=f"layers.{layer}", tokens_per_block=BLOCK, num_heads=KV_HEADS,
            key_bytes=HEAD_DIM * ITEM, value_bytes=HEAD_DIM * ITEM,
        )  # fmt: skip
        at = base + layer * num_blocks * page * ITEM
        if kind == "neuron":
            cache = Shape((2, num_blocks, KV_HEADS, BLOCK, HEAD_DIM), address=at)
        elif kind.startswith("apart"):
            shape = (2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
            plain = Shape(shape).stride()
            inner = [HEAD_DIM, BLOCK * HEAD_DIM, 1] if kind.endswith("HND") else list(plain[2:])
            cache = Shape(shape, [*plain[:2], *inner], address=at)
        else:
            shape, strides = strided(kind, LAYERS, **size)
            offset = layer * (page if kind.startswith("BL") else num_blocks * page)
            cache = Shape(shape, strides, address=base + offset * ITEM)
        regions += device.regions(cache, wanted)
    allocations = device.allocations(
        Shape((LAYERS * num_blocks * page,), address=base, device_type="cuda")
    )
    layout = KvLayout(
        0, 0, KV_HEADS, "bfloat16", "VRAM", allocations, tuple(regions)
    )  # fmt: skip
    layout.validate()
    return layout


def descriptors_per_gib(src: str, dst: str) -> int:
    """Of a prompt whose blocks are in a row on both sides."""
    plan = PairPlan(big_layout(src, 1 << 40), big_layout(dst, 1 << 44))
    blocks = [list(range(1, PROMPT_BLOCKS + 1))]
    copies = plan.copies(blocks, blocks, 0, PROMPT_BLOCKS * BLOCK)
    return round(copies.num_copies * 2**30 / copies.total_bytes)


def scattered_per_gib(src: str, dst: str) -> int:
    """Of a prompt none of whose blocks are neighbours."""
    plan = PairPlan(big_layout(src, 1 << 40), big_layout(dst, 1 << 44))
    blocks = [list(range(1, 2 * PROMPT_BLOCKS, 2))]
    copies = plan.copies(blocks, blocks, 0, PROMPT_BLOCKS * BLOCK)
    return round(copies.num_copies * 2**30 / copies.total_bytes)


def test_descriptors_per_gib_before_and_after_blocks_are_outermost() -> None:
    """The numbers of docs/gpu.md: Llama 3.1 8B, 16 tokens a block, 1024 tokens."""
    assert descriptors_per_gib("LBNHC", "LBNHC") == 256  # one run a layer
    assert descriptors_per_gib("BLHNC", "BLHNC") == 8  # one run for everything
    assert scattered_per_gib("LBNHC", "LBNHC") == 16_384  # one a layer and block
    assert scattered_per_gib("BLHNC", "BLHNC") == 512  # one a block


def test_descriptors_per_gib_from_trainium() -> None:
    """The numbers of docs/trainium.md: whether whole heads stay together decides."""
    assert scattered_per_gib("neuron", "apart HND") == 32_768  # one a layer, part and block
    assert scattered_per_gib("neuron", "apart NHD") == 2**30 // 256  # one a token and head
    assert scattered_per_gib("neuron", "BLHNC") == 2**30 // 256
