"""The worker half of the connector: one per rank, on the thread that runs the forward.

Feeds the transfer thread before and after each forward, and tells vLLM what has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from neuron_push.core.commands import (
    AbortConsumer,
    FailConsumer,
    OpenConsumer,
    Result,
    StepDone,
)
from neuron_push.core.session import Outcome
from neuron_push.core.transfer import RankSetup, TransferThread
from neuron_push.devices.base import DeviceBackend
from neuron_push.scheduler import StepPlan

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How long a step that takes blocks away waits for WRITEs that still read them."""


IDLE_SHARE = 16
LONGEST_IDLE_WAIT_S = 5e-3
LONGEST_LOAD_WAIT_S = 20e-3
"""An engine that waits for KV steps on with empty batches, and each costs both its processes
about half a millisecond of a core. So a wait gets longer with the time that nothing has happened,
to a sixteenth of it. What it waits for ends it at once all the same; only a request that arrives
meanwhile is seen later. That costs a producer time to first token, but a consumer nothing: it
registers the request with a producer that has just begun to compute it."""


@dataclass
class StepResults:
    """What vLLM is told in one step: request ids, and blocks whose load failed."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)


NOTHING = StepResults()
"""Of a step in which nothing has ended. Nobody adds to it."""


class PushWorker:
    """One rank.

    A load that fails is told at once, so that its client need not wait, and its end only when no
    WRITE can land in its blocks. Of the two ways to tell, the failed blocks come first: vLLM's
    executor for several processes holds ``failed_recving`` (0.30 on) back until the end of the
    load is reported too, which after a peer's death is a quarantine later. Blocks name a request
    only where there is one KV cache group.

    on_result: sees every result, for metrics.
    """

    def __init__(
        self,
        setup: RankSetup,
        device: DeviceBackend,
        *,
        idle_wait_s: float,
        on_result: Callable[[Result], None],
    ) -> None:
        self._device = device
        self._idle_wait_s = idle_wait_s
        self._on_result = on_result
        self._plan: StepPlan | None = None
        self._idle_s = 0.0  # waited in a row
        self._handled_preemptions: StepPlan | None = None
        # Loads that vLLM waits for -> their blocks, where a failure can be told by those. Never
        # the null block: it is in other requests' tables, too.
        self._loads: dict[str, tuple[int, ...]] = {}
        self._aborted: set[str] = set()  # of these
        self._silent: set[str] = set()  # asked for nothing: vLLM waits for no report
        self.transfer = TransferThread(setup)
        self.transfer.start()

    # ------------------------------------------------------------ before the forward

    def begin_step(self, plan: StepPlan) -> None:
        """Metadata is bound: what can leave leaves now, while the forward runs."""
        if self._plan is not None and self._plan.after:
            self.end_forward()  # of the step before: its runner did not say
        if plan.preempted:
            self.drain_preempted(plan)
        self._plan = plan
        if not (plan.before or plan.ready):
            return
        for command in plan.before:
            if isinstance(command, OpenConsumer | FailConsumer):
                blocks = command.blocks
                if isinstance(command, OpenConsumer) and command.first_token == command.end_token:
                    self._silent.add(command.request_id)
                else:
                    named = blocks[0] if len(blocks) == 1 else ()
                    self._loads[command.request_id] = tuple(id for id in named if id)
            elif isinstance(command, AbortConsumer) and command.request_id in self._loads:
                self._aborted.add(command.request_id)
        commands = plan.before
        if plan.ready:
            commands.append(StepDone(tuple(plan.ready), self._device.marker()))
        self.transfer.submit(commands)

    def drain_preempted(self, plan: StepPlan) -> None:
        """Before the forward that overwrites them, WRITEs stop reading preempted blocks.

        Some runners call this hook before they bind metadata, some never do.
        """
        if not plan.preempted or self._handled_preemptions is plan:
            return
        self.end_forward()
        self._handled_preemptions = plan
        if not self.transfer.suspend(plan.preempted, DRAIN_TIMEOUT_S):
            logger.error(
                "requests %s were preempted while WRITEs read their blocks, and these did not "
                "end within %g s: their consumers may get overwritten KV",
                list(plan.preempted),
                DRAIN_TIMEOUT_S,
            )

    # ------------------------------------------------------------ after the forward

    def end_forward(self) -> None:
        """The step's work is submitted to the device."""
        plan = self._plan
        if plan is not None and plan.after:
            self.transfer.submit([StepDone(tuple(plan.after), self._device.marker())])
            plan.after = []

    def take_results(self) -> StepResults:
        """What has ended. In a step without work, waits a little for something to end.

        May be called before end_forward, while a drafter has yet to run.
        """
        plan = self._plan
        is_idle = plan is not None and plan.is_idle
        wait_s = 0.0
        if not is_idle:
            self._idle_s = 0.0
            if not self.transfer.has_results:
                return NOTHING
        else:
            longest_s = LONGEST_LOAD_WAIT_S if self._loads else LONGEST_IDLE_WAIT_S
            wait_s = max(self._idle_wait_s, min(self._idle_s / IDLE_SHARE, longest_s))
        results = self.transfer.results(wait_s)
        if not results:
            self._idle_s += wait_s
            return NOTHING
        self._idle_s = 0.0
        step = StepResults()
        for result in results:
            self._on_result(result)
            self._sort(result, step)
        return step

    def shutdown(self) -> None:
        if not self.transfer.stop():
            logger.error("the transfer thread does not end: a NIXL call does not return")

    def _sort(self, result: Result, step: StepResults) -> None:
        request_id = result.request_id
        if result.outcome is Outcome.SENT:
            step.sent.add(request_id)
            return
        if request_id in self._silent:
            if result.outcome is not Outcome.FAILED:
                self._silent.discard(request_id)
            return
        if request_id not in self._loads:
            return  # it failed before it had blocks (a long queue): vLLM has yet to ask for it
        was_aborted = request_id in self._aborted
        if result.outcome is Outcome.FAILED:
            if was_aborted:
                return  # its blocks could be somebody else's by the time their ids are read
            if blocks := self._loads[request_id]:
                step.invalid_blocks.update(blocks)
            else:
                step.failed.add(request_id)
            return
        del self._loads[request_id]
        self._aborted.discard(request_id)
        step.received.add(request_id)
