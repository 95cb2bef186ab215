"""What one event costs our transfer thread, and whether other open requests make it dearer.

No bytes move: each request of a burst is registered as wanting nothing (its KV was in D's
prefix cache), begun, finished and released. Meanwhile others stay open: registered by D, never
begun by P.
"""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from neuron_push.bench.loads import BenchError
from neuron_push.bench.ports import quiet_ports
from neuron_push.core.agent import NixlAgent
from neuron_push.core.commands import (
    BeginProducer,
    Command,
    FinishProducer,
    OpenConsumer,
    Progress,
    StepDone,
    Target,
)
from neuron_push.core.layout import Allocation, KvLayout, Region
from neuron_push.core.link import link_path
from neuron_push.core.messages import WIRE_VERSION, EngineCard, Identity, ModelCard, RankCard
from neuron_push.core.session import Outcome, Prompt
from neuron_push.core.shop import Limits
from neuron_push.core.sidechannel import SideChannel
from neuron_push.core.transfer import RankSetup, TransferThread
from neuron_push.fit import explain_cards

_TOKENS, _BLOCK_BYTES, _NUM_BLOCKS = 16, 1024, 64
_PROMPT = Prompt(_TOKENS * 2, b"")
_PATIENT = Limits(
    lease_s=3600, request_timeout_s=3600, peer_timeout_s=600, handshake_timeout_s=10,
    quarantine_s=1,
)  # fmt: skip


@dataclass(frozen=True)
class _Node:
    name: str
    port: int
    backend: str


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


def measure_events(backend: str, few: int, many: int, burst: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each side's transfer thread for one whole request of a burst."""
    answer: dict[str, Any] = {"burst": burst}
    totals = []
    for num_open in (few, many):
        costs = _with_open(backend, num_open, burst, rounds)
        answer[f"{num_open} open"] = costs
        totals.append(costs["p_us"] + costs["d_us"])
    answer["many_to_few"] = round(totals[1] / totals[0], 3)
    return answer


def _with_open(backend: str, num_open: int, burst: int, rounds: int) -> dict[str, Any]:
    ports = quiet_ports(2)
    nodes = {
        side: _Node(f"events-{side}-{secrets.token_hex(3)}", port, backend)
        for side, port in zip(("p", "d"), ports, strict=True)
    }
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = []
    for side, node in nodes.items():
        pipes[side], theirs = context.Pipe()
        processes.append(context.Process(target=_main, args=(theirs, node), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        for pipe in pipes.values():
            _expect(pipe, 60)
        target = (nodes["p"].name, nodes["p"].port)
        pipes["d"].send(("open", target, "first", 1, False))
        pipes["p"].send(("serve", "first", 1))
        for pipe in pipes.values():
            _expect(pipe, 30)
        pipes["d"].send(("open", target, "other", num_open, True))
        _expect(pipes["d"], 120)
        time.sleep(1.0 + num_open / 5_000)  # P takes them in
        costs: dict[str, list[float]] = {"p": [], "d": []}
        for number in range(rounds):
            name = f"burst{number}"
            pipes["d"].send(("open", target, name, burst, False))
            pipes["p"].send(("serve", name, burst))
            for side, pipe in pipes.items():
                costs[side].append(_expect(pipe, 120) / burst * 1e6)
        for pipe in pipes.values():
            pipe.send(("end",))
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return {f"{side}_us": round(statistics.median(values), 1) for side, values in costs.items()}


def _expect(pipe: Connection, timeout_s: float) -> float:
    if not pipe.poll(timeout_s):
        raise BenchError(f"events: no answer in {timeout_s:g} s")
    try:
        kind, value = pipe.recv()
    except EOFError:
        raise BenchError("events: a process has ended") from None
    if kind == "error":
        raise BenchError(value)
    return float(value)


# ---------------------------------------------------------------- the processes


def _main(pipe: Connection, node: _Node) -> None:
    import os

    os.environ.update(UCX_TLS="tcp,self", NIXL_LOG_LEVEL="ERROR")
    try:
        engine = _Engine(node)
        pipe.send(("up", 0.0))
        while (command := pipe.recv())[0] != "end":
            pipe.send(("cpu_s", getattr(engine, command[0])(*command[1:])))
        engine.close()
    except (EOFError, KeyboardInterrupt):
        return
    except Exception:
        pipe.send(("error", traceback.format_exc()))


class _Engine:
    """A side channel and one rank over a few kilobytes."""

    def __init__(self, node: _Node) -> None:
        self._memory = np.zeros(_NUM_BLOCKS * _BLOCK_BYTES, dtype=np.uint8)
        base = self._memory.ctypes.data
        region = Region(
            layer="layers.0", part="kv", group=0, base_address=base, num_blocks=_NUM_BLOCKS,
            block_stride=_BLOCK_BYTES, tokens_per_block=_TOKENS, num_heads=1, head_first=0,
            token_stride=_BLOCK_BYTES // _TOKENS, head_stride=_BLOCK_BYTES,
            item_bytes=_BLOCK_BYTES // _TOKENS, device_id=0,
        )  # fmt: skip
        layout = KvLayout(
            tp_rank=0, pp_rank=0, total_kv_heads=1, dtype="bfloat16", memory_type="DRAM",
            allocations=(Allocation(base, self._memory.nbytes, 0),), regions=(region,),
        )  # fmt: skip
        identity = Identity(
            engine_id=node.name, incarnation=secrets.token_hex(4), host="127.0.0.1",
            port=node.port, tp_size=1, pp_size=1, model="none", role="both",
        )  # fmt: skip

        def card(identity: Identity, ranks: tuple[RankCard, ...]) -> EngineCard:
            return EngineCard(identity, WIRE_VERSION, "push", "none", ModelCard("none", {}), ranks)

        path = link_path(node.name, "127.0.0.1", node.port)
        self._side = SideChannel(
            identity, link_path=path, num_ranks=1, make_card=card, judge=explain_cards,
            handshake_timeout_s=10,
        )  # fmt: skip
        self._rank = TransferThread(
            RankSetup(0, layout, lambda: NixlAgent(node.name, node.backend), path, _PATIENT)
        )
        self._rank.start()
        thread = next(t for t in threading.enumerate() if t.name == "np-transfer-0")
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)

    def close(self) -> None:
        self._rank.stop()
        self._side.close()

    def open(self, target: tuple[str, int], name: str, count: int, wants: bool) -> float:
        """Register ``count`` loads; those that want nothing are over when they are sent."""
        engine, port = target
        end = _PROMPT.num_tokens - 1
        commands: list[Command] = [
            OpenConsumer(
                f"{name}-{i}", f"{name}-{i}", Target("127.0.0.1", port, engine), _PROMPT,
                0 if wants else end, end, 0, ((1, 2),) if wants else ((),),
            )
            for i in range(count)
        ]  # fmt: skip
        return self._spend(commands, 0 if wants else count, Outcome.RECEIVED)

    def serve(self, name: str, count: int) -> float:
        commands: list[Command] = []
        for i in range(count):
            request_id = f"{name}-{i}"
            commands += [
                BeginProducer(request_id, request_id, _PROMPT),
                StepDone((Progress(request_id, ((1, 2),), True, _PROMPT.num_tokens),), _Done()),
                FinishProducer(request_id),
            ]
        return self._spend(commands, count, Outcome.SENT)

    def _spend(self, commands: list[Command], count: int, outcome: Outcome) -> float:
        """The transfer thread's CPU seconds until ``count`` requests have this outcome."""
        before_s, end_s = time.clock_gettime(self._clock), time.monotonic() + 100
        self._rank.submit(commands)
        seen = 0
        while seen < count:
            if time.monotonic() > end_s:
                raise BenchError(f"events: {seen} of {count} requests are {outcome.value}")
            for result in self._rank.results(0.05):
                if result.outcome is Outcome.FAILED:
                    raise BenchError(f"events: {result.request_id}: {result.detail}")
                seen += result.outcome is outcome
        return time.clock_gettime(self._clock) - before_s
