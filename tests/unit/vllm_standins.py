"""What the scheduler half reads of vLLM's objects, and no more: vLLM itself is not needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

Table = tuple[list[int], ...]


class Status(enum.Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2
    FINISHED_ERROR = 3


@dataclass
class Sampling:
    max_tokens: int | None = 1


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any = None
    sampling_params: Sampling | None = field(default_factory=Sampling)
    status: Status = Status.FINISHED_LENGTH_CAPPED
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) if self.prompt_token_ids is not None else 5


@dataclass
class New:
    req_id: str
    block_ids: Table
    num_computed_tokens: int = 0


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[Table | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    """A SchedulerOutput."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def new(self, request_id: str, num: int, computed: int, *blocks: list[int]) -> Output:
        """A request that begins: ``num`` tokens scheduled, all its blocks."""
        self.scheduled_new_reqs.append(New(request_id, blocks, computed))
        self.num_scheduled_tokens[request_id] = num
        return self

    def more(
        self, request_id: str, num: int, computed: int, *blocks: list[int], resumed: bool = False
    ) -> Output:
        """A request that goes on; ``blocks`` are those added, or all where it resumed."""
        cached = self.scheduled_cached_reqs
        cached.req_ids.append(request_id)
        cached.new_block_ids.append(blocks or None)
        cached.num_computed_tokens.append(computed)
        if resumed:
            cached.resumed_req_ids.add(request_id)
        self.num_scheduled_tokens[request_id] = num
        return self
