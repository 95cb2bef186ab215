"""Chat and completions through a router, a prefill and a decode engine of real vLLM."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from neuron_push.launch import Pair, metrics
from tests.e2e.answers import ALTERNATIVES, assert_same_answer

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(600)]

MODEL = "smollm2"
BLOCK = 32
PREFIX = "vllm:neuron_push_"


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def complete(url: str, prompt: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return post(url, "/v1/completions", body)


def tokens(num: int, salt: int) -> list[int]:
    """A prompt of exactly ``num`` token ids that no other salt shares a block with."""
    return [1000 + (salt * 7919 + i * 31) % 20000 for i in range(num)]


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def loads(pair: Pair) -> dict[str, float]:
    return metrics(pair.consumer.url, PREFIX)


def is_idle(url: str) -> bool:
    """No request anywhere, and no block in use."""
    now = metrics(url)
    return (
        now["vllm:kv_cache_usage_perc"] == 0
        and now["vllm:num_requests_running"] == 0
        and now["vllm:num_requests_waiting"] == 0
    )


def test_answers_are_those_of_one_engine_and_every_segment_is_verified(pair: Pair) -> None:
    before = loads(pair)
    prompt = tokens(100, 1)
    through = complete(pair.url, prompt, logprobs=ALTERNATIVES)
    alone = complete(pair.producer.url, prompt, logprobs=ALTERNATIVES)
    assert_same_answer(through, alone)
    wait_until(
        lambda: (
            loads(pair)[PREFIX + "verified_loads_total"]
            == before[PREFIX + "verified_loads_total"] + 1
        ),
        5,
        "verified",
    )


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500])
def test_prompt_lengths(pair: Pair, num_tokens: int) -> None:
    """Around block boundaries, and over more than one chunk of prefill."""
    prompt = tokens(num_tokens, 100 + num_tokens)
    got = complete(pair.url, prompt)
    assert got["usage"]["prompt_tokens"] == num_tokens
    assert got["usage"]["completion_tokens"] == 8


def test_prompt_equal_to_a_cached_prefix(pair: Pair) -> None:
    """What the consumer has it does not ask for: nothing at all, when it has everything."""
    prompt = tokens(3 * BLOCK + 1, 7)
    first = complete(pair.url, prompt, logprobs=ALTERNATIVES)
    before = loads(pair)
    again = complete(pair.url, prompt, logprobs=ALTERNATIVES)
    assert_same_answer(again, first)
    assert loads(pair)[PREFIX + "load_bytes_count"] == before[PREFIX + "load_bytes_count"]
    longer = complete(pair.url, prompt + tokens(2 * BLOCK, 8))
    assert longer["usage"]["prompt_tokens"] == 5 * BLOCK + 1
    wait_until(
        lambda: loads(pair)[PREFIX + "load_bytes_count"] == before[PREFIX + "load_bytes_count"] + 1,
        5,
        "one more load",
    )
    grown = loads(pair)[PREFIX + "load_bytes_sum"] - before[PREFIX + "load_bytes_sum"]
    block_bytes = 30 * 2 * 3 * 64 * 2 * BLOCK  # layers, K and V, heads, dim, bf16
    assert grown == 2 * block_bytes  # and not the three blocks it already had
    wait_until(lambda: is_idle(pair.producer.url), 5, "producer idle")


def test_several_prompts_and_choices_in_one_request(pair: Pair) -> None:
    prompts = [tokens(40, 20), tokens(70, 21)]
    before = loads(pair)
    got = complete(pair.url, prompts, n=2, temperature=0.7)
    assert len(got["choices"]) == 4
    wait_until(lambda: is_idle(pair.producer.url), 10, "all blocks of the producer free")
    now = loads(pair)
    count, verified = PREFIX + "load_bytes_count", PREFIX + "verified_loads_total"
    assert now[count] - before[count] >= 2  # a second choice may find the first one's blocks
    assert now[verified] - before[verified] == now[count] - before[count]


def test_fifty_requests_of_mixed_lengths_leave_nothing_behind(pair: Pair) -> None:
    logs = {name: server.log.stat().st_size for name, server in pair.servers.items()}
    lengths = [1, 31, 32, 33, 64, 100, 333, 700, 1500, 4000] * 5

    def one(number: int) -> int:
        prompt = tokens(lengths[number], 1000 + number)
        return int(complete(pair.url, prompt, 4)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(50))) == [4] * 50
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")
    for name, server in pair.servers.items():
        new = server.log.read_bytes()[logs[name] :].decode(errors="replace")
        bad = [line for line in new.splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
        assert not bad, f"{name}: {bad}"


def refused(pair: Pair, params: dict[str, Any], prompt: list[int]) -> str:
    """What the consumer says to a request with these parameters; it must answer, with an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(
            pair.consumer.url,
            "/v1/completions",
            {"model": MODEL, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params},
            timeout_s=20,
        )
    return caught.value.read().decode()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": "x", "remote_port": "y"},
        {"do_remote_prefill": True, "remote_host": 7, "remote_port": 5600, "transfer_id": "t"},
        {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_engine_id": "nobody",
            "transfer_id": "t" * 5000,
        },
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": "yes"},
    ],
)
def test_absurd_parameters_fail_the_request_not_the_engine(
    pair: Pair, params: dict[str, Any]
) -> None:
    if params.get("do_remote_prefill") is True:
        refused(pair, params, tokens(50, 30))
    else:  # no transfer was asked for in a form we know: an ordinary request
        post(
            pair.consumer.url,
            "/v1/completions",
            {"model": MODEL, "prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": params},
        )
    assert complete(pair.url, tokens(50, 31))["usage"]["completion_tokens"] == 8


def test_different_prompts_on_both_legs_are_refused_by_name(pair: Pair) -> None:
    target = {
        "do_remote_prefill": True,
        "remote_host": pair.producer.host.address,
        "remote_port": pair.producer.side_port,
        "remote_engine_id": pair.producer.name,
        "transfer_id": "mismatch",
    }
    logged = pair.servers["d"].log.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(
            complete,
            pair.producer.url,
            tokens(90, 40),
            1,
            kv_transfer_params={"do_remote_decode": True, "transfer_id": "mismatch"},
        )
        started_s = time.monotonic()
        refused(pair, target, tokens(91, 40))
        assert time.monotonic() - started_s < 10
        leg.result()
    new = pair.servers["d"].log.read_bytes()[logged:].decode(errors="replace")
    assert "prompt_mismatch" in new
    for engine in (pair.producer, pair.consumer):
        wait_until(lambda url=engine.url: is_idle(url), 10, f"{engine.name}: all blocks free")


def test_producer_without_token_limit_is_refused_by_name(pair: Pair) -> None:
    target = {
        "do_remote_prefill": True,
        "remote_host": pair.producer.host.address,
        "remote_port": pair.producer.side_port,
        "remote_engine_id": pair.producer.name,
        "transfer_id": "unlimited",
    }
    logged = pair.servers["d"].log.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(
            complete,
            pair.producer.url,
            tokens(60, 41),
            5,
            kv_transfer_params={"do_remote_decode": True, "transfer_id": "unlimited"},
        )
        refused(pair, target, tokens(60, 41))
        leg.result()
    new = pair.servers["d"].log.read_bytes()[logged:].decode(errors="replace")
    assert "max_tokens" in new
