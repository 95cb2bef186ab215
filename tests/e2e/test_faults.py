"""Real vLLM engines when their peer dies or their client leaves.

One producer without a prefix cache, so that every prefill takes its time; two consumers, one of
each load-failure policy, with a router each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neuron_push.launch import Engine, Server, free_ports, metrics, start_engine, start_router
from tests.e2e.answers import ALTERNATIVES, assert_same_answer
from tests.e2e.test_serving import MODEL, PREFIX, complete, is_idle, tokens, wait_until
from tests.faults.harness.report import record

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 4000
"""Prompt tokens; some three seconds of prefill here, in chunks."""

PEER_TIMEOUT_S = 5.0  # the default
CHUNK = ("--max-num-batched-tokens", "256", "--no-enable-prefix-caching")


@dataclass
class Trio:
    """``routers``: by the policy of the consumer behind it."""

    producer: Engine
    consumers: dict[str, Engine]
    servers: dict[str, Server]
    routers: dict[str, str]
    logs: Path

    def kill_producer(self) -> float:
        """When it happened."""
        self.servers["p"].signal(signal.SIGKILL)
        return time.monotonic()

    def restart_producer(self) -> None:
        self.servers["p"].stop()
        self.servers["p"] = start_engine(self.producer, self.logs)
        self.servers["p"].wait_ready(f"{self.producer.url}/health")

    def all_free(self, *engines: Engine, within_s: float) -> None:
        for engine in engines:
            wait_until(lambda url=engine.url: is_idle(url), within_s, f"{engine.name}: blocks free")


@pytest.fixture(scope="module")
def trio(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    logs = tmp_path_factory.mktemp("faults")
    ports = free_ports(8)
    extra = {"verify_kv": True}

    def engine(name: str, role: Any, at: int, policy: str = "fail") -> Engine:
        return Engine(
            name, role, "push", model, ports[at], ports[at + 1], kv_cache_gib=1, extra=extra,
            load_failure_policy=policy, arguments=CHUNK,
        )  # fmt: skip

    producer = engine("p", "producer", 0)
    consumers = {
        "fail": engine("d-fail", "consumer", 2),
        "recompute": engine("d-recompute", "consumer", 4, "recompute"),
    }
    options = {"fail": (), "recompute": ("--decode-recomputes",)}
    servers: dict[str, Server] = {}
    try:
        for one in (producer, *consumers.values()):
            servers[one.name] = start_engine(one, logs)
        for one in (producer, *consumers.values()):
            servers[one.name].wait_ready(f"{one.url}/health")
        routers = {}
        for i, (policy, consumer) in enumerate(consumers.items()):
            name, port = f"router-{policy}", ports[6 + i]
            servers[name] = start_router(
                [producer], [consumer], port, logs, options=options[policy], name=name
            )
            routers[policy] = f"http://127.0.0.1:{port}"
            servers[name].wait_ready(f"{routers[policy]}/health", 30)
        yield Trio(producer, consumers, servers, routers, logs)
    finally:
        for server in reversed(servers.values()):
            server.stop()


def prefill_has_begun(trio: Trio) -> None:
    wait_until(
        lambda: metrics(trio.producer.url)["vllm:num_requests_running"] == 1, 20, "prefill runs"
    )
    time.sleep(0.7)  # some chunks of it, all of them written to the consumer already


def error_of(call: Future[Any], timeout_s: float) -> int:
    """The HTTP status that the call failed with."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        call.result(timeout_s)
    return caught.value.code


def test_producer_killed_in_a_long_prefill_policy_fail(trio: Trio) -> None:
    """The consumer itself answers with an error; no router helps it."""
    consumer, producer = trio.consumers["fail"], trio.producer
    prompt = tokens(LONG, 1)
    target = {
        "do_remote_prefill": True,
        "remote_host": producer.host.address,
        "remote_port": producer.side_port,
        "remote_engine_id": producer.name,
        "transfer_id": "killed",
    }
    source = {"do_remote_decode": True, "transfer_id": "killed"}
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(complete, consumer.url, prompt, 8, kv_transfer_params=target)
        prefill = pool.submit(complete, producer.url, prompt, 1, kv_transfer_params=source)
        prefill_has_begun(trio)
        killed_s = trio.kill_producer()
        assert error_of(load, 60) >= 500
        took_s = time.monotonic() - killed_s
        with contextlib.suppress(Exception):
            prefill.result(10)
    record("real vLLM: P killed in a 4,000-token prefill", "error to the client", 6.0, took_s)
    assert took_s < PEER_TIMEOUT_S + 1
    trio.all_free(consumer, within_s=4 * PEER_TIMEOUT_S)
    trio.restart_producer()
    assert complete(trio.routers["fail"], tokens(300, 2))["usage"]["completion_tokens"] == 8


def test_producer_killed_in_a_long_prefill_policy_recompute(trio: Trio) -> None:
    """The client gets the answer that an undisturbed engine gives."""
    consumer = trio.consumers["recompute"]
    prompt = tokens(LONG, 3)
    right = complete(trio.producer.url, prompt, logprobs=ALTERNATIVES)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(complete, trio.routers["recompute"], prompt, logprobs=ALTERNATIVES)
        prefill_has_begun(trio)
        killed_s = trio.kill_producer()
        answer = call.result(120)
        took_s = time.monotonic() - killed_s
    record("real vLLM: P killed in a 4,000-token prefill", "recomputed answer", 60.0, took_s)
    assert_same_answer(answer, right)
    assert took_s < 60
    trio.all_free(consumer, within_s=4 * PEER_TIMEOUT_S)
    trio.restart_producer()
    assert complete(trio.routers["recompute"], tokens(300, 4))["usage"]["completion_tokens"] == 8


def leave_early(url: str, prompt: list[int], after_s: float) -> bool:
    """Ask, and hang up; whether that was before the answer began."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    assert connection.sock is not None
    connection.sock.settimeout(after_s)
    early = True
    with contextlib.suppress(TimeoutError):
        early = not connection.sock.recv(1)
    connection.close()
    return early


def test_fifty_clients_leave_in_mid_transfer(trio: Trio) -> None:
    consumer, producer = trio.consumers["fail"], trio.producer
    trio.all_free(consumer, producer, within_s=30)
    chance = random.Random(50)
    before = metrics(consumer.url, PREFIX).get(PREFIX + "load_bytes_count", 0)
    early = sum(
        leave_early(trio.routers["fail"], tokens(1200, 100 + i), chance.uniform(0.05, 0.5))
        for i in range(50)
    )
    started_s = time.monotonic()
    trio.all_free(consumer, producer, within_s=30)
    free_s = time.monotonic() - started_s
    received = metrics(consumer.url, PREFIX).get(PREFIX + "load_bytes_count", 0) - before
    assert early >= 40, f"{early} left before their answer began"
    assert received <= 25, f"{received} loads were whole"
    record("real vLLM: 50 clients leave in mid-transfer", "all blocks free", 30.0, free_s)
    last = complete(trio.routers["fail"], tokens(700, 200))
    assert last["usage"]["completion_tokens"] == 8


def test_producer_restarted_under_load(trio: Trio) -> None:
    """While it is gone requests fail, each within its bound; when it is back they are served."""
    url = trio.routers["fail"]
    over, lock = threading.Event(), threading.Lock()
    ended: list[tuple[float, float, bool]] = []  # (when, how long it took, served)

    def client(number: int) -> None:
        salt = 1000 * (number + 1)
        while not over.is_set():
            salt += 1
            started_s = time.monotonic()
            try:
                complete(url, tokens(600, salt), 8)
                served = True
            except (urllib.error.URLError, OSError):
                served = False
            now_s = time.monotonic()
            with lock:
                ended.append((now_s, now_s - started_s, served))
            if not served:
                time.sleep(0.2)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: sum(served for *_, served in list(ended)) >= 3, 60, "load runs")
        killed_s = trio.kill_producer()
        trio.restart_producer()
        ready_s = time.monotonic()
        wait_until(
            lambda: sum(served and when > ready_s for when, _, served in list(ended)) >= 6,
            60,
            "requests are served again",
        )
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    first_s = min(when for when, _, served in ended if served and when > ready_s)
    record("real vLLM: P restarted under load", "served again", 30.0, first_s - ready_s)
    assert first_s - ready_s < 30
    failed = [took for when, took, served in ended if not served and when > killed_s]
    assert failed
    assert max(failed) < 2 * (PEER_TIMEOUT_S + 1), sorted(failed)[-5:]
    trio.all_free(*trio.consumers.values(), trio.producer, within_s=4 * PEER_TIMEOUT_S)
    log = trio.servers["d-fail"].log.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
