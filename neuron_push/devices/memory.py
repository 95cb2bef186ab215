"""Addresses and bytes behind torch tensors, for any device."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from neuron_push.core.layout import Allocation
from neuron_push.devices.base import DeviceError, KvCache, TensorLike, tensors_of


def storage_of(tensor: TensorLike, device_id: int) -> Allocation:
    """The whole allocation behind a tensor. Raises DeviceError if there is no memory."""
    storage = tensor.untyped_storage()
    address, num_bytes = int(storage.data_ptr()), int(storage.nbytes())
    if address == 0 or num_bytes == 0:
        raise DeviceError(
            f"a KV tensor of shape {tuple(tensor.shape)} on {tensor.device.type} has no memory "
            "behind it (data_ptr is 0: a meta tensor, or device memory that is not mapped)"
        )
    return Allocation(address, num_bytes, device_id)


def allocations_of(cache: KvCache, device_id: int) -> tuple[Allocation, ...]:
    """One per distinct allocation of the cache's tensors. Raises DeviceError."""
    found = {a.address: a for a in (storage_of(t, device_id) for t in tensors_of(cache))}
    return tuple(found.values())


class DeviceReader:
    """Copies bytes of remembered allocations to the host, through torch's own copy.

    For digests (`verify_kv`): the CPU must not read device memory by its address.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._tensors: list[TensorLike] = []
        self._views: dict[int, Any] = {}

    def remember(self, cache: KvCache) -> None:
        for tensor in tensors_of(cache):
            start = int(tensor.untyped_storage().data_ptr())
            at = bisect_right(self._starts, start)
            if start and (at == 0 or self._starts[at - 1] != start):
                self._starts.insert(at, start)
                self._tensors.insert(at, tensor)

    def read(self, address: int, num_bytes: int) -> bytes:
        """Raises DeviceError if the bytes are not inside one allocation, or cannot be copied."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            raise DeviceError(f"no KV tensor lies at address {address:#x}")
        start = self._starts[at]
        try:
            view = self._views.get(start)
            if view is None:
                view = self._views[start] = _bytes_of(self._tensors[at])
            first = address - start
            if first + num_bytes > view.numel():
                raise DeviceError(
                    f"{num_bytes} bytes at {address:#x} reach past the allocation at {start:#x}"
                )
            piece: bytes = view[first : first + num_bytes].cpu().numpy().tobytes()
        except (RuntimeError, NotImplementedError) as e:
            if isinstance(e, DeviceError):
                raise
            raise DeviceError(
                f"torch cannot copy {num_bytes} bytes at {address:#x} to the host: {e}. Digests "
                "need that: set verify_kv to false on this device."
            ) from e
        return piece


def _bytes_of(tensor: Any) -> Any:
    """All of the tensor's allocation as one uint8 tensor."""
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
