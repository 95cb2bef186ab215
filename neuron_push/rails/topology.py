"""The tree of a box: who is above whom, and what two devices have in common.

A chain runs from a device upwards: bridges, host bridge, NUMA node or package, machine. The
machine is in every chain, so two devices always have something in common; `Tie.level` says how
much it is worth.
"""

from __future__ import annotations

from enum import IntEnum

from .model import Box, PciDevice

MACHINE = "machine"


class Level(IntEnum):
    """How near two devices are, nearest last, so that a larger value is nearer."""

    MACHINE = 0
    NUMA = 1
    HOST_BRIDGE = 2
    BRIDGE = 3


class Topology:
    """Chains of a box, computed once and kept."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.devices: dict[str, PciDevice] = box.pci_by_address()
        self._localities = {bridge.name: bridge.locality for bridge in box.host_bridges}
        self._above: dict[str, tuple[str, ...]] = {}

    def above(self, name: str) -> tuple[str, ...]:
        """Everything above a device or bridge, nearest first, ending in the machine."""
        known = self._above.get(name)
        if known is not None:
            return known
        chain: list[str] = []
        step = name
        while (device := self.devices.get(step)) is not None:
            step = device.parent
            chain.append(step)
        chain.extend(self._localities.get(step, ()))
        chain.append(MACHINE)
        self._above[name] = tuple(chain)
        return self._above[name]

    def level(self, name: str) -> Level:
        """What kind of object a name in a chain is."""
        if name == MACHINE:
            return Level.MACHINE
        if name in self.devices:
            return Level.BRIDGE
        if name in self._localities:
            return Level.HOST_BRIDGE
        return Level.NUMA

    def common(self, one: str, other: str) -> str:
        """The nearest object above both."""
        others = set(self.above(other))
        return next(name for name in self.above(one) if name in others)

    def numa_node(self, address: str) -> int:
        """NUMA node of a device, -1 where it is not known."""
        device = self.devices.get(address)
        return device.numa_node if device is not None else -1

    def bridge_words(self, name: str) -> str:
        """An object of a chain in words for people."""
        level = self.level(name)
        if level is Level.BRIDGE:
            return f"PCIe bridge {name}"
        if level is Level.HOST_BRIDGE:
            return f"host bridge {name}"
        if level is Level.NUMA:
            return f"NUMA {name.replace('nodes:', 'node ')}"
        return "nothing but the machine itself"

    def topmost_switch(self, address: str) -> PciDevice | None:
        """The highest bridge above a device whose link speed is told."""
        for name in reversed(self.above(address)):
            device = self.devices.get(name)
            if device is not None and device.link_gbyte_per_s > 0:
                return device
        return None
