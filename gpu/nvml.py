"""Which GPU this process calls N, by NVML (nvidia-ml-py): PCI address, name, MIG."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neuron_push.devices.base import DeviceError


@dataclass(frozen=True)
class Gpu:
    """One GPU of the host. ``index`` is NVML's, in the order of PCI addresses."""

    index: int
    pci_address: str
    name: str
    uuid: str
    mig_enabled: bool


def list_gpus(load: Callable[[str], Any] = importlib.import_module) -> list[Gpu]:
    """All GPUs that the driver shows. Raises DeviceError."""
    try:
        nvml = load("pynvml")
    except ImportError:
        raise DeviceError(
            "the PCI addresses of GPUs come from NVML, and its Python package is not installed: "
            "pip install 'neuron-push[gpu]' (nvidia-ml-py)"
        ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        raise DeviceError(
            f"NVML does not start ({e}): no NVIDIA driver here, or the container was started "
            "without its GPUs (--gpus all)"
        ) from e
    try:
        return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as e:
        raise DeviceError(f"NVML does not list the GPUs: {e}") from e
    finally:
        nvml.nvmlShutdown()


def visible_gpus(gpus: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs as CUDA counts them in this process. Raises DeviceError where that is undecided.

    CUDA reads CUDA_VISIBLE_DEVICES up to the first entry that it cannot resolve; entries are
    indices or UUIDs (whole or a unique beginning). Indices follow CUDA_DEVICE_ORDER, which by
    default puts the fastest first: that is NVML's order only where all GPUs are of one kind.
    """
    selected = environ.get("CUDA_VISIBLE_DEVICES")
    tokens = None if selected is None else [t.strip() for t in selected.split(",")]
    if tokens and any(token.startswith("MIG-") for token in tokens):
        raise DeviceError(
            "CUDA_VISIBLE_DEVICES names a MIG slice: a slice has no PCI function of its own, so "
            "its NICs cannot be told, and cuda_ipc does not work between slices. Give the engine "
            "a whole GPU"
        )
    by_index = tokens is None or any(token.isdigit() for token in tokens)
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_index and not in_pci_order and len({gpu.name for gpu in gpus}) > 1:
        raise DeviceError(
            "this host has GPUs of several kinds, and CUDA numbers them by speed while NVML goes "
            "by PCI address: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if tokens is None:
        return gpus
    chosen: list[Gpu] = []
    for token in tokens:
        if token.isdigit():
            found = [gpu for gpu in gpus if gpu.index == int(token)]
        else:
            found = [gpu for gpu in gpus if token and gpu.uuid.startswith(token)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return chosen


def normal_address(text: str) -> str:
    """NVML's ``00000000:59:00.0`` as ``0000:59:00.0``, in lower case. Raises DeviceError."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.lower())
    if match is None:
        raise DeviceError(f"NVML gave {text!r} as a PCI address; expected 00000000:59:00.0")
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}"


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        mig_enabled = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # "not supported": a GPU without MIG
        mig_enabled = False
    return Gpu(
        index=index,
        pci_address=normal_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        mig_enabled=mig_enabled,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
