"""Counters and histograms of the connector, exported through vLLM's own Prometheus endpoint.

The worker records what ends; vLLM carries the numbers to the API server, logs them every
interval and exports them under ``vllm:neuron_push_*``.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from neuron_push.core.commands import Result
from neuron_push.core.session import Outcome

_SERIES = ("sent_bytes", "sent_descriptors", "sent_segments", "sent_s", "received_bytes",
           "received_segments", "received_s")  # fmt: skip


class PushStats(KVConnectorStats):
    """Observations since they were last taken: one entry a request in each series.

    ``failures`` counts failed loads by reason; ``verified`` counts loads whose every segment
    had the digest its sender computed.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {name: [] for name in _SERIES} | {"failures": {}, "verified": 0}

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
            failures = data["failures"]
            failures[result.reason.value] = failures.get(result.reason.value, 0) + 1
            return True
        return False

    def take(self) -> PushStats:
        """What was recorded since the last call."""
        taken = PushStats(self.data)
        self.reset()
        return taken

    @classmethod
    def rebuild(cls, data: dict[str, Any] | None) -> PushStats:
        return cls(data)

    def is_empty(self) -> bool:
        return not self.data["failures"] and not any(self.data[name] for name in _SERIES)

    def aggregate(self, other: KVConnectorStats) -> PushStats:
        for name in _SERIES:
            self.data[name].extend(other.data[name])
        for reason, count in other.data["failures"].items():
            self.data["failures"][reason] = self.data["failures"].get(reason, 0) + count
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
        return line


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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._series.items():
            for value in transfer_stats_data.get(name, ()):
                metrics[engine_idx].observe(value)
        self._verified[engine_idx].inc(transfer_stats_data.get("verified", 0))
        labels = self.per_engine_labelvalues[engine_idx]
        for reason, count in transfer_stats_data.get("failures", {}).items():
            self._failures.labels(*labels, reason).inc(count)


def make_prom_metrics(
    vllm_config: Any,
    metric_types: dict[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> PushPromMetrics:
    return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
