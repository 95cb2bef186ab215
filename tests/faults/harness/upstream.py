"""Two engines with vLLM's own push connector, and one transfer that is brought to a phase.

The counterpart of ``pair.py`` for somebody else's connector: it asserts nothing about what that
does, it watches for ``WINDOW_S`` and records what happened, or that nothing did.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from neuron_push.bench.couple import consumer_params, producer_params
from neuron_push.bench.geometry import BLOCK_TOKENS, Geometry
from neuron_push.bench.simulated import EngineSpec
from tests.faults.harness.report import record
from tests.faults.harness.upstream_child import AFTER, BEFORE, fault_main

CONNECTOR = "NixlPushConnector"
WINDOW_S = 60.0
START_S = 120.0
SERVE_S = 30.0
"""The window of the next request."""
STEP_S = 0.05

GEOMETRY = Geometry("faults", num_layers=8, kv_heads=1, head_size=64, num_blocks=1600)
SOURCE = list(range(1, 513))  # 32 MiB, as in pair.py: more than socket buffers hold
TARGET = list(range(600, 1112))
GUARD = list(range(513, 600))  # blocks of D that nobody may write to
SMALL = range(1112, 1600)  # for small requests, 32 blocks each, never twice in a case

_numbers = itertools.count()
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.harness.upstream_preload"])


class Event(NamedTuple):
    kind: str
    request: str
    at_s: float
    """CLOCK_MONOTONIC, which all processes share."""
    num_bad: int
    """Blocks that did not hold what they must, when D could run the request."""


class Upstream:
    """Both processes end with :meth:`close`. Belongs to one thread."""

    def __init__(self, folder: Path, ports: list[int], backend: str = "UCX") -> None:
        GEOMETRY.write_config(folder)
        self._folder = folder
        number = next(_numbers)
        self.specs = {
            side: EngineSpec(
                name=f"up{number}-{side}", role=role, mode="vllm-push", geometry=GEOMETRY,
                port=port, model_dir=str(folder), backend=backend, chunk_tokens=1024,
                busy_step_s=STEP_S,
            )
            for side, role, port in zip(
                "pd", ("kv_producer", "kv_consumer"), ports, strict=True
            )
        }  # fmt: skip
        self.events: dict[str, list[Event]] = {"p": [], "d": []}
        self.died: dict[str, str] = {}
        self._pipes: dict[str, Any] = {}
        self._processes: dict[str, Any] = {}
        self._small = iter(range(0, len(SMALL), 32))

    def start_both(self) -> None:
        try:
            for side in self.specs:
                self.start(side)
            for side in self.specs:
                self.wait_up(side)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for side in self._processes:
            self.kill(side)

    # ------------------------------------------------------------ processes

    def start(self, side: str) -> None:
        """For the first time, or again under the same name and port."""
        spec = self.specs[side]
        (self._folder / spec.name).unlink(missing_ok=True)  # torch's meeting place
        ours, theirs = _context.Pipe()
        log = str(self._folder / f"{spec.name}.log")
        process = _context.Process(target=fault_main, args=(theirs, spec, log), daemon=True)
        process.start()
        theirs.close()
        self._pipes[side], self._processes[side] = ours, process

    def wait_up(self, side: str) -> None:
        up = self.wait(side, "", {"up"}, START_S)
        assert up, f"{side}: not up in {START_S} s; {self.died}"
        self.events[side].remove(up)
        self.tell(side, "fill", BEFORE, GUARD)

    def signal(self, side: str, number: int) -> None:
        os.kill(self._processes[side].pid, number)

    def kill(self, side: str) -> None:
        process = self._processes[side]
        if process.is_alive():
            process.kill()
        process.join(10)
        if pipe := self._pipes.pop(side, None):
            pipe.close()

    def end(self, side: str) -> None:
        """In good order, as a SIGTERM would."""
        self._pipes[side].send(("end",))
        self._processes[side].join(15)
        self.kill(side)

    # ------------------------------------------------------------ what the engines say

    def tell(self, side: str, *command: Any) -> None:
        self._pipes[side].send(command)

    def pump(self, timeout_s: float) -> None:
        sides = {id(pipe): side for side, pipe in self._pipes.items()}
        for pipe in wait(list(self._pipes.values()), timeout_s):
            side = sides[id(pipe)]
            try:
                event = Event(*pipe.recv())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                self.died.setdefault(side, "the process has ended")
                self._pipes.pop(side).close()
                continue
            if event.kind == "error":
                self.died[side] = event.request
            self.events[side].append(event)

    def sleep(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._pipes:
                self.pump(left_s)
            else:
                time.sleep(left_s)

    def find(self, side: str, request: str, kinds: set[str]) -> Event | None:
        found = (e for e in self.events[side] if e.request == request and e.kind in kinds)
        return next(found, None)

    def wait(self, side: str, request: str, kinds: set[str], timeout_s: float) -> Event | None:
        end_s = time.monotonic() + timeout_s
        while True:
            event = self.find(side, request, kinds)
            left_s = end_s - time.monotonic()
            if event or left_s <= 0 or side not in self._pipes:
                return event
            self.pump(left_s)

    def ask(self, side: str, name: str, *arguments: Any) -> int:
        """A number from an engine; 0 from a dead one."""
        if side not in self._pipes:
            return 0
        self.events[side] = [e for e in self.events[side] if e.kind != name]
        self.tell(side, name, *arguments)
        answer = self.wait(side, "", {name}, 20)
        return answer.num_bad if answer else 0

    def differing(self, side: str, seed: int, blocks: list[int]) -> int:
        """How many blocks do not hold what this seed gives for them."""
        return self.ask(side, "differing", seed, blocks, blocks)

    def wait_open(self, what: str, count: int = 1) -> None:
        """Until P has so many registrations, or writes, open."""
        end_s = time.monotonic() + 20
        while self.ask("p", "open", what) < count:
            assert time.monotonic() < end_s, f"P has no {what} in 20 s; {self.died}"
            self.sleep(0.02)

    # ------------------------------------------------------------ a request that must work

    def small(self) -> list[int]:
        at = next(self._small)
        return list(SMALL[at : at + 32])

    def serve(self, case: str = "") -> bool:
        """A small request; ``case``: what has happened before it, if worth recording."""
        began_s = time.monotonic()
        blocks = self.small()
        one = UpstreamTransfer(self, "", source=blocks, target=blocks)
        one.load()
        one.prefill()
        end = self.wait("d", one.consumer, {"runnable", "failed"}, SERVE_S)
        works = end is not None and end.kind == "runnable" and not end.num_bad
        what = "serves again" if works or end is None else "serves again: failed"
        took_s = end.at_s - began_s if end else None
        record(case, what, SERVE_S, took_s, CONNECTOR)
        return works


class UpstreamTransfer:
    """One request of a pair. Nothing is recorded where ``case`` is empty."""

    def __init__(
        self, pair: Upstream, case: str, *, key: str = "", attempt: str = "dddddddd",
        source: list[int] = SOURCE, target: list[int] = TARGET,
    ) -> None:  # fmt: skip
        """``attempt``: what D's frontend appends to the router's id, ``key``."""
        self.pair, self.case = pair, case
        self.key = key or f"r{next(_numbers)}"
        self.producer = f"cmpl-{self.key}-0-aaaaaaaa"
        self.consumer = f"cmpl-{self.key}-0-{attempt}"
        self.source, self.target = source, target
        self.fault_s = 0.0
        self.is_aborted = False

    # ------------------------------------------------------------ what comes before a fault

    def load(self) -> None:
        # vLLM's router tells D its own id of the request, not P's.
        params = consumer_params(self.key, self.pair.specs["p"], self.key)
        tokens = BLOCK_TOKENS * len(self.target)
        self.pair.tell("d", "begin", self.consumer, tokens, self.target, params, self.source)

    def register(self, count: int = 1) -> None:
        """Load, and P knows of it, as the ``count``-th."""
        self.load()
        self.pair.wait_open("registrations", count)

    def has_it_all(self) -> None:
        """D's prefix cache holds the whole prompt."""
        params = consumer_params(self.key, self.pair.specs["p"], self.key)
        self.pair.tell("d", "all", self.consumer, BLOCK_TOKENS * len(self.source), params)

    def prefill(self) -> None:
        tokens = BLOCK_TOKENS * len(self.source)
        params = producer_params(self.key)
        self.pair.tell("p", "begin", self.producer, tokens, self.source, params, [])

    def prefill_finishes(self) -> float:
        event = self.pair.wait("p", self.producer, {"finished"}, 30)
        assert event, f"the prefill does not end: {self.pair.died}"
        return event.at_s

    def write_in_flight(self) -> None:
        """P has posted a WRITE, most of which D, stopped, has not taken."""
        self.register()
        self.pair.signal("d", signal.SIGSTOP)
        self.prefill()
        self.pair.wait_open("writes")
        self.pair.sleep(0.1)

    def abort(self) -> None:
        self.is_aborted = True
        self.pair.tell("d", "abort", self.consumer)

    def now(self) -> None:
        self.fault_s = time.monotonic()

    # ------------------------------------------------------------ what comes after

    def watch(self, sides: str = "pd") -> None:
        """Until both sides are through with the request or the window is over; records both."""
        ends = {"d": {"runnable", "failed", "released"}, "p": {"sent"}}
        names = {"p": self.producer, "d": self.consumer}
        for side in sides:
            left_s = self.fault_s + WINDOW_S - time.monotonic()
            self.pair.wait(side, names[side], ends[side], max(0.0, left_s))
        for side in sorted(sides):
            event = self.pair.find(side, names[side], ends[side])
            self._record(side, event)
        self.pair.sleep(1.0)  # what waited in socket buffers comes now
        self._record_overwritten()

    def _record(self, side: str, event: Event | None) -> None:
        if side in self.pair.died:
            return self._note("engine of P dies" if side == "p" else "engine of D dies", 0.0)
        took_s = max(0.0, event.at_s - self.fault_s) if event else None
        if side == "p":
            return self._note("sent", took_s)
        if event is None:
            return self._note("released" if self.is_aborted else "load ends", None)
        if event.kind == "runnable":
            return self._note("received, wrong bytes" if event.num_bad else "received", took_s)
        if event.kind == "failed":
            self._note("failed", took_s)
        self._note("released", took_s)

    def _record_overwritten(self) -> None:
        over = self.pair.find("d", self.consumer, {"runnable", "failed", "released"})
        bad = self.pair.differing("d", BEFORE, GUARD) if self.target is TARGET else 0
        bad += self.pair.differing("d", AFTER, self.target) if over else 0
        if bad:
            self._note("written after they were given back", time.monotonic() - self.fault_s)

    def _note(self, what: str, took_s: float | None) -> None:
        record(self.case, what, WINDOW_S, took_s, CONNECTOR)
