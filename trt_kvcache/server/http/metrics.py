"""``Metrics``: the metrics of an engine for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trt_kvcache.server.engine_stats import EngineConfig, EngineStats, RequestRecord

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN_TOKENS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one server: an :class:`~trt_kvcache.server.engine_stats.EngineObserver`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("trt_kvcache_requests", "Answers that ended", ["finish_reason"], registry=self._registry)
        self._refused = Counter("trt_kvcache_requests_refused", "Requests that found the queue full", registry=self._registry)
        self._queue = Histogram("trt_kvcache_queue_seconds", "From a request to its slot", buckets=_FIRST_TOKEN, registry=self._registry)
        self._first = Histogram(
            "trt_kvcache_time_to_first_token_seconds", "From a request to its first token", buckets=_FIRST_TOKEN, registry=self._registry
        )
        self._between = Histogram(
            "trt_kvcache_inter_token_latency_seconds", "From one token to the next", buckets=_BETWEEN_TOKENS, registry=self._registry
        )
        self._whole = Histogram("trt_kvcache_request_seconds", "From a request to its last token", buckets=_WHOLE, registry=self._registry)
        self._registry.register(self)
        self._now: tuple[EngineConfig, EngineStats] | None = None

    def ended(self, record: RequestRecord) -> None:
        """Count an answer that has ended, and observe its times."""
        self._requests.labels(record.finish_reason).inc()
        if record.started is not None:
            self._queue.observe(record.started - record.submitted)
        if not record.times:
            return
        self._first.observe(record.times[0] - record.submitted)
        self._whole.observe(record.times[-1] - record.submitted)
        for before, after in zip(record.times, record.times[1:], strict=False):
            self._between.observe(after - before)

    def refused(self) -> None:
        """Count a request that was refused because the queue was full."""
        self._refused.inc()

    def text(self, config: EngineConfig | None, stats: EngineStats | None) -> bytes:
        """Return all metrics in Prometheus' text format; without stats, those that are counted here."""
        self._now = None if config is None or stats is None else (config, stats)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the engine. The registry calls it."""
        if self._now is None:
            return
        config, stats = self._now
        session = stats.session
        gauges = {
            "slots": ("Slots of the cache", config.max_num_seqs),
            "slots_used": ("Slots in use", len(stats.slots)),
            "requests_waiting": ("Requests in the queue", stats.waiting),
            "clients_waiting": ("Clients that have requests in the queue", stats.waiting_clients),
            "kv_cache_used_bytes": ("Bytes of K and V of live tokens", session.cache_bytes_live),
            "kv_cache_reserved_bytes": ("Bytes of K and V", session.cache_bytes_reserved),
            "kv_cache_used_ratio": ("Share of K and V that is used", session.cache_bytes_live / max(1, session.cache_bytes_reserved)),
            "prompt_cache_bytes": ("Bytes of copies of prompts", stats.prompt_cache_bytes),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens that were run", session.prefill_tokens),
            "cached_prompt_tokens": (
                "Prompt tokens that were not run, as the prompt cache or another slot had them",
                session.reused_tokens,
            ),
            "decode_tokens": ("Tokens that decode steps have run", session.decode_tokens),
            "decode_steps": ("Decode steps", session.decode_steps),
            "drafts": ("Drafts that were verified", session.drafts),
            "draft_tokens": ("Tokens of drafts that were verified", session.draft_tokens),
            "accepted_draft_tokens": ("Tokens of drafts that were accepted", session.accepted_tokens),
            "prefill_seconds": ("Time of prefills", session.prefill_seconds),
            "decode_seconds": ("Time of decode steps", session.decode_seconds),
            "prompt_cache_hits": ("Prompts of which the prompt cache had a part", stats.prompt_cache_hits),
            "prompt_cache_misses": ("Prompts of which it had nothing", stats.prompt_cache_misses),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"trt_kvcache_{name}", what, value=value)
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"trt_kvcache_{name}", what, value=value)
