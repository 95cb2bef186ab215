"""What a rank counts reaches vLLM's statistics, and Prometheus."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from neuron_push.core.commands import Counters
from neuron_push.core.messages import Reason
from neuron_push.metrics import PushPromMetrics, PushStats, Watched


def test_only_growth_is_told_and_nothing_when_nothing_was_counted() -> None:
    counters = Counters()
    watched = Watched(counters)
    assert watched.growth() is None
    counters.event("lost_peer")
    counters.refusal(Reason.BUSY)
    growth = watched.growth()
    assert growth is not None
    assert (growth.events, growth.refusals) == ({"lost_peer": 1}, {"busy": 1})
    assert watched.growth() is None
    counters.event("lost_peer")
    counters.event("failed_write")
    growth = watched.growth()
    assert growth is not None
    assert (growth.events, growth.refusals) == ({"lost_peer": 1, "failed_write": 1}, {})


def stats(*events: Any, refused: int = 0) -> PushStats:
    counters = Counters()
    watched = Watched(counters)
    for event in events:
        counters.event(event)
    for _ in range(refused):
        counters.refusal(Reason.LEASE_OVER)
    one = PushStats()
    growth = watched.growth()
    assert growth is not None
    one.count(growth)
    return one


def test_ranks_add_up() -> None:
    both = stats("lost_peer", refused=2).aggregate(stats("lost_peer", "replaced_agent"))
    assert not both.is_empty()
    line = both.reduce()
    assert line["Lost peer"] == 2
    assert line["Replaced agent"] == 1
    assert line["Refused (lease_over)"] == 2
    assert PushStats.rebuild(both.take().data).data["events"]["lost_peer"] == 2
    assert both.is_empty()


def test_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return lambda **named: kind(**named, registry=registry)

    kinds = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    monkeypatch.setattr(PushPromMetrics.__base__, "__init__", _base_init)
    exported = PushPromMetrics(None, kinds, ["engine"], {0: ["0"]})
    exported.observe(stats("failed_write", refused=3).data)
    exported.observe(PushStats().data)
    for name, labels, value in (
        ("events_total", {"engine": "0", "event": "failed_write"}, 1),
        ("refused_loads_total", {"engine": "0", "reason": "lease_over"}, 3),
    ):
        assert registry.get_sample_value(f"vllm:neuron_push_{name}", labels) == value


def _base_init(self: Any, config: Any, kinds: Any, names: Any, values: Any) -> None:
    self.per_engine_labelvalues = values
