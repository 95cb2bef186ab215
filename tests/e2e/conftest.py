"""Real servers for the end-to-end tests: one pair for all tests of a module that can share it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl._api")

from neuron_push.launch import Engine, Pair, free_ports, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def model() -> str:
    """A real small checkpoint, made once and kept (scripts/get_model.sh)."""
    folder = ROOT / ".work" / "models" / "smollm2-135m-instruct"
    done = subprocess.run(
        [ROOT / "scripts" / "get_model.sh", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(folder)


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A producer and a consumer on loopback, with verify_kv, and a router."""
    ports = free_ports(4)
    extra = {"verify_kv": True}
    producer = Engine(
        "p", "producer", "push", model, ports[0], ports[1], kv_cache_gib=1, extra=extra
    )
    consumer = Engine(
        "d", "consumer", "push", model, ports[2], ports[3], kv_cache_gib=1, extra=extra
    )
    with serving(producer, consumer, tmp_path_factory.mktemp("servers")) as up:
        yield up
