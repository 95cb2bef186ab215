"""Every option of the connector: its default, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.config import ConfigError, PushConfig

HERE = "kv_connector_extra_config"
POSITIVE = ("lease_s", "request_timeout_s", "peer_timeout_s", "handshake_timeout_s",
            "quarantine_s", "nixl_call_timeout_s")  # fmt: skip
OPTIONS = [field.name for field in msgspec.structs.fields(PushConfig)]


def load(**options: Any) -> PushConfig:
    return PushConfig.load(options, {})


def sentence(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**options)
    return str(caught.value)


def test_defaults_are_valid_and_open_on_loopback_only() -> None:
    config = load()
    assert (config.side_channel_host, config.side_channel_port) == ("127.0.0.1", 5600)
    assert not config.insecure
    assert config.effective_quarantine_s == 2 * config.peer_timeout_s
    assert load(quarantine_s=7).effective_quarantine_s == 7
    assert load(**msgspec.to_builtins(config)) == config


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("side_channel_host", 7, "`str`, got `int`"),
        ("side_channel_port", "5600", "`int`, got `str`"),
        ("insecure", 1, "`bool`, got `int`"),
        ("insecure", "true", "`bool`, got `str`"),
        ("backends", "UCX", "`array`, got `str`"),
        ("device", None, "`str`, got `null`"),
        ("warm_peers", "h:1", "`array`, got `str`"),
        ("verify_kv", "yes", "`bool`, got `str`"),
        *((name, "5", "`float") for name in POSITIVE),
        ("idle_wait_ms", [], "`float`, got `array`"),
    ],
)
def test_bad_types(option: str, value: Any, kind: str) -> None:
    text = sentence(**{option: value})
    assert text.startswith(f"{HERE}.{option}: value {value!r} is not allowed: Expected")
    assert kind in text


def test_every_option_refuses_a_bad_type() -> None:
    for option in OPTIONS:
        assert f"{HERE}.{option}: value" in sentence(**{option: {"a": 1}})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("side_channel_port", 0),
        ("side_channel_port", 65_536),
        ("backends", []),
        ("backends", ["UCX", "LIBFABRIC"]),
        ("backends", ["ucx"]),
        ("warm_peers", ["no-port"]),
        ("warm_peers", ["host:123456"]),
        ("warm_peers", ["a b:1"]),
        *((name, value) for name in POSITIVE for value in (0, -1, 86_401, float("nan"))),
        ("idle_wait_ms", -0.1),
        ("idle_wait_ms", 101),
    ],
)
def test_out_of_range(option: str, value: Any) -> None:
    assert f"{HERE}.{option}: value {value!r} is not allowed: " in sentence(**{option: value})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("side_channel_hosts", "side_channel_host"),
        ("lease", "lease_s"),
        ("leases", "lease_s"),
        ("backend", "backends"),
        ("verify", "verify_kv"),
        ("peer_timeout", "peer_timeout_s"),
        ("handshake_timeout_ms", "handshake_timeout_s"),
    ],
)
def test_unknown_options_name_the_nearest_known(wrong: str, meant: str) -> None:
    text = sentence(**{wrong: 3})
    assert text == f"{HERE}: unknown option {wrong!r} (value 3); did you mean {meant!r}?"


def test_an_option_like_no_other_gets_the_list() -> None:
    text = sentence(zzz=1)
    for option in OPTIONS:
        assert repr(option) in text
    with pytest.raises(ConfigError, match="unknown option 7"):
        PushConfig.load({7: 1}, {})  # type: ignore[dict-item]


@pytest.mark.parametrize("host", ["10.1.2.3", "worker-7"])
def test_an_address_others_reach_needs_keys_or_insecure(host: str) -> None:
    text = sentence(side_channel_host=host)
    assert text.startswith(f"{HERE}.side_channel_host: value {host!r} can be reached by other")
    assert "key_file" in text
    assert "insecure: true" in text
    assert load(side_channel_host=host, insecure=True).side_channel_host == host
    assert load(side_channel_host=host, key_file="/k").side_channel_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_is_none_is_refused(host: str) -> None:
    text = sentence(side_channel_host=host, insecure=True)
    assert text.startswith(f"{HERE}.side_channel_host: value {host!r} is not allowed")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_nothing(host: str) -> None:
    assert load(side_channel_host=host).side_channel_host == host


def test_vllms_own_environment_names() -> None:
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
    }
    config = PushConfig.load({}, environment)
    assert (config.side_channel_host, config.side_channel_port) == ("localhost", 5700)
    config = PushConfig.load(
        {"side_channel_host": "127.0.0.1", "side_channel_port": 5800}, environment
    )
    assert (config.side_channel_host, config.side_channel_port) == ("127.0.0.1", 5800)
    empty = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "", "VLLM_NIXL_SIDE_CHANNEL_PORT": ""}
    assert PushConfig.load({}, empty) == load()


@pytest.mark.parametrize(
    ("value", "shown"), [("x", "'x'"), ("-1", "'-1'"), ("70000", "70000"), ("0", "0")]
)
def test_a_bad_port_in_the_environment_is_blamed_on_its_variable(value: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PushConfig.load({}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": value})
    text = f"VLLM_NIXL_SIDE_CHANNEL_PORT: value {shown} is not allowed: "
    assert str(caught.value).startswith(text)


def test_a_host_from_the_environment_is_judged_too() -> None:
    with pytest.raises(ConfigError, match="insecure: true"):
        PushConfig.load({}, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"})


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(OPTIONS) | st.text(), jsons, max_size=4))
def test_anything_else_is_a_config_error(options: dict[str, Any]) -> None:
    try:
        config = PushConfig.load(options, {})
    except ConfigError:
        return
    assert 1 <= config.side_channel_port <= 65_535
    assert config.lease_s > 0
