"""A box from hwloc XML (`lstopo --of xml machine.xml`), versions 1 to 3 of the format."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from . import bdf
from .discover_common import HIDDEN_ROOT_PREFIX, accelerators_of, keep_relevant
from .errors import RailsError
from .model import (
    EFA_RATE_GBPS_BY_DEVICE_ID,
    SCHEMA_VERSION,
    UNKNOWN_NUMA_NODE,
    Box,
    HostBridge,
    Nic,
    PciDevice,
)

_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]", re.IGNORECASE)
_PORT_STATES = {"1": "DOWN", "2": "INIT", "3": "ARMED", "4": "ACTIVE"}
_IO_TYPES = ("Bridge", "PCIDev", "OSDev", "Misc")


def box_from_hwloc(path: Path) -> Box:
    """Read an hwloc XML file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RailsError(f"{path} cannot be read: {error.strerror or error}") from None
    return box_from_hwloc_xml(raw, str(path))


def box_from_hwloc_xml(raw: bytes, where: str) -> Box:
    """Build a box from the text of an hwloc XML file. RailsError names the file."""
    try:
        root = ElementTree.fromstring(raw)
    except (ElementTree.ParseError, ValueError) as error:
        raise RailsError(
            f"{where} is no well-formed XML ({error}); make it with `lstopo --of xml`"
        ) from None
    if root.tag != "topology":
        raise RailsError(
            f"{where} is XML but no hwloc topology (its root is <{root.tag}>); "
            "make it with `lstopo --of xml`"
        )
    reader = _Reader(where)
    reader.walk(root)
    return reader.box()


def _nodes_of(element: ElementTree.Element) -> tuple[int, ...]:
    """NUMA nodes of an object's nodeset: comma-separated 32-bit words, most significant first."""
    words = element.get("nodeset", "").split(",")
    value = 0
    for word in words:
        value = (value << 32) | (int(word, 16) if word else 0)
    return tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)


class _Reader:
    """Walks the tree once, without recursion, carrying what lies above."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._roots: dict[str, HostBridge] = {}
        self._devices: list[PciDevice] = []
        self._nics: list[Nic] = []
        self._num_numa_nodes = 0
        self._instance_type: str | None = None
        self._machine_nodes: tuple[int, ...] = ()

    def walk(self, topology: ElementTree.Element) -> None:
        start: tuple[str, ...] = ()
        stack = [(child, "", start, UNKNOWN_NUMA_NODE) for child in reversed(topology)]
        while stack:
            element, parent, locality, numa_node = stack.pop()
            if element.tag != "object":
                continue
            kind = element.get("type", "")
            try:
                if kind in _IO_TYPES:
                    parent = self._io_object(element, kind, parent, locality, numa_node)
                else:
                    locality, numa_node = self._processor_object(element, kind, locality, numa_node)
            except (ValueError, RailsError) as error:
                raise RailsError(
                    f"{self._where}: a {kind or 'nameless'} object cannot be understood: {error}"
                ) from None
            stack.extend((child, parent, locality, numa_node) for child in reversed(element))

    def box(self) -> Box:
        nic_addresses = {nic.pci_address for nic in self._nics}
        devices = keep_relevant(self._devices, nic_addresses)
        used = {device.parent for device in devices}
        return Box(
            schema_version=SCHEMA_VERSION,
            source="hwloc",
            instance_type=self._instance_type,
            host_bridges=tuple(root for name, root in self._roots.items() if name in used),
            pci=devices,
            nics=tuple(sorted(self._nics, key=lambda nic: bdf.numbers(nic.pci_address))),
            accelerators=accelerators_of(devices),
            num_numa_nodes=self._num_numa_nodes,
        )

    def _processor_object(
        self,
        element: ElementTree.Element,
        kind: str,
        locality: tuple[str, ...],
        numa_node: int,
    ) -> tuple[tuple[str, ...], int]:
        nodes = _nodes_of(element)
        if kind == "NUMANode":
            self._num_numa_nodes += 1
        if kind == "Machine":
            self._machine_nodes = nodes
            for info in element.findall("info"):
                if info.get("name") == "DMIProductName":
                    self._instance_type = info.get("value")
        if not nodes:
            return locality, numa_node
        name = "nodes:" + ",".join(map(str, nodes))
        covers_machine = nodes == self._machine_nodes
        if not covers_machine and (not locality or locality[0] != name):
            locality = (name, *locality)
        return locality, nodes[0] if len(nodes) == 1 else numa_node

    def _io_object(
        self,
        element: ElementTree.Element,
        kind: str,
        parent: str,
        locality: tuple[str, ...],
        numa_node: int,
    ) -> str:
        if kind == "Bridge" and "pci_busid" not in element.attrib:
            match = _HOST_BRIDGE.fullmatch(element.get("bridge_pci", ""))
            if match is None:
                raise ValueError(f"bridge_pci {element.get('bridge_pci')!r}")
            name = f"pci{int(match[1], 16):04x}:{int(match[2], 16):02x}"
            self._roots.setdefault(name, HostBridge(name=name, locality=locality))
            return name
        if kind in ("Bridge", "PCIDev"):
            return self._pci_device(element, parent, numa_node)
        if kind == "OSDev":
            self._os_device(element, parent)
        return parent

    def _pci_device(self, element: ElementTree.Element, parent: str, numa_node: int) -> str:
        address = bdf.normalise(element.get("pci_busid", ""))
        match = _PCI_TYPE.match(element.get("pci_type", ""))
        if match is None:
            raise ValueError(f"pci_type {element.get('pci_type')!r} of {address}")
        if not parent:
            parent = HIDDEN_ROOT_PREFIX + address
            self._roots[parent] = HostBridge(name=parent)
        self._devices.append(
            PciDevice(
                address=address,
                parent=parent,
                class_id=int(match[1], 16),
                vendor_id=int(match[2], 16),
                device_id=int(match[3], 16),
                numa_node=numa_node,
                link_gbyte_per_s=round(float(element.get("pci_link_speed", "0")), 6),
            )
        )
        return address

    def _os_device(self, element: ElementTree.Element, parent: str) -> None:
        text = element.get("osdev_type", "")
        is_rdma = text == "3" or text.lower() in ("openfabrics", "8", "0x8")
        if not is_rdma or not bdf.is_address(parent):
            return
        device = self._devices[-1]
        infos = {info.get("name"): info.get("value", "") for info in element.findall("info")}
        rate = EFA_RATE_GBPS_BY_DEVICE_ID.get(device.device_id, 0.0) if device.is_efa else 0.0
        self._nics.append(
            Nic(
                name=element.get("name", "unnamed"),
                pci_address=parent,
                driver="efa" if device.is_efa else None,
                rate_gbps=rate,
                state=_PORT_STATES.get(infos.get("Port1State", "")),
            )
        )
