"""One simulated engine in a process of its own, told by the parent over a pipe what to do."""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import psutil

from neuron_push.bench.simulated import EngineSpec, SimEngine, Timings, prepare_process

RAW_POLL_S = 50e-6


def engine_main(pipe: Connection, spec: EngineSpec) -> None:
    """Answers ("up",), then commands until ("end",); ("error", text) when it cannot go on."""
    prepare_process(spec)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        child = Child(pipe, SimEngine(spec))
        pipe.send(("up",))
        child.serve()
    except (EOFError, KeyboardInterrupt):
        return
    except Exception:
        pipe.send(("error", f"{spec.name}:\n{traceback.format_exc()}"))


class Child:
    def __init__(self, pipe: Connection, engine: SimEngine) -> None:
        self._pipe = pipe
        self._engine = engine
        self._raw: Any = None
        self._peer = ""

    def serve(self) -> None:
        engine = self._engine
        while True:
            # An engine with nothing to do waits for its input; one with work looks at it.
            idle = not (engine.has_requests or engine.spec.busy_step_s)
            while self._pipe.poll(0.02 if idle else 0):
                if not self.command(*self._pipe.recv()):
                    engine.close()
                    return
                idle = False
            if not idle or engine.scheduler.has_pending_push_work():
                for event in engine.step():
                    self.tell(event)

    def tell(self, event: tuple[Any, ...]) -> None:
        """What has happened in a step."""
        self._pipe.send(event)

    def command(self, name: str, *arguments: Any) -> bool:
        engine = self._engine
        if name == "end":
            return False
        if name == "add":
            for request in arguments[0]:
                engine.add(*request)
        elif name == "reset":
            engine.timings = Timings()
            engine.stats.clear()
        elif name == "read":
            self._pipe.send(
                ("read", {**asdict(engine.timings), "stats": dict(engine.stats),
                          "rss": psutil.Process().memory_info().rss})
            )  # fmt: skip
        elif name == "raw_card":
            self._pipe.send(("raw_card", self._raw_agent().get_agent_metadata(), engine.address))
        elif name == "raw_meet":
            peer = self._raw_agent().add_remote_agent(arguments[0])
            self._peer = peer.decode() if isinstance(peer, bytes) else str(peer)
            self._pipe.send(("raw_met",))
        elif name == "raw_write":
            self._pipe.send(("raw_written", self._raw_write(arguments[0])))
        elif name == "raw_wait":
            self._pipe.send(("raw_arrived", self._raw_wait()))
        else:
            raise ValueError(f"unknown command {name!r}")
        return True

    # ------------------------------------------------------------ plain NIXL

    def _raw_agent(self) -> Any:
        """A second agent on the same memory, without a progress thread."""
        if self._raw is None:
            from nixl._api import nixl_agent, nixl_agent_config

            spec = self._engine.spec
            agent = nixl_agent(
                f"raw-{spec.name}", nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            agent.create_backend(spec.backend, {})
            size = spec.geometry.pool_bytes
            agent.register_memory([(self._engine.address, size, 0, "")], "DRAM")
            self._raw = agent
        return self._raw

    def _raw_write(self, runs: list[tuple[int, int, int]]) -> float:
        """One WRITE of (source, target, bytes) runs; returns the time before it was posted."""
        import numpy as np

        rows = np.array(runs, dtype=np.uint64)
        device = np.zeros(len(rows), dtype=np.uint64)
        agent = self._raw
        source = agent.get_xfer_descs(np.column_stack([rows[:, 0], rows[:, 2], device]), "DRAM")
        target = agent.get_xfer_descs(np.column_stack([rows[:, 1], rows[:, 2], device]), "DRAM")
        started_s = time.monotonic()
        handle = agent.initialize_xfer("WRITE", source, target, self._peer, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(RAW_POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the plain WRITE ended as {state}")
        agent.release_xfer_handle(handle)
        return started_s

    def _raw_wait(self, timeout_s: float = 60.0) -> float:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if any(self._raw.get_new_notifs().values()):
                return time.monotonic()
            time.sleep(RAW_POLL_S)
        raise RuntimeError(f"the plain WRITE did not arrive in {timeout_s:g} s")
