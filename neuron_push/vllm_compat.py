"""The only file that knows differences between vLLM versions (0.24 to 0.32).

Everything newer than 0.24 is looked for, never imported at module level. Importing this file
must stay light: the API server's process does it too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from neuron_push.core.layout import Allocation, KvLayout, Region
from neuron_push.core.messages import ModelCard
from neuron_push.devices.base import (
    CacheFacts,
    DeviceBackend,
    KvCaches,
    all_tensors,
    find_backend,
)
from neuron_push.devices.neuron_parallel import check_ranks, replicated_head
from neuron_push.layer_names import canonical_names
from neuron_push.scheduler import GroupFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "SupportsHMA",
]

# 0.30 on: a failed load can be reported before its blocks may be freed.
TransferResults: type | None = getattr(_base, "KVConnectorTransferResults", None)


class UnsupportedError(ValueError):
    """This engine's configuration cannot be served. The text says what, and what would do."""


def adopt_logging() -> None:
    """Our log lines go where vLLM's go, in its format and at its level."""
    ours, theirs = logging.getLogger("neuron_push"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def data_parallel_rank(config: VllmConfig) -> int:
    """Which of several engines in one deployment this is; each has a side channel of its own."""
    parallel = config.parallel_config
    # vllm-neuron resets data_parallel_rank to 0 for dense models and keeps the index.
    index = getattr(parallel, "data_parallel_index", None)
    return int(index if index is not None else parallel.data_parallel_rank or 0)


def parallel_sizes(config: VllmConfig) -> tuple[int, int]:
    """(tensor-parallel, pipeline-parallel). Raises UnsupportedError for context parallelism."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1) or 1
        if size > 1:
            raise UnsupportedError(
                f"{name} is {size}: neuron_push does not move KV that is split along the context "
                "(and vllm-neuron allows that with its own NeuronNixlConnector only); "
                f"start with {name} 1"
            )
    return int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)


def own_rank() -> tuple[int, int]:
    """(tensor-parallel rank, pipeline-parallel rank) of this worker process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()), int(get_pp_group().rank_in_group)


def model_card(config: VllmConfig) -> ModelCard:
    """What must be equal for KV of one engine to make sense in another.

    Two models of one shape and different weights have equal configurations: the last part of
    the model's name and its revision stand for the weights.
    """
    model = config.model_config
    hf = model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {}
    volatile = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
    kept = {key: value for key, value in hf.items() if key not in volatile}
    blob = json.dumps(kept, sort_keys=True, default=str).encode()
    name = str(model.model)
    fingerprint = {
        "model": os.path.basename(name.rstrip("/")),
        "revision": str(getattr(model, "revision", None) or "default"),
        "architectures": ",".join(hf.get("architectures") or ()),
        "model configuration": hashlib.blake2b(blob, digest_size=8).hexdigest(),
        "dtype": _short(model.dtype),
        "KV cache dtype": str(config.cache_config.cache_dtype),
    }
    return ModelCard(name, fingerprint)


def group_facts(cache: KVCacheConfig) -> list[GroupFacts]:
    """The engine's KV cache groups. Raises UnsupportedError for what cannot be pushed."""
    facts = []
    for index, group in enumerate(cache.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            raise UnsupportedError(
                f"KV cache group {index} ({group.layer_names[0]}, ...) is not transferable on its "
                "own: this model's cache needs more than neuron_push moves"
            )
        spec = group.kv_cache_spec
        facts.append(GroupFacts(int(spec.block_size), _is_whole(spec)))
    return facts


def can_load(cache: KVCacheConfig, kv_role: str) -> bool:
    """Whether a load that fails can be told to vLLM.

    Raises UnsupportedError where it cannot, and loading is what this engine is for.
    """
    if TransferResults is not None or len(cache.kv_cache_groups) == 1:
        return True
    if kv_role != "kv_producer":
        raise UnsupportedError(
            f"vLLM {vllm_version()} cannot be told that a load failed where the model has several "
            f"KV cache groups ({len(cache.kv_cache_groups)} here), and would answer from blocks "
            "that nobody filled: start it as kv_producer, with "
            "--disable-hybrid-kv-cache-manager, or on vLLM 0.30 or later"
        )
    return False


def find_device(config: VllmConfig, caches: KvCaches, wanted: str) -> DeviceBackend:
    """The device backend of this worker's KV tensors. Raises UnsupportedError or DeviceError."""
    first = next((tensor for _, tensor in all_tensors(caches)), None)
    if first is None or not hasattr(first, "untyped_storage"):
        raise UnsupportedError(
            "this model's KV cache is not one tensor a layer (recurrent state?): neuron_push "
            "moves attention KV only"
        )
    device = find_backend(first.device.type, wanted)
    transfer = config.kv_transfer_config
    policy = str(getattr(transfer, "kv_load_failure_policy", "fail"))
    is_consumer = transfer is not None and transfer.kv_role == "kv_consumer"
    if is_consumer and policy == "recompute" and not device.consumer_can_recompute:
        raise UnsupportedError(
            f"kv_load_failure_policy is 'recompute', but an engine that only decodes on "
            f"{device.name} has no prefill graphs: set it to 'fail', so that the router tries "
            "elsewhere, or start the engine as kv_both"
        )
    return device


def make_layout(
    config: VllmConfig, cache: KVCacheConfig, caches: KvCaches, device: DeviceBackend
) -> KvLayout:
    """This rank's KV memory.

    Raises UnsupportedError, DeviceError, LayerNameError or LayoutError with a sentence.
    """
    tp_rank, pp_rank = own_rank()
    tp_size, _ = parallel_sizes(config)
    check_ranks(tp_rank, tp_size)
    total_heads = int(config.model_config.get_total_num_kv_heads())
    first: Any = next(tensor for _, tensor in all_tensors(caches))
    names = canonical_names(layer for g in cache.kv_cache_groups for layer in g.layer_names)
    regions: list[Region] = []
    allocations: dict[int, Allocation] = {}
    for group_index, group in enumerate(cache.kv_cache_groups):
        for layer in group.layer_names:
            tensor = caches.get(layer)
            if tensor is None:
                continue  # encoder-only layers and layers that share another's cache
            spec = _layer_spec(group.kv_cache_spec, layer)
            facts = _cache_facts(
                names[layer], group_index, cache.num_blocks, spec, total_heads, tp_size, tp_rank,
                first.device.type,
            )  # fmt: skip
            for allocation in device.allocations(tensor):
                allocations[allocation.address] = allocation
            regions.extend(device.regions(tensor, facts))
    layout = KvLayout(
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        total_kv_heads=max([total_heads, *(r.head_first + r.num_heads for r in regions)]),
        dtype=device.element_type(_short(first.dtype)),
        memory_type=device.memory_type,
        allocations=tuple(allocations[address] for address in sorted(allocations)),
        regions=tuple(regions),
        packing=_packing(config),
    )
    layout.validate()
    return layout


def wanted_cache_layout(config: VllmConfig) -> str | None:
    """How KV should lie on a GPU so that blocks move in few, large pieces; None: no wish.

    From 0.28 on all layers of a block can be one run of memory (BLHNC). Blocks larger than the
    attention kernels' own cannot be laid out so, and a hybrid model's may be: no wish then.
    Before that heads outside tokens (HND), which is also how Trainium keeps them.
    """
    from vllm.platforms import current_platform

    if os.environ.get("VLLM_KV_CACHE_LAYOUT") or not current_platform.is_cuda():
        return None
    model = config.model_config
    if model is None or getattr(model, "is_hybrid", False):
        return None
    if importlib.util.find_spec("vllm.v1.kv_cache_layout") is None:
        return None if model.use_mla else "HND"
    return "BLHNC" if (config.cache_config.block_size or 16) <= 64 else None


def make_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """vLLM's own type for a step's results (0.30 on)."""
    if TransferResults is None:
        raise RuntimeError("this vLLM has no KVConnectorTransferResults")
    return TransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)


def succeeded(request: Any) -> bool:
    """Whether a finished producer request has computed its whole prompt."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _cache_facts(
    layer: str,
    group: int,
    num_blocks: int,
    spec: KVCacheSpec,
    total_heads: int,
    tp_size: int,
    tp_rank: int,
    device_type: str,
) -> CacheFacts:
    heads = getattr(spec, "num_kv_heads", None)
    head_size = getattr(spec, "head_size", None)
    if heads is None or head_size is None:
        raise UnsupportedError(
            f"layer {layer!r} keeps {type(spec).__name__}, not attention KV: neuron_push cannot "
            "move it"
        )
    item = spec.dtype.itemsize  # type: ignore[attr-defined]
    value_size = getattr(spec, "head_size_v", None) or head_size
    is_latent = "MLA" in type(spec).__name__
    first = 0
    if not is_latent and tp_size > 1:
        # With fewer KV heads than ranks, several ranks hold the same head.
        shared = replicated_head(tp_rank, tp_size, total_heads)
        if total_heads >= tp_size:
            first = tp_rank * heads
        else:
            first = tp_rank * total_heads // tp_size if shared is None else shared
    return CacheFacts(
        layer=layer,
        group=group,
        num_blocks=num_blocks,
        tokens_per_block=int(spec.block_size),
        num_heads=1 if is_latent else int(heads),
        head_first=first,
        key_bytes=int(head_size) * item,
        value_bytes=int(value_size) * item,
        interior="cpu" if device_type == "cpu" else "plain",
        kind="latent" if is_latent else "attention",
    )


def _packing(config: VllmConfig) -> str:
    """How bytes are arranged inside a head's block; both sides must name the same.

    vllm-neuron's ``neuron_config.fp8_packed_kv`` swizzles keys as (tokens / 2, dim, 2) without
    showing it in the tensor's shape.
    """
    additional = getattr(config, "additional_config", None) or {}
    neuron = additional.get("neuron_config") if isinstance(additional, Mapping) else None
    if isinstance(neuron, Mapping) and neuron.get("fp8_packed_kv"):
        return "neuron-fp8-packed"
    return "plain"


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A group whose layers differ carries one spec for each."""
    each = getattr(spec, "kv_cache_specs", None)
    return each[layer] if isinstance(each, dict) and layer in each else spec


def _is_whole(spec: KVCacheSpec) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    each = getattr(spec, "kv_cache_specs", None)
    if isinstance(each, dict):
        return all(_is_whole(one) for one in each.values())
    return isinstance(spec, FullAttentionSpec)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
