"""neuronx-distributed's idea of who holds which KV heads, where a model runner is built on it.

Read only if the library is loaded and its groups exist; nothing of it is imported here. Function
names follow ``neuronx_distributed.parallel_layers.parallel_state``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from neuron_push.devices.base import DeviceError

MODULE = "neuronx_distributed.parallel_layers.parallel_state"


def check_ranks(
    tp_rank: int, tp_size: int, modules: Mapping[str, ModuleType] = sys.modules
) -> None:
    """Raises DeviceError where the library's tensor-parallel numbers are not vLLM's."""
    state = _state(modules)
    if state is None:
        return
    theirs = (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_size())
    if tuple(map(int, theirs)) != (tp_rank, tp_size):
        raise DeviceError(
            f"neuronx-distributed runs this process as tensor-parallel rank {theirs[0]} of "
            f"{theirs[1]}, vLLM as rank {tp_rank} of {tp_size}: KV heads would be given to the "
            "wrong ranks. Start both with the same tensor-parallel size and rank order"
        )


def replicated_head(
    tp_rank: int,
    tp_size: int,
    total_heads: int,
    modules: Mapping[str, ModuleType] = sys.modules,
) -> int | None:
    """Which KV head this rank holds where several ranks hold the same one.

    None where every rank has heads of its own, or the library does not say: vLLM then gives
    neighbouring ranks the same head. neuronx-distributed may group ranks at a distance instead.
    Raises DeviceError where its groups do not fit the number of heads.
    """
    state = _state(modules)
    if state is None or total_heads >= tp_size:
        return None
    groups = _shared_groups(state)
    if groups is None:
        return None
    # Groups count all ranks of the world; ours are those of our own tensor-parallel group.
    ours = [
        sorted({rank % tp_size for rank in group})
        for group in groups
        if len({rank // tp_size for rank in group}) == 1
    ]
    distinct = sorted({tuple(group) for group in ours})
    if len(distinct) != total_heads or sorted(r for g in distinct for r in g) != [*range(tp_size)]:
        raise DeviceError(
            f"neuronx-distributed shares KV heads in the groups {groups}, which do not give each "
            f"of {tp_size} ranks one of {total_heads} KV heads: set kv_shared_group_size to "
            f"{tp_size // total_heads}"
        )
    return next(head for head, group in enumerate(distinct) if tp_rank in group)


def _state(modules: Mapping[str, ModuleType]) -> Any:
    state: Any = modules.get(MODULE)
    return state if state is not None and state.model_parallel_is_initialized() else None


def _shared_groups(state: Any) -> list[list[int]] | None:
    try:
        groups = state.get_kv_shared_group(as_list=True)
    except (AttributeError, AssertionError):  # older, or no such groups were made
        return None
    return [list(map(int, group)) for group in groups]
