"""The catalog of instance types, one JSON file each, read only when it is asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from .errors import RailsError
from .model import AcceleratorKind, Box, PciDevice

CATALOG_DIRECTORY = Path(__file__).parent / "catalog"
FAMILY_VARIABLE = "VLLM_NEURON_EFA_INSTANCE_FAMILY"


class CatalogAccelerators(msgspec.Struct, forbid_unknown_fields=True):
    kind: AcceleratorKind
    model: str
    count: int
    memory_bytes: int
    pci_id: str
    logical_cores: int = 1
    """Ranks of tensor parallelism that one device carries by default."""
    physical_cores: int = 1


class CatalogNics(msgspec.Struct, forbid_unknown_fields=True):
    count: int
    pci_id: str
    rate_gbps: float
    rdma_write: bool | None
    """Whether the NIC writes remote memory by itself; None where nobody published it."""


class CatalogPair(msgspec.Struct, forbid_unknown_fields=True):
    """One row of the map. Addresses are PCI addresses; `accelerator` is None if not published."""

    index: int
    nics: tuple[str, ...]
    accelerator: str | None = None
    numa_node: int = -1


class InstanceType(msgspec.Struct, forbid_unknown_fields=True):
    """What is published about one instance type."""

    schema_version: int
    instance_type: str
    product_names: tuple[str, ...]
    """DMI product names; one ending in `*` is a prefix."""
    families: tuple[str, ...]
    accelerators: CatalogAccelerators
    nics: CatalogNics
    numa_nodes: int
    pairing: Literal["published", "computed", "tie", "none"]
    """How sure the map is: published; computed from a topology; tie (the near NICs are known, the
    pairing is not); none (no map)."""
    rails_per_accelerator: float
    map: tuple[CatalogPair, ...]
    notes: tuple[str, ...]
    sources: dict[str, str]

    def pair_by_accelerator(self) -> dict[str, CatalogPair]:
        return {pair.accelerator: pair for pair in self.map if pair.accelerator is not None}

    def pair_by_index(self) -> dict[int, CatalogPair]:
        return {pair.index: pair for pair in self.map}


@cache
def names() -> tuple[str, ...]:
    """Every instance type of the catalog."""
    return tuple(sorted(path.stem for path in CATALOG_DIRECTORY.glob("*.json")))


@cache
def load(name: str) -> InstanceType:
    """One entry of the catalog. RailsError if there is none of that name."""
    path = CATALOG_DIRECTORY / f"{name}.json"
    if name not in names():
        raise RailsError(
            f"instance type {name!r} is not in the catalog; known are {', '.join(names())}"
        )
    return msgspec.json.decode(path.read_bytes(), type=InstanceType)


def find(box: Box) -> InstanceType | None:
    """The catalog's entry for a box: by product name, else by its set of PCI addresses."""
    family = box.env.get(FAMILY_VARIABLE)
    by_product: InstanceType | None = None
    if box.instance_type in names():
        by_product = load(box.instance_type)
    if by_product is not None and (family is None or family in by_product.families):
        return by_product
    if not box.instance_type and not box.accelerators:
        return None
    entries = [load(name) for name in names()]
    if family is not None:
        for entry in entries:
            if family in entry.families:
                return entry
    if by_product is not None:
        return by_product
    if box.instance_type:
        return _by_product_name(entries, box.instance_type)
    return _by_addresses(entries, box)


def _by_product_name(entries: list[InstanceType], product: str) -> InstanceType | None:
    best: tuple[int, InstanceType] | None = None
    for entry in entries:
        for name in entry.product_names:
            matches = product.startswith(name[:-1]) if name.endswith("*") else product == name
            if matches and (best is None or len(name) > best[0]):
                best = len(name), entry
    return best[1] if best is not None else None


def _by_addresses(entries: list[InstanceType], box: Box) -> InstanceType | None:
    """A type whose accelerators are exactly this box's, by address and PCI id."""
    devices = box.pci_by_address()
    own = {one.pci_address for one in box.accelerators}
    own_ids = {_pci_id(devices[address]) for address in own if address in devices}
    nic_ids = {_pci_id(one) for one in devices.values() if one.is_efa}
    for entry in entries:
        published = {pair.accelerator for pair in entry.map}
        if (
            published == own
            and own_ids == {entry.accelerators.pci_id}
            and nic_ids <= {entry.nics.pci_id}
        ):
            return entry
    return None


def _pci_id(device: PciDevice) -> str:
    return f"{device.vendor_id:04x}:{device.device_id:04x}"


def complete(box: Box) -> Box:
    """Fill in what follows from the catalog: the instance type, and Neuron device indices."""
    entry = find(box)
    if entry is None:
        return box
    if box.instance_type is None:
        box.instance_type = entry.instance_type
    by_accelerator = entry.pair_by_accelerator()
    for one in box.accelerators:
        pair = by_accelerator.get(one.pci_address)
        if one.kind == "neuron" and one.index < 0 and pair is not None:
            one.index = pair.index
    return box
