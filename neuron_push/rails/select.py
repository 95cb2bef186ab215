"""Which rails an accelerator should use, what NIXL will use, and whether they are the same."""

from __future__ import annotations

import msgspec

from . import instances, nixl_rule
from .dram import HostMemoryRails, predict_host_memory
from .instances import InstanceType
from .model import Accelerator, Box
from .policy import Chosen, choose
from .topology import Topology
from .visibility import process_view

GOOD_VERDICTS = frozenset({"good", "tie", "hidden"})


class Rail(msgspec.Struct):
    """A NIC that an accelerator should use, and why."""

    pci_address: str
    name: str
    reason: str


class NixlRail(msgspec.Struct):
    """A NIC that NIXL will use on its own."""

    pci_address: str
    name: str


class Choice(msgspec.Struct):
    """One accelerator. `verdict` is one of good, tie, hidden, differs, all_rails, short, tcp,
    no_rail, unknown; `words` says it in a sentence."""

    kind: str
    pci_address: str
    numa_node: int
    index: int
    process_index: int
    """Number of the device in this process; -1 if the process does not see it."""
    rails: list[Rail]
    candidates: list[str]
    """PCI addresses among which the choice is undecided; empty if it is decided."""
    source: str
    reason: str
    nixl_rails: list[NixlRail]
    nixl_reason: str
    verdict: str
    words: str

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD_VERDICTS

    def acceptable(self) -> frozenset[str]:
        """NIC addresses that may carry this device's memory."""
        return frozenset(self.candidates or [rail.pci_address for rail in self.rails])


class Selection(msgspec.Struct):
    """Everything that `rails show` tells about a box."""

    box: Box
    entry: InstanceType | None
    choices: list[Choice]
    host_memory: HostMemoryRails
    notes: list[str]

    @property
    def is_good(self) -> bool:
        """False also for a machine without a device whose host memory would go by TCP."""
        if not self.choices and self.host_memory.policy == "tcp":
            return False
        return all(choice.is_good for choice in self.choices)

    def of_process_device(self, number: int) -> Choice | None:
        """The choice for device N as this process counts, None if it sees no such device."""
        return next((one for one in self.choices if one.process_index == number), None)

    def of_address(self, pci_address: str) -> Choice | None:
        """The choice for a PCI address, None if it is no accelerator of the box."""
        return next((one for one in self.choices if one.pci_address == pci_address), None)


def select(box: Box) -> Selection:
    """Choose rails for every accelerator of a box, and compare with what NIXL will do."""
    topology = Topology(box)
    entry = instances.find(box)
    view = process_view(box, entry)
    chosen = choose(box, topology, entry, [one.pci_address for one in view.devices])
    comparison = _Comparison(box, topology, entry, chosen)
    numbers = {one.pci_address: number for number, one in enumerate(view.devices)}
    return Selection(
        box=box,
        entry=entry,
        choices=[comparison.of(one, numbers.get(one.pci_address, -1)) for one in box.accelerators],
        host_memory=predict_host_memory(box, topology),
        notes=view.notes,
    )


class _Comparison:
    """What all accelerators of a box share while they are compared."""

    def __init__(
        self,
        box: Box,
        topology: Topology,
        entry: InstanceType | None,
        chosen: dict[str, Chosen],
    ) -> None:
        self._topology = topology
        self._entry = entry
        self._chosen = chosen
        self._names = {nic.pci_address: nic.name for nic in box.nics}
        self._efa = tuple(nic.pci_address for nic in nixl_rule.visible_efa(box))
        self._cuda_map = nixl_rule.cuda_map(box, topology)
        self._has_attached_efa_call = box.host.has_attached_efa_call

    def of(self, accelerator: Accelerator, process_index: int) -> Choice:
        address = accelerator.pci_address
        chosen = self._chosen[address]
        if accelerator.kind == "neuron":
            nixl, nixl_reason = self._neuron(accelerator, chosen)
        else:
            nixl, nixl_reason = self._cuda(address)
        if process_index < 0:
            verdict, words = "hidden", "not visible to this process"
        else:
            verdict, words = self._verdict(chosen, nixl)
        return Choice(
            kind=accelerator.kind,
            pci_address=address,
            numa_node=self._topology.numa_node(address),
            index=accelerator.index,
            process_index=process_index,
            rails=[Rail(nic, self._names.get(nic, "?"), chosen.reason) for nic in chosen.nics],
            candidates=list(chosen.candidates),
            source=chosen.source,
            reason=chosen.reason,
            nixl_rails=[NixlRail(nic, self._names.get(nic, "?")) for nic in nixl or ()],
            nixl_reason=nixl_reason,
            verdict=verdict,
            words=words,
        )

    def _cuda(self, address: str) -> tuple[tuple[str, ...], str]:
        if not self._efa:
            return (), "no EFA device is visible, so NIXL falls back to TCP"
        share = self._cuda_map.get(address)
        if share is not None:
            return share, "NIXL's grouping by nearest common ancestor"
        return self._efa, "the GPU is in no share of NIXL's map, so NIXL uses every NIC"

    def _neuron(
        self, accelerator: Accelerator, chosen: Chosen
    ) -> tuple[tuple[str, ...] | None, str]:
        """None for the rails where only the runtime knows."""
        if not self._efa:
            return (), "no EFA device is visible, so NIXL falls back to TCP"
        if self._has_attached_efa_call is False:
            return self._efa, (
                "libnrt lacks nrt_get_attached_efa_bdf (Neuron SDK before 2.29), "
                "so NIXL uses every NIC"
            )
        attached = accelerator.attached_nic
        if attached is None:
            if chosen.candidates or not (chosen.nics or chosen.missing):
                return None, "NIXL asks the Neuron runtime; the answer cannot be told from here"
            attached = (chosen.nics or chosen.missing)[0]
        if attached in self._efa:
            return (attached,), "NIXL asks the Neuron runtime, which names the attached NIC"
        return self._efa, (
            f"the attached NIC {attached} is hidden from this process, so NIXL uses every NIC"
        )

    def _verdict(self, chosen: Chosen, nixl: tuple[str, ...] | None) -> tuple[str, str]:
        if not chosen.nics:
            return "no_rail", chosen.reason
        if nixl is not None and not nixl:
            return "tcp", (
                "NIXL's LIBFABRIC backend sees no EFA device and would fall back to TCP silently"
            )
        if nixl is None:
            return "tie", "undecided between equally near NICs; the Neuron runtime knows"
        is_candidate = len(nixl) == 1 and nixl[0] in chosen.candidates
        if set(nixl) != set(chosen.nics) and not is_candidate:
            return self._difference(chosen, nixl)
        if chosen.missing:
            return "short", f"{', '.join(chosen.missing)} of the published table is not near here"
        if self._entry is not None and len(chosen.nics) < self._entry.rails_per_accelerator:
            wanted = f"{self._entry.instance_type} has {self._entry.rails_per_accelerator:g}"
            return "short", f"{len(chosen.nics)} rails where {wanted}"
        return "good", "NIXL chooses the same"

    def _difference(self, chosen: Chosen, nixl: tuple[str, ...]) -> tuple[str, str]:
        if set(nixl) == set(self._efa) and len(nixl) > len(chosen.nics):
            return "all_rails", f"NIXL would use all {len(nixl)} NICs instead of {len(chosen.nics)}"
        if set(nixl) < set(chosen.nics):
            return "differs", f"NIXL would use only {len(nixl)} of {len(chosen.nics)} rails"
        return "differs", "NIXL would use other NICs"
