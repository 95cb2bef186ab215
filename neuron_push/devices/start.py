"""The order in which a worker brings its device up: checks, environment, agent, checks again.

NIXL and libfabric look at a process once, when the first agent is made, and go on with less (all
rails instead of the near one, host memory instead of device memory) where something is missing.
So everything is looked at before, and again after, and nothing is transferred unless all is well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from typing import Literal, Protocol

from neuron_push.devices.base import DeviceBackend, DeviceError, KvCaches
from neuron_push.devices.checks import Check

logger = logging.getLogger(__name__)


class AgentView(Protocol):
    """What is read of a NIXL agent after it has registered the memory."""

    def memory_types(self) -> list[str]: ...
    def metadata(self) -> bytes: ...


def start_device(
    device: DeviceBackend,
    caches: KvCaches,
    nixl_backend: str,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Before the process makes a NIXL agent. Raises DeviceError with the first thing amiss."""
    if nixl_backend not in device.nixl_backends:
        raise DeviceError(
            f"NIXL backend {nixl_backend} cannot register {device.name} memory: set "
            f"kv_connector_extra_config.backends to {[device.nixl_backends[0]]!r}"
        )
    device.prepare()
    _require(device, device.preflight(caches))
    for name, value in device.environment(caches).items():
        if environ.setdefault(name, value) == value:
            logger.info("%s: %s=%s", device.name, name, value)


RailPolicy = Literal["strict", "warn", "off"]


def confirm_device(
    device: DeviceBackend, agent: AgentView, rail_policy: RailPolicy = "warn"
) -> None:
    """Once the agent has registered the memory. Raises DeviceError with the first thing amiss.

    rail_policy: what it means when memory is registered on other rails than those near it, or
        when that cannot be known: ``strict`` fails, ``warn`` logs a line, ``off`` says nothing.
    """
    checks = device.confirm(agent.memory_types(), agent.metadata())
    if rail_policy == "off":
        checks = tuple(check for check in checks if check.name != "rails")
    for check in checks:
        if rail_policy == "strict" and check.name == "rails" and check.outcome != "ok":
            raise DeviceError(
                f"{device.name}, check 'rails' (rail_policy strict): {check.sentence}"
            )
    _require(device, checks)


def explained(device: DeviceBackend, error: Exception) -> str:
    """The error's text, and what it means on this device where that is known."""
    meaning = device.explain(str(error))
    return f"{error} {meaning}" if meaning else str(error)


def _require(device: DeviceBackend, checks: Sequence[Check]) -> None:
    for check in checks:
        if check.outcome == "failed":
            raise DeviceError(f"{device.name}, check {check.name!r}: {check.sentence}")
        if check.outcome == "note":
            logger.warning("%s, check %r: %s", device.name, check.name, check.sentence)
