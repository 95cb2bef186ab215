"""An engine without a model: vLLM's connector hooks in vLLM's order, a pause for the forward.

The connector classes, their configuration, the requests and the KV memory are real; so is NIXL.
One thread plays both the engine core and its worker, as vLLM's single-process executor does.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from neuron_push.bench.geometry import BLOCK_TOKENS, Geometry

_HOST = "127.0.0.1"
_MAP_NORESERVE = 0x4000
"""Linux; the mmap module does not name it."""


@dataclass(frozen=True)
class EngineSpec:
    """mode: push, vllm-push or vllm-pull; role: kv_producer or kv_consumer."""

    name: str
    role: str
    mode: str
    geometry: Geometry
    port: int
    model_dir: str
    """A checkpoint folder without weights, the same for both engines, and ours to write into."""
    backend: str = "UCX"
    step_s: float = 0.04
    chunk_tokens: int = 512
    busy_step_s: float = 0.0
    """A decode step of requests that are none of ours; 0: the engine has nothing else."""
    lazy_memory: bool = False
    """Address space only: for pools larger than this machine's memory."""


@dataclass
class SimRequest:
    request: Any
    blocks: list[int]
    num_tokens: int
    computed: int = 0
    given: int = 0
    is_known: bool = False


@dataclass
class Timings:
    """Microseconds the caller spent in hooks, one entry a step that computed something.

    By the clock, and by the thread's CPU time: the difference is what other threads, ours among
    them, held the caller up.
    """

    worker_us: list[float] = field(default_factory=list)
    worker_cpu_us: list[float] = field(default_factory=list)
    scheduler_us: list[float] = field(default_factory=list)
    scheduler_cpu_us: list[float] = field(default_factory=list)


def prepare_process(spec: EngineSpec) -> None:
    """Before vLLM is imported."""
    os.environ.update(
        VLLM_NIXL_SIDE_CHANNEL_HOST=_HOST,
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(spec.port),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        UCX_TLS="tcp,self",
        VLLM_LOGGING_LEVEL="ERROR",
        NIXL_LOG_LEVEL="ERROR",
    )


class SimEngine:
    """One engine; every method belongs to the process's main thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._running: dict[str, SimRequest] = {}  # prefills under way
        self._waiting: dict[str, SimRequest] = {}  # loads under way
        self._held: dict[str, SimRequest] = {}  # finished, blocks not yet free
        self._finished: set[str] = set()
        self.timings = Timings()
        self.stats: dict[str, float] = defaultdict(float)
        self._make_config()
        self._make_connectors()

    # ------------------------------------------------------------ construction

    def _make_config(self) -> None:
        import torch
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )

        spec, geometry = self.spec, self.spec.geometry
        self.config = EngineArgs(
            model=spec.model_dir,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            max_model_len=16_384,
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(**self._transfer_config()),
        ).create_engine_config()
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self._cores = os.sched_getaffinity(0)
        with set_current_vllm_config(self.config):
            init_distributed_environment(
                1, 0, f"file://{spec.model_dir}/{spec.name}", local_rank=0, backend="gloo"
            )
            initialize_model_parallel(1, 1)
        names = [f"model.layers.{i}.self_attn.attn" for i in range(geometry.num_layers)]
        self.memory = _memory(geometry.pool_bytes, spec.lazy_memory)
        pool = torch.frombuffer(self.memory, dtype=torch.bfloat16)
        shape = (
            geometry.num_layers, geometry.num_blocks, geometry.kv_heads, BLOCK_TOKENS,
            2 * geometry.head_size,
        )  # fmt: skip
        self.address = pool.data_ptr()
        self.tensors = dict(zip(names, pool.view(*shape), strict=True))
        attention = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=geometry.kv_heads,
            head_size=geometry.head_size,
            dtype=torch.bfloat16,
        )
        self.cache = KVCacheConfig(
            num_blocks=geometry.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, attention)],
        )

    def _transfer_config(self) -> dict[str, Any]:
        spec = self.spec
        config: dict[str, Any] = {"engine_id": spec.name, "kv_role": spec.role}
        if spec.mode == "push":
            config |= {
                "kv_connector": "NeuronPushConnector",
                "kv_connector_module_path": "neuron_push.connector",
                "kv_connector_extra_config": {
                    "side_channel_host": _HOST,
                    "side_channel_port": spec.port,
                    "backends": [spec.backend],
                },
            }
            return config
        names = {"vllm-push": "NixlPushConnector", "vllm-pull": "NixlConnector"}
        config |= {
            "kv_connector": names[spec.mode],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"backends": [spec.backend]},
        }
        return config

    def _make_connectors(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        def make(role: KVConnectorRole) -> Any:
            return KVConnectorFactory.create_connector(self.config, role, self.cache)

        with set_current_vllm_config(self.config):
            self.worker = make(KVConnectorRole.WORKER)
            # vLLM's NIXL workers tie the calling thread to the machine's last core.
            os.sched_setaffinity(0, self._cores)
            self.worker.register_kv_caches(self.tensors)
            self.scheduler = make(KVConnectorRole.SCHEDULER)
            metadata = self.worker.get_handshake_metadata()
            if metadata is not None:
                self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    # ------------------------------------------------------------ requests

    def add(
        self, request_id: str, num_tokens: int, blocks: list[int], params: dict[str, Any]
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=request_id,
            prompt_token_ids=[1 + i % 30_000 for i in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
        )
        one = SimRequest(request, blocks, num_tokens)
        self._timed_scheduler(lambda: self.scheduler.on_new_request(request))
        target = self._running if params.get("do_remote_decode") else self._waiting
        target[request_id] = one

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._held)

    def _timed_scheduler(self, call: Any) -> Any:
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        answer = call()
        self._scheduler_cpu_s += time.thread_time() - started_cpu_s
        self._scheduler_s += time.perf_counter() - started_s
        return answer

    _scheduler_s = _scheduler_cpu_s = 0.0

    # ------------------------------------------------------------ one step

    def step(self) -> list[tuple[Any, ...]]:
        """Schedule, compute, report, as EngineCore does; returns what happened, with times."""
        events: list[tuple[Any, ...]] = []
        output, done = self._schedule()
        meta = self._timed_scheduler(lambda: self.scheduler.build_connector_meta(output))
        computes = output.total_num_scheduled_tokens > 0 or self.spec.busy_step_s > 0
        worker, clock = self.worker, time.perf_counter
        t0, cpu0 = clock(), time.thread_time()
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        t1, cpu1 = clock(), time.thread_time()
        if computes:
            time.sleep(self.spec.busy_step_s or self.spec.step_s)
        forward_end_s = time.monotonic()
        t2, cpu2 = clock(), time.thread_time()
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        worker.get_block_ids_with_load_errors()
        stats = worker.get_kv_connector_stats()
        worker.clear_connector_metadata()
        t3, cpu3 = clock(), time.thread_time()
        if computes:
            self.timings.worker_us.append((t1 - t0 + t3 - t2) * 1e6)
            self.timings.worker_cpu_us.append((cpu1 - cpu0 + cpu3 - cpu2) * 1e6)
        self._keep(stats)
        events += [("forward_end", request_id, forward_end_s) for request_id in done]
        for request_id in done:
            events.append(("finished", request_id, self._finish_prefill(request_id)))
        self._report(results, events)
        if computes:
            self.timings.scheduler_us.append(self._scheduler_s * 1e6)
            self.timings.scheduler_cpu_us.append(self._scheduler_cpu_s * 1e6)
        self._scheduler_s = self._scheduler_cpu_s = 0.0
        if not computes and self.has_requests:
            time.sleep(0.001)  # as EngineCore does
        return events

    def _schedule(self) -> tuple[Any, list[str]]:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self._admit_loads()
        cached = CachedRequestData.make_empty()
        new, scheduled, done = [], {}, []
        budget = self.spec.chunk_tokens
        for request_id, one in self._running.items():
            count = min(budget, one.num_tokens - one.computed)
            if count <= 0:
                continue
            budget -= count
            end = -(-(one.computed + count) // BLOCK_TOKENS)
            blocks = one.blocks[one.given : end]
            if not one.is_known:
                one.is_known = True
                self._timed_scheduler(lambda one=one: self._allocate_prefill(one))
                new.append(NewRequestData.from_request(one.request, (blocks,)))
            else:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append((blocks,))
                cached.num_computed_tokens.append(one.computed)
                cached.num_output_tokens.append(0)
            one.given = end
            one.computed += count
            scheduled[request_id] = count
            if one.computed == one.num_tokens:
                done.append(request_id)
        busy = 1 if self.spec.busy_step_s else 0
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()) + busy,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self._finished,
            free_encoder_mm_hashes=[],
        )
        self._finished = set()
        return output, done

    def _allocate_prefill(self, one: SimRequest) -> None:
        self.scheduler.get_num_new_matched_tokens(one.request, 0)
        self.scheduler.update_state_after_alloc(one.request, _blocks(one.blocks), 0)

    def _admit_loads(self) -> None:
        for one in self._waiting.values():
            if one.is_known:
                continue
            one.is_known = True
            blocks = _blocks(one.blocks)

            def admit(one: SimRequest = one, blocks: Any = blocks) -> None:
                count, _ = self.scheduler.get_num_new_matched_tokens(one.request, 0)
                self.scheduler.update_state_after_alloc(one.request, blocks, count)

            self._timed_scheduler(admit)

    def _finish_prefill(self, request_id: str) -> dict[str, Any] | None:
        from vllm.v1.request import RequestStatus

        one = self._running.pop(request_id)
        one.request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        one.request.num_computed_tokens = one.num_tokens
        self._finished.add(request_id)
        held, params = self._timed_scheduler(
            lambda: self.scheduler.request_finished_all_groups(one.request, (one.blocks,))
        )
        if held:
            self._held[request_id] = one
        answer: dict[str, Any] | None = params
        return answer

    def _report(self, results: Any, events: list[tuple[Any, ...]]) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        sent, received = results.finished_sending or (), results.finished_recving or ()
        failed = set(results.failed_recving or ())
        if sent or received:
            out = KVConnectorOutput(
                finished_sending=set(sent) or None, finished_recving=set(received) or None
            )
            self._timed_scheduler(lambda: self.scheduler.update_connector_output(out))
        now_s = time.monotonic()
        for request_id in sent:
            self._held.pop(request_id, None)
            events.append(("sent", request_id, now_s))
        for request_id in received:
            one = self._waiting.pop(request_id)
            kind = "failed" if request_id in failed else "runnable"
            events.append((kind, request_id, now_s))
            self._end_load(one)

    def _end_load(self, one: SimRequest) -> None:
        """D's request is over as soon as it can run."""
        from vllm.v1.request import RequestStatus

        one.request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._finished.add(one.request.request_id)
        self.scheduler.request_finished_all_groups(one.request, (one.blocks,))

    def _keep(self, stats: Any) -> None:
        """Descriptors and bytes that left (push) or came (pull)."""
        if stats is None:
            return
        data = stats.data
        for name, keys in (
            ("descriptors", ("sent_descriptors", "num_descriptors")),
            ("bytes", ("sent_bytes", "bytes_transferred")),
        ):
            for key in keys:
                self.stats[name] += sum(data.get(key, ()))


def _blocks(ids: list[int]) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    return KVCacheBlocks(([KVCacheBlock(block) for block in ids],))


def _memory(num_bytes: int, lazy: bool) -> mmap.mmap:
    """Anonymous memory; lazy: never touched by us, so that only its use costs memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes, flags=flags | (_MAP_NORESERVE if lazy else 0))
    if not lazy:
        page = b"\x01" * (1 << 20)
        for at in range(0, num_bytes, len(page)):
            memory[at : at + len(page)] = page[: num_bytes - at]
    return memory
