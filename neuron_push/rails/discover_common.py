"""What both importers share: which devices to keep, link arithmetic, order, accelerators."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from . import bdf
from .model import Accelerator, PciDevice

BRIDGE_CLASS_ID = 0x0604
HIDDEN_ROOT_PREFIX = "hidden:"


def link_gbyte_per_s(speed_gt_per_s: float, width: int) -> float:
    """Payload rate of a PCIe link in 10^9 byte/s, with the line coding of its generation."""
    if speed_gt_per_s <= 0 or width <= 0:
        return 0.0
    if speed_gt_per_s <= 5.0:
        coding = 8 / 10
    elif speed_gt_per_s <= 32.0:
        coding = 128 / 130
    else:
        coding = 242 / 256
    return round(speed_gt_per_s * width * coding / 8, 6)


def keep_relevant(
    devices: Iterable[PciDevice], nic_addresses: Collection[str]
) -> tuple[PciDevice, ...]:
    """NICs, accelerators and the bridges above them, in the given order."""
    by_address = {device.address: device for device in devices}
    wanted: set[str] = set()
    for device in by_address.values():
        if device.is_efa or device.accelerator_kind or device.address in nic_addresses:
            name = device.address
            while name in by_address and name not in wanted:
                wanted.add(name)
                name = by_address[name].parent
    return tuple(device for name, device in by_address.items() if name in wanted)


def accelerators_of(devices: Iterable[PciDevice]) -> tuple[Accelerator, ...]:
    """The accelerators among the devices, in their order. CUDA indices follow PCI addresses."""
    found = [(device, device.accelerator_kind) for device in devices]
    cuda = sorted((device.address for device, kind in found if kind == "cuda"), key=bdf.numbers)
    index = {address: position for position, address in enumerate(cuda)}
    return tuple(
        Accelerator(kind=kind, pci_address=device.address, index=index.get(device.address, -1))
        for device, kind in found
        if kind is not None
    )
