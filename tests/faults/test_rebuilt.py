"""One side has had to build a new NIXL agent: the other one's blocks come back by its word."""

from __future__ import annotations

import time

import pytest

from neuron_push.core.faulty import Fault, Kind
from neuron_push.core.session import Outcome
from tests.faults.harness.inprocess import LIMITS, PROMPT, SOURCE, TARGET, faulty, serve
from tests.faults.harness.report import record
from tests.integration.engines import TOKENS_PER_BLOCK

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]
pytest.importorskip("nixl._api")


def test_new_agent_of_the_producer_answers_for_its_old_one() -> None:
    """Without its word D would have to replace its own agent, and fail all its other loads."""
    with faulty() as (p, d, plan, _):
        serve(p, d)
        d.load("r", "r", p, PROMPT, TARGET)
        p.prefill("r", "r", PROMPT, SOURCE, upto=2 * TOKENS_PER_BLOCK)
        time.sleep(0.2)
        plan.add(Fault("notifications", Kind.BLOCK, block_s=3))
        began_s = time.monotonic()
        d.wait("r", Outcome.FAILED, 4)
        bound_s = 2 * LIMITS.nixl_call_timeout_s + LIMITS.peer_timeout_s + LIMITS.quarantine_s + 1.5
        d.wait("r", Outcome.RELEASED, bound_s)
        case = "P replaces a stuck NIXL agent, mid-transfer"
        record(case, "D's blocks back", bound_s, time.monotonic() - began_s)
        assert p.rank.num_abandoned == 1
        assert d.rank.num_abandoned == 0
        p.finish("r")
        p.wait("r", Outcome.SENT, 4)
        serve(p, d)
        assert p.num_open() == d.num_open() == 0
