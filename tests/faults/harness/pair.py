"""A producer and a consumer process, and one transfer that is brought to a phase."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.harness.process import Lab, RankProcess
from tests.faults.harness.report import record

NUM_BLOCKS = 2304
SOURCE = list(range(1, 1025))  # 32 MiB: more than socket buffers hold
TARGET = list(range(1100, 2124))
GUARD = [*range(1025, 1100), *range(2124, 2304)]  # blocks of D that nobody may write to
TOKENS = 16 * 1024
KV, BEFORE, AFTER = 1, 2, 3  # seeds: P's KV, D's blocks before, D's blocks once given back

_numbers = itertools.count()


class Pair:
    def __init__(self, backend: str, logs: Path, lab: Lab | None) -> None:
        self.backend = backend
        number = next(_numbers)
        settings: dict[str, Any] = {"num_layers": 8, "num_blocks": NUM_BLOCKS, "backend": backend}
        self.lab = lab
        self.p = RankProcess(f"p{number}", logs, lab=lab, host="p", **settings)
        self.d = RankProcess(f"d{number}", logs, lab=lab, host="d", **settings)
        self.p.wait_up()
        self.d.wait_up()

    def close(self) -> None:
        self.p.kill()
        self.d.kill()

    def role(self, name: str) -> RankProcess:
        return self.p if name == "P" else self.d

    def revive(self) -> None:
        """Whoever is dead is started again, under the same engine id."""
        dead = [process for process in (self.p, self.d) if not process.is_alive]
        for process in dead:
            process.kill()
            process.start()
        for process in dead:
            process.wait_up()


class Transfer:
    """One request of a pair. Times are those of the system's monotonic clock."""

    def __init__(self, pair: Pair, case: str, *, big: bool = True) -> None:
        """Its times are recorded under ``case``, unless that is empty."""
        self.pair, self.case = pair, case
        self.p, self.d = pair.p, pair.d
        self.name = f"r{next(_numbers)}"
        self.source = SOURCE if big else SOURCE[:64]
        self.target = TARGET if big else TARGET[:64]
        self.fault_s = 0.0

    def fill(self) -> None:
        self.p.call("fill", seed=KV, blocks=self.source)
        self.d.call("fill", seed=BEFORE, blocks=TARGET + GUARD)

    def tokens(self) -> int:
        return 16 * len(self.source)

    def load(self) -> None:
        self.d.call(
            "load",
            request=self.name,
            key=self.name,
            target=self.p.target,
            tokens=self.tokens(),
            blocks=self.target,
        )

    def announce(self) -> None:
        self.d.call("announce", request=self.name, key=self.name, target=self.p.target)

    def prefill(self) -> None:
        self.p.call(
            "prefill", request=self.name, key=self.name, tokens=self.tokens(), blocks=self.source
        )
        self.p.call("finish", request=self.name)

    def fail(self) -> None:
        """P's engine gives the request up, and holds its blocks until SENT."""
        self.p.call("fail", request=self.name, key=self.name)

    def write_in_flight(self) -> None:
        """P has posted a WRITE, most of which D, stopped, has not taken."""
        self.load()
        time.sleep(0.15)
        self.d.signal(signal.SIGSTOP)
        self.prefill()
        time.sleep(0.15)

    # ------------------------------------------------------------ outcomes

    def expect(self, process: RankProcess, outcome: str, bound_s: float) -> dict[str, Any]:
        """In time, counted from the fault."""
        left_s = self.fault_s + bound_s - time.monotonic()
        result = process.wait(self.name, outcome, max(left_s, 0.1))
        record(self.case, outcome, bound_s, result["t"] - self.fault_s)
        return result

    def outcomes(self, process: RankProcess) -> list[str]:
        return [result["outcome"] for result in process.results(self.name)]

    def expect_consumer_over(self, bound_s: float) -> str:
        """Received, with every byte; or failed, and released: each once. Returns the last."""
        end_s = self.fault_s + bound_s
        while not {"received", "released"} & set(self.outcomes(self.d)):
            assert time.monotonic() < end_s, (
                f"consumer not over in {bound_s} s: {self.d.results(self.name)}; {self.d.tail()}"
            )
            time.sleep(0.02)
        last = self.d.results(self.name)[-1]
        record(self.case, last["outcome"], bound_s, last["t"] - self.fault_s)
        if last["outcome"] == "received":
            assert self.outcomes(self.d) == ["received"]
            bad = self.d.call("differing", seed=KV, blocks=self.target, source=self.source)
            assert not bad, f"{len(bad)} blocks do not hold what was sent"
        else:
            assert self.outcomes(self.d) in (["failed", "released"], ["released"])
        # The engine may use them for something else now.
        self.d.call("fill", seed=AFTER, blocks=self.target)
        return str(last["outcome"])

    def check_nothing_landed(self) -> None:
        """In blocks that were given back, or were never asked for."""
        for seed, blocks in ((AFTER, self.target), (BEFORE, GUARD)):
            bad = self.d.call("differing", seed=seed, blocks=blocks, source=None)
            assert not bad, f"{len(bad)} blocks were written after they were given back: {bad[:8]}"

    def check_accounts(self) -> None:
        """Every request has ended as often as it began."""
        for process, ends in ((self.p, {"sent"}), (self.d, {"received", "released"})):
            outcomes = self.outcomes(process)
            assert len([o for o in outcomes if o in ends]) <= 1, outcomes
            assert len(outcomes) == len(set(outcomes)), outcomes


def serve(pair: Pair, case: str = "", bound_s: float = 4.0, *, attempts: int = 1) -> None:
    """The pair works: a small request gets its KV at the first attempt (or the last allowed).

    ``case``: what has happened before it, if that is worth recording.
    """
    began_s = time.monotonic()
    for attempt in range(attempts):
        transfer = Transfer(pair, "", big=False)
        transfer.p.call("fill", seed=KV, blocks=transfer.source)
        transfer.fault_s = time.monotonic()
        transfer.load()
        transfer.prefill()
        end = transfer.expect_consumer_over(bound_s)
        transfer.expect(pair.p, "sent", bound_s + 4)
        if end == "received":
            record(case, "serves again", bound_s * attempts, time.monotonic() - began_s)
            return
        assert attempt + 1 < attempts, f"{pair.d.results(transfer.name)}; {pair.d.tail()}"
