"""Boxes from the fixtures, and a sysfs tree made from a box."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neuron_push.rails import box_io
from neuron_push.rails.discover_common import link_gbyte_per_s
from neuron_push.rails.model import Box, PciDevice

TOPOLOGIES = Path(__file__).parents[2] / "fixtures" / "topologies"


def load(name: str) -> Box:
    return box_io.load_box(TOPOLOGIES / f"{name}.json")


def chain(box: Box, device: PciDevice) -> list[str]:
    by_address = box.pci_by_address()
    names = [device.address]
    while names[-1] in by_address:
        names.append(by_address[names[-1]].parent)
    return list(reversed(names))


def write_sysfs(box: Box, root: Path) -> None:
    """A tree below `root` from which discovery must read the same box."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    system = root / "sys/devices/system"
    for node in range(box.num_numa_nodes):
        put(system / f"node/node{node}/cpulist", f"{node * 8}-{node * 8 + 7}")
        put(system / f"cpu/cpu{node * 8}/topology/physical_package_id", str(node))
    for device in box.pci:
        directory = root / "sys/devices" / Path(*chain(box, device))
        directory.mkdir(parents=True, exist_ok=True)
        put(directory / "vendor", f"0x{device.vendor_id:04x}")
        put(directory / "device", f"0x{device.device_id:04x}")
        put(directory / "class", f"0x{device.class_id:04x}00")
        put(directory / "numa_node", str(device.numa_node))
        speed, width = link_of(device.link_gbyte_per_s)
        put(directory / "current_link_speed", f"{speed} GT/s PCIe" if speed else "Unknown")
        put(directory / "current_link_width", str(width))
        link(bus / device.address, directory)
    for number, nic in enumerate(box.nics):
        directory = root / "sys/class/infiniband" / nic.name
        target = (bus / nic.pci_address).resolve()
        driver = root / "sys/bus/pci/drivers" / (nic.driver or "efa")
        driver.mkdir(parents=True, exist_ok=True)
        if not (target / "driver").exists():
            link(target / "driver", driver)
        put(directory / "ports/1/state", f"4: {nic.state or 'ACTIVE'}")
        put(directory / "ports/1/rate", f"{nic.rate_gbps:g} Gb/sec (4X HDR)")
        link(directory / "device", target)
        put(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", nic.name)
        if nic.openable:
            put(root / f"dev/infiniband/uverbs{number}", "")
    if box.instance_type:
        put(root / "sys/devices/virtual/dmi/id/product_name", box.instance_type)


def link_of(gbyte_per_s: float) -> tuple[float, int]:
    for speed in (2.5, 5.0, 8.0, 16.0, 32.0):
        for width in (1, 4, 8, 16):
            if abs(link_gbyte_per_s(speed, width) - gbyte_per_s) < 1e-3:
                return speed, width
    return 0.0, 0


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.fixture
def p5en() -> Box:
    return load("p5en.48xlarge")


@pytest.fixture
def trn2() -> Box:
    return load("trn2.48xlarge")
