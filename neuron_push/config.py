"""PushConfig: every option of the connector, its default, its unit, one validation.

Options come from ``kv_transfer_config.kv_connector_extra_config``; the side channel's host and
port may also come from vLLM's own environment names, so that deployments made for its NIXL
connector need no new variables.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._\-\[\]:]+:[0-9]{1,5}$", max_length=300)]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ConfigError(ValueError):
    """An option that cannot be right: its name, its value, what is allowed."""


class PushConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All options. Times are in seconds.

    side_channel_host, side_channel_port: where this engine meets its peers and routers;
        one port per engine, plus the data-parallel rank.
    key_file: the deployment's keys, made by ``neuron-push keygen`` and the same on all engines
        and routers; without it the side channel is open.
    insecure: allow a side channel without keys on an address other hosts can reach.
    backends: the NIXL backend that carries the bytes, ``["UCX"]`` or ``["LIBFABRIC"]``.
    device: which device backend holds the KV memory; ``auto`` takes the one that accepts
        vLLM's KV tensors.
    rail_policy: what to do when memory is registered on other rails than those near its device
        (or that cannot be known): ``strict`` stops the engine, ``warn`` logs it.
    warm_peers: ``host:port`` side channels to connect to at start instead of at first use.
    verify_kv: send a digest of each segment and compare it with what arrived (costs a read
        of all KV on both sides; for proofs, not for production).
    lease_s: how long finished blocks wait for a consumer that does not renew them.
    request_timeout_s: when a consumer gives up on a transfer whatever the reason.
    peer_timeout_s: silence after which a peer with open transfers counts as dead.
    handshake_timeout_s: how long a request waits for a first contact.
    quarantine_s: how long destination blocks stay unused after a dead peer's connection was
        torn down; default twice peer_timeout_s.
    stall_timeout_s: a WRITE that makes no progress for so long fails its transfer.
    nixl_call_timeout_s: a NIXL call that does not return for so long costs its agent, which is
        given up and replaced.
    idle_wait_ms: how long an engine step without work waits for a completion.
    """

    side_channel_host: str = "127.0.0.1"
    side_channel_port: Port = 5600
    key_file: str = ""
    insecure: bool = False
    backends: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1)] = ("UCX",)
    device: str = "auto"
    rail_policy: Literal["strict", "warn", "off"] = "warn"
    warm_peers: tuple[Address, ...] = ()
    verify_kv: bool = False
    lease_s: Positive = 120.0
    request_timeout_s: Positive = 300.0
    peer_timeout_s: Positive = 5.0
    handshake_timeout_s: Positive = 5.0
    quarantine_s: Positive | None = None
    stall_timeout_s: Positive = 30.0
    nixl_call_timeout_s: Positive = 3.0
    idle_wait_ms: Annotated[float, Meta(ge=0, le=100)] = 1.0

    @property
    def effective_quarantine_s(self) -> float:
        return self.quarantine_s or 2 * self.peer_timeout_s

    @classmethod
    def load(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> PushConfig:
        """From vLLM's extra config; raises ConfigError with one sentence per problem."""
        options = dict(extra)
        names = {field.name for field in msgspec.structs.fields(cls)}
        for name, value in options.items():
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(names)}"
                raise ConfigError(
                    f"kv_connector_extra_config: unknown option {name!r} (value {value!r}); {hint}"
                )
        names_of = _from_environment(options, environment)
        checked: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            if field.name in options:
                try:
                    checked[field.name] = msgspec.convert(options[field.name], type=field.type)
                except msgspec.ValidationError as e:
                    name = names_of.get(field.name, f"kv_connector_extra_config.{field.name}")
                    raise ConfigError(
                        f"{name}: value {options[field.name]!r} is not allowed: {e}"
                    ) from None
        config = cls(**checked)
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.backends[0] not in ("UCX", "LIBFABRIC"):
            raise ConfigError(
                f"kv_connector_extra_config.backends: value {list(self.backends)!r} is not "
                "allowed: one of ['UCX'], ['LIBFABRIC']"
            )
        if self.side_channel_host in ("0.0.0.0", "::", "*"):
            raise ConfigError(
                f"kv_connector_extra_config.side_channel_host: value {self.side_channel_host!r} is "
                "not allowed: peers are told this address and must reach it. Give an address of "
                "this host."
            )
        if self.side_channel_host not in LOOPBACK and not self.insecure and not self.key_file:
            raise ConfigError(
                f"kv_connector_extra_config.side_channel_host: value {self.side_channel_host!r} "
                "can be reached by other hosts, and whoever reaches the side channel can have KV "
                "written into this engine's memory. Make a key file with `neuron-push keygen` and "
                "set key_file on all engines, or keep it on 127.0.0.1, or set insecure: true if "
                "the network itself keeps strangers out."
            )


def _from_environment(options: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Fill in what is not set; returns option -> the variable its value came from."""
    names_of: dict[str, str] = {}
    for option, variable in (
        ("side_channel_host", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
        ("side_channel_port", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    ):
        value = environment.get(variable)
        if value and option not in options:
            names_of[option] = variable
            is_number = option.endswith("port") and value.isdecimal()
            options[option] = int(value) if is_number else value
    return names_of
