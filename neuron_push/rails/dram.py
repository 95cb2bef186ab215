"""Which rails NIXL uses for host memory: its NUMA-aware policy, step by step.

All figures are integers in Gb/s, as NIXL computes them. `line` is a NIC's rate, `up` its own link,
`sw` the topmost switch above it. Per NUMA node the switches add up; what one NIC's link takes of
the mean node decides how many rails one buffer gets. Wherever a figure is missing, NIXL uses all
rails.
"""

from __future__ import annotations

import math

import msgspec

from .model import Box, Nic
from .nixl_rule import visible_efa
from .topology import Topology

MAX_BANDWIDTH_VARIABLE = "NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG"


class HostMemoryRails(msgspec.Struct):
    """The rails of a host buffer. With policy `all`, every rail carries every buffer."""

    policy: str
    rails_per_buffer: int
    reason: str
    nics_by_node: dict[int, list[str]]
    """PCI addresses from which a buffer of that NUMA node gets its rails."""


class _NicFigures(msgspec.Struct):
    nic: Nic
    line: int
    up: int
    node: int
    switch: str | None
    switch_gbps: int


def predict_host_memory(box: Box, topology: Topology) -> HostMemoryRails:
    """NIXL's choice for host memory on this box, with the sentence that explains it."""
    nics = visible_efa(box)
    nodes = max(1, box.num_numa_nodes)

    def all_rails(reason: str) -> HostMemoryRails:
        addresses = [nic.pci_address for nic in nics]
        return HostMemoryRails("all", len(nics), reason, dict.fromkeys(range(nodes), addresses))

    if not nics:
        return HostMemoryRails("tcp", 0, "no EFA device is visible, so NIXL falls back to TCP", {})
    if len(nics) == 1:
        return all_rails("there is one NIC only")
    figures = [_figures(nic, topology) for nic in nics if nic.pci_address in topology.devices]
    if not figures:
        return all_rails("the NICs are not in the PCI tree")
    line, up = _mean([one.line for one in figures]), _mean([one.up for one in figures])
    by_node = _switches_by_node(figures)
    node_speed = _mean([sum(switches.values()) for switches in by_node])
    for value, words in (
        (line, "rate of the NICs"),
        (up, "link speed of the NICs"),
        (node_speed, "bandwidth of the switches above them"),
    ):
        if value == 0:
            return all_rails(f"the {words} is not told, so NIXL gives up choosing")
    most, words = _wanted(box, node_speed // up, line)
    if most == 0:
        return all_rails("one NIC's link is faster than its NUMA node, so NIXL gives up choosing")
    if most >= len(nics):
        return all_rails(f"{words} reach {most} NICs and there are only {len(nics)}")
    if any(not switches for switches in by_node):
        return all_rails("a NUMA node has no NIC below a switch, so NIXL's policy fails to load")
    if any(speed // up == 0 for switches in by_node for speed in switches.values()):
        return all_rails("a switch is slower than one NIC, so NIXL's policy fails to load")
    homes: dict[int, list[str]] = {node: [] for node in range(len(by_node))}
    for one in figures:
        if one.node >= 0 and one.switch is not None:
            homes[one.node].append(one.nic.pci_address)
    for node, own in homes.items():
        if len(own) < most:
            others = [name for other, names in homes.items() if other != node for name in names]
            homes[node] = own + others
    for node in range(len(by_node), nodes):  # NIXL has no entry for them, and uses all rails
        homes[node] = [nic.pci_address for nic in nics]
    return HostMemoryRails("numa", most, f"{words} feed {most} NICs of {up} Gb/s each", homes)


def _figures(nic: Nic, topology: Topology) -> _NicFigures:
    device = topology.devices[nic.pci_address]
    switch = topology.topmost_switch(nic.pci_address)
    return _NicFigures(
        nic=nic,
        line=int(nic.rate_gbps),
        up=int(device.link_gbyte_per_s * 8),
        node=device.numa_node,
        switch=switch.address if switch is not None else None,
        switch_gbps=math.ceil(switch.link_gbyte_per_s * 8) if switch is not None else 0,
    )


def _mean(values: list[int]) -> int:
    return sum(values) // len(values) if values else 0


def _switches_by_node(figures: list[_NicFigures]) -> list[dict[str, int]]:
    """For every node up to the highest seen: its topmost switches and their Gb/s."""
    placed = [one for one in figures if one.node >= 0 and one.switch is not None]
    highest = max((one.node for one in placed), default=-1)
    by_node: list[dict[str, int]] = [{} for _ in range(highest + 1)]
    for one in placed:
        if one.switch is not None:
            by_node[one.node][one.switch] = one.switch_gbps
    return by_node


def _wanted(box: Box, recommended: int, line: int) -> tuple[int, str]:
    text = box.env.get(MAX_BANDWIDTH_VARIABLE, "")
    if text.isascii() and text.isdigit():
        return max(int(text), line) // line, f"the {text} Gb/s of {MAX_BANDWIDTH_VARIABLE}"
    return recommended, "the switches of a NUMA node"
