"""Which accelerators a process sees, and under which number.

`--device N` and a worker's local rank are numbers of the process, not of the host:
CUDA_VISIBLE_DEVICES and the NEURON variables select and renumber.
"""

from __future__ import annotations

import msgspec

from .instances import InstanceType
from .model import Accelerator, Box

MAX_CORES = 4096


class ProcessView(msgspec.Struct):
    """Accelerators in the order in which this process counts them, and what was unclear."""

    devices: list[Accelerator]
    notes: list[str]


def process_view(box: Box, entry: InstanceType | None) -> ProcessView:
    """Apply the environment of the box to its accelerators."""
    notes: list[str] = []
    cuda = _in_index_order(box, "cuda")
    neuron = _in_index_order(box, "neuron")
    selected = box.env.get("CUDA_VISIBLE_DEVICES")
    if cuda and selected is not None:
        cuda = _select_cuda(cuda, selected, notes)
    if neuron:
        neuron = _select_neuron(box, neuron, entry, notes)
    return ProcessView(devices=cuda + neuron, notes=notes)


def parse_ranges(text: str) -> list[int]:
    """`0-3,8` to [0, 1, 2, 3, 8]. ValueError on anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        start = int(first)
        end = int(last) if dash else start
        if not 0 <= start <= end < MAX_CORES:
            raise ValueError(part)
        numbers.extend(range(start, end + 1))
    return numbers


def _in_index_order(box: Box, kind: str) -> list[Accelerator]:
    found = [one for one in box.accelerators if one.kind == kind and one.visible is not False]
    return sorted(found, key=lambda one: (one.index < 0, one.index, one.pci_address))


def _select_cuda(devices: list[Accelerator], text: str, notes: list[str]) -> list[Accelerator]:
    """CUDA's rule: the list up to its first invalid entry."""
    chosen: list[Accelerator] = []
    for token in (part.strip() for part in text.split(",")):
        if token.startswith(("GPU-", "MIG-")):
            notes.append(
                f"CUDA_VISIBLE_DEVICES names {token[:4]}... by UUID, which cannot be resolved from "
                "here; all GPUs are shown, and a MIG slice uses the rails of its parent GPU"
            )
            return devices
        if not token.isdigit() or int(token) >= len(devices) or devices[int(token)] in chosen:
            if token:
                notes.append(
                    f"CUDA_VISIBLE_DEVICES={text[:60]!r}: CUDA stops at {token[:20]!r}, which is "
                    f"no device of this host (0 to {len(devices) - 1}) or stands there twice"
                )
            break
        chosen.append(devices[int(token)])
    return chosen


def _select_neuron(
    box: Box, devices: list[Accelerator], entry: InstanceType | None, notes: list[str]
) -> list[Accelerator]:
    """Logical core ids to devices: core x LNC div physical cores per device."""
    name = "NEURON_RT_VISIBLE_CORES"
    text = box.env.get(name)
    if text is None:
        name = "NEURON_VISIBLE_DEVICES"
        text = box.env.get(name)
    if not text or entry is None or entry.accelerators.kind != "neuron":
        return devices
    default_cores = entry.accelerators.physical_cores // entry.accelerators.logical_cores
    try:
        cores = parse_ranges(text)
        cores_per_logical = int(box.env.get("NEURON_LOGICAL_NC_CONFIG", default_cores))
    except ValueError:
        notes.append(f"{name}={text[:60]!r} is no list of cores such as 0-3,8; it was ignored")
        return devices
    wanted = [core * cores_per_logical // entry.accelerators.physical_cores for core in cores]
    if wanted and max(wanted) >= len(devices):
        notes.append(
            f"{name}={text[:60]!r} asks for device {max(wanted)}, and there are {len(devices)}"
        )
    return [devices[number] for number in dict.fromkeys(wanted) if number < len(devices)]
