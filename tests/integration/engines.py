"""Engines without a model: a side channel, and ranks with real NIXL over numpy memory.

Everything but vLLM is real here; the tests play the part of its scheduler and worker.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neuron_push.core.agent import Agent, NixlAgent
from neuron_push.core.commands import (
    BeginProducer,
    FinishProducer,
    OpenConsumer,
    Progress,
    Result,
    StepDone,
    Target,
)
from neuron_push.core.faulty import FaultPlan, FaultyAgent
from neuron_push.core.keys import SideKeys
from neuron_push.core.layout import Allocation, KvLayout, Region
from neuron_push.core.link import link_path
from neuron_push.core.messages import WIRE_VERSION, EngineCard, Identity, ModelCard, RankCard
from neuron_push.core.session import Outcome, Prompt
from neuron_push.core.shop import Limits
from neuron_push.core.sidechannel import SideChannel
from neuron_push.core.transfer import RankSetup, TransferThread
from neuron_push.fit import explain_cards

TOKENS_PER_BLOCK = 16
NUM_HEADS = 2
ITEM_BYTES = 64
BLOCK_BYTES = TOKENS_PER_BLOCK * NUM_HEADS * ITEM_BYTES


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Done:
    """A marker of work that is over, as on a CPU."""

    def done(self) -> bool:
        return True


def make_memory(num_layers: int, num_blocks: int) -> tuple[npt.NDArray[np.uint8], KvLayout]:
    """K and V apart, one allocation. Shape (layers, 2, blocks, bytes)."""
    memory = np.zeros((num_layers, 2, num_blocks, BLOCK_BYTES), dtype=np.uint8)
    base = memory.ctypes.data
    regions = tuple(
        Region(
            layer=f"layers.{layer}",
            part="kv"[part],  # type: ignore[arg-type]
            group=0,
            base_address=base + (layer * 2 + part) * num_blocks * BLOCK_BYTES,
            num_blocks=num_blocks,
            block_stride=BLOCK_BYTES,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_heads=NUM_HEADS,
            head_first=0,
            token_stride=ITEM_BYTES,
            head_stride=TOKENS_PER_BLOCK * ITEM_BYTES,
            item_bytes=ITEM_BYTES,
            device_id=0,
        )
        for layer in range(num_layers)
        for part in range(2)
    )
    layout = KvLayout(
        tp_rank=0,
        pp_rank=0,
        total_kv_heads=NUM_HEADS,
        dtype="bfloat16",
        memory_type="DRAM",
        allocations=(Allocation(base, memory.nbytes, 0),),
        regions=regions,
    )
    layout.validate()
    return memory, layout


LIMITS = Limits(
    lease_s=30,
    request_timeout_s=20,
    peer_timeout_s=3,
    handshake_timeout_s=3,
    quarantine_s=1,
)


@dataclass
class Engine:
    name: str
    backend: str = "UCX"
    num_layers: int = 4
    num_blocks: int = 64
    verify: bool = True
    limits: Limits = LIMITS
    model: dict[str, str] = field(default_factory=lambda: {"architecture": "Test"})
    make: Callable[[int, int], tuple[Any, KvLayout]] = make_memory
    keys: SideKeys | None = None
    plan: FaultPlan | None = None
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.memory, self.layout = self.make(self.num_layers, self.num_blocks)
        self.incarnation = secrets.token_hex(4)
        self.identity = Identity(
            engine_id=self.name,
            incarnation=self.incarnation,
            host=self.host,
            port=self.port,
            tp_size=1,
            pp_size=1,
            model="test",
            role="both",
        )
        path = link_path(self.name, self.host, self.port)
        self.side = SideChannel(
            self.identity,
            link_path=path,
            num_ranks=1,
            make_card=self._card,
            judge=explain_cards,
            handshake_timeout_s=self.limits.handshake_timeout_s,
            keys=self.keys,
        )
        self.rank = TransferThread(
            RankSetup(
                rank=0,
                layout=self.layout,
                make_agent=self._make_agent,
                link_path=path,
                limits=self.limits,
                verify=self.verify,
            )
        )
        self.rank.start()
        self.ended: dict[str, list[Result]] = {}

    def _make_agent(self) -> Agent:
        agent = NixlAgent(f"{self.name}/0/{secrets.token_hex(4)}", self.backend)
        return agent if self.plan is None else FaultyAgent(agent, self.plan)

    def _card(self, identity: Identity, ranks: tuple[RankCard, ...]) -> EngineCard:
        return EngineCard(
            identity=identity,
            wire_version=WIRE_VERSION,
            transfer_mode="push",
            vllm_version="none",
            model=ModelCard("test", self.model),
            ranks=ranks,
        )

    @property
    def target(self) -> Target:
        return Target(self.host, self.port, self.name)

    def num_open(self) -> int:
        """Sessions and loads of the rank that are not over, read from another thread."""
        loop = self.rank._loop
        if loop is None:
            return -1
        sessions = list(loop._producing._sessions.values())
        return sum(not session.is_over for session in sessions) + loop._consuming.num_open

    def close(self) -> None:
        self.rank.stop()
        self.side.close()

    def wait(self, request_id: str, outcome: Outcome, timeout_s: float = 10) -> Result:
        """The result with this outcome; asserts that it comes in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            for result in self.ended.get(request_id, ()):
                if result.outcome is outcome:
                    return result
            assert time.monotonic() < end_s, (
                f"{self.name}: {request_id} has no {outcome} within {timeout_s} s, only "
                f"{self.ended.get(request_id)}"
            )
            for result in self.rank.results(0.01):
                self.ended.setdefault(result.request_id, []).append(result)

    # the vLLM parts

    def prefill(
        self, request_id: str, key: str, prompt: Prompt, blocks: list[int], upto: int | None = None
    ) -> None:
        self.rank.submit(
            [
                BeginProducer(request_id, key, prompt),
                StepDone(
                    (Progress(request_id, (tuple(blocks),), True, upto or prompt.num_tokens),),
                    Done(),
                ),
            ]
        )

    def finish(self, request_id: str) -> None:
        self.rank.submit([FinishProducer(request_id)])

    def load(
        self,
        request_id: str,
        key: str,
        producer: Engine,
        prompt: Prompt,
        blocks: list[int],
        first: int = 0,
        end: int | None = None,
    ) -> None:
        self.load_from(request_id, key, producer.target, prompt, blocks, first, end)

    def load_from(
        self,
        request_id: str,
        key: str,
        target: Target,
        prompt: Prompt,
        blocks: list[int],
        first: int = 0,
        end: int | None = None,
    ) -> None:
        self.rank.submit(
            [
                OpenConsumer(
                    request_id,
                    key,
                    target,
                    prompt,
                    first,
                    prompt.num_tokens - 1 if end is None else end,
                    first // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK,
                    (tuple(blocks),),
                )
            ]
        )


@contextmanager
def engines(**settings: object) -> Iterator[tuple[Engine, Engine]]:
    """A producer and a consumer."""
    producer = Engine("p-" + secrets.token_hex(3), **settings)  # type: ignore[arg-type]
    try:
        consumer = Engine("d-" + secrets.token_hex(3), **settings)  # type: ignore[arg-type]
        try:
            yield producer, consumer
        finally:
            consumer.close()
    finally:
        producer.close()
