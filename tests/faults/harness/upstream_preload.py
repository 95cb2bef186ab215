"""Imported once, by the process that all engines of vLLM's connector are forked from.

Importing vLLM takes ten seconds of a core and starts no thread; a fork of it takes none.
"""

from __future__ import annotations

from importlib import import_module

from neuron_push.bench.geometry import GEOMETRIES
from neuron_push.bench.simulated import EngineSpec, prepare_process

prepare_process(EngineSpec("", "kv_producer", "vllm-push", GEOMETRIES["smollm2"], 0, ""))

for module in (
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "vllm.engine.arg_utils",
    "vllm.v1.request",
    "tests.faults.harness.upstream_child",
):
    import_module(module)
