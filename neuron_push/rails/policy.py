"""Our choice of rails, by falling certainty, each with the reason in words.

1. What nrt_get_attached_efa_bdf answered for the device.
2. The published table of the instance type, where the live PCI tree does not contradict it.
3. The nearest common PCIe bridge or host bridge; GPUs below the same one share its NICs equally.
4. The same NUMA node.
5. The machine's only NIC. Else refuse: a far NIC is no rail.

A Neuron device gets exactly one rail. Where several NICs are equally near and nothing published
tells them apart, the choice is marked as undecided and its candidates are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from . import bdf
from .instances import CatalogPair, InstanceType
from .model import Accelerator, Box, Nic, nic_is_efa
from .nixl_rule import deal, group
from .topology import Level, Topology


class Chosen(msgspec.Struct):
    """PCI addresses of the rails of one accelerator."""

    nics: tuple[str, ...]
    source: str
    """runtime, table, bridge, numa, only or none."""
    reason: str
    candidates: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """NICs that the table names and this box lacks."""


def usable_nics(box: Box) -> list[Nic]:
    """NICs that can be rails: EFA where there is any, else any RDMA NIC; open and not down."""
    devices = box.pci_by_address()
    working = [
        nic for nic in box.nics if nic.openable is not False and nic.state in (None, "ACTIVE")
    ]
    efa = [nic for nic in working if nic_is_efa(nic, devices.get(nic.pci_address))]
    return efa or working


def choose(
    box: Box, topology: Topology, entry: InstanceType | None, visible: Iterable[str]
) -> dict[str, Chosen]:
    """The choice for every accelerator of the box, by PCI address."""
    return _Policy(box, topology, entry, visible).choices()


class _Policy:
    def __init__(
        self, box: Box, topology: Topology, entry: InstanceType | None, visible: Iterable[str]
    ) -> None:
        self._box = box
        self._topology = topology
        self._entry = entry
        self._usable = [nic.pci_address for nic in usable_nics(box)]
        self._usable_set = frozenset(self._usable)
        self._visible = frozenset(visible)
        self._below = self._nics_below()
        self._rows = entry.pair_by_accelerator() if entry is not None else {}
        self._rows_by_index = entry.pair_by_index() if entry is not None else {}

    def choices(self) -> dict[str, Chosen]:
        chosen: dict[str, Chosen] = {}
        open_ones: list[Accelerator] = []
        for one in self._box.accelerators:
            decided = self._from_runtime(one) or self._from_table(one)
            if decided is not None:
                chosen[one.pci_address] = decided
            elif one.pci_address in self._visible:
                open_ones.append(one)
            else:
                chosen[one.pci_address] = Chosen((), "none", "not visible to this process")
        claimed = frozenset(nic for one in chosen.values() for nic in one.nics)
        chosen.update(self._by_nearness(open_ones, claimed))
        return self._with_ties_spread(chosen)

    def _nics_below(self) -> dict[str, list[str]]:
        """Usable NICs below every object of the tree."""
        below: dict[str, list[str]] = {}
        for address in self._usable:
            if address in self._topology.devices:
                for name in self._topology.above(address):
                    below.setdefault(name, []).append(address)
        return below

    def _nearest(self, address: str) -> tuple[str | None, list[str]]:
        """The first object above the accelerator with a NIC below it, and those NICs."""
        for name in self._topology.above(address):
            if name in self._below:
                return name, self._below[name]
        return None, []

    def _from_runtime(self, one: Accelerator) -> Chosen | None:
        if one.attached_nic is None:
            return None
        if one.attached_nic in self._usable_set:
            return Chosen((one.attached_nic,), "runtime", "the Neuron runtime says it is attached")
        return Chosen(
            (),
            "none",
            f"the Neuron runtime names {one.attached_nic}, which is missing, down or not open here",
            missing=(one.attached_nic,),
        )

    def _row(self, one: Accelerator) -> CatalogPair | None:
        row = self._rows.get(one.pci_address)
        if row is None:
            by_index = self._rows_by_index.get(one.index)
            if by_index is not None and by_index.accelerator is None:
                row = by_index
        return row if row is not None and row.nics else None

    def _from_table(self, one: Accelerator) -> Chosen | None:
        row = self._row(one)
        if row is None or self._entry is None:
            return None
        table = f"published table of {self._entry.instance_type}"
        present = tuple(nic for nic in row.nics if nic in self._usable_set)
        missing = tuple(nic for nic in row.nics if nic not in self._usable_set)
        if not present:
            if one.kind == "neuron" and missing and self._usable:
                return Chosen(
                    (),
                    "none",
                    f"{table} names {missing[0]}, which is missing, down or not open "
                    "here; another NIC does not replace it",
                    missing=missing,
                )
            return None
        stop, near = self._nearest(one.pci_address)
        level = self._topology.level(stop) if stop is not None else Level.MACHINE
        if level >= Level.HOST_BRIDGE and stop is not None:
            far = tuple(nic for nic in present if nic not in near)
            present = tuple(nic for nic in present if nic in near)
            if not present:
                return None  # the tree contradicts the table: nearness decides, the doctor tells
            where = f"both below {self._topology.bridge_words(stop)}"
            if far:
                where += f"; {', '.join(far)} is not near here, against the table"
                missing += far
        else:
            where = "no nearer NIC exists"
        if self._entry.pairing == "tie" and len(present) > 1:
            reason = (
                f"{table} names {len(present)} NICs for the group; which one is attached is not "
                "published, the Neuron runtime decides"
            )
            return Chosen(present, "table", reason, candidates=present, missing=missing)
        index = f"device {row.index}" if one.kind == "neuron" else f"GPU {row.index}"
        return Chosen(present, "table", f"{table}, {index}; {where}", missing=missing)

    def _by_nearness(
        self, accelerators: list[Accelerator], claimed: frozenset[str]
    ) -> dict[str, Chosen]:
        """`claimed` are NICs that the table gave to others: they are shared only in need."""
        gpus = [one.pci_address for one in accelerators if one.kind == "cuda"]
        free = [nic for nic in self._usable if nic not in claimed]
        shares = group(self._topology, gpus, free)
        chosen = {}
        takers_by_numa: dict[int, list[str]] = {}
        for one in accelerators:
            address = one.pci_address
            stop, near = self._nearest(address)
            level = self._topology.level(stop) if stop is not None else Level.MACHINE
            if stop is None or level < Level.HOST_BRIDGE:
                takers_by_numa.setdefault(self._topology.numa_node(address), []).append(address)
                continue
            words = f"nearest: both below {self._topology.bridge_words(stop)}"
            if one.kind == "neuron":
                chosen[address] = self._one_of(near, "bridge", words)
            else:
                share = shares.get(address, ())
                if not share or not set(share) <= set(near):
                    share = tuple(near)
                if len(share) < len(near):
                    words += f"; its equal share, {len(share)} of {len(near)} NICs there"
                chosen[address] = Chosen(share, "bridge", words)
        kinds = {one.pci_address: one.kind for one in accelerators}
        for node, addresses in takers_by_numa.items():
            chosen.update(self._by_numa(node, addresses, kinds))
        return chosen

    def _by_numa(self, node: int, takers: list[str], kinds: Mapping[str, str]) -> dict[str, Chosen]:
        local = [nic for nic in self._usable if node >= 0 and self._topology.numa_node(nic) == node]
        if not local:
            if len(self._usable) == 1:
                reason = "the machine's only NIC; no nearer one exists"
                return {taker: Chosen(tuple(self._usable), "only", reason) for taker in takers}
            return {taker: Chosen((), "none", self._refusal(node)) for taker in takers}
        words = f"no common bridge is known; same NUMA node {node}"
        shares = deal(local, takers)
        return {
            taker: self._one_of(local, "numa", words)
            if kinds[taker] == "neuron"
            else Chosen(shares[taker], "numa", words)
            for taker in takers
        }

    def _refusal(self, node: int) -> str:
        if not self._box.nics:
            return "no RDMA NIC was found"
        if not self._usable:
            return "every RDMA NIC is down or not open to this process"
        if node < 0:
            return "neither a common PCIe bridge nor the NUMA node is known, so no NIC is near"
        return f"no NIC shares a PCIe bridge or NUMA node {node} with the device"

    def _one_of(self, near: list[str], source: str, words: str) -> Chosen:
        if len(near) == 1:
            return Chosen(tuple(near), source, words)
        reason = f"{words}, equally near as {len(near) - 1} more; the Neuron runtime decides"
        return Chosen(tuple(near), source, reason, candidates=tuple(near))

    def _with_ties_spread(self, chosen: dict[str, Chosen]) -> dict[str, Chosen]:
        """Where a choice is undecided, name one candidate, evenly over the sharing devices."""
        tied: dict[tuple[str, ...], list[str]] = {}
        for address, one in chosen.items():
            if one.candidates:
                tied.setdefault(one.candidates, []).append(address)
        for candidates, addresses in tied.items():
            ordered = sorted(addresses, key=bdf.numbers)
            for position, address in enumerate(ordered):
                pick = candidates[position * len(candidates) // len(ordered)]
                if len(ordered) < len(candidates):
                    pick = candidates[position]
                chosen[address].nics = (pick,)
        return chosen
