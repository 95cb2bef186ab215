"""A box from /sys (and the little of /proc and /dev that belongs to devices).

The root directory is a parameter, so that a captured tree works as well as the live one. Whatever
cannot be read becomes a sentence in the box's `gaps`; it is never a traceback, and never taken for
'there is none'.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import bdf
from .discover_common import (
    HIDDEN_ROOT_PREFIX,
    accelerators_of,
    keep_relevant,
    link_gbyte_per_s,
)
from .model import (
    EFA_RATE_GBPS_BY_DEVICE_ID,
    SCHEMA_VERSION,
    UNKNOWN_NUMA_NODE,
    Box,
    HostBridge,
    Nic,
    PciDevice,
)

_ROOT_NAME = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
MAX_GAPS = 20


class SysfsReader:
    """Small reads below one root. None for what is absent; a gap for what is forbidden."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gaps: list[str] = []
        self.hidden_addresses: list[str] = []

    def text(self, path: Path) -> str | None:
        try:
            return path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.gap(f"{path} cannot be read: {error.strerror or error}")
            return None

    def integer(self, path: Path, default: int) -> int:
        value = self.text(path)
        if not value:
            return default
        try:
            return int(value, 0)
        except ValueError:
            self.gap(f"{path} holds {value[:40]!r} where a number was expected")
            return default

    def number(self, path: Path) -> float:
        match = _NUMBER.match(self.text(path) or "")
        return float(match[0]) if match else 0.0

    def names(self, path: Path) -> list[str] | None:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.gap(f"{path} cannot be listed: {error.strerror or error}")
            return None

    def link_name(self, path: Path) -> str | None:
        try:
            return os.path.basename(os.readlink(path))
        except OSError:
            return None

    def gap(self, sentence: str) -> None:
        if len(self.gaps) < MAX_GAPS and sentence not in self.gaps:
            self.gaps.append(sentence)


def pci_and_nics(root: Path) -> tuple[Box, SysfsReader]:
    """The PCI tree, NICs and accelerators below `root`, nothing else filled in."""
    reader = SysfsReader(root)
    nics = _read_nics(reader)
    devices, roots = _read_pci(reader)
    ordered = _in_hwloc_order(devices, roots)
    kept = keep_relevant(ordered, {nic.pci_address for nic in nics})
    used = {device.parent for device in kept}
    by_address = {device.address: device for device in kept}
    nodes = reader.names(root / "sys/devices/system/node")
    box = Box(
        schema_version=SCHEMA_VERSION,
        source="sysfs",
        host_bridges=tuple(bridge for name, bridge in roots.items() if name in used),
        pci=kept,
        nics=tuple(_with_rate(nic, by_address.get(nic.pci_address)) for nic in nics),
        accelerators=accelerators_of(kept),
        num_numa_nodes=sum(re.fullmatch(r"node\d+", name) is not None for name in nodes or ()),
    )
    return box, reader


def _read_pci(reader: SysfsReader) -> tuple[list[PciDevice], dict[str, HostBridge]]:
    directory = reader.root / "sys/bus/pci/devices"
    names = reader.names(directory)
    roots: dict[str, HostBridge] = {}
    if names is None:
        reader.gap(
            f"{directory} is missing, so no PCI device can be seen; mount /sys into this container"
        )
        return [], roots
    known = {bdf.normalise(name) for name in names if bdf.is_address(name)}
    devices = []
    localities: dict[int, tuple[str, ...]] = {}
    for name in names:
        if not bdf.is_address(name):
            reader.gap(f"{directory / name} is no PCI address and was left out")
            continue
        device, root = _read_device(reader, directory / name, known)
        devices.append(device)
        if root is not None and root not in roots:
            if device.numa_node not in localities:
                localities[device.numa_node] = _locality(reader, device.numa_node)
            roots[root] = HostBridge(name=root, locality=localities[device.numa_node])
    if reader.hidden_addresses:
        reader.gap(
            f"the bridges above {len(reader.hidden_addresses)} PCI devices are hidden here, so "
            f"nearness by PCIe is unknown for them; the first is {reader.hidden_addresses[0]}"
        )
    return devices, roots


def _read_device(reader: SysfsReader, path: Path, known: set[str]) -> tuple[PciDevice, str | None]:
    address = bdf.normalise(path.name)
    chain = os.path.realpath(path).split(os.sep)
    above = chain[-2] if len(chain) > 1 else ""
    root: str | None = next((part for part in chain if _ROOT_NAME.fullmatch(part)), None)
    if _ROOT_NAME.fullmatch(above):
        parent = above
    elif bdf.is_address(above) and bdf.normalise(above) in known and root is not None:
        parent = bdf.normalise(above)
    else:
        parent = root = HIDDEN_ROOT_PREFIX + address
        reader.hidden_addresses.append(address)
    speed = reader.number(path / "current_link_speed")
    width = int(reader.number(path / "current_link_width"))
    if width >= 255:
        width = 0
    device = PciDevice(
        address=address,
        parent=parent,
        vendor_id=reader.integer(path / "vendor", 0) & 0xFFFF,
        device_id=reader.integer(path / "device", 0) & 0xFFFF,
        class_id=(reader.integer(path / "class", 0) >> 8) & 0xFFFF,
        numa_node=_numa_node(reader, path),
        link_gbyte_per_s=link_gbyte_per_s(speed, width),
        link_speed_gt_per_s=speed,
        link_width=width,
        driver=reader.link_name(path / "driver"),
        is_virtual_function=(path / "physfn").exists(),
    )
    return device, root


def _numa_node(reader: SysfsReader, path: Path) -> int:
    node = reader.integer(path / "numa_node", UNKNOWN_NUMA_NODE)
    if not -1 <= node <= 1023:
        reader.gap(f"{path / 'numa_node'} holds {node}, which is no NUMA node")
        return UNKNOWN_NUMA_NODE
    return node


def _locality(reader: SysfsReader, node: int) -> tuple[str, ...]:
    """Processor-side objects above a host bridge of this node: the node, then its package."""
    if node < 0:
        return ()
    base = reader.root / "sys/devices/system"
    all_nodes = [int(name[4:]) for name in reader.names(base / "node") or () if name[4:].isdigit()]
    if all_nodes in ([], [node]):
        return ()
    own = _package_of(reader, node)
    package = sorted(other for other in all_nodes if _package_of(reader, other) == own)
    names = [f"nodes:{node}"]
    if own is not None and len(package) > 1 and package != sorted(all_nodes):
        names.append("nodes:" + ",".join(map(str, package)))
    return tuple(names)


def _package_of(reader: SysfsReader, node: int) -> str | None:
    base = reader.root / "sys/devices/system"
    first_cpu = _NUMBER.match(reader.text(base / f"node/node{node}/cpulist") or "")
    if first_cpu is None:
        return None
    return reader.text(base / f"cpu/cpu{first_cpu[0]}/topology/physical_package_id")


def _in_hwloc_order(devices: list[PciDevice], roots: dict[str, HostBridge]) -> list[PciDevice]:
    """Depth first below each root; roots by NUMA node, those without one last."""
    children: dict[str, list[PciDevice]] = {}
    for device in sorted(devices, key=lambda one: bdf.numbers(one.address)):
        children.setdefault(device.parent, []).append(device)

    def root_key(name: str) -> tuple[bool, tuple[str, ...], str]:
        locality = roots[name].locality
        return not locality, locality, name

    ordered: list[PciDevice] = []
    stack = [
        child
        for name in sorted(roots, key=root_key, reverse=True)
        for child in reversed(children.get(name, []))
    ]
    while stack:
        device = stack.pop()
        ordered.append(device)
        stack.extend(reversed(children.get(device.address, [])))
    return ordered


def _read_nics(reader: SysfsReader) -> list[Nic]:
    directory = reader.root / "sys/class/infiniband"
    openable = _openable(reader)
    nics = []
    for name in reader.names(directory) or ():
        path = directory / name
        address = os.path.basename(os.path.realpath(path / "device"))
        if not bdf.is_address(address):
            continue  # software RDMA (rxe, siw) hangs on no PCI device
        state = reader.text(path / "ports/1/state")
        nics.append(
            Nic(
                name=name,
                pci_address=bdf.normalise(address),
                driver=reader.link_name(path / "device/driver"),
                rate_gbps=reader.number(path / "ports/1/rate"),
                state=state.split(":")[-1].strip() if state else None,
                openable=openable.get(name) if openable is not None else None,
                p2p=reader.text(path / "device/p2p"),
            )
        )
    nics.sort(key=lambda nic: (bdf.numbers(nic.pci_address), nic.name))
    return nics


def _with_rate(nic: Nic, device: PciDevice | None) -> Nic:
    if nic.rate_gbps == 0 and device is not None and device.is_efa:
        nic.rate_gbps = EFA_RATE_GBPS_BY_DEVICE_ID.get(device.device_id, 0.0)
    return nic


def _openable(reader: SysfsReader) -> dict[str, bool] | None:
    """Which RDMA devices this process can open; None where that cannot be told.

    On a captured tree the presence of the node is all there is. On the live one the node is opened:
    a device cgroup can forbid that while permissions look fine.
    """
    nodes = reader.names(reader.root / "sys/class/infiniband_verbs")
    live = reader.root == Path("/")
    device_directory = reader.root / "dev/infiniband"
    if nodes is None or (not live and not device_directory.exists()):
        return None
    found = {}
    for node in nodes:
        name = reader.text(reader.root / "sys/class/infiniband_verbs" / node / "ibdev")
        if name:
            path = device_directory / node
            found[name] = _can_open(path) if live else path.exists()
    return found


def _can_open(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(descriptor)
    return True
