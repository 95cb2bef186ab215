"""The worker half, driven as vLLM's model runners drive it, over a scripted transfer thread."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from neuron_push import worker as worker_module
from neuron_push.core.commands import (
    AbortConsumer,
    AnnounceConsumer,
    BeginProducer,
    Command,
    FailConsumer,
    OpenConsumer,
    Progress,
    Result,
    StepDone,
    Target,
)
from neuron_push.core.messages import Reason
from neuron_push.core.session import Outcome, Prompt
from neuron_push.scheduler import StepPlan
from neuron_push.worker import PushWorker, StepResults

PROMPT = Prompt(10, b"")
TARGET = Target("h", 5600, "p")


class Mark:
    def __init__(self, number: int) -> None:
        self.number = number

    def done(self) -> bool:
        return True


class Device:
    """Marks are numbered: how much had been submitted when one was made."""

    def __init__(self) -> None:
        self.num_submitted = 0

    def marker(self) -> Mark:
        return Mark(self.num_submitted)


class Transfer:
    """In place of the transfer thread: what it is told, and a script of what it answers."""

    def __init__(self, setup: Any) -> None:
        self.told: list[Any] = []
        self.ended: list[Result] = []
        self.waits: list[float] = []
        self.drains = True
        self.ends = True

    def start(self) -> None:
        pass

    def submit(self, commands: list[Command]) -> None:
        self.told.extend(commands)

    @property
    def has_results(self) -> bool:
        return bool(self.ended)

    def suspend(self, request_ids: tuple[str, ...], timeout_s: float) -> bool:
        assert timeout_s > 0
        self.told.append(("suspend", request_ids))
        return self.drains

    def results(self, wait_s: float) -> list[Result]:
        self.waits.append(wait_s)
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> bool:
        return self.ends


class Rank:
    """A PushWorker and its surroundings."""

    def __init__(self) -> None:
        self.device = Device()
        self.seen: list[Result] = []
        self.half = PushWorker(
            None,  # type: ignore[arg-type]
            self.device,  # type: ignore[arg-type]
            idle_wait_s=0.001,
            on_result=self.seen.append,
        )
        self.transfer: Transfer = self.half.transfer  # type: ignore[assignment]

    def step(self, plan: StepPlan, *ended: Result) -> StepResults:
        """Bind, forward, wait_for_save, results: the order of CPU and of vllm-neuron."""
        self.half.begin_step(plan)
        self.device.num_submitted += 1
        self.half.end_forward()
        self.transfer.ended += ended
        return self.half.take_results()

    def is_forgotten(self) -> bool:
        return not (self.half._loads or self.half._aborted or self.half._silent)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "TransferThread", Transfer)


def load(request_id: str, *blocks: tuple[int, ...], end: int = 9) -> OpenConsumer:
    return OpenConsumer(request_id, "k/0.0", TARGET, PROMPT, 0, end, 0, blocks or ((1, 2, 3),))


def plan(*before: Command, **more: Any) -> StepPlan:
    return StepPlan(list(before), **more)


def received(request_id: str) -> Result:
    return Result(request_id, Outcome.RECEIVED, num_segments=1)


def failed(request_id: str) -> Result:
    return Result(request_id, Outcome.FAILED, Reason.TIMEOUT, "late")


def released(request_id: str) -> Result:
    return Result(request_id, Outcome.RELEASED, Reason.TIMEOUT, "late")


def sent(request_id: str) -> Result:
    return Result(request_id, Outcome.SENT)


NOTHING = StepResults()


# ------------------------------------------------------------------ what is sent, and when


def test_commands_leave_before_the_forward_and_progress_after_it() -> None:
    rank = Rank()
    begin = BeginProducer("a", "k", PROMPT)
    hit, chunk = Progress("a", ((1,),), True, 4), Progress("a", ((2,),), False, 8)
    rank.half.begin_step(plan(begin, ready=[hit], after=[chunk], is_idle=False))
    told = rank.transfer.told
    assert told[0] is begin
    assert told[1].progress == (hit,)
    assert told[1].marker.number == 0  # what earlier steps submitted
    assert len(told) == 2
    rank.device.num_submitted += 1
    rank.half.end_forward()
    assert told[2].progress == (chunk,)
    assert told[2].marker.number == 1  # this step's work too
    rank.half.take_results()
    rank.half.end_forward()
    assert len(told) == 3  # once


def test_a_forward_with_nothing_of_ours_tells_nothing() -> None:
    rank = Rank()
    assert rank.step(plan(is_idle=False)) == NOTHING
    assert rank.transfer.told == []


def test_results_before_wait_for_save_do_not_send_what_a_drafter_still_computes() -> None:
    """With speculative decoding runner V1 takes results before the drafter, and saves after."""
    rank = Rank()
    rank.half.begin_step(plan(after=[Progress("a", ((1,),), False, 4)], is_idle=False))
    rank.device.num_submitted += 1  # the target model
    rank.half.take_results()
    assert rank.transfer.told == []
    rank.device.num_submitted += 1  # the drafter
    rank.half.end_forward()
    (step,) = rank.transfer.told
    assert step.marker.number == 2


def test_a_runner_that_never_saves_loses_nothing() -> None:
    rank = Rank()
    chunk = Progress("a", ((1,),), False, 4)
    rank.half.begin_step(plan(after=[chunk], is_idle=False))
    rank.half.take_results()
    rank.half.begin_step(plan(preempted=("a",)))
    late, suspend = rank.transfer.told
    assert late.progress == (chunk,)
    assert suspend == ("suspend", ("a",))  # what it suspends was told before


def test_only_idle_steps_wait_for_results() -> None:
    rank = Rank()
    rank.half.take_results()  # no metadata yet
    rank.step(plan(is_idle=False))
    rank.step(plan(is_idle=True))
    assert rank.transfer.waits == [0.001]


@pytest.mark.parametrize(("loads", "longest_s"), [([], 0.005), ([load("a")], 0.020)])
def test_a_wait_grows_with_the_time_without_an_event(
    loads: list[Command], longest_s: float
) -> None:
    rank = Rank()
    rank.step(plan(*loads))
    for _ in range(200):
        rank.step(plan())
    waits = rank.transfer.waits
    assert waits == sorted(waits)
    assert (waits[0], waits[15], waits[-1]) == (0.001, 0.001, longest_s)
    for wait_s, before_s in zip(waits[1:], accumulate(waits), strict=False):
        assert wait_s <= max(0.001, before_s / 16)
    rank.step(plan(), sent("b"))
    rank.step(plan())
    assert waits[-1] == 0.001  # something has happened
    for _ in range(200):
        rank.step(plan())
    rank.step(plan(is_idle=False))
    rank.step(plan())
    assert waits[-1] == 0.001  # something was computed


@pytest.mark.parametrize("hooks", ["handle_preemptions, then bind", "bind only"])
def test_preempted_requests_are_drained_once_and_first(hooks: str) -> None:
    """vllm-neuron never calls handle_preemptions."""
    rank = Rank()
    step = plan(BeginProducer("b", "k", PROMPT), preempted=("a",), is_idle=False)
    if hooks != "bind only":
        rank.half.drain_preempted(step)
    rank.half.begin_step(step)
    assert rank.transfer.told[0] == ("suspend", ("a",))
    assert [type(told).__name__ for told in rank.transfer.told] == ["tuple", "BeginProducer"]
    rank.half.begin_step(plan(preempted=("a",)))
    assert rank.transfer.told[-1] == ("suspend", ("a",))  # again in a later step


def test_writes_that_do_not_drain_are_reported_by_name(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.transfer.drains = False
    rank.half.begin_step(plan(preempted=("a",)))
    assert "requests ['a'] were preempted" in caplog.text


# ------------------------------------------------------------------ what vLLM is told


def test_a_load_that_succeeds() -> None:
    rank = Rank()
    assert rank.step(plan(AnnounceConsumer("a", "k", TARGET))) == NOTHING
    assert rank.step(plan(load("a"))) == NOTHING
    assert rank.step(plan(), received("a")) == StepResults(received={"a"})
    assert rank.step(plan()) == NOTHING
    assert [result.request_id for result in rank.seen] == ["a"]
    assert rank.is_forgotten()


def test_a_load_that_fails_is_told_at_once_and_ends_when_nothing_can_land() -> None:
    rank = Rank()
    rank.step(plan(load("a", (4, 5, 6))))
    assert rank.step(plan(), failed("a")) == StepResults(invalid_blocks={4, 5, 6})
    assert rank.step(plan()) == NOTHING
    assert rank.step(plan(), released("a")) == StepResults(received={"a"})
    assert rank.is_forgotten()


def test_failed_and_released_in_one_step() -> None:
    rank = Rank()
    rank.step(plan(load("a")))
    both = StepResults(invalid_blocks={1, 2, 3}, received={"a"})
    assert rank.step(plan(), failed("a"), released("a")) == both
    assert rank.step(plan(AbortConsumer("a"))) == NOTHING  # vLLM finishes it with an error
    assert rank.is_forgotten()


def test_vllm_finishes_a_failed_request_before_its_blocks_are_safe() -> None:
    rank = Rank()
    rank.step(plan(load("a")))
    rank.step(plan(), failed("a"))
    assert rank.step(plan(AbortConsumer("a"))) == NOTHING
    assert rank.step(plan(), released("a")) == StepResults(received={"a"})
    assert rank.is_forgotten()


def test_the_null_block_is_never_blamed() -> None:
    """It stands in the tables of other requests, which vLLM would fail, too."""
    rank = Rank()
    rank.step(plan(load("a", (0, 0, 6))))
    assert rank.step(plan(), failed("a")) == StepResults(invalid_blocks={6})


def test_several_groups_have_no_block_ids_of_their_own() -> None:
    rank = Rank()
    rank.step(plan(load("a", (4, 5, 6), (4, 7))))
    assert rank.step(plan(), failed("a")) == StepResults(failed={"a"})
    assert rank.step(plan(), released("a")) == StepResults(received={"a"})
    assert rank.is_forgotten()


def test_bad_parameters() -> None:
    """Without blocks named, vLLM would answer from what happened to be in them."""
    rank = Rank()
    command = FailConsumer("a", Reason.BAD_PARAMS, "no", ((7, 8),))
    told = StepResults(received={"a"}, invalid_blocks={7, 8})
    assert rank.step(plan(command), failed("a"), released("a")) == told
    assert rank.is_forgotten()


def test_an_aborted_load_is_released_once_and_blames_no_block() -> None:
    """Its request is over: block ids could be somebody else's by the time they are read."""
    rank = Rank()
    rank.step(plan(load("a")))
    assert rank.step(plan(AbortConsumer("a"))) == NOTHING
    assert rank.step(plan(), released("a")) == StepResults(received={"a"})
    assert rank.is_forgotten()


def test_an_abort_that_crosses_a_failure() -> None:
    rank = Rank()
    rank.step(plan(load("a")))
    told = StepResults(received={"a"})
    assert rank.step(plan(AbortConsumer("a")), failed("a"), released("a")) == told
    assert rank.is_forgotten()


def test_an_abort_that_crosses_success() -> None:
    rank = Rank()
    rank.step(plan(load("a")))
    assert rank.step(plan(AbortConsumer("a")), received("a")) == StepResults(received={"a"})
    assert rank.is_forgotten()


def test_aborted_before_it_had_blocks() -> None:
    rank = Rank()
    rank.step(plan(AnnounceConsumer("a", "k", TARGET)))
    assert rank.step(plan(AbortConsumer("a"))) == NOTHING
    assert rank.is_forgotten()


def test_nothing_wanted_nothing_reported() -> None:
    """vLLM asserts that it waits for a load that is reported."""
    rank = Rank()
    assert rank.step(plan(load("a", (), end=0)), received("a")) == NOTHING
    rank.step(plan(load("b", (), end=0)))
    assert rank.step(plan(), failed("b")) == NOTHING
    assert rank.step(plan(), released("b")) == NOTHING
    assert rank.is_forgotten()


def test_a_load_that_ends_while_its_request_is_queued() -> None:
    """request_timeout_s counts from arrival: vLLM has asked for nothing yet."""
    rank = Rank()
    rank.step(plan(AnnounceConsumer("a", "k", TARGET)))
    assert rank.step(plan(), failed("a"), released("a")) == NOTHING
    assert rank.step(plan(load("a"))) == NOTHING
    assert rank.step(plan(), received("a")) == StepResults(received={"a"})


def test_several_groups_have_no_blocks_to_blame() -> None:
    rank = Rank()
    rank.step(plan(load("a", (1, 2), (3,))))
    told = StepResults(received={"a"}, failed={"a"})
    assert rank.step(plan(), failed("a"), released("a")) == told


def test_sent_is_passed_on() -> None:
    rank = Rank()
    assert rank.step(plan(), sent("a"), sent("b")) == StepResults(sent={"a", "b"})


def test_a_thread_that_hangs_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.half.shutdown()
    assert not caplog.text
    rank.transfer.ends = False
    rank.half.shutdown()
    assert "does not end" in caplog.text


def test_markers_are_those_of_step_done() -> None:
    rank = Rank()
    rank.step(plan(after=[Progress("a", ((1,),), True, 4)], is_idle=False))
    assert isinstance(rank.transfer.told[0], StepDone)
