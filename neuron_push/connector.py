"""NeuronPushConnector: the class that vLLM loads.

    --kv-transfer-config '{"kv_connector": "NeuronPushConnector",
        "kv_connector_module_path": "neuron_push.connector", "kv_role": "kv_producer", ...}'

It forwards to scheduler.py in the engine's process and to worker.py in each rank; what is
decided is decided there. Importing it starts nothing and loads neither NIXL nor a device.
"""

from __future__ import annotations

import functools
import logging
import secrets
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from neuron_push import vllm_compat as compat
from neuron_push.config import PushConfig
from neuron_push.core.agent import AgentError, NixlAgent
from neuron_push.core.commands import Result, Target
from neuron_push.core.keys import load_keys
from neuron_push.core.link import link_path
from neuron_push.core.messages import WIRE_VERSION, EngineCard, Identity, RankCard
from neuron_push.core.oncepermin import OncePerMinute
from neuron_push.core.shop import Limits
from neuron_push.core.sidechannel import SideChannel
from neuron_push.core.transfer import RankSetup
from neuron_push.devices import near
from neuron_push.devices.host import request_amx_permission
from neuron_push.devices.start import confirm_device, explained, start_device
from neuron_push.fit import explain_cards, remark_on_rails
from neuron_push.metrics import PushStats, Watched, make_prom_metrics
from neuron_push.scheduler import PushScheduler, StepPlan
from neuron_push.spin import let_readers_sleep, note_step
from neuron_push.worker import NOTHING, PushWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class PushMetadata(compat.KVConnectorMetadata):
    """What the scheduler half tells the worker half for one step."""

    plan: StepPlan = field(default_factory=StepPlan)


_NO_MATCH: tuple[int | None, bool] = (0, False)
_NOT_HELD: tuple[bool, dict[str, Any] | None] = (False, None)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _survive(
    answer: Callable[[], _T],
) -> Callable[
    [Callable[Concatenate[NeuronPushConnector, _P], _T]],
    Callable[Concatenate[NeuronPushConnector, _P], _T],
]:
    """A scheduler hook whose fault must cost a request at most, not the engine.

    An exception there would end the engine: it is logged, and vLLM gets ``answer()``, with which
    it goes on as if this request had nothing to do with KV transfer.
    """

    def wrap(
        hook: Callable[Concatenate[NeuronPushConnector, _P], _T],
    ) -> Callable[Concatenate[NeuronPushConnector, _P], _T]:
        @functools.wraps(hook)
        def guarded(self: NeuronPushConnector, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.log_fault(hook.__name__)
                return answer()

        return guarded

    return wrap


class NeuronPushConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):
    """One instance in the engine's process, one in each worker; ``role`` says which."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: compat.KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.adopt_logging()
        let_readers_sleep()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # vLLM makes no connector without it
        self._config = PushConfig.load(transfer.kv_connector_extra_config)
        self._tp_size, self._pp_size = compat.parallel_sizes(vllm_config)
        self._engine_id = str(transfer.engine_id)
        self._host = self._config.side_channel_host
        self._port = self._config.side_channel_port + compat.data_parallel_rank(vllm_config)
        self._link_path = link_path(self._engine_id, self._host, self._port)
        self._scheduler: PushScheduler | None = None
        self._side: SideChannel | None = None
        self._worker: PushWorker | None = None
        self._stats = PushStats()
        self._has_stats = False
        self._watched: Watched | None = None
        self._faults = OncePerMinute()
        if role is compat.KVConnectorRole.SCHEDULER:
            self._start_scheduler(str(transfer.kv_role))
        else:
            # Before the first kernel of this process, whatever the first step will be.
            request_amx_permission()

    def _start_scheduler(self, kv_role: str) -> None:
        groups = compat.group_facts(self._kv_cache_config)
        can_load = compat.can_load(self._kv_cache_config, kv_role)
        identity = Identity(
            engine_id=self._engine_id,
            incarnation=secrets.token_hex(8),
            host=self._host,
            port=self._port,
            tp_size=self._tp_size,
            pp_size=self._pp_size,
            model=str(self._vllm_config.model_config.model),
            role=kv_role.removeprefix("kv_"),
        )
        model = compat.model_card(self._vllm_config)

        def make_card(identity: Identity, ranks: tuple[RankCard, ...]) -> EngineCard:
            version = compat.vllm_version()
            return EngineCard(identity, WIRE_VERSION, "push", version, model, ranks)

        key_file = self._config.key_file

        side = SideChannel(
            identity,
            link_path=self._link_path,
            num_ranks=self._tp_size * self._pp_size,
            make_card=make_card,
            judge=explain_cards,
            remarks=remark_on_rails,
            handshake_timeout_s=self._config.handshake_timeout_s,
            keys=load_keys(Path(key_file)) if key_file else None,
        )
        self._side = side

        def dial(target: Target) -> None:
            side.dial(target.host, target.port, target.engine_id)

        self._scheduler = PushScheduler(
            groups, dial, is_producer=kv_role != "kv_consumer", can_load=can_load
        )
        for address in self._config.warm_peers:
            host, _, port = address.rpartition(":")
            side.dial(host, int(port), "", keep_trying=True)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish: vLLM warns and goes on where the attention backend cannot have it."""
        return compat.wanted_cache_layout(vllm_config)

    # ============================================================ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._config
        device = compat.find_device(self._vllm_config, kv_caches, config.device)
        # Before any NIXL agent of this process, and before addresses are taken.
        start_device(device, kv_caches, config.backends[0])
        layout = compat.make_layout(self._vllm_config, self._kv_cache_config, kv_caches, device)
        rank = layout.pp_rank * self._tp_size + layout.tp_rank
        stem = f"{self._engine_id}/{rank}"
        setup = RankSetup(
            rank=rank,
            layout=layout,
            make_agent=lambda: NixlAgent(f"{stem}/{secrets.token_hex(8)}", config.backends[0]),
            link_path=self._link_path,
            limits=Limits(
                lease_s=config.lease_s,
                request_timeout_s=config.request_timeout_s,
                peer_timeout_s=config.peer_timeout_s,
                handshake_timeout_s=config.handshake_timeout_s,
                quarantine_s=config.effective_quarantine_s,
                stall_timeout_s=config.stall_timeout_s,
                nixl_call_timeout_s=config.nixl_call_timeout_s,
            ),
            verify=config.verify_kv,
            read_memory=device.read_memory,
            confirm=lambda agent: confirm_device(device, agent, config.rail_policy),
            describe_rails=lambda: near.rails_card(
                rank, device.locality(layout.regions[0]).pci_address, config.backends[0]
            ),
        )
        try:
            self._worker = PushWorker(
                setup,
                device,
                idle_wait_s=config.idle_wait_ms / 1000,
                on_result=self._on_result,
            )
        except AgentError as e:
            raise AgentError(explained(device, e)) from e
        self._watched = Watched(self._worker.transfer.counters)
        num_bytes = sum(allocation.num_bytes for allocation in layout.allocations)
        logger.info(
            "engine %s rank %d: %s memory of %d layers registered with NIXL %s: %.2f GiB in %d "
            "registrations",
            self._engine_id,
            rank,
            device.name,
            len(kv_caches),
            config.backends[0],
            num_bytes / 2**30,
            len(layout.allocations),
        )

    def _on_result(self, result: Result) -> None:
        if self._stats.record(result):
            self._has_stats = True

    def handle_preemptions(self, kv_connector_metadata: compat.KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, PushMetadata):
            self._worker.drain_preempted(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: compat.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, PushMetadata):
            plan = connector_metadata.plan
            note_step(plan.is_idle)
            self._worker.begin_step(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what this hook would start left when metadata was bound, before the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is not scheduled before all its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are pushed when a step's work is done, not layer by layer."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For vLLM before 0.30."""
        if self._worker is None:
            return None, None
        step = self._worker.take_results()
        self._invalid_blocks = step.invalid_blocks
        return step.sent or None, step.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """For vLLM 0.30 and later."""
        step = self._worker.take_results() if self._worker is not None else NOTHING
        if step is NOTHING:  # nearly every step
            return self._no_results
        self._invalid_blocks = step.invalid_blocks
        return compat.make_results(step.sent, step.received, step.failed)

    @functools.cached_property
    def _no_results(self) -> Any:
        return compat.make_results(set(), set(), set())

    _invalid_blocks: set[int] = set()  # noqa: RUF012  replaced, never added to

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, NOTHING.invalid_blocks
        return invalid

    def get_kv_connector_stats(self) -> Any:
        if self._watched is not None and (growth := self._watched.growth()) is not None:
            self._stats.count(growth)
            self._has_stats = True
        if not self._has_stats:  # asked for at every step
            return None
        self._has_stats = False
        return self._stats.take()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._side is not None:
            self._side.close()

    # ============================================================ scheduler

    @property
    def _sched(self) -> PushScheduler:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler

    def log_fault(self, hook: str) -> None:
        """The exception that is being handled, once a minute for each hook."""
        text = "a fault of neuron_push in %s, please report it; the engine goes on:\n%s"
        self._faults.warning(logger, hook, text, hook, traceback.format_exc())

    @_survive(lambda: None)
    def on_new_request(self, request: Request) -> None:
        self._sched.on_new_request(request)

    @_survive(lambda: _NO_MATCH)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._sched.num_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: vLLM must not zero blocks that a push writes into (0.32 on)."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @_survive(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()
        try:
            self._sched.on_allocated(request, block_ids, num_external_tokens)
        except Exception:
            self.log_fault("update_state_after_alloc")
            self._sched.on_fault(request.request_id, block_ids, num_external_tokens)

    @_survive(PushMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PushMetadata:
        plan = self._sched.build_plan(scheduler_output)
        note_step(plan.is_idle)
        return PushMetadata(plan)

    @_survive(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received: Iterable[str] | None = connector_output.finished_recving
        if received:
            self._sched.on_received(received)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_survive(lambda: _NOT_HELD)
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, produced = self._sched.on_finished(request, block_ids, compat.succeeded(request))
        if not (held and produced):
            return held, None
        # For routers that dispatch the decode leg after the prefill's answer.
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_host": self._host,
            "remote_port": self._port,
            "remote_request_id": request.request_id,
            "tp_size": self._tp_size,
            "pp_size": self._pp_size,
            "transfer_id": (request.kv_transfer_params or {}).get("transfer_id"),
        }

    @_survive(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._sched.has_commands

    # ============================================================ metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return PushStats.rebuild(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        return make_prom_metrics(*args, **kwargs)
