"""Counters: evidence, emulation, alarms."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_push.rails.errors import RailsError
from neuron_push.rails.model import Box
from neuron_push.rails.select import select
from neuron_push.rails.watch import Snapshot, WatchResult, explain, read_counters, watch

from .conftest import put

MB = 10**6
MOVING = ("rdma_write_bytes", "rdma_write_recv_bytes", "send_bytes")


def after(box: Box, **growth: dict[str, int]) -> WatchResult:
    return compared(box, None, growth)


def compared(box: Box, device: int | None, growth: dict[str, dict[str, int]]) -> WatchResult:
    zero = dict.fromkeys((*MOVING, "unresponsive_remote_events"), 0)
    before: Snapshot = {nic.name: dict(zero) for nic in box.nics}
    later = {name: values | growth.get(name, {}) for name, values in before.items()}
    return explain(select(box), before, later, seconds=1.0, device=device)


def test_writes_on_the_rails_of_a_device(p5en: Box) -> None:
    moved = {"rdma_write_bytes": 100 * MB}
    result = compared(p5en, 0, {"rdmap85s0": moved, "rdmap86s0": moved})
    assert result.good
    assert [nic.name for nic in result.nics if nic.expected] == ["rdmap85s0", "rdmap86s0"]


def test_a_rail_that_carries_nothing(p5en: Box) -> None:
    result = compared(p5en, 0, {"rdmap85s0": {"rdma_write_bytes": 100 * MB}})
    assert not result.good
    assert "rdmap86s0" in result.findings[0]


def test_a_receiver_counts_too(p5en: Box) -> None:
    moved = {"rdma_write_recv_bytes": 100 * MB}
    assert compared(p5en, 0, {"rdmap85s0": moved, "rdmap86s0": moved}).good


def test_other_nics_are_named(p5en: Box) -> None:
    moved = {"rdma_write_bytes": 100 * MB}
    result = compared(p5en, 0, dict.fromkeys(("rdmap85s0", "rdmap86s0", "rdmap160s0"), moved))
    assert result.good
    assert "rdmap160s0" in result.findings[0]


def test_emulated_writes(p5en: Box) -> None:
    result = after(p5en, rdmap85s0={"send_bytes": 500 * MB})
    assert not result.good
    assert "UNSOLICITED" in result.findings[0]


def test_alarms_and_silence(p5en: Box) -> None:
    result = after(p5en, rdmap85s0={"unresponsive_remote_events": 3})
    assert not result.good
    assert any("unresponsive_remote_events grew by 3" in text for text in result.findings)
    quiet = after(p5en)
    assert quiet.good
    assert "no KV moved" in quiet.findings[0]


def test_a_driver_without_write_counters(p5en: Box) -> None:
    snapshot = {"rdmap85s0": {"tx_bytes": 1}}
    result = explain(select(p5en), snapshot, snapshot, seconds=1.0)
    assert result.good
    assert "no rdma_write counters" in result.findings[0]


def test_reading_twice(p5en: Box, tmp_path: Path) -> None:
    directory = tmp_path / "sys/class/infiniband/rdmap85s0/ports/1/hw_counters"
    put(directory / "rdma_write_bytes", "1000")
    put(directory / "rx_drops", "not a number")

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        put(directory / "rdma_write_bytes", str(1000 + 50 * MB))

    result = watch(select(p5en), root=tmp_path, sleep=sleep)
    (nic,) = result.nics
    assert nic.growth == {"rdma_write_bytes": 50 * MB}


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(RailsError, match="has hw_counters"):
        read_counters(tmp_path, ["rdmap85s0"])


def test_counters_that_wrap_or_vanish(p5en: Box) -> None:
    before = {"rdmap85s0": {"tx_bytes": 100}, "rdmap86s0": {"tx_bytes": 1}}
    result = explain(select(p5en), before, {"rdmap85s0": {"tx_bytes": 5}}, seconds=1.0)
    assert [(nic.name, nic.growth) for nic in result.nics] == [("rdmap85s0", {"tx_bytes": 0})]
