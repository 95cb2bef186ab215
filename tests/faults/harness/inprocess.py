"""Two engines in the test's own process, over real NIXL, and plans of what goes wrong at either."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from neuron_push.core.commands import Result
from neuron_push.core.faulty import FaultPlan
from neuron_push.core.session import Outcome, Prompt
from neuron_push.core.shop import Limits
from tests.faults.harness.report import record
from tests.integration.engines import TOKENS_PER_BLOCK, Engine

LIMITS = Limits(
    lease_s=2.0,
    request_timeout_s=6.0,
    peer_timeout_s=1.0,
    handshake_timeout_s=1.0,
    quarantine_s=0.5,
    stall_timeout_s=1.0,
    nixl_call_timeout_s=0.7,
)
PROMPT = Prompt(4 * TOKENS_PER_BLOCK, b"h" * 16)
SOURCE, TARGET = [1, 2, 3, 4], [11, 12, 13, 14]
NACK_S = 1.0
"""0.1 s on a quiet machine; this one may be busy."""


@contextmanager
def faulty(**settings: object) -> Iterator[tuple[Engine, Engine, FaultPlan, FaultPlan]]:
    """Producer, consumer, and the plans of what goes wrong at either."""
    settings = {"limits": LIMITS, "verify": False, **settings}
    p = Engine("p-" + secrets.token_hex(3), plan=FaultPlan(), **settings)  # type: ignore[arg-type]
    d = Engine("d-" + secrets.token_hex(3), plan=FaultPlan(), **settings)  # type: ignore[arg-type]
    try:
        p.memory[:] = np.random.default_rng(3).integers(1, 255, p.memory.shape, dtype=np.uint8)
        assert p.plan is not None
        assert d.plan is not None
        yield p, d, p.plan, d.plan
    finally:
        d.close()
        p.close()


def transfer(
    p: Engine, d: Engine, name: str, prompt: Prompt = PROMPT, target: list[int] = TARGET
) -> None:
    d.load(name, name, p, prompt, target)
    p.prefill(name, name, prompt, SOURCE)
    p.finish(name)


def transfer_rest(p: Engine, name: str) -> None:
    p.prefill(name, name, PROMPT, SOURCE)
    p.finish(name)


def serve(p: Engine, d: Engine) -> None:
    """The pair works, and everything is accounted for."""
    name = "ok-" + secrets.token_hex(3)
    d.memory[:, :, TARGET] = 0
    transfer(p, d, name)
    d.wait(name, Outcome.RECEIVED)
    p.wait(name, Outcome.SENT)
    assert (d.memory[:, :, TARGET] == p.memory[:, :, SOURCE]).all()


def fails(d: Engine, name: str, case: str, since_s: float, bound_s: float) -> Result:
    """The load fails in time, and then its blocks come back: each once."""
    failed = d.wait(name, Outcome.FAILED, bound_s)
    record(case, f"load failed: {failed.reason}", bound_s, time.monotonic() - since_s)
    d.wait(name, Outcome.RELEASED, 8)
    time.sleep(0.05)
    d.rank.results()
    assert [r.outcome for r in d.ended[name]] == [Outcome.FAILED, Outcome.RELEASED]
    return failed
