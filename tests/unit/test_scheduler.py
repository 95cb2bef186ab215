"""The scheduler half, its hooks called in the orders vLLM calls them.

Blocks hold 4 tokens. What the ranks are told is compared as short lines.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

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
from neuron_push.prompts import prompt_of
from neuron_push.scheduler import GroupFacts, PushScheduler, StepPlan
from tests.unit.vllm_standins import Output, Request, Sampling, Status

PRODUCE = {"do_remote_decode": True, "transfer_id": "t"}
CONSUME = {
    "do_remote_prefill": True,
    "remote_host": "h",
    "remote_port": 5600,
    "remote_engine_id": "p",
    "transfer_id": "t",
}
TARGET = Target("h", 5600, "p")
LIMIT_US = float(os.environ.get("NEURON_PUSH_HOOK_LIMIT_US", "1000"))


def line(command: Command) -> str:
    match command:
        case BeginProducer():
            return f"begin {command.request_id}"
        case Progress():
            blocks = "|".join(",".join(map(str, ids)) for ids in command.new_blocks)
            how = "=" if command.replace else "+"
            return f"{command.request_id} {how}{blocks} final {command.final_tokens}"
        case FinishProducer():
            return f"finish {command.request_id}"
        case FailProducer():
            held = " held" if command.held else ""
            return f"fail {command.request_id} {command.reason.value}{held}"
        case AnnounceConsumer():
            return f"announce {command.request_id}"
        case OpenConsumer():
            blocks = "|".join(",".join(map(str, ids)) for ids in command.blocks)
            tokens = f"{command.first_token}:{command.end_token}"
            return f"open {command.request_id} {tokens} base {command.base_token} in {blocks}"
        case FailConsumer():
            blocks = "|".join(",".join(map(str, ids)) for ids in command.blocks)
            return f"fail {command.request_id} {command.reason.value} in {blocks}"
        case AbortConsumer():
            return f"abort {command.request_id}"
    raise AssertionError(command)


def told(plan: StepPlan) -> dict[str, list[str]]:
    """What a plan says, without what it does not say."""
    parts = {
        "before": [line(c) for c in plan.before],
        "ready": [line(c) for c in plan.ready],
        "after": [line(c) for c in plan.after],
        "preempted": list(plan.preempted),
    }
    return {name: lines for name, lines in parts.items() if lines}


class Engine:
    """A PushScheduler, and the part of vLLM's scheduler that calls it."""

    def __init__(self, *groups: GroupFacts, is_producer: bool = True, can_load: bool = True):
        self.dialled: list[Target] = []
        self.half = PushScheduler(
            groups or (GroupFacts(4, True),),
            self.dialled.append,
            is_producer=is_producer,
            can_load=can_load,
        )

    def arrive(self, request_id: str, num_tokens: int, params: Any = None, **more: Any) -> Request:
        request = Request(request_id, list(range(num_tokens)), params, **more)
        self.half.on_new_request(request)  # type: ignore[arg-type]
        return request

    def step(self, output: Output | None = None) -> dict[str, list[str]]:
        return told(self.half.build_plan(output or Output()))  # type: ignore[arg-type]

    def match(self, request: Request, num_local: int = 0) -> tuple[int, bool]:
        return self.half.num_matched_tokens(request, num_local)  # type: ignore[arg-type]

    def allocate(self, request: Request, num_external: int, *blocks: list[int]) -> None:
        self.half.on_allocated(request, blocks, num_external)  # type: ignore[arg-type]

    def finish(
        self, request: Request, *blocks: list[int], status: Status = Status.FINISHED_LENGTH_CAPPED
    ) -> tuple[bool, bool]:
        request.status = status
        good = status is Status.FINISHED_LENGTH_CAPPED
        return self.half.on_finished(request, blocks, good)  # type: ignore[arg-type]

    def is_forgotten(self) -> bool:
        half = self.half
        return not (half._producing or half._consuming or half._commands or half._tails)


# ------------------------------------------------------------------ producer


def test_a_prefill_in_one_step() -> None:
    engine = Engine()
    request = engine.arrive("a", 10, PRODUCE)
    assert engine.half.has_commands
    assert engine.step(Output().new("a", 10, 0, [5, 6, 7])) == {
        "before": ["begin a"],
        "ready": ["a =5,6,7 final 0"],
        "after": ["a + final 10"],
    }
    assert not engine.half.has_commands
    assert engine.finish(request, [5, 6, 7]) == (True, True)
    assert engine.half.has_commands
    assert engine.step(Output(finished_req_ids={"a"})) == {"before": ["finish a"]}
    assert engine.is_forgotten()


def test_chunks_become_final_one_by_one() -> None:
    engine = Engine()
    engine.arrive("a", 19, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    assert engine.step(Output().more("a", 6, 8, [3, 4])) == {"after": ["a +3,4 final 14"]}
    assert engine.step(Output().more("a", 5, 14, [5])) == {"after": ["a +5 final 19"]}


def test_a_chunk_within_a_block_brings_no_block() -> None:
    engine = Engine()
    engine.arrive("a", 8, PRODUCE)
    engine.step(Output().new("a", 2, 0, [1]))
    assert engine.step(Output().more("a", 1, 2)) == {"after": ["a + final 3"]}
    assert engine.step() == {}


def test_the_prompts_last_token_is_nobodys_business() -> None:
    """Consumers compute it themselves: a chunk that brings only that is not reported."""
    engine = Engine()
    engine.arrive("a", 9, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    assert engine.step(Output().more("a", 1, 8, [3])) == {}


def test_what_the_prefix_cache_held_is_ready_before_the_step() -> None:
    engine = Engine()
    engine.arrive("a", 14, PRODUCE)
    assert engine.step(Output().new("a", 6, 8, [1, 2, 3, 4]))["ready"] == ["a =1,2,3,4 final 8"]


def test_a_hit_on_a_block_that_this_step_computes_is_not_final() -> None:
    """vLLM shares a block from the moment it is scheduled, not from when it is filled."""
    engine = Engine()
    engine.arrive("a", 12, PRODUCE)
    engine.arrive("b", 14, {**PRODUCE, "transfer_id": "u"})
    plan = engine.step(Output().new("a", 8, 4, [1, 2, 3]).new("b", 2, 12, [1, 2, 3, 9]))
    assert plan["ready"] == ["a =1,2,3 final 4", "b =1,2,3,9 final 4"]
    assert plan["after"] == ["a + final 12", "b + final 14"]


def test_a_hit_on_a_block_of_a_request_that_is_not_ours() -> None:
    engine = Engine()
    engine.arrive("b", 14, PRODUCE)
    plan = engine.step(Output().new("x", 8, 0, [1, 2]).new("b", 6, 8, [1, 2, 3, 4]))
    assert plan["ready"] == ["b =1,2,3,4 final 0"]


def test_a_hit_on_a_block_given_out_earlier_and_filled_now() -> None:
    engine = Engine()
    engine.step(Output().new("x", 6, 0, [1, 2]))  # half of block 2
    engine.arrive("b", 12, PRODUCE)
    plan = engine.step(Output().more("x", 2, 6).new("b", 4, 8, [1, 2, 3]))
    assert plan["ready"] == ["b =1,2,3 final 0"]  # 1 is final, and only costs a step of waiting
    engine.step(Output(finished_req_ids={"x"}))
    engine.arrive("c", 12, {**PRODUCE, "transfer_id": "u"})
    plan = engine.step(Output().new("c", 4, 8, [1, 2, 7]))
    assert plan["ready"] == ["c =1,2,7 final 8"]


def test_a_hit_on_a_block_that_speculation_reserved_early() -> None:
    """Lookahead gives out blocks beyond the one being filled."""
    engine = Engine()
    engine.step(Output().new("x", 6, 0, [1, 2, 3]))
    engine.arrive("b", 12, PRODUCE)
    plan = engine.step(Output().more("x", 2, 6).new("b", 4, 8, [1, 2, 9]))
    assert plan["ready"] == ["b =1,2,9 final 4"]


def test_decoding_neighbours_are_followed_without_growth() -> None:
    engine = Engine()
    engine.step(Output().new("x", 3, 0, [1]))
    for position in range(3, 400):
        new = [[position]] if position % 4 == 0 else []
        assert engine.step(Output().more("x", 1, position, *new)) == {}
    assert len(engine.half._tails["x"][0]) == 2
    engine.step(Output(finished_req_ids={"x"}))
    assert engine.is_forgotten()


def test_preempted_and_resumed() -> None:
    """Blocks are taken without asking; the resumed request has others."""
    engine = Engine()
    request = engine.arrive("a", 16, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    assert engine.step(Output(preempted_req_ids={"a", "stranger"})) == {"preempted": ["a"]}
    plan = engine.step(Output().more("a", 8, 0, [5, 6], resumed=True))
    assert plan == {
        "before": ["begin a"],
        "ready": ["a =5,6 final 0"],
        "after": ["a + final 8"],
    }
    assert engine.step(Output().more("a", 8, 8, [7, 8]))["after"] == ["a +7,8 final 16"]
    assert engine.finish(request, [5, 6, 7, 8]) == (True, True)


def test_preempted_and_resumed_on_model_runner_v2() -> None:
    """It lists resumed requests among the new ones."""
    engine = Engine()
    engine.arrive("a", 16, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    engine.step(Output(preempted_req_ids={"a"}))
    plan = engine.step(Output().new("a", 12, 4, [1, 6, 7, 8]))
    assert plan == {
        "before": ["begin a"],
        "ready": ["a =1,6,7,8 final 4"],
        "after": ["a + final 16"],
    }


def test_preempted_after_the_last_chunk_and_computed_again() -> None:
    engine = Engine()
    engine.arrive("a", 8, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    engine.step(Output(preempted_req_ids={"a"}))
    plan = engine.step(Output().more("a", 8, 0, [3, 4], resumed=True))
    assert plan["after"] == ["a + final 8"]


def test_aborted_in_every_state() -> None:
    engine = Engine()
    queued = engine.arrive("queued", 8, PRODUCE)
    assert engine.finish(queued, [], status=Status.FINISHED_ABORTED) == (False, True)
    assert engine.step() == {"before": ["begin queued", "fail queued producer_aborted"]}

    running = engine.arrive("running", 8, PRODUCE)
    engine.step(Output().new("running", 4, 0, [1]))
    assert engine.finish(running, [1], status=Status.FINISHED_ABORTED) == (True, True)
    assert engine.step()["before"] == ["fail running producer_aborted held"]

    preempted = engine.arrive("preempted", 8, PRODUCE)
    engine.step(Output().new("preempted", 4, 0, [1]))
    engine.step(Output(preempted_req_ids={"preempted"}))
    assert engine.finish(preempted, [], status=Status.FINISHED_ERROR) == (True, True)
    assert engine.step()["before"] == ["fail preempted producer_aborted held"]

    done = engine.arrive("done", 8, PRODUCE)
    engine.step(Output().new("done", 8, 0, [1, 2]))
    assert engine.finish(done, [1, 2], status=Status.FINISHED_ABORTED) == (True, True)
    engine.step(Output(finished_req_ids={"done", "running", "preempted"}))
    assert engine.is_forgotten()


@pytest.mark.parametrize("max_tokens", [2, 16, None])
def test_more_than_one_token_is_refused_and_served_as_an_ordinary_request(
    max_tokens: int | None,
) -> None:
    engine = Engine()
    request = engine.arrive("a", 8, PRODUCE, sampling_params=Sampling(max_tokens))
    plan = engine.step(Output().new("a", 8, 0, [1, 2]))
    assert plan == {"before": ["fail a max_tokens"]}
    assert engine.step(Output().more("a", 1, 8, [3])) == {}
    assert engine.finish(request, [1, 2, 3]) == (False, False)


def test_a_pooling_request_has_no_token_limit() -> None:
    engine = Engine()
    engine.arrive("a", 8, PRODUCE, sampling_params=None)
    assert engine.step() == {"before": ["begin a"]}


def test_a_consumer_engine_refuses_to_produce() -> None:
    """It would hold blocks for the lease, and send nothing."""
    engine = Engine(is_producer=False)
    request = engine.arrive("a", 8, PRODUCE)
    assert engine.step(Output().new("a", 8, 0, [1, 2])) == {"before": ["fail a bad_params"]}
    assert engine.finish(request, [1, 2]) == (False, False)


def test_a_model_that_forgets_is_pushed_when_the_prefill_is_over() -> None:
    engine = Engine(GroupFacts(4, True), GroupFacts(4, False))
    request = engine.arrive("a", 8, PRODUCE)
    assert engine.step(Output().new("a", 4, 0, [1], [2])) == {"before": ["begin a"]}
    assert engine.step(Output().more("a", 4, 4, [3], [4])) == {}
    assert engine.finish(request, [1, 3], [2, 4]) == (True, True)
    assert engine.step() == {"before": ["a =1,3|2,4 final 8", "finish a"]}


def test_such_a_model_preempted_has_nothing_to_suspend() -> None:
    """Nothing would lift the suspension: these prefills are not followed step by step."""
    engine = Engine(GroupFacts(4, False))
    request = engine.arrive("a", 8, PRODUCE)
    engine.step(Output().new("a", 4, 0, [1]))
    assert engine.step(Output(preempted_req_ids={"a"})) == {}
    assert engine.step(Output().more("a", 8, 0, [3, 4], resumed=True)) == {}
    engine.finish(request, [3, 4])
    assert engine.step() == {"before": ["a =3,4 final 8", "finish a"]}


def test_groups_of_unequal_blocks() -> None:
    engine = Engine(GroupFacts(4, True), GroupFacts(8, True))
    engine.arrive("a", 16, PRODUCE)
    plan = engine.step(Output().new("a", 8, 8, [1, 2, 3, 4], [5, 6]))
    assert plan["ready"] == ["a =1,2,3,4|5,6 final 8"]


# ------------------------------------------------------------------ consumer


def test_a_load_from_arrival_to_the_end() -> None:
    engine = Engine(is_producer=False)
    request = engine.arrive("a", 10, CONSUME)
    assert engine.dialled == [TARGET]
    assert engine.half.has_commands
    assert engine.step() == {"before": ["announce a"]}  # no block yet: it waits in the queue
    assert engine.match(request) == (9, True)
    assert engine.match(request) == (9, True)  # allocation failed, asked again
    engine.allocate(request, 9, [4, 5, 6])
    assert engine.step() == {"before": ["open a 0:9 base 0 in 4,5,6"]}
    engine.half.on_received(["a"])
    engine.allocate(request, 0, [4, 5, 6])  # promoted
    assert engine.step(Output().new("a", 1, 9, [4, 5, 6])) == {}
    assert engine.finish(request, [4, 5, 6]) == (False, False)
    assert engine.step() == {}
    assert engine.is_forgotten()


def test_only_what_the_prefix_cache_lacks_is_asked_for() -> None:
    engine = Engine()
    request = engine.arrive("a", 15, CONSUME)
    assert engine.match(request, 8) == (6, True)
    engine.allocate(request, 6, [1, 2, 3, 4])
    assert engine.step()["before"][1] == "open a 8:14 base 8 in 3,4"


def test_blocks_begin_where_all_groups_have_a_boundary() -> None:
    engine = Engine(GroupFacts(4, True), GroupFacts(6, True))
    request = engine.arrive("a", 31, CONSUME)
    engine.match(request, 16)
    engine.allocate(request, 14, list(range(1, 9)), list(range(11, 17)))
    assert engine.step()["before"][1] == "open a 16:30 base 12 in 4,5,6,7,8|13,14,15"


@pytest.mark.parametrize(("num_tokens", "num_local"), [(9, 8), (1, 0), (12, 12)])
def test_a_full_hit_lets_the_producer_free_its_blocks(num_tokens: int, num_local: int) -> None:
    """Also for a prompt of one token, whose KV the consumer computes itself."""
    engine = Engine()
    request = engine.arrive("a", num_tokens, CONSUME)
    assert engine.match(request, num_local) == (0, False)
    engine.allocate(request, 0, [1, 2, 3])
    end = num_tokens - 1
    assert engine.step()["before"][1] == f"open a {end}:{end} base {end // 4 * 4} in "
    assert engine.match(request, 0) == (0, False)  # a one-token prompt is asked about again
    assert engine.finish(request, [1, 2, 3]) == (False, False)
    assert engine.step() == {}


def test_vllm_may_take_less_than_it_was_offered() -> None:
    """prompt_logprobs: nothing. A replayed window: whole blocks only."""
    engine = Engine()
    request = engine.arrive("a", 11, CONSUME)
    assert engine.match(request) == (10, True)
    engine.allocate(request, 0, [1, 2, 3])
    assert engine.step()["before"][1] == "open a 10:10 base 8 in "
    request = engine.arrive("b", 11, CONSUME)
    engine.match(request)
    engine.allocate(request, 8, [1, 2])
    assert engine.step()["before"][1] == "open b 0:8 base 0 in 1,2"


def test_after_success_failure_or_preemption_nothing_is_loaded_again() -> None:
    engine = Engine()
    request = engine.arrive("a", 10, CONSUME)
    engine.match(request)
    engine.allocate(request, 9, [1, 2, 3])
    engine.step()
    assert engine.match(request) == (0, False)
    engine.half.on_received(["a", "stranger"])
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0, [7, 8, 9])
    assert engine.step() == {}


def test_aborted_loads_in_every_state() -> None:
    engine = Engine()
    queued = engine.arrive("queued", 10, CONSUME)
    assert engine.finish(queued, status=Status.FINISHED_ABORTED) == (False, False)
    assert engine.step() == {"before": ["announce queued", "abort queued"]}

    loading = engine.arrive("loading", 10, CONSUME)
    engine.match(loading)
    engine.allocate(loading, 9, [1, 2, 3])
    engine.step()
    engine.finish(loading, [1, 2, 3], status=Status.FINISHED_ABORTED)
    assert engine.step() == {"before": ["abort loading"]}
    engine.half.on_received(["loading"])

    loaded = engine.arrive("loaded", 10, CONSUME)
    engine.match(loaded)
    engine.allocate(loaded, 9, [1, 2, 3])
    engine.half.on_received(["loaded"])
    engine.step()
    engine.finish(loaded, [1, 2, 3], status=Status.FINISHED_ABORTED)
    assert engine.step() == {}
    assert engine.is_forgotten()


def test_bad_parameters_fail_the_load_and_name_its_blocks() -> None:
    """vLLM before 0.30 knows a failed load by its blocks only."""
    engine = Engine(is_producer=False)
    request = engine.arrive("a", 14, {**CONSUME, "remote_port": -1})
    assert engine.dialled == []
    assert engine.match(request, 4) == (9, True)
    engine.allocate(request, 9, [1, 2, 3, 4])
    assert engine.step() == {"before": ["fail a bad_params in 2,3,4"]}
    assert engine.match(request) == (0, False)
    engine.finish(request, [1, 2, 3, 4], status=Status.FINISHED_ERROR)
    assert engine.step() == {"before": ["abort a"]}


def test_bad_parameters_of_a_full_hit_do_not_matter() -> None:
    engine = Engine()
    request = engine.arrive("a", 5, {**CONSUME, "remote_port": -1})
    assert engine.match(request, 4) == (0, False)
    engine.allocate(request, 0, [1, 2])
    assert engine.step() == {}
    engine.finish(request, [1, 2])
    assert engine.is_forgotten()


def test_parameters_of_no_known_form_are_ignored_aloud(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    request = engine.arrive("a", 5, {"do_remote_prefill": "yes"})
    assert "request a: ignored: kv_transfer_params.do_remote_prefill" in caplog.text
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0, [1, 2])
    assert engine.finish(request, [1, 2]) == (False, False)
    assert engine.step() == {}


def test_where_failures_cannot_be_told_nothing_is_loaded() -> None:
    engine = Engine(can_load=False)
    request = engine.arrive("a", 10, CONSUME)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0, [1, 2, 3])
    assert engine.step()["before"] == ["announce a", "open a 9:9 base 8 in "]


def test_requests_that_have_nothing_to_do_with_it() -> None:
    engine = Engine()
    request = engine.arrive("x", 10)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0, [1, 2, 3])
    assert engine.step(Output().new("x", 10, 0, [1, 2, 3])) == {}
    assert engine.finish(request, [1, 2, 3]) == (False, False)
    assert not engine.half.has_commands


# ------------------------------------------------------------------ faults of ours


def test_a_fault_in_following_prefills_fails_them_when_they_finish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    request = engine.arrive("a", 16, PRODUCE)
    engine.step(Output().new("a", 8, 0, [1, 2]))
    broken = Output(preempted_req_ids={"a"}).new("x", 8, 0)
    broken.scheduled_new_reqs[0].block_ids = None  # type: ignore[assignment]
    assert engine.step(broken) == {"preempted": ["a"]}  # blocks are protected all the same
    assert "a fault of neuron_push" in caplog.text
    assert "after" not in engine.step(Output().more("a", 8, 8, [3, 4]))  # table unknown: no push
    assert engine.finish(request, [1, 2, 3, 4]) == (True, True)
    assert engine.step() == {"before": ["fail a fault held"]}
    engine.arrive("b", 8, PRODUCE)
    assert engine.step(Output().new("b", 8, 0, [5, 6]))["after"] == ["b + final 8"]


def test_a_fault_while_blocks_are_allocated_fails_the_load() -> None:
    engine = Engine()
    request = engine.arrive("a", 14, CONSUME)
    engine.match(request, 4)
    engine.step()
    engine.half.on_fault("a", ([1, 2, 3, 4],), 9)
    assert engine.step() == {"before": ["fail a fault in 2,3,4"]}
    assert engine.match(request) == (0, False)
    engine.half.on_fault("stranger", ([1],), 9)
    assert engine.step() == {}


# ------------------------------------------------------------------ prompts


def prompt(**more: Any) -> bytes:
    request = Request("r", more.pop("ids", [1, 2, 3]), **more)
    return prompt_of(request).digest  # type: ignore[arg-type]


def test_a_prompts_digest_covers_all_that_its_kv_depends_on() -> None:
    image = SimpleNamespace(identifier="image-1")
    adapter = SimpleNamespace(lora_name="pirate")
    digests = [
        prompt(),
        prompt(ids=[1, 2, 4]),
        prompt(cache_salt="s"),
        prompt(lora_request=adapter),
        prompt(mm_features=[image]),
        prompt(mm_features=[image, image]),
        prompt(ids=[-1, 2, 3]),
        prompt(ids=[2**40, 2, 3]),
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 16 for digest in digests)
    assert prompt() == prompt()
    assert prompt(ids=None) == b""


# ------------------------------------------------------------------ speed


def test_hooks_take_microseconds_with_32_open_requests() -> None:
    """16 prefills of 2049 tokens in chunks of 512, and 16 loads of 1024, at 16 tokens a block.

    Processor time, so that other processes do not count; the printed figures are the point.
    """
    half = Engine(GroupFacts(16, True)).half
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        began = time.thread_time_ns()
        answer = call(*arguments)
        took.setdefault(name, []).append((time.thread_time_ns() - began) / 1e3)
        return answer

    for turn in range(100):
        producers = [
            Request(f"p{turn}-{i}", list(range(2049)), {**PRODUCE, "transfer_id": f"t{i}"})
            for i in range(16)
        ]
        consumers = [
            Request(f"d{turn}-{i}", list(range(1024)), {**CONSUME, "transfer_id": f"u{i}"})
            for i in range(16)
        ]
        for request in producers + consumers:
            timed("on_new_request", half.on_new_request, request)
        for request in consumers:
            num, _ = timed("get_num_new_matched_tokens", half.num_matched_tokens, request, 0)
            blocks = (list(range(64)),)
            timed("update_state_after_alloc", half.on_allocated, request, blocks, num)
        for chunk in range(4):
            output = Output()
            for number, request in enumerate(producers):
                ids = list(range(number * 128 + chunk * 32, number * 128 + chunk * 32 + 32))
                add = output.new if chunk == 0 else output.more
                add(request.request_id, 512, chunk * 512, ids)
            timed("build_connector_meta", half.build_plan, output)
        timed("update_connector_output", half.on_received, [r.request_id for r in consumers])
        for request in producers + consumers:
            timed("request_finished", half.on_finished, request, ([],), True)
        timed("has_pending_push_work", lambda: half.has_commands)
        finished = {request.request_id for request in producers + consumers}
        timed("build_connector_meta", half.build_plan, Output(finished_req_ids=finished))
    slow = []
    for name, microseconds in took.items():
        microseconds.sort()
        p99 = microseconds[len(microseconds) * 99 // 100]
        p50 = microseconds[len(microseconds) // 2]
        print(f"{name}: p50 {p50:.1f} us, p99 {p99:.1f} us of {len(microseconds)} calls")
        if p99 > LIMIT_US:
            slow.append(name)
    assert not slow
