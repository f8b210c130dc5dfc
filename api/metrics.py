"""Prometheus counters of this process's requests."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    """Requests by method, route template and status, and their latency; one registry per app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "recast_http_requests_total",
            "HTTP requests answered",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "recast_http_request_seconds",
            "Time to answer a request",
            ("method", "route"),
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._jobs = Gauge(
            "recast_jobs", "Jobs of the key's workspace", ("kind", "status"), registry=self.registry
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one finished request; methods nobody defined share one label."""
        method = method if method in METHODS else "OTHER"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self, jobs: Mapping[tuple[str, str], int]) -> bytes:
        """The exposition text; ``jobs`` counts jobs by (kind, status)."""
        self._jobs.clear()
        for (kind, status), count in jobs.items():
            self._jobs.labels(kind, status).set(count)
        return generate_latest(self.registry)
