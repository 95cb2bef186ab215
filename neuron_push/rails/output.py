"""What people read: a table, a tree, and a few lines around them. rich is loaded on first use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from . import bdf
from .select import Choice, Selection
from .topology import Level, Topology

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from .predict import Prediction

MAX_ROWS = 256
WIDTH_WITHOUT_TERMINAL = 160
WIDTH_OF_REASONS = 110
_STYLE_BY_VERDICT = {"good": "green", "tie": "yellow", "hidden": "dim"}
_WORD_BY_VERDICT = {
    "good": "good",
    "tie": "undecided",
    "hidden": "hidden",
    "differs": "DIFFERS",
    "all_rails": "ALL RAILS",
    "short": "SHORT",
    "tcp": "TCP",
    "no_rail": "NO RAIL",
}


def console(file: TextIO | None = None) -> Console:
    """Colours on a terminal only; a fixed width elsewhere, so that nothing is cut off."""
    from rich.console import Console

    stream = file if file is not None else sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, color_system=None, width=WIDTH_WITHOUT_TERMINAL)


def print_selection(selection: Selection, out: Console, *, with_tree: bool = True) -> None:
    """Differences first, then the table, the tree, host memory and notes."""
    _print_head(selection, out)
    _print_differences(selection, out)
    if selection.choices:
        _print_table(selection, out)
    if with_tree and selection.box.pci:
        out.print(_tree(selection))
    _print_host_memory(selection, out)
    for note in (*selection.notes, *selection.box.gaps):
        out.print(f"note: {note}", markup=False)


def _print_head(selection: Selection, out: Console) -> None:
    box = selection.box
    kinds = {"cuda": "GPUs", "neuron": "Neuron devices"}
    counts: dict[str, int] = {}
    for choice in selection.choices:
        counts[choice.kind] = counts.get(choice.kind, 0) + 1
    devices = ", ".join(f"{count} {kinds[kind]}" for kind, count in counts.items())
    used = {rail.pci_address for choice in selection.choices for rail in choice.rails}
    name = box.instance_type or "unknown instance type"
    out.print(
        f"{name}: {devices or 'no accelerator'}, {len(box.nics)} RDMA NICs, "
        f"{len(used)} of them used as rails",
        style="bold",
        markup=False,
    )


def _print_differences(selection: Selection, out: Console) -> None:
    """One line per kind of trouble, with the devices that have it."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for choice in selection.choices:
        if not choice.is_good:
            key = (choice.verdict, choice.words)
            grouped.setdefault(key, []).append(bdf.short(choice.pci_address))
    for (verdict, words), addresses in grouped.items():
        shown = ", ".join(addresses[:8]) + (", ..." if len(addresses) > 8 else "")
        word = _WORD_BY_VERDICT.get(verdict, verdict)
        out.print(f"{word}: {words}", style="bold red", markup=False)
        out.print(f"    devices {shown}", markup=False)


def _rails_text(rails: list[str], total: int) -> str:
    if not rails:
        return "-"
    if len(rails) == total and total > 4:
        return f"all {total}"
    return " ".join(rails[:8]) + (" ..." if len(rails) > 8 else "")


def _print_table(selection: Selection, out: Console) -> None:
    from rich import box as borders
    from rich.table import Table

    total = len(selection.box.nics)
    reasons = _shared_reasons(selection.choices)
    is_wide = out.width >= WIDTH_OF_REASONS
    table = Table(box=borders.SIMPLE_HEAD, pad_edge=False)
    for name in ("device", "PCI", "NUMA"):
        table.add_column(name, no_wrap=True)
    for name in ("rails to use", "NIXL takes"):
        table.add_column(name, min_width=10)
    table.add_column("verdict", no_wrap=True)
    if is_wide:
        table.add_column("why")
    for choice in sorted(selection.choices, key=_by_number)[:MAX_ROWS]:
        number = choice.process_index if choice.process_index >= 0 else "-"
        nixl = _rails_text([rail.name for rail in choice.nixl_rails], total)
        row = [
            f"{choice.kind} {number}",
            bdf.short(choice.pci_address),
            str(choice.numa_node) if choice.numa_node >= 0 else "?",
            _rails_text([rail.name for rail in choice.rails], total),
            "same" if choice.verdict == "good" else nixl,
            _WORD_BY_VERDICT.get(choice.verdict, choice.verdict),
        ]
        if is_wide:
            row.append(reasons.get(choice.reason, choice.reason))
        table.add_row(*row, style=_STYLE_BY_VERDICT.get(choice.verdict, "red"))
    out.print(table)
    if len(selection.choices) > MAX_ROWS:
        rest = len(selection.choices) - MAX_ROWS
        out.print(f"... and {rest} more; --json lists them all")


def _by_number(choice: Choice) -> tuple[bool, int, str]:
    return choice.process_index < 0, choice.process_index, choice.pci_address


def _shared_reasons(choices: list[Choice]) -> dict[str, str]:
    """The table's name stands in the head already: keep what differs from row to row."""
    short = {}
    for choice in choices:
        head, _, tail = choice.reason.partition("; ")
        if head.startswith("published table of ") and tail:
            where = tail.replace("both below PCIe bridge 0000:", "same switch ")
            short[choice.reason] = f"table, {head.rsplit(', ', 1)[-1]}; {where}"
    return short


def _tree(selection: Selection) -> Tree:
    """Roots, switches, devices and NICs; bridges that lead to one thing only are left out."""
    from rich.tree import Tree

    topology = Topology(selection.box)
    shown = {choice.pci_address for choice in selection.choices}
    shown.update(nic.pci_address for nic in selection.box.nics)
    leaves = [device.address for device in selection.box.pci if device.address in shown]
    below: dict[str, int] = {}
    for address in leaves[:MAX_ROWS]:
        for name in topology.above(address):
            below[name] = below.get(name, 0) + 1
    root = Tree("machine")
    branches = {"machine": root}
    labels = _leaf_labels(selection)
    for address in leaves[:MAX_ROWS]:
        parent = root
        last = 0
        for name in reversed(topology.above(address)):
            is_step = below[name] > 1 and below[name] != last
            if name != "machine" and topology.level(name) is Level.NUMA:
                is_step = True
            last = below[name]
            if name in branches:
                parent = branches[name]
            elif is_step:
                parent = parent.add(_short_words(topology, name), style="dim")
                branches[name] = parent
        label, style = labels[address]
        parent.add(label, style=style)
    if len(leaves) > MAX_ROWS:
        root.add(f"... and {len(leaves) - MAX_ROWS} more")
    return root


def _short_words(topology: Topology, name: str) -> str:
    words = topology.bridge_words(name)
    return words.replace("PCIe bridge", "switch")


def _leaf_labels(selection: Selection) -> dict[str, tuple[str, str]]:
    labels = {}
    users: dict[str, list[str]] = {}
    for choice in selection.choices:
        for rail in choice.rails:
            number = choice.process_index if choice.process_index >= 0 else choice.index
            users.setdefault(rail.pci_address, []).append(f"{choice.kind} {number}")
        names = ", ".join(rail.name for rail in choice.rails) or "no rail"
        number = choice.process_index if choice.process_index >= 0 else choice.index
        labels[choice.pci_address] = (
            f"{choice.kind} {number}  {bdf.short(choice.pci_address)} -> {names}",
            _STYLE_BY_VERDICT.get(choice.verdict, "red"),
        )
    for nic in selection.box.nics:
        serves = ", ".join(users.get(nic.pci_address, [])) or "unused"
        state = "" if nic.state in (None, "ACTIVE") else f", {nic.state}"
        closed = ", not open to this process" if nic.openable is False else ""
        labels[nic.pci_address] = (
            f"{nic.name}  {bdf.short(nic.pci_address)}  {nic.rate_gbps:g} Gb/s{state}{closed}"
            f"  <- {serves}",
            "cyan",
        )
    return labels


def _print_host_memory(selection: Selection, out: Console) -> None:
    memory = selection.host_memory
    if memory.policy == "tcp":
        out.print(f"host memory: {memory.reason}", style="bold red", markup=False)
        return
    per_buffer = "1 rail" if memory.rails_per_buffer == 1 else f"{memory.rails_per_buffer} rails"
    out.print(f"host memory: {per_buffer} per buffer; {memory.reason}", markup=False)


def print_prediction(prediction: Prediction, out: Console) -> None:
    """Bytes, operations and times of one prompt."""
    first = prediction.ranks[0]
    out.print("")
    out.print(
        f"KV of this prompt: {prediction.bytes_total / 1e6:.1f} MB over {len(prediction.ranks)} "
        f"ranks, {first.bytes_sent / 1e6:.1f} MB each, in blocks of {prediction.block_bytes} bytes"
    )
    low, high = first.operations
    out.print(
        f"per rank: {first.num_rails} rails, {first.rate_gbps:g} Gb/s; {low} operations where "
        f"blocks are contiguous on both sides, {high} where none are"
    )
    if prediction.line_time_s is None or prediction.expected_time_s is None:
        out.print("no time can be told: a rank has no rail, or a NIC's rate is not known")
    else:
        out.print(
            f"time: {prediction.line_time_s * 1e3:.1f} ms at line rate, about "
            f"{prediction.expected_time_s * 1e3:.1f} ms expected; the busiest NIC, "
            f"{prediction.busiest_nic}, carries {prediction.busiest_nic_bytes / 1e6:.1f} MB"
        )
    nixl = prediction.nixl_line_time_s
    if nixl is not None and nixl != prediction.line_time_s:
        out.print(f"with the rails NIXL takes on its own: {nixl * 1e3:.1f} ms at line rate")
    out.print(
        f"NIXL registers {prediction.registered_buffer_bytes / 2**20:.0f} MiB of control buffers "
        "for these ranks (32 MiB per rail and process)"
    )
