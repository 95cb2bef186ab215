"""hwloc XML from a box: what NIXL should believe about a machine, through HWLOC_XMLFILE.

NIXL deals NICs to all GPUs of the host, also to those that a container does not see. A file that
holds one GPU only, together with FI_EFA_IFACE naming its NICs, gives that GPU all of them. hwloc's
own XML reader refuses comments before the DOCTYPE, so there are none.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import quoteattr

import msgspec

from . import bdf
from .errors import RailsError
from .model import Box, PciDevice
from .select import Choice, Selection

_ROOT = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})")
_BRIDGE_CLASS = 0x0604


def pruned_to(selection: Selection, choice: Choice) -> Box:
    """The box with this one accelerator, and every NIC."""
    if choice.kind != "cuda":
        raise RailsError(
            "--write-hwloc is for GPUs: NIXL asks the Neuron runtime about Neuron devices"
        )
    if not choice.rails:
        raise RailsError(f"--write-hwloc has no rails to give: {choice.reason}")
    box = msgspec.structs.replace(selection.box)
    others = {one.pci_address for one in box.accelerators} - {choice.pci_address}
    box.pci = tuple(device for device in box.pci if device.address not in others)
    box.accelerators = tuple(
        one for one in box.accelerators if one.pci_address == choice.pci_address
    )
    return box


def to_xml(box: Box) -> str:
    """The box as hwloc XML of version 2.0. Processors are placeholders, one per NUMA node."""
    return _Writer(box).text()


class _Writer:
    def __init__(self, box: Box) -> None:
        self._box = box
        self._children: dict[str, list[PciDevice]] = {}
        for device in box.pci:
            self._children.setdefault(device.parent, []).append(device)
        self._nics = {nic.pci_address: nic.name for nic in box.nics}
        self._next_index = 0
        self._lines: list[str] = []

    def text(self) -> str:
        nodes = max(1, self._box.num_numa_nodes)
        everything = (1 << nodes) - 1
        self._lines = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            '<!DOCTYPE topology SYSTEM "hwloc2.dtd">',
            '<topology version="2.0">',
        ]
        self._open(1, "Machine", os_index=0, **_sets(everything))
        for node in range(nodes):
            sets = _sets(1 << node)
            self._open(2, "Package", os_index=node, **sets)
            self._leaf(3, "NUMANode", os_index=node, **sets, local_memory=0)
            self._leaf(3, "PU", os_index=node, **sets)
            self._roots(3, f"nodes:{node}")
            self._close(2)
        self._roots(2, None)
        self._close(1)
        self._lines.append("</topology>")
        return "\n".join(self._lines) + "\n"

    def _roots(self, depth: int, place: str | None) -> None:
        """Host bridges of one NUMA node; of none, or of an unknown one, where `place` is None."""
        places = {f"nodes:{node}" for node in range(max(1, self._box.num_numa_nodes))}
        for bridge in self._box.host_bridges:
            match = _ROOT.fullmatch(bridge.name)
            children = self._children.get(bridge.name, [])
            home = next((name for name in bridge.locality if name in places), None)
            if match is None or not children or home != place:
                continue
            last = max(self._last_bus(child) for child in children)
            buses = f"{int(match[1], 16):04x}:[{match[2]}-{last:02x}]"
            self._open(depth, "Bridge", bridge_type="0-1", depth=0, bridge_pci=buses)
            for child in children:
                self._device(depth + 1, child)
            self._close(depth)

    def _device(self, depth: int, device: PciDevice) -> None:
        ids = f"{device.vendor_id:04x}:{device.device_id:04x}"
        facts = {
            "pci_busid": device.address,
            "pci_type": f"{device.class_id:04x} [{ids}] [{ids}] 00",
            "pci_link_speed": f"{device.link_gbyte_per_s:.6f}",
        }
        children = self._children.get(device.address, [])
        if device.class_id == _BRIDGE_CLASS:
            domain = bdf.numbers(device.address)[0]
            first = min((bdf.numbers(child.address)[1] for child in children), default=0)
            last = max((self._last_bus(child) for child in children), default=first)
            buses = f"{domain:04x}:[{first:02x}-{last:02x}]"
            self._open(
                depth, "Bridge", bridge_type="1-1", depth=depth - 3, bridge_pci=buses, **facts
            )
            for child in children:
                self._device(depth + 1, child)
            self._close(depth)
            return
        name = self._nics.get(device.address)
        if name is None:
            self._leaf(depth, "PCIDev", **facts)
            return
        self._open(depth, "PCIDev", **facts)
        self._leaf(depth + 1, "OSDev", name=name, osdev_type=3)
        self._close(depth)

    def _last_bus(self, device: PciDevice) -> int:
        buses = [bdf.numbers(device.address)[1]]
        buses += [self._last_bus(child) for child in self._children.get(device.address, [])]
        return max(buses)

    def _open(self, level: int, kind: str, /, **facts: object) -> None:
        self._lines.append("  " * level + f"<object {self._attributes(kind, facts)}>")

    def _leaf(self, level: int, kind: str, /, **facts: object) -> None:
        self._lines.append("  " * level + f"<object {self._attributes(kind, facts)}/>")

    def _close(self, level: int) -> None:
        self._lines.append("  " * level + "</object>")

    def _attributes(self, kind: str, facts: dict[str, object]) -> str:
        self._next_index += 1
        pairs = {"type": kind, "gp_index": self._next_index, **facts}
        return " ".join(f"{name}={quoteattr(str(value))}" for name, value in pairs.items())


def _sets(mask: int) -> dict[str, str]:
    """One placeholder processor per NUMA node, so that both kinds of sets look alike."""
    text = ",".join(
        f"0x{mask >> shift & 0xFFFFFFFF:08x}"
        for shift in range(32 * ((mask.bit_length() - 1) // 32), -1, -32)
    )
    names = ("cpuset", "complete_cpuset", "nodeset", "complete_nodeset")
    return dict.fromkeys(names, text)
