"""A pair of real servers on each other supported vLLM version, and on two versions at once.

    NEURON_PUSH_VERSIONS=0.27.1,0.29.0 pytest -m versions tests/e2e/test_versions.py

Where their interpreters come from: tests/versions.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from neuron_push.launch import Engine, Pair, free_ports, metrics, serving
from tests.e2e.answers import ALTERNATIVES, assert_same_answer
from tests.e2e.test_serving import (
    BLOCK,
    PREFIX,
    complete,
    is_idle,
    loads,
    refused,
    tokens,
    wait_until,
)
from tests.versions import ASKED, python_of

SERVED = [version for version in ASKED if version != "0.24.0"]  # which no CPU can run
# Not the interfaces that tests with network namespaces make and unmake meanwhile.
LOOPBACK = {"UCX_NET_DEVICES": "lo"}

pytestmark = [
    pytest.mark.versions,
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.timeout(1800),  # a first run installs vLLM
    pytest.mark.skipif(not SERVED, reason="NEURON_PUSH_VERSIONS lists no version"),
]


@pytest.fixture(scope="module")
def versions(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def pair(
    versions: tuple[str, str], model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """(producer's version, consumer's); "" is the one this interpreter has."""
    pythons = [python_of(version) if version else sys.executable for version in versions]
    ports = free_ports(4)
    producer, consumer = (
        Engine(
            name, role, "push", model, ports[i], ports[i + 2], kv_cache_gib=1,
            max_model_len=2048, extra={"verify_kv": True}, environment=LOOPBACK,
            python=pythons[i],
        )
        for i, (name, role) in enumerate((("p", "producer"), ("d", "consumer")))
    )  # fmt: skip
    with serving(producer, consumer, tmp_path_factory.mktemp("servers")) as up:
        yield up


PAIRS = [(version, version) for version in SERVED] + (
    [(SERVED[0], ""), ("", SERVED[-1])] if SERVED else []
)
on_each_pair = pytest.mark.parametrize(
    "versions", PAIRS or [("", "")], indirect=True, scope="module",
    ids=lambda pair: "-to-".join(version or "installed" for version in pair),
)  # fmt: skip


@on_each_pair
def test_requests_are_pushed_verified_and_leave_nothing_behind(pair: Pair) -> None:
    logs = {name: server.log.stat().st_size for name, server in pair.servers.items()}
    before = loads(pair)
    prompt = tokens(100, 1)
    through = complete(pair.url, prompt, logprobs=ALTERNATIVES)
    assert_same_answer(through, complete(pair.producer.url, prompt, logprobs=ALTERNATIVES))
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500, 300]

    def one(number: int) -> int:
        got = complete(pair.url, tokens(lengths[number], 200 + number), 4)
        return int(got["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(len(lengths)))) == [4] * len(lengths)
    longer = complete(pair.url, prompt + tokens(2 * BLOCK, 8))  # a prefix hit on both sides
    assert longer["usage"]["prompt_tokens"] == 100 + 2 * BLOCK
    num_loads = 1 + len(lengths) - 1 + 1  # a prompt of one token has nothing to load
    wait_until(
        lambda: (
            loads(pair)[PREFIX + "verified_loads_total"]
            == before[PREFIX + "verified_loads_total"] + num_loads
        ),
        10,
        "every load verified",
    )
    assert metrics(pair.producer.url, PREFIX)[PREFIX + "push_bytes_count"] >= num_loads
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
    for name, server in pair.servers.items():
        new = server.log.read_bytes()[logs[name] :].decode(errors="replace")
        bad = [line for line in new.splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
        assert not bad, f"{name}: {bad}"


@on_each_pair
def test_a_load_that_fails_ends_the_request_not_the_engine(pair: Pair) -> None:
    """Before 0.30 vLLM has no word for a failed load but its blocks' ids."""
    nobody = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "nobody",
        "transfer_id": "lost",
    }
    refused(pair, nobody, tokens(50, 30))
    refused(pair, {"do_remote_prefill": True, "remote_host": 7}, tokens(50, 31))
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
    assert complete(pair.url, tokens(50, 32))["usage"]["completion_tokens"] == 8
