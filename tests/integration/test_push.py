"""Two ranks, real NIXL, no model: bytes arrive, and blocks come back."""

from __future__ import annotations

import time

import numpy as np
import pytest

from neuron_push.core.messages import Reason
from neuron_push.core.session import Outcome, Prompt
from tests.integration.engines import TOKENS_PER_BLOCK, Engine, engines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]
pytest.importorskip("nixl._api")

RNG = np.random.default_rng(7)


def fill(engine: Engine) -> None:
    engine.memory[:] = RNG.integers(1, 255, engine.memory.shape, dtype=np.uint8)


def meet(p: Engine, d: Engine) -> None:
    """Connect, by a request that needs nothing."""
    prompt = Prompt(1, b"")
    d.load("meet", "meet", p, prompt, [], first=0, end=0)
    p.prefill("meet", "meet", prompt, [1])
    p.finish("meet")
    p.wait("meet", Outcome.SENT)


@pytest.mark.parametrize("first_comes", ["registration", "prefill"])
def test_either_order(first_comes: str) -> None:
    with engines() as (p, d):
        fill(p)
        prompt = Prompt(5 * TOKENS_PER_BLOCK + 3, b"h" * 16)
        source, target = [3, 4, 5, 9, 2, 7], [11, 12, 20, 21, 22, 1]

        def register() -> None:
            d.load("rd", "k", p, prompt, target)

        def prefill() -> None:
            p.prefill("rp", "k", prompt, source)
            p.finish("rp")

        steps = [register, prefill] if first_comes == "registration" else [prefill, register]
        for step in steps:
            step()
        got = d.wait("rd", Outcome.RECEIVED)
        assert got.verified
        p.wait("rp", Outcome.SENT)
        assert (d.memory[:, :, target] == p.memory[:, :, source]).all()
        untouched = [b for b in range(64) if b not in target]
        assert not d.memory[:, :, untouched].any()


def test_progressive_segments_and_prefix_offset() -> None:
    with engines() as (p, d):
        fill(p)
        prompt = Prompt(6 * TOKENS_PER_BLOCK, b"h" * 16)
        source, target = [1, 2, 3, 4, 5, 6], [30, 29, 28, 27]
        meet(p, d)
        d.load("rd", "k", p, prompt, target, first=2 * TOKENS_PER_BLOCK)
        time.sleep(0.05)  # the registration has arrived before the first chunk ends
        for upto in (40, 70, 96):
            p.prefill("rp", "k", prompt, source, upto)
        p.finish("rp")
        got = d.wait("rd", Outcome.RECEIVED)
        assert got.num_segments == 2  # after 40 tokens only what D has already is final
        assert got.verified
        assert (d.memory[:, :, target] == p.memory[:, :, source[2:]]).all()
        p.wait("rp", Outcome.SENT)


def test_many_requests_on_one_connection() -> None:
    with engines(num_blocks=512) as (p, d):
        fill(p)
        order_p, order_d = RNG.permutation(np.arange(1, 512)), RNG.permutation(np.arange(1, 512))
        pairs = []
        at = 0
        for i, num_blocks in enumerate([1, 2, 3, 5, 8, 13, 21, 34, 55] * 3):
            source = [int(b) for b in order_p[at : at + num_blocks]]
            target = [int(b) for b in order_d[at : at + num_blocks]]
            at += num_blocks
            prompt = Prompt(num_blocks * TOKENS_PER_BLOCK - i % 5, b"h" * 16)
            pairs.append((source, target))
            d.load(f"d{i}", f"k{i}", p, prompt, target)
            p.prefill(f"p{i}", f"k{i}", prompt, source)
            p.finish(f"p{i}")
        for i, (source, target) in enumerate(pairs):
            assert d.wait(f"d{i}", Outcome.RECEIVED).verified
            p.wait(f"p{i}", Outcome.SENT)
            assert (d.memory[:, :, target] == p.memory[:, :, source]).all()


def test_full_hit_frees_the_producer_at_once() -> None:
    with engines() as (p, d):
        prompt = Prompt(33, b"h" * 16)
        p.prefill("rp", "k", prompt, [1, 2, 3])
        p.finish("rp")
        d.load("rd", "k", p, prompt, [], first=32, end=32)
        d.wait("rd", Outcome.RECEIVED)
        p.wait("rp", Outcome.SENT, timeout_s=2)


@pytest.mark.parametrize("prompt", [Prompt(31, b"h" * 16), Prompt(32, b"x" * 16)])
def test_mismatched_prompt_is_refused_by_name(prompt: Prompt) -> None:
    with engines() as (p, d):
        fill(p)
        d.load("rd", "k", p, prompt, [4, 5])
        p.prefill("rp", "k", Prompt(32, b"h" * 16), [1, 2])
        p.finish("rp")
        assert d.wait("rd", Outcome.FAILED).reason is Reason.PROMPT_MISMATCH
        d.wait("rd", Outcome.RELEASED, timeout_s=2)
        p.wait("rp", Outcome.SENT, timeout_s=2)
        assert not d.memory.any()


def test_misfit_fails_the_request_at_once_with_a_sentence() -> None:
    p = Engine("p-misfit", model={"architecture": "Llama"})
    d = Engine("d-misfit", model={"architecture": "Qwen"})
    try:
        d.load("rd", "k", p, Prompt(32, b""), [4, 5])
        failed = d.wait("rd", Outcome.FAILED, timeout_s=2)
        assert failed.reason is Reason.HANDSHAKE
        assert "architecture" in failed.detail
        assert "Llama" in failed.detail
        d.wait("rd", Outcome.RELEASED, timeout_s=1)
    finally:
        d.close()
        p.close()


def test_nobody_there() -> None:
    with engines() as (p, d):
        p.close()
        d.load("rd", "k", p, Prompt(32, b""), [4, 5])
        failed = d.wait("rd", Outcome.FAILED, timeout_s=5)
        assert failed.reason is Reason.HANDSHAKE
        assert "nothing answers" in failed.detail or "no connection" in failed.detail


def test_block_ids_out_of_range_are_refused() -> None:
    with engines() as (p, d):
        p.prefill("rp", "k", Prompt(32, b""), [1, 2])
        d.load("rd", "k", p, Prompt(32, b""), [4, 64])
        failed = d.wait("rd", Outcome.FAILED)
        assert failed.reason is Reason.BAD_REGISTRATION
        assert "64" in failed.detail
        d.wait("rd", Outcome.RELEASED)
