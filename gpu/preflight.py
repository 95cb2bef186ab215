"""What must be true on a machine with NVIDIA GPUs before NIXL registers their memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neuron_push_gpu.nvml import Gpu, list_gpus, visible_gpus

from neuron_push.devices.base import DeviceError, KvCaches, all_tensors
from neuron_push.devices.checks import Check, run_in_order

DMABUF_KERNEL = (5, 12)
PEER_MODULES = ("nvidia_peermem", "efa_nv_peermem", "nv_peer_mem")


@dataclass
class GpuMachine:
    """Where the checks look; a test points them elsewhere."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    list_gpus: Callable[[], list[Gpu]] = list_gpus
    kernel: Callable[[], str] = lambda: os.uname().release

    def has_driver(self) -> bool:
        return (self.root / "proc/driver/nvidia/version").exists() or bool(self._nodes())

    def nic_drivers(self) -> list[str]:
        """Driver name of every RDMA device, such as ``efa`` or ``mlx5_core``."""
        base = self.root / "sys/class/infiniband"
        try:
            names = sorted(os.listdir(base))
        except OSError:
            return []
        return [os.path.basename(os.path.realpath(base / n / "device/driver")) for n in names]

    def peer_module(self) -> str | None:
        return next((m for m in PEER_MODULES if (self.root / "sys/module" / m).is_dir()), None)

    def has_open_driver(self) -> bool:
        try:
            text = (self.root / "proc/driver/nvidia/version").read_text()
        except OSError:
            return False
        return "Open Kernel Module" in text

    def _nodes(self) -> list[str]:
        try:
            names = os.listdir(self.root / "dev")
        except OSError:
            return []
        return [name for name in names if re.fullmatch(r"nvidia\d+", name)]


class GpuPreflight:
    """One run of the checks."""

    def __init__(self, machine: GpuMachine, caches: KvCaches | None) -> None:
        self._machine = machine
        self._caches = caches
        self.visible: list[Gpu] = []

    def run(self) -> tuple[Check, ...]:
        return run_in_order(
            [
                ("driver", self.driver),
                ("mapping", self.mapping),
                ("mig", self.mig),
                ("one_gpu", self.one_gpu),
                ("address", self.address),
                ("allocator", self.allocator),
                ("rdma", self.rdma),
            ]
        )

    def driver(self) -> Check:
        if self._machine.has_driver():
            return Check("driver", "ok", "the NVIDIA driver is loaded")
        return Check(
            "driver",
            "failed",
            "there is no NVIDIA driver on this machine (no /proc/driver/nvidia, no /dev/nvidia*)",
            "run on a machine with an NVIDIA GPU, and give a container its GPUs (--gpus all)",
        )

    def mapping(self) -> Check:
        self.visible = visible_gpus(self._machine.list_gpus(), self._machine.environ)
        if not self.visible:
            value = self._machine.environ.get("CUDA_VISIBLE_DEVICES")
            return Check(
                "mapping",
                "failed",
                f"this process sees no GPU (CUDA_VISIBLE_DEVICES is {value!r})",
                "unset it, or name a GPU of this host",
            )
        named = ", ".join(f"{n}: {gpu.pci_address}" for n, gpu in enumerate(self.visible))
        return Check("mapping", "ok", f"GPUs of this process: {named} ({self.visible[0].name})")

    def mig(self) -> Check:
        sliced = [gpu.pci_address for gpu in self.visible if gpu.mig_enabled]
        if sliced:
            return Check(
                "mig",
                "failed",
                f"GPU {sliced[0]} is cut into MIG slices: a slice has no PCI function of its own, "
                "so its NICs cannot be told, and cuda_ipc does not work between slices",
                "give the engine a whole GPU (nvidia-smi -mig 0), or another GPU",
            )
        return Check("mig", "ok", "no GPU of this process is cut into MIG slices")

    def one_gpu(self) -> Check:
        if self._caches is None:
            return Check("one_gpu", "skipped", "no KV tensor here: looked at in an engine")
        numbers = {tensor.get_device() for _, tensor in all_tensors(self._caches)}
        if len(numbers) != 1:
            return Check(
                "one_gpu",
                "failed",
                f"KV tensors are on the GPUs {sorted(numbers)} of one process",
                "run one worker process per GPU, as vLLM does",
            )
        number = numbers.pop()
        if not 0 <= number < len(self.visible):
            return Check(
                "one_gpu",
                "failed",
                f"KV tensors are on cuda:{number}, but NVML shows {len(self.visible)} GPUs here",
                "make CUDA and NVML see the same GPUs",
            )
        return Check("one_gpu", "ok", f"cuda:{number} is {self.visible[number].pci_address}")

    def address(self) -> Check:
        if self._caches is None:
            return Check("address", "skipped", "no KV tensor here: looked at in an engine")
        for layer, tensor in all_tensors(self._caches):
            if tensor.data_ptr() == 0:
                says = f"the KV tensor of layer {layer!r} has no address (data_ptr is 0)"
                return Check("address", "failed", says, "load the model on a GPU, not on meta")
        return Check("address", "ok", "every KV tensor has an address")

    def allocator(self) -> Check:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = self._machine.environ.get(name, "")
            if re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
                return Check(
                    "allocator",
                    "failed",
                    f"{name}={value}: memory of expandable segments is mapped piecewise, and NICs "
                    "and cuda_ipc cannot register it",
                    f"set {name}=expandable_segments:False",
                )
        return Check("allocator", "ok", "KV memory comes from ordinary allocations")

    def rdma(self) -> Check:
        """How a NIC reads this memory: a peer-memory module, or dma-buf."""
        drivers = self._machine.nic_drivers()
        if not drivers:
            return Check(
                "rdma",
                "note",
                "there is no RDMA NIC: KV moves by cuda_ipc between engines of one host, and "
                "through host memory between hosts",
            )
        module = self._machine.peer_module()
        if module is not None:
            return Check("rdma", "ok", f"NICs read GPU memory through the module {module}")
        release = self._machine.kernel()
        numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
        if numbers >= DMABUF_KERNEL and self._machine.has_open_driver():
            return Check("rdma", "ok", f"NICs read GPU memory by dma-buf (kernel {release})")
        return Check(
            "rdma",
            "failed",
            f"NICs ({drivers[0]}) cannot read GPU memory: no module {' or '.join(PEER_MODULES)}, "
            f"and dma-buf needs kernel 5.12 (here {release}) and NVIDIA's open kernel modules",
            "load nvidia_peermem (EFA: efa_nv_peermem), or install the open kernel modules",
        )


def gpu_of(visible: list[Gpu], number: int) -> Gpu:
    """The GPU that this process calls ``cuda:<number>``. Raises DeviceError."""
    if not 0 <= number < len(visible):
        raise DeviceError(f"cuda:{number} does not exist; this process sees {len(visible)} GPUs")
    return visible[number]
