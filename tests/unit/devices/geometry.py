"""KV caches in the layouts of Trainium and of GPUs, as torch tensors over host memory.

The GPU layouts from vLLM 0.28 on are made by vLLM's own code; the shapes before that, and
vllm-neuron's, are written down here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from neuron_push_gpu.device import CudaDevice

from neuron_push import vllm_compat as compat
from neuron_push.core.layout import KvLayout
from neuron_push.devices.neuron import NeuronDevice
from tests.unit.devices.fakes import FakeTensor

HEADS, TOKENS, DIM = 3, 8, 16
Entry = Callable[[int, int, int, int, int], Any]
"""(layer, 0 for K and 1 for V, block, head, token) -> the vector there, by torch's indexing."""


@dataclass
class Cache:
    """One engine's KV: what the connector is given, and where each vector is."""

    device: Any
    layers: dict[str, Any]
    entry: Entry
    storage: list[Any]

    def layout(self, num_blocks: int, monkeypatch: Any = None) -> KvLayout:
        """Through the adapter's own make_layout."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
        )
        group = SimpleNamespace(layer_names=list(self.layers), kv_cache_spec=spec)
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=num_blocks)
        return compat.make_layout(one_rank(), cache, self.layers, self.device)  # type: ignore[arg-type]

    def fill(self) -> None:
        for storage in self.storage:
            storage.view(torch.int16).random_(1, 2**15 - 1)


def one_rank() -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        additional_config={},
    )


class HostNeuron(NeuronDevice):
    memory_type = "DRAM"  # the fake's memory


class HostCuda(CudaDevice):
    memory_type = "DRAM"


def neuron(num_layers: int, num_blocks: int) -> Cache:
    """vllm-neuron: (2, blocks, heads, tokens, dim), one allocation a layer."""
    made = [
        torch.zeros(2, num_blocks, HEADS, TOKENS, DIM, dtype=torch.bfloat16)
        for _ in range(num_layers)
    ]
    layers = {f"layers.{n}.self_attn": FakeTensor(t, "neuron") for n, t in enumerate(made)}
    return Cache(HostNeuron(), layers, lambda n, p, b, h, t: made[n][p, b, h, t], made)


def nxdi(num_layers: int, num_blocks: int) -> Cache:
    """neuronx-distributed-inference: a key and a value tensor, and a spare block."""
    made = [
        torch.zeros(num_blocks + 1, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
        for _ in range(2 * num_layers)
    ]
    layers = {
        f"layers.{n}.self_attn": [FakeTensor(t, "neuron") for t in made[2 * n : 2 * n + 2]]
        for n in range(num_layers)
    }
    return Cache(HostNeuron(), layers, lambda n, p, b, h, t: made[2 * n + p][b, t, h], made)


def cuda_apart(two_first: bool, heads_outside: bool) -> Callable[[int, int], Cache]:
    """Before 0.28: (2, B, N, H, D) or (B, 2, N, H, D), in memory as it says or heads outside."""

    def make(num_layers: int, num_blocks: int) -> Cache:
        outer = (2, num_blocks) if two_first else (num_blocks, 2)
        inner = (HEADS, TOKENS) if heads_outside else (TOKENS, HEADS)
        made = [torch.zeros(*outer, *inner, DIM, dtype=torch.bfloat16) for _ in range(num_layers)]
        shown = [t.transpose(2, 3) if heads_outside else t for t in made]

        def entry(layer: int, part: int, block: int, head: int, token: int) -> Any:
            where = (part, block) if two_first else (block, part)
            return shown[layer][(*where, token, head)]

        return Cache(HostCuda(), named(shown), entry, made)

    return make


def cuda(layout_name: str) -> Callable[[int, int], Cache]:
    """From 0.28 on: every layer shows (B, H, N, K+V); the name tells how the bytes lie."""

    def make(num_layers: int, num_blocks: int) -> Cache:
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            compute_layout_strides,
            create_kv_cache_views,
        )
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
        )
        layout = KVCacheLayout[layout_name]
        strides = compute_layout_strides(spec, num_blocks, num_layers, layout)
        raw = torch.zeros(num_layers * num_blocks * spec.page_size_bytes, dtype=torch.int8)
        tensor = SimpleNamespace(
            layers=range(num_layers), layer_stride=strides[0], block_stride=strides[1], offset=0
        )
        views = create_kv_cache_views(raw, spec, num_blocks, layout, tensor)  # type: ignore[arg-type]

        def entry(layer: int, part: int, block: int, head: int, token: int) -> Any:
            return views[layer][block, head, token, part * DIM : (part + 1) * DIM]

        return Cache(HostCuda(), named(views), entry, [raw])

    return make


def named(tensors: list[Any]) -> dict[str, Any]:
    return {
        f"model.layers.{n}.self_attn.attn": FakeTensor(t, "cuda") for n, t in enumerate(tensors)
    }


NEURON = {"vllm-neuron": neuron, "neuronx-distributed-inference": nxdi}
CUDA = {
    "split NHD": cuda_apart(True, False),
    "split HND": cuda_apart(True, True),
    "blocks first NHD": cuda_apart(False, False),
    "blocks first HND": cuda_apart(False, True),
    **{name: cuda(name) for name in ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")},
}
