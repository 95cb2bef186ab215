"""A third party's device backend, as small as one can be: an accelerator called "abacus" whose
memory the host can address. Installed by an entry point of the group ``neuron_push.devices``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from neuron_push.core.layout import Allocation, Region
from neuron_push.core.shop import read_host_memory
from neuron_push.devices.base import CacheFacts, KvCache, KvCaches, Locality, all_tensors
from neuron_push.devices.checks import Check, Description, described, run_in_order
from neuron_push.devices.memory import allocations_of
from neuron_push.devices.strides import attention_regions


class AbacusMark:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.ended.wait(timeout_s)


class AbacusDevice:
    name = "abacus"
    memory_type: Literal["DRAM", "VRAM"] = "DRAM"
    torch_types: tuple[str, ...] = ("abacus-v1",)
    buffer_device = "cpu"
    nixl_backends: tuple[str, ...] = ("UCX",)
    consumer_can_recompute = True

    def __init__(self) -> None:
        self.marks: list[AbacusMark] = []

    def accepts(self, device_type: str) -> bool:
        return device_type in self.torch_types

    def prepare(self) -> None: ...

    def preflight(self, caches: KvCaches | None = None) -> tuple[Check, ...]:
        def beads() -> Check:
            for layer, tensor in all_tensors(caches or {}):
                if tensor.data_ptr() == 0:
                    return Check("beads", "failed", f"{layer} has no beads", "buy some")
            return Check("beads", "ok", "all beads are there")

        return run_in_order([("beads", beads)])

    def environment(self, caches: KvCaches | None = None) -> dict[str, str]:
        return {"ABACUS_ROWS": "10"}

    def regions(self, cache: KvCache, facts: CacheFacts) -> tuple[Region, ...]:
        return attention_regions(cache, facts, 0)

    def allocations(self, cache: KvCache) -> tuple[Allocation, ...]:
        return allocations_of(cache, 0)

    def element_type(self, torch_name: str) -> str:
        return torch_name

    def locality(self, region: Region) -> Locality:
        return Locality(None, None, (), "an abacus stands on a table")

    def confirm(self, memory_types: Sequence[str], metadata: bytes) -> tuple[Check, ...]:
        good = self.memory_type in memory_types
        return (Check("table", "ok" if good else "failed", "table looked at", "use a table"),)

    def marker(self) -> AbacusMark:
        self.marks.append(AbacusMark())
        return self.marks[-1]

    def read_memory(self, address: int, num_bytes: int) -> bytes:
        return read_host_memory(address, num_bytes)

    def explain(self, symptom: str) -> str | None:
        return None

    def describe(self) -> Description:
        return described(self.name, self.preflight(), "an abacus is at hand")
