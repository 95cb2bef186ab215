"""kv_transfer_params as routers write them, and as nobody should."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.params import (
    BadParams,
    ConsumerParams,
    ProducerParams,
    base_request_id,
    parse_params,
    sub_request,
)

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_engine_id": "prefill-1",
    "transfer_id": "t-1",
}
REQUEST = "cmpl-abc-0-1a2b3c4d"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
jsons = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
names = st.sampled_from([*GOOD, "remote_request_id", "tp_size"])


@given(st.dictionaries(names | st.text(), jsons) | jsons, st.text(max_size=300))
def test_anything_at_all_is_answered_and_never_raises(params: Any, request_id: str) -> None:
    parsed = parse_params(params, request_id)
    if isinstance(parsed, BadParams):
        assert 0 < len(parsed.sentence) < 600
    sub_request(request_id)
    base_request_id(request_id)


@given(st.dictionaries(names, jsons))
def test_one_wrong_field_among_good_ones_never_raises(wrong: dict[str, Any]) -> None:
    parsed = parse_params({**GOOD, **wrong}, REQUEST)
    if isinstance(parsed, ConsumerParams):
        assert re.fullmatch(r"[A-Za-z0-9._:\-]+/0\.0", parsed.key)
        assert 1 <= parsed.target.port <= 65_535


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), nested(100_000), "x" * 10**7],
    ids=["huge", "huge negative", "deep", "long"],
)
@pytest.mark.parametrize(
    "name", ["do_remote_prefill", "remote_host", "remote_port", "remote_engine_id", "transfer_id"]
)
def test_values_whose_text_is_endless(name: str, value: Any) -> None:
    parsed = parse_params({**GOOD, name: value}, REQUEST)
    assert isinstance(parsed, BadParams)
    assert len(parsed.sentence) < 300
    assert name in parsed.sentence


def test_what_routers_send() -> None:
    parsed = parse_params(GOOD, REQUEST)
    assert isinstance(parsed, ConsumerParams)
    assert parsed.key == "t-1/0.0"
    assert parsed.target.address == "10.0.0.7:5600"
    assert parsed.target.engine_id == "prefill-1"
    produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}
    assert parse_params(produce, "cmpl-xyz-0-ffffffff") == ProducerParams("t-1/0.0")
    nulls = {**produce, "remote_host": None, "remote_port": None, "remote_engine_id": None}
    assert parse_params(nulls, "cmpl-xyz-0-ffffffff") == ProducerParams("t-1/0.0")


@pytest.mark.parametrize(
    "params", [None, {}, {"x": 1}, {"do_remote_prefill": False}, {"do_remote_decode": None}]
)
def test_nothing_to_do_with_kv_transfer(params: Any) -> None:
    assert parse_params(params, REQUEST) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"do_remote_prefill": "yes"},
            "kv_transfer_params.do_remote_prefill: value 'yes' is not allowed: expected true or "
            "false",
        ),
        ({"do_remote_prefill": 1}, "do_remote_prefill: value 1 is not allowed"),
        ({"do_remote_decode": []}, "do_remote_decode: value of type list is not allowed"),
        ({"do_remote_decode": True}, "both do_remote_prefill and do_remote_decode"),
        ({"transfer_id": "a b"}, "transfer_id: value 'a b' is not allowed: expected 1 to 160"),
        ({"transfer_id": "t" * 161}, "transfer_id: value 'ttt"),
        ({"transfer_id": ""}, "transfer_id: value '' is not allowed"),
        ({"transfer_id": 3}, "transfer_id: value 3 is not allowed"),
        ({"transfer_id": None, "remote_request_id": 4}, "remote_request_id: value 4 is"),
        ({"remote_host": 7}, "remote_host: value 7 is not allowed: expected a host name or"),
        ({"remote_host": None}, "remote_host: value None is not allowed"),
        ({"remote_host": "a/b"}, "remote_host: value 'a/b' is not allowed"),
        ({"remote_port": "5600"}, "remote_port: value '5600' is not allowed: expected a port"),
        ({"remote_port": True}, "remote_port: value True is not allowed"),
        ({"remote_port": 0}, "remote_port: value 0 is not allowed"),
        ({"remote_port": 65_536}, "remote_port: value 65536 is not allowed"),
        ({"remote_engine_id": None}, "remote_engine_id: value None is not allowed: expected the"),
        ({"remote_engine_id": "e\n"}, r"remote_engine_id: value 'e\n' is not allowed"),
    ],
)
def test_sentences(change: dict[str, Any], sentence: str) -> None:
    parsed = parse_params({**GOOD, **change}, REQUEST)
    assert isinstance(parsed, BadParams)
    assert sentence in parsed.sentence


def test_a_huge_number_is_called_so() -> None:
    parsed = parse_params({**GOOD, "remote_port": 10**5000}, REQUEST)
    assert isinstance(parsed, BadParams)
    assert "remote_port: value a huge number is not allowed" in parsed.sentence


def test_who_asked_for_a_load_gets_an_error_and_others_are_served() -> None:
    """A consumer must not answer from blocks that nobody fills; the rest is ignored aloud."""
    for change in ({"remote_port": 0}, {"transfer_id": ""}, {"do_remote_decode": True}):
        parsed = parse_params({**GOOD, **change}, REQUEST)
        assert isinstance(parsed, BadParams)
        assert parsed.is_consumer
    for params in ("x", [1], {**GOOD, "do_remote_prefill": "yes"}, {"do_remote_decode": 1}):
        parsed = parse_params(params, REQUEST)
        assert isinstance(parsed, BadParams)
        assert not parsed.is_consumer
    parsed = parse_params("x", REQUEST)
    assert isinstance(parsed, BadParams)
    assert parsed.sentence == "kv_transfer_params is a str, expected an object"
    parsed = parse_params({"do_remote_decode": True}, "cmpl-a b-0-1a2b3c4d")
    assert isinstance(parsed, BadParams)
    assert "X-Request-Id: value 'a b'" in parsed.sentence


@pytest.mark.parametrize(
    ("request_id", "base", "sub"),
    [
        ("cmpl-abc-0-1a2b3c4d", "abc", "0.0"),
        ("cmpl-abc-3-1a2b3c4d", "abc", "3.0"),
        ("2_cmpl-abc-3-1a2b3c4d", "abc", "3.2"),
        ("chatcmpl-abc-1a2b3c4d", "abc", "0.0"),
        ("5_chatcmpl-abc-1a2b3c4d", "abc", "0.5"),
        ("cmpl-550e8400-e29b-41d4-a716-446655440000-12-deadbeef",
         "550e8400-e29b-41d4-a716-446655440000", "12.0"),
        ("chatcmpl-550e8400-e29b-41d4-a716-446655440000-deadbeef",
         "550e8400-e29b-41d4-a716-446655440000", "0.0"),
        ("cmpl-job-12345678-0-1a2b3c4d", "job-12345678", "0.0"),
        ("cmpl-job-7-0-1a2b3c4d", "job-7", "0.0"),
        ("chatcmpl-job-7-1a2b3c4d", "job-7", "0.0"),  # no prompt index in chat
        ("cmpl-abc-0", "abc", "0.0"),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1
        ("7_abc", "7_abc", "0.0"),  # not a child: the client's own name
        ("abc", "abc", "0.0"),
        ("", "", "0.0"),
    ],
)  # fmt: skip
def test_real_request_ids(request_id: str, base: str, sub: str) -> None:
    assert base_request_id(request_id) == base
    assert sub_request(request_id) == sub


@given(
    st.from_regex(r"[a-z0-9\-]{1,40}", fullmatch=True),
    st.integers(0, 99),
    st.integers(0, 99),
    st.sampled_from(["00000000", "deadbeef", "12345678"]),
    st.sampled_from(["ffffffff", "0a0b0c0d"]),
)
def test_both_engines_derive_the_same_key(x: str, prompt: int, n: int, ours: str, his: str) -> None:
    """Only the random suffix differs between the legs of one dispatch."""
    produce = {"do_remote_decode": True}
    consume = {k: v for k, v in GOOD.items() if k != "transfer_id"}
    for form in (f"{n}_cmpl-{x}-{prompt}", f"cmpl-{x}-{prompt}", f"chatcmpl-{x}"):
        one = parse_params(produce, f"{form}-{ours}")
        other = parse_params(consume, f"{form}-{his}")
        named = parse_params({**consume, "remote_request_id": f"{form}-{ours}"}, f"{form}-{his}")
        assert isinstance(one, ProducerParams)
        assert isinstance(other, ConsumerParams)
        assert one.key == other.key == named.key  # type: ignore[union-attr]


@pytest.mark.parametrize("header", ["550e8400-e29b-41d4-a716-446655440000", "job-12345678"])
def test_a_remote_request_id_may_be_the_header_itself(header: str) -> None:
    """As vLLM's proxies for its push connector send it."""
    consume = {k: v for k, v in GOOD.items() if k != "transfer_id"}
    one = parse_params({"do_remote_decode": True}, f"cmpl-{header}-0-1a2b3c4d")
    other = parse_params({**consume, "remote_request_id": header}, "cmpl-other-0-deadbeef")
    assert isinstance(one, ProducerParams)
    assert isinstance(other, ConsumerParams)
    assert one.key == other.key
