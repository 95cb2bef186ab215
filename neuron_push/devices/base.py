"""DeviceBackend: what the connector needs to know of the memory that holds the KV cache.

A backend is found through the entry-point group ``neuron_push.devices``; a third party can add
one. It turns a KV tensor into regions (:mod:`neuron_push.core.layout`), tells NIXL which kind
of memory that is, and says when work submitted to the device has become visible to the NIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, Protocol

from neuron_push.core.commands import Marker
from neuron_push.core.layout import Allocation, Region


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


class TensorLike(Protocol):
    """The part of torch.Tensor that backends read; torch itself is not imported."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...


class DeviceBackend(Protocol):
    """One kind of memory."""

    name: str
    memory_type: Literal["DRAM", "VRAM"]
    buffer_device: str
    """What vLLM calls this memory in ``kv_buffer_device``."""

    def accepts(self, device_type: str) -> bool:
        """Whether KV tensors on this torch device type are this backend's."""

    def prepare(self) -> None:
        """Once per worker process, before the model runs and before any NIXL agent exists."""

    def regions(self, tensor: TensorLike, facts: CacheFacts) -> tuple[Region, ...]:
        """Where the layer's keys and values lie. Raises DeviceError."""

    def allocation(self, tensor: TensorLike) -> Allocation:
        """The whole allocation behind a tensor, to register with NIXL. Raises DeviceError."""

    def marker(self) -> Marker:
        """A mark behind everything submitted to the device so far."""

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        """The bytes there, for digests."""


def find_backend(device_type: str, wanted: str = "auto") -> DeviceBackend:
    """The backend for KV tensors on ``device_type``. Raises DeviceError with what there is."""
    known: list[str] = []
    for entry in entry_points(group="neuron_push.devices"):
        known.append(entry.name)
        if wanted not in ("auto", entry.name):
            continue
        backend: DeviceBackend = entry.load()()
        if backend.accepts(device_type):
            return backend
        if wanted == entry.name:
            raise DeviceError(
                f"device {wanted!r} does not take KV tensors on torch device {device_type!r}; "
                "leave the option `device` at 'auto'"
            )
    if wanted != "auto" and wanted not in known:
        raise DeviceError(f"device: value {wanted!r} is not allowed: one of {['auto', *known]}")
    raise DeviceError(
        f"no device backend takes KV tensors on torch device {device_type!r}; installed: "
        f"{known}. Install the backend's package, which registers it under the entry-point "
        "group neuron_push.devices."
    )
