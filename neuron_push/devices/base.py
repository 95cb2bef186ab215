"""DeviceBackend: what the connector needs to know of the memory that holds the KV cache.

A backend is found through the entry-point group ``neuron_push.devices``; a third party can add
one (tests/unit/devices/sample_backend.py is a small example, and tests/unit/devices/conformance.py
what it must pass). It turns a KV tensor into regions (:mod:`neuron_push.core.layout`), tells NIXL
which kind of memory that is, checks the machine before a NIXL agent exists, and says when work
submitted to the device has become visible to the NIC.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol

from neuron_push.core.commands import Marker
from neuron_push.core.layout import Allocation, Region
from neuron_push.devices.checks import Check, Description

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "neuron_push.devices"


class DeviceError(RuntimeError):
    """This memory, or this machine, cannot be used. The text says why and how to mend it."""


@dataclass(frozen=True)
class CacheFacts:
    """What vLLM's KV cache spec says of one layer, in plain numbers.

    interior: how one block's bytes are arranged beyond the tensor's strides: ``"plain"`` as
        the strides say; ``"cpu"``: vLLM's CPU attention keeps, per head, all keys of the block
        and then all values, whatever the last dimension's view suggests.
    kind: ``"attention"`` (keys and values), ``"latent"`` (MLA: one vector per token), or
        ``"opaque"``: a block is moved whole or not at all.
    """

    layer: str
    group: int
    num_blocks: int
    tokens_per_block: int
    num_heads: int
    head_first: int
    key_bytes: int
    value_bytes: int
    interior: Literal["plain", "cpu"] = "plain"
    kind: Literal["attention", "latent", "opaque"] = "attention"


@dataclass(frozen=True)
class Locality:
    """Where a region lies in the machine.

    pci_address: of the accelerator, as ``0000:cc:00.0``; None for host memory or where unknown.
    numa_node: the accelerator's; None where unknown.
    rails: names of the NICs that should carry this memory, preferred first; empty where the
        choice is left to NIXL.
    reason: one sentence: who said so, or why nothing is known.
    """

    pci_address: str | None
    numa_node: int | None
    rails: tuple[str, ...]
    reason: str


class TorchDevice(Protocol):
    @property
    def type(self) -> str: ...


class TensorLike(Protocol):
    """The part of torch.Tensor that backends read; torch itself is not imported."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> TorchDevice: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def get_device(self) -> int: ...
    def untyped_storage(self) -> Any: ...


KvCache = TensorLike | Sequence[TensorLike]
"""One layer's cache as vLLM hands it over: a tensor, or the key and the value tensor apart."""

KvCaches = Mapping[str, KvCache]


class DeviceBackend(Protocol):
    """One kind of memory. The class is called without arguments; making one touches nothing."""

    name: str
    memory_type: Literal["DRAM", "VRAM"]
    """What NIXL calls this memory."""
    torch_types: tuple[str, ...]
    """Torch device types whose KV tensors are this backend's."""
    buffer_device: str
    """What vLLM calls this memory in ``kv_buffer_device``."""
    nixl_backends: tuple[str, ...]
    """NIXL backends that can register this memory, preferred first."""
    consumer_can_recompute: bool
    """Whether an engine that only decodes can compute a prompt itself when a load fails."""

    def accepts(self, device_type: str) -> bool:
        """Whether KV tensors on this torch device type are this backend's.

        Raises DeviceError where they would be, but cannot be used; the text says why.
        """

    def prepare(self) -> None:
        """Once per worker process, before its first kernel and before any NIXL agent exists."""

    def preflight(self, caches: KvCaches | None = None) -> tuple[Check, ...]:
        """Look at the machine, and at the engine's KV tensors where there are any.

        In a fixed order, in which each check relies on those before it. Before any NIXL agent
        exists: NIXL and libfabric decide once per process what memory they can register, and
        degrade without an error. Without `caches` what needs a tensor is skipped. Never raises.
        """

    def environment(self, caches: KvCaches | None = None) -> dict[str, str]:
        """Variables this process, or a child that will hold such memory, needs before NIXL
        starts. Never one that is set already. After :meth:`preflight`.
        """

    def regions(self, cache: KvCache, facts: CacheFacts) -> tuple[Region, ...]:
        """Where the layer's keys and values lie. Raises DeviceError: no address, or strides that
        are not understood.
        """

    def allocations(self, cache: KvCache) -> tuple[Allocation, ...]:
        """The whole allocations behind a cache, to register with NIXL once each.

        Raises DeviceError.
        """

    def element_type(self, torch_name: str) -> str:
        """Name of the numbers in the cache, equal on two devices only where they mean the same.

        torch_name: such as ``"bfloat16"``.
        """

    def locality(self, region: Region) -> Locality:
        """Where the region lies and which NICs are near. Never raises."""

    def confirm(self, memory_types: Sequence[str], metadata: bytes) -> tuple[Check, ...]:
        """Checks that are possible only once the agent exists and the memory is registered.

        memory_types: what the NIXL backend says it can register, such as ``["DRAM", "VRAM"]``.
        metadata: the agent's, which tells the rails of each registration. Never raises.
        """

    def marker(self) -> Marker:
        """A mark behind everything submitted to the device so far.

        Called on the engine's thread: takes microseconds, waits for nothing.
        """

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        """The bytes there, for digests; inside one registered allocation. Raises DeviceError."""

    def explain(self, symptom: str) -> str | None:
        """What an error text or a log line means on this device and how to mend it, if known."""

    def describe(self) -> Description:
        """What this backend says of this machine, for people. Never raises."""


def tensors_of(cache: KvCache) -> tuple[TensorLike, ...]:
    """The tensors of one layer: one, or key and value."""
    return tuple(cache) if isinstance(cache, Sequence) else (cache,)


def all_tensors(caches: KvCaches) -> Iterator[tuple[str, TensorLike]]:
    """(layer, tensor) of every tensor, in the caches' order."""
    for layer, cache in caches.items():
        for tensor in tensors_of(cache):
            yield layer, tensor


def installed_backends() -> list[EntryPoint]:
    """Entry points in a fixed order: ours first, so that a stranger does not shadow them."""
    found = entry_points(group=ENTRY_POINT_GROUP)
    return sorted(found, key=lambda e: (not e.module.startswith("neuron_push"), e.name))


def find_backend(device_type: str, wanted: str = "auto") -> DeviceBackend:
    """The backend for KV tensors on ``device_type``. Raises DeviceError with what there is."""
    known: list[str] = []
    refusals: list[str] = []
    for entry in installed_backends():
        known.append(entry.name)
        if wanted not in ("auto", entry.name):
            continue
        try:
            backend: DeviceBackend = entry.load()()
        except Exception as e:  # a stranger's package
            refusals.append(f"device backend {entry.name!r} ({entry.value}) does not load: {e!r}")
            continue
        try:
            if backend.accepts(device_type):
                for sentence in refusals:  # ours is used; a stranger's package is broken
                    logger.warning("%s", sentence)
                return backend
        except DeviceError as e:
            refusals.append(str(e))
            continue
        if wanted == entry.name:
            raise DeviceError(
                f"device {wanted!r} does not take KV tensors on torch device {device_type!r}; "
                "leave the option `device` at 'auto'"
            )
    if wanted != "auto" and wanted not in known:
        raise DeviceError(f"device: value {wanted!r} is not allowed: one of {['auto', *known]}")
    if refusals:
        raise DeviceError("; ".join(refusals))
    raise DeviceError(
        f"no device backend takes KV tensors on torch device {device_type!r}; installed: "
        f"{known}. Install the backend's package, which registers it under the entry-point "
        f"group {ENTRY_POINT_GROUP}."
    )
