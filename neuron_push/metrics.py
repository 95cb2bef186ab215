"""Counters and histograms of the connector, exported through vLLM's own Prometheus endpoint.

The worker records what ends; vLLM carries the numbers to the API server, logs them every
interval and exports them under ``vllm:neuron_push_*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from neuron_push.core.commands import Counters, Result
from neuron_push.core.session import Outcome

_SERIES = ("sent_bytes", "sent_descriptors", "sent_segments", "sent_s", "received_bytes",
           "received_segments", "received_s")  # fmt: skip
_COUNTS_BY = ("failures", "refusals", "events")


class PushStats(KVConnectorStats):
    """Observations since they were last taken: one entry a request in each series.

    ``failures`` counts failed loads by reason; ``verified`` counts loads whose every segment
    had the digest its sender computed; ``events`` and ``refusals`` are growth of the rank's
    :class:`Counters`.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {name: [] for name in _SERIES} | {name: {} for name in _COUNTS_BY}
        self.data["verified"] = 0

    def record(self, result: Result) -> bool:
        """Whether there was something to record."""
        data = self.data
        if result.outcome is Outcome.SENT:
            if result.num_segments:
                data["sent_bytes"].append(result.num_bytes)
                data["sent_descriptors"].append(result.num_descriptors)
                data["sent_segments"].append(result.num_segments)
                data["sent_s"].append(result.duration_s)
                return True
        elif result.outcome is Outcome.RECEIVED:
            if result.num_segments:
                data["received_bytes"].append(result.num_bytes)
                data["received_segments"].append(result.num_segments)
                data["received_s"].append(result.duration_s)
                data["verified"] += int(result.verified)
                return True
        elif result.outcome is Outcome.FAILED and result.reason is not None:
            _add(data["failures"], {result.reason.value: 1})
            return True
        return False

    def count(self, growth: Growth) -> None:
        """What has happened beside the requests."""
        _add(self.data["events"], growth.events)
        _add(self.data["refusals"], growth.refusals)

    def take(self) -> PushStats:
        """What was recorded since the last call."""
        taken = PushStats(self.data)
        self.reset()
        return taken

    @classmethod
    def rebuild(cls, data: dict[str, Any] | None) -> PushStats:
        return cls(data)

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in (*_SERIES, *_COUNTS_BY))

    def aggregate(self, other: KVConnectorStats) -> PushStats:
        for name in _SERIES:
            self.data[name].extend(other.data[name])
        for name in _COUNTS_BY:
            _add(self.data[name], other.data[name])
        self.data["verified"] += other.data["verified"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        data = self.data
        line: dict[str, int | float] = {"Pushed": len(data["sent_s"])}
        if data["sent_s"]:
            line["Pushed MB"] = round(sum(data["sent_bytes"]) / 1e6, 1)
            line["Descriptors per push"] = round(
                sum(data["sent_descriptors"]) / len(data["sent_s"]), 1
            )
        line["Received"] = len(data["received_s"])
        if data["received_s"]:
            line["Received MB"] = round(sum(data["received_bytes"]) / 1e6, 1)
            waits = sorted(data["received_s"])
            line["Median wait (ms)"] = round(waits[len(waits) // 2] * 1e3, 1)
        for reason, count in data["failures"].items():
            line[f"Failed ({reason})"] = count
        for reason, count in data["refusals"].items():
            line[f"Refused ({reason})"] = count
        for event, count in data["events"].items():
            line[event.replace("_", " ").capitalize()] = count
        return line


def _add(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        totals[name] = totals.get(name, 0) + count


class Growth(NamedTuple):
    """Of a rank's counters since the last look."""

    events: Mapping[str, int]
    refusals: Mapping[str, int]


class Watched:
    """A rank's counters, looked at by the worker's thread at every step."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._num_seen = 0
        self._seen = Growth({}, {})

    def growth(self) -> Growth | None:
        """None, and nothing done, if nothing was counted."""
        num_changes = self._counters.num_changes
        if num_changes == self._num_seen:
            return None
        self._num_seen = num_changes
        before = self._seen
        self._seen = Growth(dict(self._counters.events), dict(self._counters.refusals))
        return Growth(*(_less(*each) for each in zip(self._seen, before, strict=True)))


def _less(totals: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    grown = {name: total - before.get(name, 0) for name, total in totals.items()}
    return {name: count for name, count in grown.items() if count}


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_BYTES = tuple(float(4**n) for n in range(7, 19))
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192, 32768)


class PushPromMetrics(KVConnectorPromMetrics):
    """One Prometheus series a statistic and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[Counter]

        def each(kind: Any, name: str, text: str, **more: Any) -> dict[int, Any]:
            metric = kind(
                name=f"vllm:neuron_push_{name}", documentation=text, labelnames=labelnames, **more
            )
            return {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

        self._series = {
            "sent_s": each(
                histogram,
                "push_seconds",
                "From a prefill's arrival to its blocks' release.",
                buckets=_SECONDS,
            ),
            "sent_bytes": each(histogram, "push_bytes", "KV bytes a push.", buckets=_BYTES),
            "sent_descriptors": each(
                histogram, "push_descriptors", "NIXL descriptors a push.", buckets=_COUNTS
            ),
            "sent_segments": each(histogram, "push_segments", "Segments a push.", buckets=_COUNTS),
            "received_s": each(
                histogram,
                "load_seconds",
                "From registration to the last byte.",
                buckets=_SECONDS,
            ),
            "received_bytes": each(histogram, "load_bytes", "KV bytes a load.", buckets=_BYTES),
            "received_segments": each(
                histogram, "load_segments", "Segments a load.", buckets=_COUNTS
            ),
        }
        self._verified = each(counter, "verified_loads", "Loads whose every digest matched.")
        self._failures = counter(
            name="vllm:neuron_push_failed_loads",
            documentation="Loads that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._refusals = counter(
            name="vllm:neuron_push_refused_loads",
            documentation="Loads that this engine, as the producer, said no to, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._events = counter(
            name="vllm:neuron_push_events",
            documentation="Lost peers, replaced NIXL agents, failed WRITEs, dropped notifications.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._series.items():
            for value in transfer_stats_data.get(name, ()):
                metrics[engine_idx].observe(value)
        self._verified[engine_idx].inc(transfer_stats_data.get("verified", 0))
        labels = self.per_engine_labelvalues[engine_idx]
        by_label = {"failures": self._failures, "refusals": self._refusals, "events": self._events}
        for name, metric in by_label.items():
            for label, count in transfer_stats_data.get(name, {}).items():
                metric.labels(*labels, label).inc(count)


def make_prom_metrics(
    vllm_config: Any,
    metric_types: dict[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> PushPromMetrics:
    return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
