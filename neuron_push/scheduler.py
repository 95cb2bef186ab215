"""The engine-core half of the connector: vLLM's requests become commands for the ranks.

Runs on the scheduler's only thread, where an exception ends the engine and a microsecond
delays every request: hooks look things up, append to lists, and never raise for what a client
wrote.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neuron_push.core.commands import (
    AbortConsumer,
    AnnounceConsumer,
    BeginProducer,
    Command,
    FailConsumer,
    FailProducer,
    FinishProducer,
    OpenConsumer,
    Progress,
    Target,
)
from neuron_push.core.messages import Reason
from neuron_push.core.session import Prompt
from neuron_push.params import BadParams, ConsumerParams, ProducerParams, parse_params
from neuron_push.prompts import prompt_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

BlockIds = Sequence[Sequence[int]]

DIAL_AGAIN_S = 1.0
"""Dialling wakes a thread; a producer that many requests name is dialled once in this time."""

MAX_DIALLED = 1024


@dataclass(frozen=True)
class GroupFacts:
    """One KV cache group. ``whole``: every token of a prompt keeps its block to the end."""

    tokens_per_block: int
    whole: bool


@dataclass(slots=True)
class StepPlan:
    """What the ranks are told for one step.

    ``before`` takes effect before the forward; ``ready`` once what earlier steps submitted is
    done; ``after`` once this step's own work is. ``preempted`` requests lose their blocks in
    this very step. ``is_idle``: nothing computes.
    """

    before: list[Command] = field(default_factory=list)
    ready: list[Progress] = field(default_factory=list)
    after: list[Progress] = field(default_factory=list)
    preempted: tuple[str, ...] = ()
    is_idle: bool = True


@dataclass(slots=True)
class _Producing:
    key: str
    prompt: Prompt
    end_token: int
    is_scheduled: bool = False
    is_complete: bool = False
    has_failed: bool = False
    is_doubtful: bool = False  # we lost track of its blocks: nothing more of it may be sent


@dataclass(slots=True)
class _Consuming:
    params: ConsumerParams | BadParams
    prompt: Prompt
    num_local: int = 0
    is_opened: bool = False
    is_loading: bool = False


class PushScheduler:
    """dial(target): warm the connection to a producer; returns at once.

    can_load: False where a load that failed could not be told to vLLM; prompts are then
    computed here, whatever their parameters ask for.
    """

    def __init__(
        self,
        groups: Sequence[GroupFacts],
        dial: Callable[[Target], None],
        *,
        is_producer: bool,
        can_load: bool = True,
    ) -> None:
        self._is_producer = is_producer
        self._can_load = can_load
        self._groups = tuple(groups)
        self._dial = dial
        # Blocks of a group that forgets (sliding window) may be reused while we write from
        # them: such models are pushed when the prefill is over and the engine holds them.
        self._progressive = all(group.whole for group in groups)
        self._producing: dict[str, _Producing] = {}
        self._consuming: dict[str, _Consuming] = {}
        self._commands: list[Command] = []
        self._tails: dict[str, BlockIds] = {}  # request id -> its last blocks in each group
        self._dialled: dict[Target, float] = {}  # when
        self._align_tokens = math.lcm(*(group.tokens_per_block for group in self._groups))

    # ------------------------------------------------------------ hooks, in vLLM's order

    def on_new_request(self, request: Request) -> None:
        parsed = parse_params(request.kv_transfer_params, request.request_id)
        if parsed is None:
            return
        request_id = request.request_id
        if isinstance(parsed, ProducerParams):
            self._new_producer(request, parsed)
        elif isinstance(parsed, ConsumerParams):
            self._consuming[request_id] = _Consuming(parsed, prompt_of(request))
            self._warm(parsed.target)
            self._commands.append(AnnounceConsumer(request_id, parsed.key, parsed.target))
        elif parsed.is_consumer:
            self._consuming[request_id] = _Consuming(parsed, prompt_of(request))
        else:
            logger.warning("request %s: ignored: %s", request_id, parsed.sentence)

    def num_matched_tokens(self, request: Request, num_local: int) -> tuple[int, bool]:
        """(tokens to load beyond ``num_local``, asynchronously). May be asked every step.

        The prompt's last token is always computed here: that samples the first output token,
        and so its KV need not travel.
        """
        load = self._consuming.get(request.request_id)
        if load is None or load.is_opened:
            return 0, False
        load.num_local = num_local
        if not self._can_load:
            return 0, False
        missing = load.prompt.num_tokens - 1 - num_local
        return (missing, True) if missing > 0 else (0, False)

    def on_allocated(self, request: Request, block_ids: BlockIds, num_external: int) -> None:
        """``block_ids[g]`` are all blocks of the request, local hits included."""
        request_id = request.request_id
        load = self._consuming.get(request_id)
        if load is None or load.is_opened:
            return
        load.is_opened = True
        load.is_loading = num_external > 0
        end = load.num_local + num_external  # what vLLM counts on, which may be less than offered
        if num_external <= 0:
            end = load.prompt.num_tokens - 1
        first = load.num_local if num_external > 0 else end
        base = first // self._align_tokens * self._align_tokens
        blocks: tuple[tuple[int, ...], ...] = tuple(() for _ in self._groups)
        if first < end:
            blocks = tuple(
                tuple(ids[base // group.tokens_per_block : -(-end // group.tokens_per_block)])
                for ids, group in zip(block_ids, self._groups, strict=True)
            )
        if not isinstance(load.params, BadParams):
            key, target = load.params.key, load.params.target
            self._commands.append(
                OpenConsumer(request_id, key, target, load.prompt, first, end, base, blocks)
            )
        elif load.is_loading:
            sentence = load.params.sentence
            self._commands.append(FailConsumer(request_id, Reason.BAD_PARAMS, sentence, blocks))

    def build_plan(self, output: SchedulerOutput) -> StepPlan:
        plan = StepPlan(is_idle=output.total_num_scheduled_tokens == 0)
        if self._is_producer:
            if self._progressive:  # else nothing is sent from blocks that the engine may take
                preempted = output.preempted_req_ids or ()
                plan.preempted = tuple(r for r in preempted if r in self._producing)
            try:
                self._follow_prefills(output, plan)
            except Exception:
                logger.exception("prefills under way are not pushed on: a fault of neuron_push")
                self._distrust_prefills(plan)
            for request_id in output.finished_req_ids:
                self._tails.pop(request_id, None)
        if self._commands:
            plan.before = self._commands + plan.before
            self._commands = []
        return plan

    def on_finished(
        self, request: Request, block_ids: BlockIds, succeeded: bool
    ) -> tuple[bool, bool]:
        """(hold the blocks until the ranks report SENT, it was a producer's request)."""
        request_id = request.request_id
        load = self._consuming.pop(request_id, None)
        if load is not None:
            if load.is_loading or not load.is_opened:
                self._commands.append(AbortConsumer(request_id))
            return False, False
        prefill = self._producing.pop(request_id, None)
        if prefill is None or prefill.has_failed:
            return False, False
        if succeeded and not prefill.is_doubtful:
            if not self._progressive:
                blocks = tuple(tuple(ids) for ids in block_ids)
                self._commands.append(Progress(request_id, blocks, True, prefill.prompt.num_tokens))
            self._commands.append(FinishProducer(request_id))
            return True, True
        status = getattr(request.status, "name", str(request.status)).lower()
        reason, detail = Reason.PRODUCER_ABORTED, f"the producer's request ended as {status}"
        if prefill.is_doubtful:
            reason = Reason.FAULT
            detail = "a fault of neuron_push in the producer's engine: its log says which"
        self._commands.append(
            FailProducer(
                request_id,
                prefill.key,
                reason,
                detail,
                held=prefill.is_scheduled,
            )
        )
        return prefill.is_scheduled, True

    def on_fault(self, request_id: str, block_ids: BlockIds, num_external: int) -> None:
        """on_allocated raised: vLLM waits for a load that may not have been asked for."""
        load = self._consuming.get(request_id)
        if load is None or num_external <= 0:
            return
        load.is_opened = load.is_loading = True
        blocks = tuple(  # not the local hits, which other requests share
            tuple(ids[load.num_local // group.tokens_per_block :])
            for ids, group in zip(block_ids, self._groups, strict=False)
        )
        detail = "a fault of neuron_push in this engine: its log says which"
        self._commands.append(FailConsumer(request_id, Reason.FAULT, detail, blocks))

    def on_received(self, request_ids: Iterable[str]) -> None:
        """The ranks have reported these loads over, well or badly."""
        for request_id in request_ids:
            load = self._consuming.get(request_id)
            if load is not None:
                load.is_loading = False

    @property
    def has_commands(self) -> bool:
        """Whether the ranks must be told something, even if no request needs a step."""
        return bool(self._commands)

    # ------------------------------------------------------------ inside

    def _warm(self, target: Target) -> None:
        """Connect to it while the request still queues; the rank that needs it dials as well."""
        now_s = time.monotonic()
        if now_s - self._dialled.get(target, -math.inf) < DIAL_AGAIN_S:
            return
        if len(self._dialled) >= MAX_DIALLED:  # a client names them
            self._dialled.clear()
        self._dialled[target] = now_s
        self._dial(target)

    def _new_producer(self, request: Request, params: ProducerParams) -> None:
        request_id, prompt = request.request_id, prompt_of(request)
        prefill = _Producing(params.key, prompt, prompt.num_tokens - 1)
        self._producing[request_id] = prefill
        max_tokens = getattr(request.sampling_params, "max_tokens", 1)
        if not self._is_producer:
            reason = Reason.BAD_PARAMS
            detail = "this engine's kv_role is kv_consumer: it sends no KV"
        elif max_tokens != 1:
            reason = Reason.MAX_TOKENS
            detail = (
                f"the producer's request has max_tokens {max_tokens}, expected 1: the router "
                "must limit the prefill leg to one token"
            )
        else:
            self._commands.append(BeginProducer(request_id, params.key, prompt))
            return
        prefill.has_failed = True
        self._commands.append(FailProducer(request_id, params.key, reason, detail, held=False))

    def _follow_prefills(self, output: SchedulerOutput, plan: StepPlan) -> None:
        if not self._progressive:
            for new in output.scheduled_new_reqs:
                if new.req_id in self._producing:
                    self._producing[new.req_id].is_scheduled = True
            return
        scheduled = output.num_scheduled_tokens
        written = self._written_blocks(output)
        self._note_tails(output)
        for new in output.scheduled_new_reqs:
            prefill = self._producing.get(new.req_id)
            if prefill is not None:
                if prefill.is_scheduled:  # resumed: model runner V2 is told so as if it were new
                    plan.before.append(BeginProducer(new.req_id, prefill.key, prefill.prompt))
                self._step(
                    plan, new.req_id, prefill, new.block_ids, new.num_computed_tokens,
                    scheduled.get(new.req_id, 0), written,
                )  # fmt: skip
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            prefill = self._producing.get(request_id)
            if prefill is None:
                continue
            resumed = request_id in cached.resumed_req_ids
            if prefill.is_complete and not resumed:
                continue
            if resumed:
                plan.before.append(BeginProducer(request_id, prefill.key, prefill.prompt))
            self._step(
                plan, request_id, prefill, cached.new_block_ids[i], cached.num_computed_tokens[i],
                scheduled.get(request_id, 0), written if resumed else None,
            )  # fmt: skip

    def _step(
        self,
        plan: StepPlan,
        request_id: str,
        prefill: _Producing,
        new_blocks: BlockIds | None,
        num_computed: int,
        num_scheduled: int,
        written: set[int] | None,
    ) -> None:
        """One step of one prefill: what is final before it, and what will be after it.

        ``written`` are the blocks that this step computes, for a request that begins or
        resumes: the prefix cache hands out blocks that another request of the same step has
        yet to fill.
        """
        if prefill.has_failed or prefill.is_doubtful:
            return
        prefill.is_scheduled = True
        blocks = tuple(tuple(ids) for ids in new_blocks or [() for _ in self._groups])
        num_tokens = prefill.prompt.num_tokens
        if written is not None:
            # What the prefix cache held is final already: it can go while this step computes.
            cached = min(num_computed, num_tokens)
            for ids, group in zip(blocks, self._groups, strict=True):
                hits = ids[: -(-cached // group.tokens_per_block)]
                for i, block in enumerate(hits):
                    if block in written:
                        cached = min(cached, i * group.tokens_per_block)
                        break
            plan.ready.append(Progress(request_id, blocks, True, cached))
            blocks = tuple(() for _ in self._groups)
        final = min(num_computed + num_scheduled, num_tokens)
        plan.after.append(Progress(request_id, blocks, False, final))
        prefill.is_complete = final >= prefill.end_token

    def _distrust_prefills(self, plan: StepPlan) -> None:
        """Their block tables may lack what a step gave them: each fails when it finishes."""
        plan.ready, plan.after = [], []
        for prefill in self._producing.values():
            prefill.is_doubtful = prefill.is_scheduled = True

    def _written_blocks(self, output: SchedulerOutput) -> set[int]:
        """Blocks that this step's forward writes, of all requests.

        Those newly given out, and the last two blocks of each running request, which may have
        been given out earlier and be filled only now (two: speculation reserves ahead). Empty if
        no prefill of ours begins with a prefix hit: then nobody asks.
        """
        cached = output.scheduled_cached_reqs
        written: set[int] = set()
        begins = [new.req_id for new in output.scheduled_new_reqs if new.num_computed_tokens > 0]
        begins += cached.resumed_req_ids
        if not begins or self._producing.keys().isdisjoint(begins):
            return written
        for new in output.scheduled_new_reqs:
            for ids, group in zip(new.block_ids, self._groups, strict=True):
                written.update(ids[new.num_computed_tokens // group.tokens_per_block :])
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for tail in self._tails.get(request_id, ()):
                written.update(tail)
            for ids in new_blocks or ():
                written.update(ids)
        return written

    def _note_tails(self, output: SchedulerOutput) -> None:
        """Remember each running request's last two blocks, for later steps."""
        for new in output.scheduled_new_reqs:
            self._tails[new.req_id] = [ids[-2:] for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_blocks is not None:
                tails: BlockIds = self._tails.get(request_id) or [()] * len(new_blocks)
                self._tails[request_id] = [
                    ids[-2:] if len(ids) > 1 else (*tail, *ids)[-2:]
                    for ids, tail in zip(new_blocks, tails, strict=True)
                ]
