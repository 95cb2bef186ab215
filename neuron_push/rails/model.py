"""One machine as data: the box.

A box is what discovery produces and what every other part of this package reads. It is plain JSON
with a schema version, so that a machine can be captured on one host and examined on another.
Nothing private is in it: no serial numbers, no network addresses, no host name, no instance id.

PCI devices are listed in the order in which hwloc would list them, because NIXL's grouping rule
depends on it. A device's `parent` is the PCI address of the bridge above it, or the name of a host
bridge (`pci0000:44`). A host bridge's `locality` names the processor-side objects above it, near to
far, by the NUMA nodes they cover (`nodes:0`); the machine itself is left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

AcceleratorKind = Literal["cuda", "neuron"]
UNKNOWN_NUMA_NODE = -1

AMAZON_VENDOR_ID = 0x1D0F
NVIDIA_VENDOR_ID = 0x10DE
EFA_DEVICE_IDS = range(0xEFA0, 0xEFB0)
NEURON_FAMILY_BY_DEVICE_ID = {
    0x7164: "trn1",
    0x7264: "inf2",
    0x7364: "trn2",
    0x7564: "trn3",
    0x7565: "trn3",
}
# Line rate of each generation of the adapter, from the bandwidth of the types that carry it.
EFA_RATE_GBPS_BY_DEVICE_ID = {0xEFA0: 100.0, 0xEFA1: 100.0, 0xEFA2: 200.0, 0xEFA3: 400.0}


class PciDevice(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One PCI function. Bridges are devices too (class 0x0604)."""

    address: str
    parent: str
    vendor_id: int
    device_id: int
    class_id: int
    numa_node: int = UNKNOWN_NUMA_NODE
    link_gbyte_per_s: float = 0.0
    """Bytes per second of the link above the device, in 10^9; 0 where it is not told."""
    link_speed_gt_per_s: float = 0.0
    link_width: int = 0
    driver: str | None = None
    is_virtual_function: bool = False

    @property
    def is_efa(self) -> bool:
        return self.vendor_id == AMAZON_VENDOR_ID and self.device_id in EFA_DEVICE_IDS

    @property
    def accelerator_kind(self) -> AcceleratorKind | None:
        if self.vendor_id == NVIDIA_VENDOR_ID and 0x300 <= self.class_id <= 0x3FF:
            return "cuda"
        if self.vendor_id == AMAZON_VENDOR_ID and self.device_id in NEURON_FAMILY_BY_DEVICE_ID:
            return "neuron"
        return None


class HostBridge(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A root of the PCI tree, `pciDDDD:BB`, and the processor-side objects above it."""

    name: str
    locality: tuple[str, ...] = ()


class Nic(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One RDMA device, as under /sys/class/infiniband."""

    name: str
    pci_address: str
    driver: str | None = None
    rate_gbps: float = 0.0
    state: str | None = None
    """Port state such as ACTIVE or DOWN. The EFA driver says ACTIVE whatever happens."""
    openable: bool | None = None
    """Whether this process may open the device's verbs node; None where that is not known."""
    p2p: str | None = None
    """What the EFA driver offers for device memory; None where the driver does not tell."""


class Accelerator(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU or Neuron device."""

    kind: AcceleratorKind
    pci_address: str
    index: int = -1
    """Index on the host (nvidia-smi's, or N of /dev/neuronN); -1 where it is not known."""
    visible: bool | None = None
    """Whether this process may use it; None where that is not known."""
    attached_nic: str | None = None
    """PCI address that nrt_get_attached_efa_bdf answered, where somebody asked."""


class Library(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A shared library that NIXL's plugin needs, and what became of the search for it."""

    name: str
    found: bool
    path: str | None = None
    error: str | None = None
    versions: tuple[str, ...] = ()
    """Symbol versions it defines (of libfabric: FABRIC_1.0 and up)."""


class Plugin(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One copy of NIXL's LIBFABRIC plugin."""

    distribution: str
    version: str
    needed: tuple[str, ...] = ()
    needed_versions: tuple[str, ...] = ()
    """Symbol versions wanted, as `library:VERSION`."""
    load_error: str | None = None
    loads: bool | None = None


class Host(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the doctor wants to know about a machine beside its PCI tree. None is 'not known'."""

    kernel: str | None = None
    container: str | None = None
    nixl_versions: dict[str, str] = {}
    plugins: tuple[Plugin, ...] = ()
    libraries: tuple[Library, ...] = ()
    libfabric_version: str | None = None
    libfabric_copies: tuple[str, ...] = ()
    libfabric_providers: tuple[str, ...] | None = None
    verbs_abi: str | None = None
    efa_verbs_abi: str | None = None
    modules: tuple[str, ...] | None = None
    efa_driver_version: str | None = None
    device_nodes: tuple[str, ...] | None = None
    memlock_bytes: int | None = None
    """Soft RLIMIT_MEMLOCK in bytes; -1 is unlimited."""
    open_files: int | None = None
    page_bytes: int | None = None
    hugepages_total: int | None = None
    hugepages_free: int | None = None
    memory_bytes: int | None = None
    kernel_arguments: tuple[str, ...] | None = None
    iommu_groups: int | None = None
    clock_synchronised: bool | None = None
    has_attached_efa_call: bool | None = None
    """Whether libnrt has nrt_get_attached_efa_bdf; None where there is no libnrt to ask."""


class Box(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One machine."""

    schema_version: int
    source: str
    """How this box came about: sysfs, hwloc, or words of whoever made it."""
    instance_type: str | None = None
    host_bridges: tuple[HostBridge, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    nics: tuple[Nic, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    num_numa_nodes: int = 0
    env: dict[str, str] = {}
    host: Host = msgspec.field(default_factory=Host)
    gaps: tuple[str, ...] = ()
    """What could not be read, one sentence each."""

    def pci_by_address(self) -> dict[str, PciDevice]:
        return {device.address: device for device in self.pci}

    def nic_by_address(self) -> dict[str, Nic]:
        return {nic.pci_address: nic for nic in self.nics}


def nic_is_efa(nic: Nic, device: PciDevice | None) -> bool:
    """By driver or PCI id, never by name: names change between boots."""
    if device is not None and device.vendor_id:
        return device.is_efa
    return nic.driver == "efa"
