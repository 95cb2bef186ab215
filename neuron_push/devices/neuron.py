"""Trainium: KV memory in a Neuron device's HBM, moved by EFA (Neuron Direct RDMA).

For vllm-neuron 0.24 with vLLM 0.24 and nixl 1.3.2 and later. What is known comes from the public
sources that docs/trainium.md names; it has not run on Neuron hardware (scripts/check_trainium.sh
does that).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from neuron_push.core.commands import Marker
from neuron_push.core.layout import Allocation, Region
from neuron_push.devices import near
from neuron_push.devices.base import (
    CacheFacts,
    DeviceError,
    KvCache,
    KvCaches,
    Locality,
    TensorLike,
    tensors_of,
)
from neuron_push.devices.checks import Check, Description, described
from neuron_push.devices.memory import DeviceReader, allocations_of
from neuron_push.devices.neuron_fence import Fence, Sequences
from neuron_push.devices.neuron_preflight import TORCH_TYPES, NeuronMachine, NeuronPreflight
from neuron_push.devices.neuron_symptoms import explain
from neuron_push.devices.nrt import Nrt
from neuron_push.devices.strides import attention_regions
from neuron_push.layer_names import layer_index

logger = logging.getLogger(__name__)

_SOFTWARE = (
    "vllm-neuron",
    "libtorch-neuronx-lite",
    "torch-neuronx",
    "neuronx-distributed",
    "neuronx-distributed-inference",
    "neuronx-cc",
    "nixl",
    "vllm",
)
_PLACEHOLDERS = {
    "vllm-neuron": "0.1.0",
    "libtorch-neuronx-lite": "0.0.1",
    "torch-neuronx": "1.0",
    "neuronx-distributed": "0.1",
}
"""What the public package index holds under AWS's names: empty packages."""


class NeuronDevice:
    """KV memory on a NeuronCore, written by compiled graphs."""

    name = "neuron"
    memory_type: Literal["DRAM", "VRAM"] = "VRAM"
    torch_types: tuple[str, ...] = TORCH_TYPES
    buffer_device = "cuda"  # what vllm-neuron's platform accepts; it stands for device memory
    nixl_backends: tuple[str, ...] = ("LIBFABRIC",)  # UCX cannot register this memory
    consumer_can_recompute = False  # a pure consumer compiles no prefill graphs

    def __init__(self, machine: NeuronMachine | None = None) -> None:
        self._machine = machine or NeuronMachine(near_nic=self._near_nic)
        self._nrt: Nrt | None = None
        self._last: TensorLike | None = None
        self._fence: Fence | None = None
        self._reader = DeviceReader()

    def accepts(self, device_type: str) -> bool:
        if device_type == "xla":
            raise DeviceError(
                "KV tensors on torch device 'xla' cannot be registered: an XLA tensor is a handle "
                "whose memory moves between steps, so it has no stable address. Use vllm-neuron "
                "0.24 or newer, whose tensors are on device 'neuron'"
            )
        return device_type in self.torch_types

    def prepare(self) -> None:
        """Nothing: vllm-neuron's worker has initialised the runtime before it makes us."""

    def preflight(self, caches: KvCaches | None = None) -> tuple[Check, ...]:
        run = NeuronPreflight(self._machine, caches)
        checks = run.run()
        self._nrt = run.nrt
        if caches:
            self._last = _last_tensor(caches)
            for cache in caches.values():
                self._reader.remember(cache)
        return checks

    def environment(self, caches: KvCaches | None = None) -> dict[str, str]:
        wanted = near.environment_of(None) | {
            "NEURON_RT_MAP_HBM": "1",
            "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        }
        return {n: v for n, v in wanted.items() if n not in self._machine.environ}

    def regions(self, cache: KvCache, facts: CacheFacts) -> tuple[Region, ...]:
        """``(2, blocks, heads, tokens, dim)`` as vllm-neuron makes them, or key and value apart
        as neuronx-distributed-inference's block-wise cache keeps them.
        """
        regions = attention_regions(cache, facts, _number(cache), order="heads_first")
        if facts.kind == "attention" and any(region.part == "kv" for region in regions):
            raise DeviceError(
                f"layer {facts.layer!r}: a KV tensor of shape {tuple(tensors_of(cache)[0].shape)} "
                "is none that this release knows on Neuron; expected (2, blocks, heads, tokens, "
                f"dim) or a key and a value tensor, with {facts.num_blocks} blocks, "
                f"{facts.num_heads} heads, {facts.tokens_per_block} tokens a block"
            )
        return regions

    def allocations(self, cache: KvCache) -> tuple[Allocation, ...]:
        return allocations_of(cache, _number(cache))

    def element_type(self, torch_name: str) -> str:
        """8-bit floats end at 240 up to trn2 and at 448 from trn3 on: not the same numbers."""
        if torch_name == "float8_e4m3fn" and not self._machine.product_name().startswith("trn3"):
            return "float8_e4m3fn up to 240"
        return torch_name

    def locality(self, region: Region) -> Locality:
        nic, why = None, "the Neuron runtime was not asked"
        if self._nrt is not None:
            try:
                nic = self._nrt.attached_efa(region.base_address)
                why = f"the Neuron runtime names {nic}"
            except DeviceError as e:
                why = f"the Neuron runtime does not tell: {e}"
        return near.locality_of(None, nic, why)

    def confirm(self, memory_types: Sequence[str], metadata: bytes) -> tuple[Check, ...]:
        if "VRAM" not in memory_types:
            says = (
                f"NIXL registers {list(memory_types)} only: it found no Neuron device memory when "
                "the agent was made, and would have gone on with host memory"
            )
            mend = (
                "use the EFA installer's libfabric, put /opt/aws/neuron/lib and "
                "/opt/amazon/efa/lib into LD_LIBRARY_PATH, and see that nothing in this process "
                "starts libfabric before the runtime"
            )
            return (Check("memory_type", "failed", says, mend),)
        return (
            Check("memory_type", "ok", "NIXL registers device memory (VRAM)"),
            near.rails_taken(metadata),
        )

    def marker(self) -> Marker:
        if self._fence is None:
            if self._last is None:
                raise DeviceError("marker: preflight has not seen the engine's KV tensors yet")
            sequences = Sequences(self._nrt) if self._nrt is not None else None
            self._fence = Fence(self._read_one, sequences)
        return self._fence.mark()

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        return self._reader.read(address, num_bytes)

    def explain(self, symptom: str) -> str | None:
        return explain(symptom)

    def describe(self) -> Description:
        checks = self.preflight()
        return described(self.name, checks, "Neuron devices can be used", software_versions())

    def _read_one(self) -> None:
        """Copy the last layer's first element: it is there once the graph that wrote it is."""
        tensor: Any = self._last
        first = (0,) * (len(tensor.shape) - 1)
        tensor[(*first, slice(0, 1))].cpu()

    def _near_nic(self) -> str | None:
        return near.environment_of(None).get("FI_EFA_IFACE")


def software_versions() -> dict[str, str]:
    """Neuron software by distribution name. Nothing is imported, nothing is required."""
    found: dict[str, str] = {}
    for name in _SOFTWARE:
        try:
            text = version(name)
        except PackageNotFoundError:
            continue
        is_empty = _PLACEHOLDERS.get(name) == text
        found[name] = text + (" (an empty package of the public index)" if is_empty else "")
    for module in ("libtorch_neuronx_lite", "torch_neuronx"):
        if module in sys.modules:
            found[f"{module} (imported)"] = str(getattr(sys.modules[module], "__version__", "?"))
    return found


def _number(cache: KvCache) -> int:
    """torch's index of the core, which on vllm-neuron is the local rank; NIXL ignores it."""
    return max(0, tensors_of(cache)[0].get_device())


def _last_tensor(caches: KvCaches) -> TensorLike:
    """Of the layer with the highest index: it is written last."""
    layers = list(caches)
    last = max(range(len(layers)), key=lambda i: (layer_index(layers[i]), i))
    return tensors_of(caches[layers[last]])[-1]
