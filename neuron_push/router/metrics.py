"""The router's own Prometheus series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8,
)  # fmt: skip


class RouterMetrics:
    """One set of series per application, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.legs = Counter(
            "neuron_push_router_requests",
            "Legs of requests that ended, by leg (prefill, decode) and outcome.",
            ("leg", "outcome"),
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "neuron_push_router_ttft_seconds",
            "From a streaming request's arrival to the first byte of its decode engine's stream.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "neuron_push_router_in_flight",
            "Client requests being served.",
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
