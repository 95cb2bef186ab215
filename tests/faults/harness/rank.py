"""One engine with one rank as a process of its own, told what to do by JSON lines on stdin.

Every line is ``{"op": NAME, ...}``; the answer is a line too, in order. Logs go to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# NIXL's Python package asks only whether a value is a tensor, and PyTorch takes seconds to load.
sys.modules["torch"] = _no_torch = ModuleType("torch")
_no_torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]

# ruff: noqa: E402
import numpy as np

from neuron_push.core.commands import (
    AbortConsumer,
    AnnounceConsumer,
    FailProducer,
    Target,
)
from neuron_push.core.faulty import Fault, FaultPlan, Kind
from neuron_push.core.keys import load_keys
from neuron_push.core.messages import Reason
from neuron_push.core.session import Prompt
from neuron_push.core.shop import Limits
from tests.faults.harness.pattern import pattern
from tests.integration.engines import Engine


class Rank:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.plan = FaultPlan()
        keys = settings.pop("key_file", None)
        self.engine = Engine(
            settings.pop("name"),
            limits=Limits(**settings.pop("limits")),
            keys=load_keys(Path(keys)) if keys else None,
            verify=False,
            plan=self.plan,
            **settings,
        )
        self.results: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()

    def _collect(self) -> None:
        while not self._stop.is_set():
            for result in self.engine.rank.results(0.02):
                self.results.append(
                    {
                        "t": time.monotonic(),
                        "request": result.request_id,
                        "outcome": result.outcome.value,
                        "reason": result.reason.value if result.reason else "",
                        "detail": result.detail,
                        "segments": result.num_segments,
                    }
                )

    # ------------------------------------------------------------ what the test asks

    def op_info(self) -> dict[str, Any]:
        return {"port": self.engine.port, "incarnation": self.engine.side.identity.incarnation}

    def op_prefill(
        self, request: str, key: str, tokens: int, blocks: list[int], upto: int | None = None
    ) -> None:
        self.engine.prefill(request, key, Prompt(tokens, b"h" * 16), blocks, upto)

    def op_finish(self, request: str) -> None:
        self.engine.finish(request)

    def op_fail(self, request: str, key: str, held: bool = True) -> None:
        reason = Reason.PRODUCER_ABORTED
        self.engine.rank.submit([FailProducer(request, key, reason, "by the test", held)])

    def op_announce(self, request: str, key: str, target: list[Any]) -> None:
        self.engine.rank.submit([AnnounceConsumer(request, key, Target(*target))])

    def op_load(
        self,
        request: str,
        key: str,
        target: list[Any],
        tokens: int,
        blocks: list[int],
        first: int = 0,
    ) -> None:
        prompt = Prompt(tokens, b"h" * 16)
        self.engine.load_from(request, key, Target(*target), prompt, blocks, first=first)

    def op_abort(self, request: str) -> None:
        self.engine.rank.submit([AbortConsumer(request)])

    def op_suspend(self, request: str, timeout_s: float) -> bool:
        return self.engine.rank.suspend((request,), timeout_s)

    def op_results(self, since: int = 0) -> list[dict[str, Any]]:
        return self.results[since:]

    def op_fill(self, seed: int, blocks: list[int]) -> None:
        memory = self.engine.memory
        shape = (*memory.shape[:2], memory.shape[3])
        for block in blocks:
            memory[:, :, block] = pattern(seed, block, shape)

    def op_differing(self, seed: int, blocks: list[int], source: list[int] | None) -> list[int]:
        """Which blocks do not hold the pattern; ``source``: the pattern of these instead."""
        memory = self.engine.memory
        shape = (*memory.shape[:2], memory.shape[3])
        return [
            block
            for block, origin in zip(blocks, source or blocks, strict=True)
            if not np.array_equal(memory[:, :, block], pattern(seed, origin, shape))
        ]

    def op_faults(self, faults: list[dict[str, Any]]) -> None:
        self.plan.clear()
        self.plan.add(*(Fault(**{**fault, "kind": Kind(fault["kind"])}) for fault in faults))

    def op_stats(self) -> dict[str, Any]:
        counters = self.engine.rank.counters
        status = Path("/proc/self/status").read_text()
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "rss_kib": int(status.split("VmRSS:")[1].split()[0]),
            "abandoned": self.engine.rank.num_abandoned,
            "open": self.engine.num_open(),
            "lost_peers": counters.events["lost_peer"],
            "dropped": counters.events["dropped_notification"],
            "refused": counters.refusals.get("bad_registration", 0),
            "struck": self.plan.struck,
        }

    def op_close(self) -> bool:
        self._stop.set()
        stopped = self.engine.rank.stop()
        self.engine.side.close()
        return stopped


def main() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.DEBUG, format="%(relativeCreated)d %(message)s"
    )
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    lines: queue.Queue[str] = queue.Queue()
    rank = Rank(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        asked = json.loads(line)
        op: Callable[..., Any] = getattr(rank, "op_" + asked.pop("op"))
        try:
            answer: dict[str, Any] = {"ok": op(**asked)}
        except Exception as e:
            logging.exception("op failed")
            answer = {"error": repr(e)}
        answers.write(json.dumps(answer) + "\n")
        if op.__name__ == "op_close":
            break
    del lines
    os._exit(0)


if __name__ == "__main__":
    main()
