"""A prompt's KV in Trainium's layout arrives byte for byte in each layout of GPUs.

Real NIXL, real planner, real sessions, the adapter's make_layout; host memory plays both devices'.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from neuron_push.core.layout import KvLayout
from neuron_push.core.session import Outcome, Prompt
from tests.integration.engines import Engine

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
pytest.importorskip("nixl._api")
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from neuron_push import vllm_compat  # noqa: E402
from tests.unit.devices import geometry  # noqa: E402

NUM_LAYERS, TOKENS = 3, geometry.TOKENS
SOURCE, TARGET = [3, 4, 5, 9], [7, 1, 2, 11]
NUM_TOKENS = 3 * TOKENS + 5


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "own_rank", lambda: (0, 0))


def maker(make: Callable[[int, int], geometry.Cache]) -> Callable[[int, int], tuple[Any, KvLayout]]:
    def memory(num_layers: int, num_blocks: int) -> tuple[Any, KvLayout]:
        cache = make(num_layers, num_blocks)
        return cache, cache.layout(num_blocks)

    return memory


@contextmanager
def pair(
    producer: Callable[[int, int], geometry.Cache],
    consumer: Callable[[int, int], geometry.Cache],
    num_blocks: tuple[int, int] = (12, 16),
) -> Iterator[tuple[Engine, Engine]]:
    p = Engine(
        "p-" + secrets.token_hex(3), num_layers=NUM_LAYERS, num_blocks=num_blocks[0],
        make=maker(producer),
    )  # fmt: skip
    try:
        d = Engine(
            "d-" + secrets.token_hex(3), num_layers=NUM_LAYERS, num_blocks=num_blocks[1],
            make=maker(consumer),
        )  # fmt: skip
        try:
            yield p, d
        finally:
            d.close()
    finally:
        p.close()


def push_and_compare(p: Engine, d: Engine) -> None:
    p.memory.fill()
    prompt = Prompt(NUM_TOKENS + 1, b"h" * 16)
    d.load("rd", "k", p, prompt, TARGET)
    p.prefill("rp", "k", prompt, SOURCE)
    p.finish("rp")
    assert d.wait("rd", Outcome.RECEIVED, 60).verified
    p.wait("rp", Outcome.SENT, 60)
    for layer in range(NUM_LAYERS):
        for part in (0, 1):
            for token in range(NUM_TOKENS):
                at, offset = divmod(token, TOKENS)
                for head in range(geometry.HEADS):
                    want = p.memory.entry(layer, part, SOURCE[at], head, offset)
                    got = d.memory.entry(layer, part, TARGET[at], head, offset)
                    assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (
                        layer, part, token, head,
                    )  # fmt: skip
    null = [d.memory.entry(n, p_, 0, h, t) for n in range(NUM_LAYERS) for p_ in (0, 1)
            for h in range(geometry.HEADS) for t in range(TOKENS)]  # fmt: skip
    assert not any(vector.any() for vector in null), "block 0 is never written"


@pytest.mark.parametrize("consumer", geometry.CUDA)
def test_trainium_to_each_gpu_layout(consumer: str) -> None:
    with pair(geometry.neuron, geometry.CUDA[consumer]) as (p, d):
        push_and_compare(p, d)


@pytest.mark.parametrize("consumer", ["split HND", "LBNHC", "BLHNC"])
def test_block_wise_cache_of_neuronx_distributed_inference(consumer: str) -> None:
    with pair(geometry.nxdi, geometry.CUDA[consumer]) as (p, d):
        push_and_compare(p, d)


@pytest.mark.parametrize("layout", ["BLHNC", "LBNHC"])
def test_gpu_to_trainium(layout: str) -> None:
    with pair(geometry.CUDA[layout], geometry.neuron) as (p, d):
        push_and_compare(p, d)


@pytest.mark.parametrize(
    "layouts", [("BLHNC", "BLHNC"), ("LBNHC", "BLHNC"), ("split NHD", "LBHNC")]
)
def test_gpu_to_gpu(layouts: tuple[str, str]) -> None:
    with pair(geometry.CUDA[layouts[0]], geometry.CUDA[layouts[1]]) as (p, d):
        push_and_compare(p, d)


def test_layers_pair_although_the_engines_name_them_differently() -> None:
    _, ours = maker(geometry.neuron)(NUM_LAYERS, 4)
    _, theirs = maker(geometry.CUDA["BLHNC"])(NUM_LAYERS, 4)
    assert {r.layer for r in ours.regions} == {r.layer for r in theirs.regions}
    assert {r.layer for r in ours.regions} == {"layers.0", "layers.1", "layers.2"}
