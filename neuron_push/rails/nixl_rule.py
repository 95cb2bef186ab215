"""What NIXL's LIBFABRIC backend will do on its own, reimplemented.

The rule, as of NIXL 0.9 to 1.5 (`src/utils/libfabric/libfabric_topology.cpp`, groupNicsWithAccel):

1. Every visible NIC marks itself and all objects above it.
2. Each NVIDIA GPU of the host, visible or not, walks up to the first marked object and stops there.
3. Each NIC walks up to the first object at which a GPU stopped, and belongs to it.
4. There the NICs, sorted by bus and device, are dealt in consecutive shares to the GPUs in the
   order in which they came; the first ones get one more where it does not divide. Fewer NICs than
   GPUs: every GPU gets all of them.
5. A GPU in no share is not in the map, and a lookup that fails yields every NIC.

GPUs hidden from a container still take their share, because /sys shows them; NICs count only if
libfabric could open them. Neuron devices are not grouped: NIXL asks the Neuron runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import bdf
from .model import Box, Nic, nic_is_efa
from .topology import Topology


def visible_efa(box: Box) -> list[Nic]:
    """EFA NICs that libfabric will return to a process with this box's environment.

    FI_EFA_IFACE is a comma list of whole, case-sensitive device names; a value that begins with
    `all` means every NIC.
    """
    devices = box.pci_by_address()
    nics = [
        nic
        for nic in box.nics
        if nic.openable is not False and nic_is_efa(nic, devices.get(nic.pci_address))
    ]
    wanted = box.env.get("FI_EFA_IFACE", "")
    if wanted and not wanted.startswith("all"):
        names = set(wanted.split(","))
        nics = [nic for nic in nics if nic.name in names]
    return nics


def deal(nics: Sequence[str], takers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Step 4: consecutive shares of the sorted NICs; all of them to each where they are fewer."""
    ordered = sorted(nics, key=lambda address: bdf.numbers(address)[1:3])
    if len(ordered) < len(takers):
        return {taker: tuple(ordered) for taker in takers}
    share, extra = divmod(len(ordered), len(takers))
    shares = {}
    start = 0
    for position, taker in enumerate(takers):
        end = start + share + (position < extra)
        shares[taker] = tuple(ordered[start:end])
        start = end
    return shares


def group(
    topology: Topology, accelerators: Iterable[str], nics: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Steps 1 to 5: PCI addresses of GPUs (in document order) to those of their NICs.

    GPUs in no share are absent from the answer.
    """
    nic_addresses = [address for address in nics if address in topology.devices]
    marked: set[str] = set()
    for address in nic_addresses:
        marked.add(address)
        marked.update(topology.above(address))
    takers: dict[str, list[str]] = {}
    for address in accelerators:
        stop = next((name for name in topology.above(address) if name in marked), None)
        if stop is not None:
            takers.setdefault(stop, []).append(address)
    members: dict[str, list[str]] = {}
    for address in nic_addresses:
        stop = next((name for name in topology.above(address) if name in takers), None)
        if stop is not None:
            members.setdefault(stop, []).append(address)
    shares: dict[str, tuple[str, ...]] = {}
    for stop, addresses in members.items():
        shares.update(deal(addresses, takers[stop]))
    return shares


def cuda_map(box: Box, topology: Topology) -> dict[str, tuple[str, ...]]:
    """NIXL's map of the box's NVIDIA GPUs, as in its `Accelerator-PCI` lines."""
    gpus = [one.pci_address for one in box.accelerators if one.kind == "cuda"]
    return group(topology, gpus, [nic.pci_address for nic in visible_efa(box)])
