"""A drawing of a machine: a frame per NUMA node, a box per switch, devices and rails inside."""

from __future__ import annotations

from html import escape

from . import bdf
from .select import Choice, Selection
from .topology import Level, Topology

_WIDTH, _ROW, _GAP, _HEAD = 276, 26, 14, 26
_DEVICE_WIDTH, _NIC_WIDTH = 106, 122
_COLUMNS = 4
_COLOUR_BY_VERDICT = {"good": "#2e7d32", "tie": "#f9a825", "hidden": "#9e9e9e"}
_BAD = "#c62828"
MAX_LEAVES = 512


def draw(selection: Selection) -> str:
    """An SVG document. Colours mark verdicts; a line joins each device with its rails."""
    groups = _groups(selection)
    body: list[str] = []
    y = 46.0
    width = 2 * _GAP + _COLUMNS * (_WIDTH + _GAP)
    for node, switches in groups.items():
        height, drawn = _draw_node(selection, node, switches, y)
        body.extend(drawn)
        y += height + _GAP
    title = escape(
        f"{selection.box.instance_type or 'machine'}: {len(selection.choices)} devices, "
        f"{len(selection.box.nics)} NICs"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y:.0f}" '
        f'width="{width}" height="{y:.0f}" font-family="sans-serif" font-size="12">\n'
        f"<title>{title}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{_GAP}" y="28" font-size="17" font-weight="bold">{title}</text>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def _groups(selection: Selection) -> dict[str, dict[str, list[str]]]:
    """NUMA node to switch to the addresses of its devices and NICs."""
    topology = Topology(selection.box)
    leaves = [choice.pci_address for choice in selection.choices]
    leaves += [nic.pci_address for nic in selection.box.nics]
    members: dict[str, list[str]] = {}
    for address in leaves[:MAX_LEAVES]:
        for name in topology.above(address):
            if topology.level(name) is Level.HOST_BRIDGE:
                members.setdefault(name, []).append(address)
    groups: dict[str, dict[str, list[str]]] = {}
    for root, addresses in members.items():
        shared = set(topology.above(addresses[0]))
        for address in addresses[1:]:
            shared &= set(topology.above(address))
        nearest = next(name for name in topology.above(addresses[0]) if name in shared)
        nodes = [name for name in topology.above(root) if topology.level(name) is Level.NUMA]
        node = nodes[0].replace("nodes:", "NUMA node ") if nodes else "NUMA node not told"
        groups.setdefault(node, {})[topology.bridge_words(nearest)] = addresses
    return dict(sorted(groups.items()))


def _draw_node(
    selection: Selection, node: str, switches: dict[str, list[str]], top: float
) -> tuple[float, list[str]]:
    drawn: list[str] = []
    y = top + _HEAD
    names = list(switches)
    for start in range(0, len(names), _COLUMNS):
        row = names[start : start + _COLUMNS]
        tallest = 0.0
        for column, name in enumerate(row):
            x = 2 * _GAP + column * (_WIDTH + _GAP)
            height, parts = _draw_switch(selection, name, switches[name], x, y)
            drawn.extend(parts)
            tallest = max(tallest, height)
        y += tallest + _GAP
    height = y - top
    width = _COLUMNS * (_WIDTH + _GAP) + _GAP
    frame = (
        f'<rect x="{_GAP / 2}" y="{top:.0f}" width="{width}" height="{height:.0f}" rx="8" '
        f'fill="#eef3f8" stroke="#90a4ae"/>\n'
        f'<text x="{_GAP * 1.5}" y="{top + 17:.0f}" fill="#455a64">{escape(node)}</text>'
    )
    return height, [frame, *drawn]


def _draw_switch(
    selection: Selection, name: str, addresses: list[str], x: float, y: float
) -> tuple[float, list[str]]:
    choices = {choice.pci_address: choice for choice in selection.choices}
    nics = {nic.pci_address: nic for nic in selection.box.nics}
    devices = [choices[address] for address in addresses if address in choices]
    rails = [nics[address] for address in addresses if address in nics]
    rows = max(len(devices), len(rails), 1)
    height = _HEAD + rows * _ROW + 8.0
    parts = [
        f'<rect x="{x}" y="{y:.0f}" width="{_WIDTH}" height="{height:.0f}" rx="6" fill="#ffffff" '
        f'stroke="#b0bec5"/>',
        f'<text x="{x + 8}" y="{y + 17:.0f}" fill="#607d8b" font-size="11">{escape(name)}</text>',
    ]
    left, right = x + 8 + _DEVICE_WIDTH, x + _WIDTH - 8 - _NIC_WIDTH
    middle_by_nic = {}
    for row, nic in enumerate(rails):
        top = y + _HEAD + row * _ROW
        middle_by_nic[nic.pci_address] = top + 10
        up = nic.state in (None, "ACTIVE") and nic.openable is not False
        label = f"{nic.name} {nic.rate_gbps:g}G"
        parts.append(_pill(right, top, _NIC_WIDTH, label, "#1565c0" if up else "#9e9e9e"))
    for row, choice in enumerate(devices):
        top = y + _HEAD + row * _ROW
        colour = _COLOUR_BY_VERDICT.get(choice.verdict, _BAD)
        parts.append(_pill(x + 8, top, _DEVICE_WIDTH, _device_label(choice), colour))
        parts.extend(
            f'<line x1="{left}" y1="{top + 10:.0f}" x2="{right}" '
            f'y2="{middle_by_nic[rail.pci_address]:.0f}" stroke="{colour}" stroke-width="1.5"/>'
            for rail in choice.rails
            if rail.pci_address in middle_by_nic
        )
    return height, parts


def _device_label(choice: Choice) -> str:
    number = choice.process_index if choice.process_index >= 0 else choice.index
    return f"{choice.kind} {number} {bdf.short(choice.pci_address)[:5]}"


def _pill(x: float, y: float, width: float, label: str, colour: str) -> str:
    return (
        f'<rect x="{x}" y="{y:.0f}" width="{width}" height="20" rx="10" fill="{colour}"/>'
        f'<text x="{x + width / 2}" y="{y + 14:.0f}" text-anchor="middle" fill="#ffffff" '
        f'font-size="11">{escape(label)}</text>'
    )
