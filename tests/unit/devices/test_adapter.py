"""How the adapter uses a device: which one, what it refuses, how its KV should lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from neuron_push import vllm_compat as compat  # noqa: E402
from neuron_push.devices.base import DeviceError  # noqa: E402
from tests.unit.devices import geometry  # noqa: E402
from tests.unit.devices.fakes import Shape  # noqa: E402


def config(role: str = "kv_both", policy: str = "fail") -> Any:
    transfer = SimpleNamespace(kv_role=role, kv_load_failure_policy=policy)
    return SimpleNamespace(kv_transfer_config=transfer)


def caches(device_type: str) -> dict[str, Any]:
    return {"layers.0.self_attn": Shape((2, 4, 1, 1, 8), device_type=device_type)}


@pytest.mark.parametrize("device_type", ["cpu", "neuron", "privateuseone", "cuda"])
def test_the_device_follows_from_the_tensors(device_type: str) -> None:
    device = compat.find_device(config(), caches(device_type), "auto")
    assert device.accepts(device_type)


def test_no_tensor_is_no_attention_cache() -> None:
    for tensors in ({}, {"layers.0": [object()]}):
        with pytest.raises(compat.UnsupportedError, match="not one tensor a layer"):
            compat.find_device(config(), tensors, "auto")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="no stable address"):
        compat.find_device(config(), caches("xla"), "auto")


def test_a_pure_consumer_on_trainium_cannot_recompute() -> None:
    for role, policy, device_type in (
        ("kv_consumer", "fail", "neuron"),
        ("kv_both", "recompute", "neuron"),
        ("kv_consumer", "recompute", "cuda"),
        ("kv_consumer", "recompute", "cpu"),
    ):
        compat.find_device(config(role, policy), caches(device_type), "auto")
    with pytest.raises(compat.UnsupportedError, match="no prefill graphs: set it to 'fail'"):
        compat.find_device(config("kv_consumer", "recompute"), caches("neuron"), "auto")


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "own_rank", lambda: (0, 0))


@pytest.mark.usefixtures("_one_rank")
def test_packing_is_part_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert geometry.neuron(1, 3).layout(3).packing == "plain"
    packed = geometry.one_rank()
    packed.additional_config = {"neuron_config": {"fp8_packed_kv": True}}
    monkeypatch.setattr(geometry, "one_rank", lambda: packed)
    assert geometry.neuron(1, 3).layout(3).packing == "neuron-fp8-packed"


@pytest.mark.usefixtures("_one_rank")
def test_one_registration_per_allocation() -> None:
    assert len(geometry.CUDA["BLHNC"](5, 4).layout(4).allocations) == 1
    assert len(geometry.neuron(5, 4).layout(4).allocations) == 5
    assert len(geometry.nxdi(5, 4).layout(4).allocations) == 10


def wanted(
    monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, block_size: int = 16, **model: Any
) -> str | None:
    from vllm import platforms

    monkeypatch.setattr(
        platforms, "current_platform", SimpleNamespace(is_cuda=lambda: cuda), raising=False
    )
    told = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=False, use_mla=False, **model),
        cache_config=SimpleNamespace(block_size=block_size),
    )
    return compat.wanted_cache_layout(told)  # type: ignore[arg-type]


def test_blocks_outermost_are_asked_for_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    has_names = compat.importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
    assert wanted(monkeypatch) == ("BLHNC" if has_names else "HND")
    assert wanted(monkeypatch, cuda=False) is None
    if has_names:
        assert wanted(monkeypatch, block_size=128) is None
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert wanted(monkeypatch) is None


def test_before_0_28_heads_outside_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    assert wanted(monkeypatch) == "HND"
