"""One engine with vLLM's own push connector as a process, that faults can happen to.

The engine is the one of ``bench connector``: vLLM's hooks in vLLM's order, at a steady pace as
if other requests were being decoded, so that the connector is never without a step. Added here:
aborts as vLLM's scheduler does them, known contents of every block, the reuse of blocks the
moment they come back, and NIXL calls that fail or take long.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from neuron_push.bench.child import Child
from neuron_push.bench.simulated import EngineSpec, SimEngine, SimRequest, prepare_process
from tests.faults.harness.pattern import pattern

KV, BEFORE, AFTER = 1, 2, 3
"""Seeds: the KV of a prompt; D's blocks before; blocks once they were given back."""

LEASE_S = 6
"""The shortest lease with which vLLM's heartbeats (a sixth of it, whole seconds) come at all."""
REGISTRATION_TIMEOUT_S = 8
"""``request_timeout_s`` of our own fault tests."""


class FaultEngine(SimEngine):
    """Every method belongs to the process's main thread."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        geometry = spec.geometry
        shape = (geometry.num_layers, geometry.num_blocks, geometry.page_bytes)
        self._pages = np.frombuffer(self.memory, dtype=np.uint8).reshape(shape)
        self._aborted: set[str] = set()

    def _transfer_config(self) -> dict[str, Any]:
        config = super()._transfer_config()
        config["kv_connector_extra_config"] |= {
            "kv_lease_duration": LEASE_S,
            "push_registration_timeout": REGISTRATION_TIMEOUT_S,
        }
        return config

    # ------------------------------------------------------------ requests

    def abort(self, request_id: str) -> str:
        """As the scheduler's finish_requests; what has come back at once: sent, released or ""."""
        from vllm.v1.request import RequestStatus

        is_load = request_id in self._waiting
        one = self._waiting[request_id] if is_load else self._running.pop(request_id)
        one.request.status = RequestStatus.FINISHED_ABORTED
        self._finished.add(request_id)
        held, _ = self.scheduler.request_finished_all_groups(one.request, (one.blocks,))
        if is_load and one.is_known:
            self._aborted.add(request_id)  # its blocks wait for finished_recving
            return ""
        if is_load:
            del self._waiting[request_id]
            return "released"
        if held:
            self._held[request_id] = one
        return "" if held else "sent"

    def has_it_all(self, request_id: str, num_tokens: int, params: dict[str, Any]) -> None:
        """A request whose whole prompt is in this engine's prefix cache, from begin to end."""
        self.add(request_id, num_tokens, [], params)
        one = self._waiting.pop(request_id)
        count, _ = self.scheduler.get_num_new_matched_tokens(one.request, num_tokens)
        assert not count
        self._end_load(one)

    def _end_load(self, one: SimRequest) -> None:
        if one.request.request_id not in self._aborted:
            super()._end_load(one)

    def is_aborted(self, request_id: str) -> bool:
        return request_id in self._aborted

    # ------------------------------------------------------------ contents

    def _pattern(self, seed: int, block: int) -> Any:
        return pattern(seed, block, (self._pages.shape[0], self._pages.shape[2]))

    def fill(self, seed: int, blocks: list[int]) -> None:
        for block in blocks:
            self._pages[:, block] = self._pattern(seed, block)

    def differing(self, seed: int, blocks: list[int], source: list[int]) -> int:
        """How many blocks do not hold what this seed gives for the blocks in ``source``."""
        return sum(
            not np.array_equal(self._pages[:, block], self._pattern(seed, origin))
            for block, origin in zip(blocks, source, strict=False)
        )

    # ------------------------------------------------------------ NIXL

    def num_open(self, what: str) -> int:
        """On P: ``registrations`` that wait for their prefill, or ``writes`` under way."""
        worker = self.worker.connector_worker
        known = worker._pending_d_registrations if "reg" in what else worker._sending_transfers
        return len(known)

    def break_call(self, method: str, delay_s: float, raises: bool, times: int) -> None:
        """The next calls of this method of the NIXL agent wait, then fail if they are to."""
        nixl = self.worker.connector_worker.nixl_wrapper
        call: Callable[..., Any] = getattr(nixl, method)
        left = times

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left <= 0:
                return call(*args, **kwargs)
            left -= 1
            time.sleep(delay_s)
            if raises:
                raise RuntimeError(f"{method} fails: planned by the test")
            return call(*args, **kwargs)

        setattr(nixl, method, broken)


class FaultChild(Child):
    """Commands as the bench's, and: begin, all, abort, fill, differing, open, break."""

    _engine: FaultEngine

    def __init__(self, pipe: Connection, engine: FaultEngine) -> None:
        super().__init__(pipe, engine)
        self._blocks: dict[str, tuple[list[int], list[int]]] = {}

    def command(self, name: str, *arguments: Any) -> bool:
        engine = self._engine
        if name == "begin":
            request_id, num_tokens, blocks, params, source = arguments
            engine.fill(BEFORE if source else KV, blocks)
            self._blocks[request_id] = (blocks, source)
            engine.add(request_id, num_tokens, blocks, params)
        elif name == "all":
            engine.has_it_all(*arguments)
        elif name == "abort":
            if kind := engine.abort(arguments[0]):
                self.tell((kind, arguments[0], time.monotonic()))
        elif name == "fill":
            engine.fill(*arguments)
        elif name == "differing":
            self._pipe.send((name, "", time.monotonic(), engine.differing(*arguments)))
        elif name == "open":
            self._pipe.send((name, "", time.monotonic(), engine.num_open(*arguments)))
        elif name == "break":
            engine.break_call(*arguments)
        else:
            return super().command(name, *arguments)
        return True

    def tell(self, event: tuple[Any, ...]) -> None:
        """(what, request id, time, blocks with wrong contents). What came back is used again."""
        kind, request_id, at = event
        blocks, source = self._blocks.get(request_id, ([], []))
        bad = 0
        if kind == "runnable":
            if self._engine.is_aborted(request_id):
                kind = "released"
            else:
                bad = self._engine.differing(KV, blocks, source)
        if kind in ("sent", "runnable", "failed", "released"):
            self._engine.fill(AFTER, blocks)
        if kind == "finished":
            at = time.monotonic()
        self._pipe.send((kind, request_id, at, bad))


def fault_main(pipe: Connection, spec: EngineSpec, log: str) -> None:
    """Answers ("up", "", time, 0), then events; ("error", text, time, 0) when it cannot go on."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    prepare_process(spec)
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"  # their own account of what went wrong
    try:
        child = FaultChild(pipe, FaultEngine(spec))
        pipe.send(("up", "", time.monotonic(), 0))
        child.serve()
    except (EOFError, KeyboardInterrupt):
        return
    except Exception:
        traceback.print_exc()
        pipe.send(("error", traceback.format_exc(), time.monotonic(), 0))
