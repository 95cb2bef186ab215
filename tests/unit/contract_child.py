"""The connector against one vLLM, in a process of its own: see test_contract.py.

    python contract_child.py [FOLDER]

FOLDER holds a package ``vllm`` to be used instead of the installed one. Two engines are made
with vLLM's own factory, and driven through the hooks as its scheduler calls them and through its
own model runner mixin; only the forward is ours, and the configuration a stand-in. Prints one
line, or a traceback.
"""

from __future__ import annotations

import inspect
import os
import pickle
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
os.environ.setdefault("UCX_NET_DEVICES", "lo")

import torch
import vllm
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, supports_hma
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from neuron_push import vllm_compat

KNOWS_FAILED = hasattr(base, "KVConnectorTransferResults")
NUM_BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 16, 2, 4, 8, 3


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ------------------------------------------------------------------ signatures


def check_signatures(ours: type) -> int:
    """Every call that the base class's hooks accept, ours accept too."""
    assert not inspect.isabstract(ours), ours.__abstractmethods__
    num_hooks = 0
    for owner in (base.KVConnectorBase_V1, base.SupportsHMA):
        for name, theirs in inspect.getmembers(owner, inspect.isroutine):
            mine = getattr(ours, name)
            if name.startswith("_") or getattr(mine, "__func__", mine) is theirs:
                continue
            num_hooks += 1
            wanted = [
                p for p in inspect.signature(theirs).parameters.values()
                if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]  # fmt: skip
            signature = inspect.signature(mine)
            required = [p.name for p in wanted if p.default is p.empty]
            signature.bind(*wanted)
            signature.bind(*required)
            if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                signature.bind(**{p.name: p for p in wanted})
    return num_hooks


# ------------------------------------------------------------------ one engine


def spec(kind: type = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16, **more)


def cache_config(*specs: Any) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layers.{g}.{i}" for i in range(LAYERS)], one)
        for g, one in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(name: str, role: str, port: int, **extra: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="NeuronPushConnector",
        kv_connector_module_path="neuron_push.connector",
        kv_role=role,
        engine_id=name,
        kv_connector_extra_config={
            "side_channel_port": port, "verify_kv": True, "handshake_timeout_s": 1, **extra,
        },
    )  # fmt: skip
    model = SimpleNamespace(
        model="/models/test", revision=None, dtype=torch.bfloat16,
        hf_config=SimpleNamespace(to_dict=lambda: {"architectures": ["Test"]}),
        get_total_num_kv_heads=lambda: HEADS,
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
    )  # fmt: skip


class Engine:
    """Both halves of one engine, and the part of vLLM's scheduler that calls them."""

    def __init__(self, name: str, role: str) -> None:
        self.port = free_port()
        config, cache = engine_config(name, role, self.port), cache_config(spec())
        make = KVConnectorFactory.create_connector
        # The worker's half first, as vLLM does.
        self.worker: Any = make(config, base.KVConnectorRole.WORKER, cache)
        self.caches = {
            f"layers.0.{i}": torch.zeros(NUM_BLOCKS, HEADS, TOKENS, 2 * SIZE, dtype=torch.bfloat16)
            for i in range(LAYERS)
        }
        self.worker.register_kv_caches(self.caches)
        self.scheduler: Any = make(config, base.KVConnectorRole.SCHEDULER, cache)
        for hook in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
            if hasattr(self.scheduler, hook):
                getattr(self.scheduler, hook)(SimpleNamespace(block_pool=None))
        assert self.worker.get_handshake_metadata() is None
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.invalid: set[int] = set()
        self.stats: list[Any] = []

    def arrive(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def allocate(self, request: Request, ids: list[int], num_local: int = 0) -> int:
        """As the waiting loop does; returns how many tokens come from elsewhere."""
        num, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local)
        assert is_async == (num > 0)
        blocks = KVCacheBlocks(([KVCacheBlock(block_id=i) for i in ids],))
        self.scheduler.update_state_after_alloc(request, blocks, num)
        return int(num)

    def step(self, output: SchedulerOutput | None = None, forward: Any = None) -> None:
        """schedule, execute_model with the mixin of this vLLM, update_from_output."""
        output = output or SchedulerOutput.make_empty()
        meta = self.scheduler.build_connector_meta(output)
        output.kv_connector_metadata = pickle.loads(pickle.dumps(meta))  # to the worker process
        mixin.get_kv_transfer_group = lambda: self.worker
        mixin.get_forward_context = lambda: None
        runner = mixin.KVConnectorModelRunnerMixin
        options: dict[str, Any] = {}
        if (
            forward is None
            and "wait_for_save" in inspect.signature(runner._get_kv_connector_output).parameters
        ):
            options["wait_for_save"] = False  # what kv_connector_no_forward passes
        if "has_sync_kv_loads" in vars(type(output)) or hasattr(output, "has_sync_kv_loads"):
            # Newer runners; on vllm-neuron (0.24) nothing calls this.
            self.worker.handle_preemptions(output.kv_connector_metadata)
        with runner._get_kv_connector_output(output, **options) as result:
            if forward is not None:
                self.worker.wait_for_layer_load("layers.0.0")
                forward()
                self.worker.save_kv_layer("layers.0.0", self.caches["layers.0.0"], None)
        self._update(result)

    def _update(self, result: KVConnectorOutput) -> None:
        self.scheduler.update_connector_output(result)
        self.sent += result.finished_sending or ()
        self.received += result.finished_recving or ()
        self.failed += getattr(result, "failed_recving", None) or ()
        self.invalid |= result.invalid_block_ids or set()
        if result.kv_connector_stats is not None:
            self.stats.append(result.kv_connector_stats)

    def until(self, condition: Any, timeout_s: float = 20) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, "not in time"
            self.scheduler.has_pending_push_work()
            self.step()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def request(request_id: str, num_tokens: int, params: dict[str, Any], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(range(num_tokens)), sampling, None)


def begin(made: Request, num: int, ids: list[int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(made, (ids,))]
    output.num_scheduled_tokens = {made.request_id: num}
    output.total_num_scheduled_tokens = num
    made.num_computed_tokens = num
    return output


def go_on(made: Request, num: int, ids: list[int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    cached = output.scheduled_cached_reqs
    cached.req_ids = [made.request_id]
    cached.new_block_ids = [(ids,)]
    cached.num_computed_tokens = [made.num_computed_tokens]
    output.num_scheduled_tokens = {made.request_id: num}
    output.total_num_scheduled_tokens = num
    made.num_computed_tokens += num
    return output


# ------------------------------------------------------------------ what is checked


def check_transfer(producer: Engine, consumer: Engine) -> None:
    """11 tokens in two chunks, progressively, into other blocks; byte for byte."""
    address = {"remote_host": "127.0.0.1", "remote_port": producer.port, "remote_engine_id": "p"}
    prefill = request("cmpl-x-0-aaaaaaaa", 11, {"do_remote_decode": True, "transfer_id": "t"}, 1)
    decode = request(
        "cmpl-x-0-bbbbbbbb", 11, {"do_remote_prefill": True, "transfer_id": "t", **address}, 8
    )
    consumer.arrive(decode)
    producer.arrive(prefill)
    assert producer.allocate(prefill, [3, 4]) == 0
    assert consumer.allocate(decode, [9, 7, 8]) == 10
    consumer.step()

    def write(*ids: int) -> Any:
        def forward() -> None:
            for cache in producer.caches.values():
                for block in ids:
                    cache[block] = torch.randn(HEADS, TOKENS, 2 * SIZE)

        return forward

    producer.step(begin(prefill, 8, [3, 4]), write(3, 4))
    consumer.step()
    producer.step(go_on(prefill, 3, [5]), write(5))
    prefill.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held, params = producer.scheduler.request_finished_all_groups(prefill, ([3, 4, 5],))
    assert held
    assert params["remote_port"] == producer.port
    assert producer.scheduler.has_pending_push_work()
    consumer.until(lambda: consumer.received)
    producer.until(lambda: producer.sent)
    assert consumer.received == [decode.request_id]
    assert producer.sent == [prefill.request_id]
    for layer, cache in producer.caches.items():
        got = consumer.caches[layer]
        for source, target in ((3, 9), (4, 7), (5, 8)):
            assert torch.equal(cache[source].view(torch.int16), got[target].view(torch.int16))
    assert not consumer.failed
    assert not consumer.invalid
    # Promoted: nothing more is loaded, and nothing is reported a second time.
    assert consumer.scheduler.get_num_new_matched_tokens(decode, 0) == (0, False)
    for engine in (producer, consumer):
        for _ in range(5):
            engine.step()
    decode.status = RequestStatus.FINISHED_STOPPED
    assert consumer.scheduler.request_finished_all_groups(decode, ([9, 7, 8],)) == (False, None)
    assert (producer.sent, consumer.received) == ([prefill.request_id], [decode.request_id])
    (stats,) = consumer.stats
    assert stats.reduce()["Received"] == 1
    assert stats.data["verified"] == 1


def check_failure(consumer: Engine) -> None:
    """Nobody answers: told by the blocks that nobody filled."""
    params = {
        "do_remote_prefill": True, "transfer_id": "u", "remote_host": "127.0.0.1",
        "remote_port": free_port(), "remote_engine_id": "nobody",
    }  # fmt: skip
    for number, bad in enumerate((params, {**params, "remote_host": 7})):
        consumer.received.clear()
        lost = request(f"cmpl-{number}-0-cccccccc", 11, bad, 8)
        consumer.arrive(lost)
        assert consumer.allocate(lost, [1, 2, 3]) == 10
        consumer.until(lambda: consumer.received)
        assert consumer.received == [lost.request_id]
        assert consumer.invalid == {1, 2, 3}
        assert not consumer.failed
        consumer.invalid.clear()
        lost.status = RequestStatus.FINISHED_ERROR
        assert consumer.scheduler.request_finished_all_groups(lost, ([1, 2, 3],)) == (False, None)


class Broken:
    """A scheduler half in which everything is a fault of ours, but for the way out."""

    def __init__(self) -> None:
        self.on_fault_calls: list[tuple[Any, ...]] = []

    def on_fault(self, *arguments: Any) -> None:
        self.on_fault_calls.append(arguments)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"fault in {name}")


def check_faults(engine: Engine) -> None:
    """No fault of ours ends vLLM's scheduler: each hook has an answer to go on with."""
    half, broken = engine.scheduler, Broken()
    whole, half._scheduler = half._scheduler, broken
    made = request("cmpl-f-0-dddddddd", 11, {"do_remote_prefill": True}, 8)
    made.status = RequestStatus.FINISHED_STOPPED
    assert half.on_new_request(made) is None
    assert half.get_num_new_matched_tokens(made, 0) == (0, False)
    half.update_state_after_alloc(made, KVCacheBlocks(([KVCacheBlock(block_id=1)],)), 4)
    assert [(call[0], call[2]) for call in broken.on_fault_calls] == [(made.request_id, 4)]
    meta = half.build_connector_meta(SchedulerOutput.make_empty())
    assert isinstance(pickle.loads(pickle.dumps(meta)), base.KVConnectorMetadata)
    half.update_connector_output(KVConnectorOutput(finished_recving={made.request_id}))
    assert half.request_finished_all_groups(made, ([1],)) == (False, None)
    assert half.request_finished(made, [1]) == (False, None)
    assert half.has_pending_push_work() is False
    half._scheduler = whole


def check_groups() -> None:
    """Where no failure can be told, a consumer with several groups does not start."""
    several = cache_config(spec(), spec(SlidingWindowSpec, sliding_window=8))
    for role in ("kv_producer", "kv_consumer"):
        refused = ""
        try:
            made: Any = KVConnectorFactory.create_connector(
                engine_config(f"several-{role}", role, free_port()),
                base.KVConnectorRole.SCHEDULER,
                several,
            )
            made.shutdown()
        except vllm_compat.UnsupportedError as e:
            refused = str(e)
        assert bool(refused) == (role == "kv_consumer" and not KNOWS_FAILED)
        assert not refused or "several KV cache groups (2 here)" in refused


def main() -> None:
    vllm_compat.own_rank = lambda: (0, 0)  # no process group in here
    ours: Any = KVConnectorFactory.get_connector_class(
        engine_config("p", "kv_both", 1).kv_transfer_config
    )
    assert supports_hma(ours)
    num_hooks = check_signatures(ours)
    assert ours.build_kv_connector_stats().is_empty()
    check_groups()
    producer, consumer = Engine("p", "kv_producer"), Engine("d", "kv_consumer")
    try:
        check_transfer(producer, consumer)
        check_failure(consumer)
        check_faults(consumer)
    finally:
        producer.close()
        consumer.close()
    print(f"contract kept with vLLM {vllm.__version__}: {num_hooks} hooks")


if __name__ == "__main__":
    main()
