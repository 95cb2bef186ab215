"""NVIDIA GPUs: KV memory in HBM, moved by GPUDirect RDMA, cuda_ipc, or through the host.

No call here waits for the whole device, and none touches a stream but to record an event on the
one that vLLM computes on, outside of any graph.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from neuron_push_gpu.nvml import Gpu
from neuron_push_gpu.preflight import GpuMachine, GpuPreflight, gpu_of

from neuron_push.core.commands import Marker
from neuron_push.core.layout import Allocation, Region
from neuron_push.devices import near
from neuron_push.devices.base import (
    CacheFacts,
    DeviceError,
    KvCache,
    KvCaches,
    Locality,
    tensors_of,
)
from neuron_push.devices.checks import Check, Description, described
from neuron_push.devices.memory import DeviceReader, allocations_of
from neuron_push.devices.strides import attention_regions

POLL_S = 50e-6

_SOFTWARE = ("torch", "vllm", "nixl", "nixl-cu12", "nixl-cu13", "nvidia-ml-py")

_SYMPTOMS = (
    (
        r"cuda_?ipc|unhandled cuda error.*ipc|invalid resource handle",
        "cuda_ipc needs both engines on one host, in one IPC and PID namespace, and memory from "
        "ordinary allocations (no expandable segments, no sleep mode, no MIG).",
    ),
    (
        r"nvidia_peermem|ibv_reg_mr|fi_mr_reg(attr)?\b.*(einval|-22|bad address|-14)",
        "The NIC cannot read GPU memory: load nvidia_peermem (EFA: efa_nv_peermem) or use NVIDIA's "
        "open kernel modules with kernel 5.12 or newer; libfabric before 2.5.1 cannot export "
        "GB200 memory.",
    ),
    (
        r"unsupported backend '?libfabric",
        "NIXL's LIBFABRIC plugin does not load: libfabric.so.1, libhwloc.so.15 or libcudart is "
        "missing. Run with NIXL_LOG_LEVEL=DEBUG to see which.",
    ),
)


class CudaMark:
    """An event on the compute stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout_s: float) -> bool:
        # Event.synchronize has no time limit. Sleeping releases the interpreter lock.
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
        return True


class CudaDevice:
    """KV memory on one GPU of this process."""

    name = "cuda"
    memory_type: Literal["DRAM", "VRAM"] = "VRAM"
    torch_types: tuple[str, ...] = ("cuda",)
    buffer_device = "cuda"
    nixl_backends: tuple[str, ...] = ("UCX", "LIBFABRIC")
    consumer_can_recompute = True

    def __init__(self, machine: GpuMachine | None = None, torch: Any = None) -> None:
        self._machine = machine or GpuMachine()
        self._loaded_torch = torch
        self._visible: list[Gpu] = []
        self._number = 0
        self._reader = DeviceReader()

    @property
    def _torch(self) -> Any:
        if self._loaded_torch is None:
            import torch

            self._loaded_torch = torch
        return self._loaded_torch

    def accepts(self, device_type: str) -> bool:
        return device_type in self.torch_types

    def prepare(self) -> None:
        """Nothing: vLLM has chosen the GPU and made its context."""

    def preflight(self, caches: KvCaches | None = None) -> tuple[Check, ...]:
        run = GpuPreflight(self._machine, caches)
        checks = run.run()
        self._visible = run.visible
        for cache in (caches or {}).values():
            self._number = max(0, tensors_of(cache)[0].get_device())
            self._reader.remember(cache)
        return checks

    def environment(self, caches: KvCaches | None = None) -> dict[str, str]:
        if not self._visible:
            return {}
        wanted = near.environment_of(gpu_of(self._visible, self._number).pci_address)
        return {n: v for n, v in wanted.items() if n not in self._machine.environ}

    def regions(self, cache: KvCache, facts: CacheFacts) -> tuple[Region, ...]:
        """vLLM's layouts on GPUs: ``(B, H, N, K+V)`` in any stride order from 0.28 on, before
        that ``(2, B, N, H, D)`` and ``(B, 2, N, H, D)``, and MLA.
        """
        return attention_regions(cache, facts, _number(cache), order="tokens_first")

    def allocations(self, cache: KvCache) -> tuple[Allocation, ...]:
        return allocations_of(cache, _number(cache))

    def element_type(self, torch_name: str) -> str:
        return torch_name

    def locality(self, region: Region) -> Locality:
        try:
            gpu = gpu_of(self._visible, region.device_id)
        except DeviceError as e:
            return Locality(None, None, (), str(e))
        return near.locality_of(gpu.pci_address, None, f"NVML: cuda:{region.device_id}")

    def confirm(self, memory_types: Sequence[str], metadata: bytes) -> tuple[Check, ...]:
        if "VRAM" not in memory_types:
            says = f"the NIXL backend registers {list(memory_types)} only, no device memory"
            mend = "UCX: use a build with CUDA; LIBFABRIC: an EFA adapter must be visible"
            return (Check("memory_type", "failed", says, mend),)
        taken = Check("memory_type", "ok", "NIXL registers device memory (VRAM)")
        if "efa" not in self._machine.nic_drivers():
            return (taken,)
        return (taken, near.rails_taken(metadata))

    def marker(self) -> Marker:
        cuda = self._torch.cuda
        event = cuda.Event()
        event.record(cuda.current_stream(self._number))
        return CudaMark(event)

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        return self._reader.read(address, num_bytes)

    def explain(self, symptom: str) -> str | None:
        for pattern, sentence in _SYMPTOMS:
            if re.search(pattern, symptom, re.IGNORECASE | re.DOTALL):
                return sentence
        return None

    def describe(self) -> Description:
        versions: dict[str, str] = {}
        for name in _SOFTWARE:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        return described(self.name, self.preflight(), "NVIDIA GPUs can be used", versions)


def _number(cache: KvCache) -> int:
    """CUDA's index of the GPU in this process: NIXL calls cudaSetDevice with it."""
    return max(0, tensors_of(cache)[0].get_device())
