"""Boxes to and from JSON, with every doubt about a file turned into one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from . import bdf
from .errors import RailsError
from .model import SCHEMA_VERSION, Box, PciDevice

MAX_FILE_BYTES = 64 * 2**20
MAX_DEVICES = 100_000
MAX_NUMA_NODE = 1023
MAX_RATE_GBPS = 100_000.0
MAX_LINK_GBYTE_PER_S = 10_000.0
MAX_CHAIN = 64


def dump_box(box: Box) -> bytes:
    """The box as indented JSON, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(box), indent=1) + b"\n"


def load_box(path: Path) -> Box:
    """Read and check a box file. RailsError says what is wrong and where."""
    return decode_box(_read(path), str(path))


def decode_box(raw: bytes, where: str) -> Box:
    """Decode and check the JSON text of a box."""
    try:
        head = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RailsError(
            f"{where} is not JSON ({error}); make it with `neuron-push rails capture > box.json`"
        ) from None
    version = head.get("schema_version") if isinstance(head, dict) else None
    if not isinstance(version, int):
        raise RailsError(
            f"{where} has no schema_version, so it is no box; "
            "make it with `neuron-push rails capture > box.json`"
        )
    if version != SCHEMA_VERSION:
        raise RailsError(
            f"{where} has schema_version {version} and this program reads {SCHEMA_VERSION}; "
            "capture the machine again with this version of neuron-push"
        )
    try:
        box = msgspec.json.decode(raw, type=Box)
    except msgspec.ValidationError as error:
        raise RailsError(f"{where} is no valid box: {error}") from None
    check_box(box, where)
    return box


def check_box(box: Box, where: str) -> None:
    """Refuse values that no machine has. RailsError with the first one found."""
    for problem in _problems(box):
        raise RailsError(f"{where} is no valid box: {problem}")


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise RailsError(f"{path} is a directory; expected a box file (JSON) or hwloc XML")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RailsError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, so it is no box")
        return path.read_bytes()
    except FileNotFoundError:
        raise RailsError(
            f"{path} does not exist; make it with `neuron-push rails capture > {path}`"
        ) from None
    except OSError as error:
        raise RailsError(f"{path} cannot be read: {error.strerror or error}") from None


def _problems(box: Box) -> Iterator[str]:
    if len(box.pci) > MAX_DEVICES or len(box.nics) > MAX_DEVICES:
        yield f"more than {MAX_DEVICES} devices"
    roots = {bridge.name for bridge in box.host_bridges}
    by_address: dict[str, PciDevice] = {}
    for device in box.pci:
        yield from _address_problems(device.address, "PCI device")
        if device.address in by_address:
            yield f"PCI device {device.address} is listed twice"
        by_address[device.address] = device
        yield from _device_problems(device)
    for device in box.pci:
        if device.parent not in by_address and device.parent not in roots:
            yield f"PCI device {device.address} has the unknown parent {device.parent!r}"
    yield from _loop_problems(by_address, roots)
    yield from _nic_problems(box)
    yield from _accelerator_problems(box, by_address)


def _address_problems(address: str, what: str) -> Iterator[str]:
    if not bdf.is_address(address):
        yield f"{what} {address[:60]!r} is no PCI address such as 0000:59:00.0"
    elif bdf.normalise(address) != address:
        yield f"{what} {address!r} must be written {bdf.normalise(address)!r}"


def _device_problems(device: PciDevice) -> Iterator[str]:
    if not -1 <= device.numa_node <= MAX_NUMA_NODE:
        yield f"PCI device {device.address} has numa_node {device.numa_node}; expected -1 to 1023"
    link = device.link_gbyte_per_s
    if not math.isfinite(link) or not 0 <= link <= MAX_LINK_GBYTE_PER_S:
        yield f"PCI device {device.address} has link_gbyte_per_s {link}; expected 0 to 10000"
    for name in ("vendor_id", "device_id", "class_id"):
        value = getattr(device, name)
        if not 0 <= value <= 0xFFFF:
            yield f"PCI device {device.address} has {name} {value}; 16 bits expected"


def _loop_problems(by_address: dict[str, PciDevice], roots: set[str]) -> Iterator[str]:
    known_good: set[str] = set(roots)
    for start in by_address:
        seen: list[str] = []
        name = start
        while name not in known_good and name in by_address:
            seen.append(name)
            name = by_address[name].parent
            if len(seen) > MAX_CHAIN:
                yield f"the parents above {start} form a loop or a chain of more than {MAX_CHAIN}"
                return
        known_good.update(seen)


def _nic_problems(box: Box) -> Iterator[str]:
    seen: set[str] = set()
    for nic in box.nics:
        yield from _address_problems(nic.pci_address, f"NIC {nic.name}")
        if nic.name in seen:
            yield f"NIC {nic.name} is listed twice"
        seen.add(nic.name)
        if not math.isfinite(nic.rate_gbps) or not 0 <= nic.rate_gbps <= MAX_RATE_GBPS:
            yield f"NIC {nic.name} has rate_gbps {nic.rate_gbps}; expected 0 to 100000"


def _accelerator_problems(box: Box, by_address: dict[str, PciDevice]) -> Iterator[str]:
    seen: set[str] = set()
    for accelerator in box.accelerators:
        address = accelerator.pci_address
        yield from _address_problems(address, "accelerator")
        if address in seen:
            yield f"accelerator {address} is listed twice"
        seen.add(address)
        if address not in by_address:
            yield f"accelerator {address} is not among the PCI devices"
        if accelerator.attached_nic is not None:
            yield from _address_problems(accelerator.attached_nic, "attached_nic")
