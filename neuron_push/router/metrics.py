"""The router's own Prometheus series."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neuron_push.router.breaker import CLOSED, HALF_OPEN, OPEN
from neuron_push.router.engines import Engine

_STATES = {CLOSED: 0, HALF_OPEN: 1, OPEN: 2}
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
            "From a streaming request's arrival to the first token of its decode engine's stream.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "neuron_push_router_in_flight",
            "Client requests being served.",
            registry=self.registry,
        )

        self.retries = Counter(
            "neuron_push_router_retries",
            "Second tries, by the leg that failed the first, its outcome, and how the second went.",
            ("leg", "outcome", "result"),
            registry=self.registry,
        )

    def watch(self, engines: Sequence[Engine]) -> None:
        """Shows these engines' breakers from now on."""
        self.registry.register(_Breakers(engines))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Breakers(Collector):
    """Read when asked for: a breaker becomes half-open by time alone."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "neuron_push_router_breaker_state",
            "Circuit breaker of an engine: 0 closed, 1 half-open, 2 open.",
            labels=("role", "engine"),
        )
        opened = CounterMetricFamily(
            "neuron_push_router_breaker_opened",
            "How often the circuit breaker of an engine has opened.",
            labels=("role", "engine"),
        )
        for engine in self._engines:
            labels = (engine.role, engine.url)
            state.add_metric(labels, _STATES[engine.breaker.state])
            opened.add_metric(labels, engine.breaker.times_opened)
        return (state, opened)
