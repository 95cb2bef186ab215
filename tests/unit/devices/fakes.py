"""Stand-ins for hardware: a tensor that says it is elsewhere, a libnrt of a few lines, NVML."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from neuron_push_gpu.nvml import Gpu
from neuron_push_gpu.preflight import GpuMachine

from neuron_push.devices.base import CacheFacts
from neuron_push.devices.neuron_preflight import NeuronMachine
from neuron_push.devices.nrt import Nrt

HEADS, TOKENS, DIM, ITEM = 2, 4, 8, 2


class FakeTensor:
    """A fake device tensor over the memory of a CPU tensor."""

    def __init__(self, tensor: Any, device_type: str, index: int = 0, address: int | None = None):
        self.tensor = tensor
        self.device = SimpleNamespace(type=device_type, index=index)
        self.dtype = tensor.dtype
        self._index = index
        self._address = tensor.data_ptr() if address is None else address
        self.num_reads = 0

    @property
    def shape(self) -> Sequence[int]:
        return tuple(self.tensor.shape)

    def stride(self) -> Sequence[int]:
        return tuple(self.tensor.stride())

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return int(self.tensor.element_size())

    def get_device(self) -> int:
        return self._index

    def untyped_storage(self) -> Any:
        return self.tensor.untyped_storage()

    def __getitem__(self, index: Any) -> Any:
        def cpu() -> Any:
            self.num_reads += 1
            return self.tensor[index]

        return SimpleNamespace(cpu=cpu)


class Shape:
    """A tensor of numbers only: nothing lies at its address."""

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        address: int = 1 << 40,
        item: int = ITEM,
        device_type: str = "cuda",
        index: int = 0,
    ) -> None:
        self.shape = tuple(shape)
        if strides is None:
            strides = [1] * len(shape)
            for axis in range(len(shape) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * shape[axis + 1]
        self._strides, self._address, self._item, self._index = strides, address, item, index
        self.device = SimpleNamespace(type=device_type)

    def stride(self) -> Sequence[int]:
        return tuple(self._strides)

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._item

    def get_device(self) -> int:
        return self._index

    def untyped_storage(self) -> Any:
        size = self._item * sum((n - 1) * s for n, s in zip(self.shape, self._strides, strict=True))
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: size + self._item)


def facts(num_blocks: int, **changes: Any) -> CacheFacts:
    numbers: dict[str, Any] = {
        "layer": "layers.0", "group": 0, "num_blocks": num_blocks, "tokens_per_block": TOKENS,
        "num_heads": HEADS, "head_first": 0, "key_bytes": DIM * ITEM, "value_bytes": DIM * ITEM,
    }  # fmt: skip
    return CacheFacts(**(numbers | changes))


# ------------------------------------------------------------ libnrt

LIBNRT = r"""
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int fake_status = 0;                       /* what every call answers when it is not 0 */
char fake_bdf[64] = "0000:c9:00.0";
uint64_t fake_completed = ((uint64_t)7 << 48) | 100;
uint64_t fake_submitted = ((uint64_t)7 << 48) | 100;
uint64_t fake_range_start = 0, fake_range_end = UINT64_MAX;

typedef struct { uint64_t v[4]; char detail[128]; char hash[64]; } version_t;
int nrt_get_version(version_t *out, size_t size) {
    if (fake_status) return fake_status;
    if (size < sizeof *out) return 4;
    memset(out, 0, sizeof *out);
    out->v[0] = 2; out->v[1] = FAKE_MINOR; out->v[2] = FAKE_PATCH;
    return 0;
}
int nrt_get_total_nc_count(uint32_t *out) { *out = 128; return fake_status; }
#if FAKE_MINOR >= 31
int nrt_get_attached_efa_bdf(const void *va, char *out, size_t *len) {
    size_t need = strlen(fake_bdf) + 1;    /* in: with the NUL, out: without */
    if (fake_status) return fake_status;
    if ((uint64_t)va < fake_range_start || (uint64_t)va >= fake_range_end) return 2;
    if (*len < need) return 4;
    memcpy(out, fake_bdf, need);
    *len = need - 1;
    return 0;
}
#endif
int nrt_host_device_id_get(int device, uint32_t *out) { *out = device + 8; return fake_status; }
int nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd) {
    (void)va; (void)size; *fd = 42; return fake_status;
}
#if FAKE_MINOR >= 29
int nrta_get_sequence(uint32_t lnc, int xu, int queue, uint64_t *out) {
    if (lnc != 0 || xu != 3 || queue != 0) return 2;
    *out = fake_completed; return fake_status;
}
int nrta_is_completed(uint64_t seq, bool *out) {
    if (fake_status) return fake_status;
    if (seq > fake_submitted) return 2;
    *out = seq <= fake_completed;
    return 0;
}
#endif
"""


def build_libnrt(folder: Path, minor: int = 31, patch: int = 24) -> Path:
    """Compile a libnrt.so.1 that says it is version 2.<minor>.<patch>.0."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "nrt.c", folder / "libnrt.so.1"
    source.write_text(LIBNRT)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-DFAKE_MINOR={minor}",
         f"-DFAKE_PATCH={patch}", "-Wl,-soname,libnrt.so.1", "-o", str(library), str(source)],
        check=True,
    )  # fmt: skip
    return library


def open_libnrt(path: Path) -> Nrt:
    """Privately: RTLD_GLOBAL copies of several versions would shadow each other."""
    return Nrt(ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW), str(path))


def knob(nrt: Nrt, name: str, kind: Any = ctypes.c_uint64) -> Any:
    """A global variable of the fake."""
    return kind.in_dll(nrt._library, name)


# ------------------------------------------------------------ machines


def trainium(
    root: Path,
    nrt: Nrt | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    product: str = "trn2.48xlarge",
    num_devices: int = 2,
    num_efa: int = 2,
    near_nic: str | None = "rdmap201s0",
    missing_libraries: Sequence[str] = (),
) -> NeuronMachine:
    """A tree that looks like a Trainium instance."""
    (root / "dev").mkdir(parents=True)
    for number in range(num_devices):
        (root / f"dev/neuron{number}").touch()
    dmi = root / "sys/devices/virtual/dmi/id"
    dmi.mkdir(parents=True)
    (dmi / "product_name").write_text(product + "\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for number in range(num_efa + num_devices):
        device = bus / f"0000:{number:02x}:00.0"
        device.mkdir()
        (device / "vendor").write_text("0x1d0f\n")
        (device / "device").write_text("0xefa2\n" if number < num_efa else "0x7364\n")
    for number in range(num_efa):
        (root / f"sys/class/infiniband/rdmap{201 + number}s0").mkdir(parents=True)
    maps = root / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    path = nrt.path if nrt is not None else "/opt/aws/neuron/lib/libnrt.so.1"
    maps.write_text(f"7f0000-7f1000 r-xp 00000000 08:01 1  {path}\n")

    def open_library(name: str) -> object:
        if name in missing_libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return object()

    def load() -> Nrt:
        assert nrt is not None
        return nrt

    return NeuronMachine(
        root=root,
        environ={} if environ is None else environ,
        load_nrt=load,
        open_library=open_library,
        near_nic=lambda: near_nic,
    )


H100 = Gpu(0, "0000:53:00.0", "NVIDIA H100", "GPU-aaaa1111", False)


def gpu_box(
    root: Path,
    gpus: Sequence[Gpu] = (H100,),
    environ: Mapping[str, str] | None = None,
    *,
    nic: str | None = None,
    module: str | None = None,
    open_driver: bool = True,
    kernel: str = "6.8.0-1021-aws",
) -> GpuMachine:
    """A tree that looks like a machine with NVIDIA GPUs."""
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    kind = "Open Kernel Module for x86_64" if open_driver else "Kernel Module"
    version.write_text(f"NVRM version: NVIDIA UNIX {kind}  570.86.15\n")
    if nic is not None:
        driver = root / f"sys/bus/pci/drivers/{nic}"
        driver.mkdir(parents=True)
        device = root / "sys/class/infiniband/nic0/device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(driver)
    if module is not None:
        (root / f"sys/module/{module}").mkdir(parents=True)
    return GpuMachine(
        root=root,
        environ={} if environ is None else environ,
        list_gpus=lambda: list(gpus),
        kernel=lambda: kernel,
    )


class FakeCuda:
    """torch.cuda with one stream whose work ends when told."""

    def __init__(self) -> None:
        self.finished = 0
        self.recorded = 0
        self.cuda = self

    def current_stream(self, index: int) -> int:
        return index

    def Event(self) -> Any:  # torch's name
        box = self

        class Event:
            number = -1

            def record(self, stream: int) -> None:
                box.recorded += 1
                self.number = box.recorded

            def query(self) -> bool:
                return self.number <= box.finished

        return Event()
