"""The same, over LIBFABRIC: two hosts (namespaces), tcp rails, real vLLM."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_push.bench.lab import Lab
from neuron_push.launch import Engine, Pair, free_ports, metrics, serving
from tests.e2e.answers import ALTERNATIVES, assert_same_answer
from tests.e2e.test_serving import PREFIX, complete, is_idle, tokens, wait_until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.lab,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def run(*argv: str | Path, **environment: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    libraries = run(ROOT / "scripts" / "libfabric_cpu.sh")
    with Lab() as lab:
        environment = {
            "LD_LIBRARY_PATH": libraries,
            "FI_PROVIDER_PATH": libraries,
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": "eth0",
        }
        ports = free_ports(4)
        engines = [
            Engine(
                engine_id,
                "producer" if engine_id == "p" else "consumer",
                "push",
                model,
                port,
                side,
                host,
                backend="LIBFABRIC",
                kv_cache_gib=1,
                extra={"verify_kv": True},
                environment=environment,
            )
            for engine_id, port, side, host in zip(
                ("p", "d"), ports[:2], ports[2:], lab.hosts, strict=True
            )
        ]
        with serving(engines[0], engines[1], tmp_path_factory.mktemp("servers")) as up:
            yield up


@pytest.mark.parametrize("num_tokens", [40, 2500])
def test_push_over_libfabric(pair: Pair, num_tokens: int) -> None:
    before = metrics(pair.consumer.url, PREFIX)
    prompt = tokens(num_tokens, num_tokens)
    through = complete(pair.url, prompt, logprobs=ALTERNATIVES)
    alone = complete(pair.producer.url, prompt, logprobs=ALTERNATIVES)
    assert_same_answer(through, alone)
    verified = PREFIX + "verified_loads_total"
    wait_until(
        lambda: metrics(pair.consumer.url, PREFIX)[verified] == before[verified] + 1,
        5,
        "the load is verified",
    )
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
