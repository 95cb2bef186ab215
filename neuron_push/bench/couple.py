"""Two simulated engines, P and D, and the router's part between them."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from neuron_push.bench.child import engine_main
from neuron_push.bench.geometry import Geometry, Tables
from neuron_push.bench.loads import BenchError
from neuron_push.bench.ports import quiet_ports
from neuron_push.bench.simulated import EngineSpec

START_TIMEOUT_S = 600.0


@dataclass
class Life:
    """One request's moments, CLOCK_MONOTONIC seconds, which both processes share."""

    added_s: float = 0.0
    forward_end_s: float = 0.0
    runnable_s: float = 0.0
    sent_s: float = 0.0

    @property
    def hand_over_s(self) -> float:
        return self.runnable_s - self.forward_end_s

    @property
    def is_over(self) -> bool:
        return bool(self.forward_end_s and self.runnable_s and self.sent_s)


@dataclass
class Settings:
    """Of both engines of a couple."""

    mode: str
    geometry: Geometry
    backend: str = "UCX"
    step_s: float = 0.04
    chunk_tokens: int = 512
    decode_step_s: float = 0.0
    lazy_memory: bool = False


class Couple:
    """Use as a context manager; the processes end with it."""

    _numbers = itertools.count()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.number = next(self._numbers)

    def __enter__(self) -> Couple:
        settings = self.settings
        self._folder = tempfile.TemporaryDirectory(prefix="neuron-push-sim-")
        settings.geometry.write_config(Path(self._folder.name))
        ports = quiet_ports(2)
        base = EngineSpec(
            name=f"sim{self.number}-p", role="kv_producer", mode=settings.mode,
            geometry=settings.geometry, port=ports[0],
            model_dir=self._folder.name, backend=settings.backend,
            step_s=settings.step_s, chunk_tokens=settings.chunk_tokens,
            lazy_memory=settings.lazy_memory,
        )  # fmt: skip
        self.specs = {
            "p": base,
            "d": replace(
                base, name=f"sim{self.number}-d", role="kv_consumer", port=ports[1],
                busy_step_s=settings.decode_step_s,
            ),
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Any] = {}
        self._processes = []
        for side, spec in self.specs.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=engine_main, args=(theirs, spec), daemon=True)
            process.start()
            theirs.close()
            self._pipes[side] = ours
            self._processes.append(process)
        try:
            for side in self._pipes:
                self._expect(side, "up", START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            try:
                pipe.send(("end",))
            except OSError:
                continue
        for process in self._processes:
            process.join(8)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._folder.cleanup()

    # ------------------------------------------------------------ requests

    def transfer(
        self, keys: Sequence[str], num_tokens: int, tables: tuple[Tables, Tables],
        timeout_s: float = 120.0, num_open: int | None = None, reset_after: int | None = None,
    ) -> dict[str, Life]:  # fmt: skip
        """Returns when D can run each of these requests, and P's blocks are free.

        num_open: so many at a time, the next when one is over; else all at once.
        reset_after: forget what was measured when so many are over.
        """
        lives: dict[str, Life] = {}
        blocks: dict[str, tuple[list[int], list[int]]] = {}
        waiting = deque(keys)
        pull = self.settings.mode == "vllm-pull"

        def load(key: str, params: dict[str, Any]) -> tuple[Any, ...]:
            return (f"cmpl-{key}-0-dddddddd", num_tokens, blocks[key][1], params)

        def start(count: int) -> None:
            new = [waiting.popleft() for _ in range(min(count, len(waiting)))]
            for key in new:
                lives[key] = Life(added_s=time.monotonic())
                blocks[key] = (tables[0].take(num_tokens), tables[1].take(num_tokens))
            if new and not pull:
                p = self.specs["p"]
                asked = {key: consumer_params(key, p, f"cmpl-{key}-0-aaaaaaaa") for key in new}
                self._pipes["d"].send(("add", [load(key, asked[key]) for key in new]))
            legs = [
                (f"cmpl-{key}-0-aaaaaaaa", num_tokens, blocks[key][0], producer_params(key))
                for key in new
            ]
            self._pipes["p"].send(("add", legs))

        def on_event(side: str, event: tuple[Any, ...]) -> None:
            kind, key = event[0], event[1].split("-")[1]
            if kind == "failed":
                raise BenchError(f"{self.settings.mode}: request {key} failed on D")
            if kind == "finished":
                if pull:
                    self._pipes["d"].send(("add", [load(key, event[2])]))
                return
            setattr(lives[key], f"{kind}_s", event[2])
            if key in blocks and lives[key].is_over:
                for table, taken in zip(tables, blocks.pop(key), strict=True):
                    table.give(taken)
                if len(lives) - len(blocks) == reset_after:
                    self.reset()
                if waiting:
                    start(1)

        start(num_open or len(keys))
        self._watch(on_event, lambda: not (blocks or waiting), timeout_s)
        return lives

    def _watch(
        self, on_event: Callable[[str, tuple[Any, ...]], None], is_over: Callable[[], bool],
        timeout_s: float,
    ) -> None:  # fmt: skip
        end_s = time.monotonic() + timeout_s
        sides = {id(pipe): side for side, pipe in self._pipes.items()}
        while not is_over():
            ready = wait(list(self._pipes.values()), max(0.0, end_s - time.monotonic()))
            if not ready:
                raise BenchError(f"{self.settings.mode}: not over after {timeout_s:g} s")
            for pipe in ready:
                event = self._receive(sides[id(pipe)])
                on_event(sides[id(pipe)], event)

    # ------------------------------------------------------------ questions

    def reset(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(("reset",))

    def read(self) -> dict[str, dict[str, Any]]:
        """Of both sides: hook times, the connector's own counts, resident memory."""
        answers = {}
        for side, pipe in self._pipes.items():
            pipe.send(("read",))
            answers[side] = self._expect(side, "read", 30.0)[1]
        return answers

    def raw_meet(self) -> None:
        """Plain agents beside the connectors' own, for :meth:`raw_write`."""
        cards = {}
        for side, pipe in self._pipes.items():
            pipe.send(("raw_card",))
            cards[side] = self._expect(side, "raw_card", 60.0)
        for side, other in (("p", "d"), ("d", "p")):
            self._pipes[side].send(("raw_meet", cards[other][1]))
            self._expect(side, "raw_met", 60.0)
        self._addresses = {side: card[2] for side, card in cards.items()}

    def raw_write(self, source: list[int], target: list[int]) -> float:
        """Seconds for one plain WRITE of these blocks, from posting it to its notification."""
        runs = block_runs(
            source, target, self.settings.geometry, self._addresses["p"], self._addresses["d"]
        )
        self._pipes["d"].send(("raw_wait",))
        self._pipes["p"].send(("raw_write", runs))
        started_s = self._expect("p", "raw_written", 60.0)[1]
        return float(self._expect("d", "raw_arrived", 60.0)[1] - started_s)

    def _expect(self, side: str, name: str, timeout_s: float) -> tuple[Any, ...]:
        """The next message of this name; what happened before it is of no interest."""
        end_s = time.monotonic() + timeout_s
        while self._pipes[side].poll(max(0.0, end_s - time.monotonic())):
            message = self._receive(side)
            if message[0] == name:
                return message
        raise BenchError(f"{self.specs[side].name}: no {name!r} in {timeout_s:g} s")

    def _receive(self, side: str) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self._pipes[side].recv()
        except EOFError:
            raise BenchError(f"{self.specs[side].name} has ended") from None
        if message[0] == "error":
            raise BenchError(message[1])
        return message


def consumer_params(key: str, p: EngineSpec, remote_request_id: str) -> dict[str, Any]:
    """D's leg of a request; a router that knows P's own request id names it."""
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": key,
        "remote_engine_id": p.name, "remote_host": "127.0.0.1", "remote_port": p.port,
        "tp_size": 1, "pp_size": 1, "remote_request_id": remote_request_id,
    }  # fmt: skip


def producer_params(key: str) -> dict[str, Any]:
    """P's leg of a request."""
    return {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key,
        "remote_engine_id": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip


def block_runs(
    source: list[int], target: list[int], geometry: Geometry, source_base: int, target_base: int
) -> list[tuple[int, int, int]]:
    """(source address, target address, bytes): blocks side by side at both ends are one run."""
    page = geometry.page_bytes
    layer_bytes = page * geometry.num_blocks
    runs: list[tuple[int, int, int]] = []
    first = 0
    for i in range(1, len(source) + 1):
        if i < len(source) and (source[i], target[i]) == (source[i - 1] + 1, target[i - 1] + 1):
            continue
        for layer in range(geometry.num_layers):
            at = layer * layer_bytes
            runs.append(
                (source_base + at + source[first] * page, target_base + at + target[first] * page,
                 (i - first) * page)
            )  # fmt: skip
        first = i
    return runs


@dataclass
class Keys:
    """Names of transfers, none used twice."""

    prefix: str
    _next: itertools.count[int] = field(default_factory=itertools.count)

    def take(self, count: int = 1) -> list[str]:
        return [f"{self.prefix}{next(self._next)}" for _ in range(count)]
