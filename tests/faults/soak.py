"""Mixed load with random faults for as long as one likes: ``python -m tests.faults.soak MINUTES``.

One producer, two consumers, real processes, real NIXL (UCX over loopback). Every request's blocks
are checked and refilled when they come back, and looked at again later. In the second half nobody
is killed and no NIXL call hangs, so that what grows can be seen: at the end nothing is open, and no
process has more threads, descriptors or (by 5 %) memory than after its warm-up in that half.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.harness.pair import (
    BEFORE,
    GUARD,
    KV,
    SOURCE,
    TARGET,
    Pair,
    Transfer,
)
from tests.faults.harness.process import RankProcess

FAULTS = {
    "none": 60,
    "abort": 12,
    "fail": 8,
    "lose a notification": 4,
    "twice a notification": 4,
    "WRITE fails": 3,
    "stop P": 3,
    "stop D": 3,
    "kill P": 1,
    "kill D": 1,
    "stuck": 1,
}
NOT_IN_THE_SECOND_HALF = {"kill P", "kill D", "stuck"}
WARM_UP = 25
END_S = 25.0
MAX_GROWTH = 1.05


class Soak:
    def __init__(self, logs: Path, seed: int) -> None:
        self._random = random.Random(seed)
        first, second = Pair("UCX", logs, None), Pair("UCX", logs, None)
        second.p.kill()
        second.p = first.p
        self.pairs = [first, second]
        self.served: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._baseline: dict[str, dict[str, Any]] = {}
        self._since_start: Counter[str] = Counter()
        for pair in self.pairs:
            pair.p.call("fill", seed=KV, blocks=SOURCE)
            pair.d.call("fill", seed=BEFORE, blocks=TARGET + GUARD)

    @property
    def processes(self) -> list[RankProcess]:
        return [self.pairs[0].p, *(pair.d for pair in self.pairs)]

    def run(self, seconds: float) -> None:
        self._until(time.monotonic() + seconds / 2, FAULTS)
        for process in self.processes:
            self._forget(process)
        survived = {name: FAULTS[name] for name in FAULTS.keys() - NOT_IN_THE_SECOND_HALF}
        self._until(time.monotonic() + seconds / 2, dict(sorted(survived.items())))

    def _until(self, end_s: float, faults: dict[str, int]) -> None:
        while time.monotonic() < end_s:
            fault = self._random.choices(list(faults), list(faults.values()))[0]
            self.faults[fault] += 1
            self.one(self._random.choice(self.pairs), fault)

    def one(self, pair: Pair, fault: str) -> None:
        transfer = Transfer(pair, f"soak: {fault}", big=self._random.random() < 0.3)
        transfer.fault_s = time.monotonic()
        p, d = pair.p, pair.d
        self._plan(pair, fault)
        produce = transfer.fail if fault == "fail" else transfer.prefill
        steps = [transfer.load, produce]
        if self._random.random() < 0.5:
            steps.reverse()
        steps[0]()
        time.sleep(self._random.random() * 0.05)
        steps[1]()
        if fault == "abort":
            d.call("abort", request=transfer.name)
        victim = {"P": p, "D": d}.get(fault[-1])
        if victim is not None and fault.startswith(("stop", "kill")):
            self._strike(victim, fault)
        if victim is None or fault.startswith("stop") or victim is p:
            outcome = transfer.expect_consumer_over(END_S)
            self.served[outcome] += 1
            if p.is_alive:
                transfer.check_accounts()
            transfer.check_nothing_landed()
        if victim is not p or fault.startswith("stop"):
            transfer.expect(p, "sent", END_S)
        self._revive(pair)
        self._measure(pair)

    def _plan(self, pair: Pair, fault: str) -> None:
        planned = {
            "lose a notification": {"call": "notifications", "kind": "drop"},
            "twice a notification": {"call": "notifications", "kind": "duplicate"},
            "WRITE fails": {"call": "post_write", "kind": "raise"},
            "stuck": {"call": "notifications", "kind": "block", "block_s": 2.0},
        }.get(fault)
        process = pair.p if fault == "WRITE fails" else self._random.choice([pair.p, pair.d])
        process.call("faults", faults=[planned] if planned else [])
        if fault == "stuck":
            # The agent that was given up keeps its thread and descriptors: measured anew.
            self._forget(process)

    def _strike(self, victim: RankProcess, fault: str) -> None:
        time.sleep(self._random.random() * 0.05)
        if fault.startswith("kill"):
            victim.kill()
            self._forget(victim)
            return
        victim.signal(signal.SIGSTOP)
        time.sleep(self._random.random() * 2.5)
        victim.signal(signal.SIGCONT)

    def _revive(self, pair: Pair) -> None:
        for process in (pair.p, pair.d):
            if not process.is_alive:
                process.restart()
                seed, blocks = (KV, SOURCE) if process is pair.p else (BEFORE, TARGET + GUARD)
                process.call("fill", seed=seed, blocks=blocks)

    def _forget(self, process: RankProcess) -> None:
        self._baseline.pop(process.name, None)
        self._since_start[process.name] = 0

    def _measure(self, pair: Pair) -> None:
        for process in (pair.p, pair.d):
            self._since_start[process.name] += 1
            if self._since_start[process.name] == WARM_UP:
                self._baseline[process.name] = process.call("stats")

    def settle(self) -> None:
        """At the end: nothing open, nothing grown. Raises AssertionError."""
        end_s = time.monotonic() + END_S
        while any(process.call("stats")["open"] for process in self.processes):
            assert time.monotonic() < end_s, [p.call("stats") for p in self.processes]
            time.sleep(0.2)
        for process in self.processes:
            self._compare(process)
        for pair in self.pairs:
            bad = pair.d.call("differing", seed=BEFORE, blocks=GUARD, source=None)
            assert not bad, f"{pair.d.name}: blocks nobody asked for were written: {bad[:8]}"

    def _compare(self, process: RankProcess) -> None:
        first, stats = self._baseline.get(process.name), process.call("stats")
        shown = ("threads", "fds", "rss_kib", "abandoned")
        print(f"{process.name}: {[(name, first and first[name], stats[name]) for name in shown]}")
        if first is None or stats["abandoned"] != first["abandoned"]:
            print(f"{process.name}: not compared: too few requests, or an agent was given up")
            return
        num = self._since_start[process.name] - WARM_UP
        assert stats["threads"] <= first["threads"], (process.name, first, stats)
        assert stats["fds"] <= first["fds"] + 8, (process.name, first, stats)
        assert stats["rss_kib"] <= first["rss_kib"] * MAX_GROWTH, (process.name, first, stats)
        print(f"{process.name}: has not grown in {num} requests")

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()


def main() -> None:
    minutes = float(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    print(f"seed {seed}, {minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed)
        try:
            soak.run(60 * minutes)
            soak.settle()
        finally:
            print(f"faults {dict(soak.faults)}; ended {dict(soak.served)}", flush=True)
            soak.close()
    print("soak: good")


if __name__ == "__main__":
    main()
