"""Counters of the gateway and gauges of the swarm, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spheroid_node.gateway.swarm import View
from spheroid_node.serving.stats import GenerationStats

OUTCOMES = ("completed", "refused", "unavailable", "ended_early", "cancelled")


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "spheroid_gateway_requests", "Completions asked for", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._bytes = Counter("spheroid_gateway_bytes", "Bytes generated", registry=registry)
        self._sweeps = Counter("spheroid_gateway_sweeps", "Sweeps through the chain", registry=registry)
        self._hop_seconds = Counter(
            "spheroid_gateway_hop_seconds", "Compute time at the hops", ["block"], registry=registry
        )
        self._first_byte = Histogram(
            "spheroid_gateway_first_byte_seconds", "Time to the first byte", registry=registry
        )
        self.generating = Gauge(
            "spheroid_gateway_generating", "Completions that are being generated", registry=registry
        )
        self._replicas = Gauge("spheroid_swarm_replicas", "Live replicas", ["block"], registry=registry)
        self._versions = Gauge("spheroid_swarm_version", "Newest version", ["group"], registry=registry)
        self._round = Gauge("spheroid_swarm_round", "Round of the run", registry=registry)
        self._ce = Gauge(
            "spheroid_swarm_from_noise_ce", "Nats a byte on held-out text, from noise", registry=registry
        )
        self._speed = Gauge(
            "spheroid_swarm_tokens_per_second", "Training speed of all replicas together", registry=registry
        )

    def finished(self, outcome: str, stats: GenerationStats | None = None) -> None:
        """Count a request that ended as ``outcome``, one of OUTCOMES, and what it cost."""
        self._requests.labels(outcome).inc()
        if stats is None:
            return
        self._bytes.inc(stats.bytes)
        self._sweeps.inc(stats.sweeps)
        for block, seconds in enumerate(stats.hop_seconds):
            self._hop_seconds.labels(str(block)).inc(seconds)
        if stats.first_byte is not None:
            self._first_byte.observe(stats.first_byte)

    def show(self, view: View) -> None:
        """Take the gauges from ``view``."""
        snapshot = view.snapshot
        for block in range(snapshot.run.model.blocks):
            self._replicas.labels(str(block)).set(len(snapshot.of_block(block)))
        for group, version in snapshot.versions.items():
            self._versions.labels(group).set(version.version)
        self._round.set(snapshot.round)
        self._ce.set(float("nan") if snapshot.from_noise_ce is None else snapshot.from_noise_ce)
        self._speed.set(snapshot.total("tokens_per_second"))

    def render(self) -> bytes:
        return generate_latest(self.registry)
