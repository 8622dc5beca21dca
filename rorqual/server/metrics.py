"""What a scraper finds: the names that people already watch vLLM by, and under `rorqual:` what only we have.

Counts and gauges are read off the engine when somebody asks; only latencies and ends are noted as they happen.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rorqual.engine.output import Delta, RequestOutput
from rorqual.engine.stats import EngineStats
from rorqual.server.worker import Served
from rorqual.store.interface import StoreStat

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
"""Upper bounds in seconds."""


class Histogram:
    """Observations by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, about: str, model: str) -> HistogramMetricFamily:
        made, total, buckets = HistogramMetricFamily(name, about, labels=["model_name"]), 0, []
        for bound, count in zip((*(str(bound) for bound in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        made.add_metric([model], buckets, self._sum)
        return made


class Metrics(Collector):
    """One engine's. The worker's thread writes and reads it, as a `Watcher`.

    model: its name, a label of all. clock: that of the engine's times.
    """

    def __init__(self, engine: Served, model: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._model, self._clock = engine, model, clock
        self._first, self._between, self._whole = Histogram(FIRST_TOKEN), Histogram(BETWEEN_TOKENS), Histogram(WHOLE)
        self._ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._last: dict[tuple[str, int], float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def delta(self, output: RequestOutput, delta: Delta) -> None:
        now, key = self._clock(), (delta.request, delta.index)
        if delta.token_ids:
            if key in self._last:
                self._between.add(now - self._last[key])
            else:
                self._first.add(now - output.times.arrived)
            self._last[key] = now
        if delta.finish_reason is not None:
            self._end(output, key, delta.finish_reason, now)

    def ended(self, output: RequestOutput, reason: str, completions: int) -> None:
        now = self._clock()
        for _ in range(completions - 1):
            self._ends[reason] += 1
        self._end(output, (output.request, 0), reason, now)
        for key in [key for key in self._last if key[0] == output.request]:
            del self._last[key]

    def _end(self, output: RequestOutput, key: tuple[str, int], reason: str, now: float) -> None:
        self._ends[reason] += 1
        self._last.pop(key, None)
        self._whole.add(now - output.times.arrived)

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._state(stats)
        yield from self._totals(stats)
        yield from self._drafts(stats)
        yield from self._ours(stats)
        yield self._first.family("vllm:time_to_first_token_seconds", "From arrival to the first token.", self._model)
        yield self._between.family("vllm:inter_token_latency_seconds", "Between two steps with tokens.", self._model)
        yield self._whole.family("vllm:e2e_request_latency_seconds", "From arrival to the end.", self._model)
        made = CounterMetricFamily(
            "vllm:request_success", "Completions by why they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._ends.items():
            made.add_metric([self._model, reason], count)
        yield made

    def _state(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Completions that have a slot.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Completions in the queue.", stats.waiting)
        used = stats.pages_used / max(1, stats.pages)
        yield self._gauge("vllm:kv_cache_usage_perc", "Pages that live requests hold; 1 is all of them.", used)
        facts = {
            "block_size": str(stats.page_tokens),
            "num_gpu_blocks": str(stats.pages),
            "enable_prefix_caching": "True",
            "max_model_len": str(self._engine.max_model_len),
            "slots": str(stats.slots),
            "page_bytes": str(stats.page_bytes),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache's shape.", labels=["model_name", *facts])
        info.add_metric([self._model, *facts.values()], 1)
        yield info

    def _totals(self, stats: EngineStats) -> Iterator[Metric]:
        counts = stats.counts
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", counts.prompt)
        yield self._counter("vllm:generation_tokens", "Tokens given to completions.", counts.new)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache.", counts.prompt)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", counts.hit)
        yield self._counter("vllm:num_preemptions", "Times that a completion lost its pages.", stats.preemptions)

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        counts = stats.counts
        yield self._counter("vllm:spec_decode_num_drafts", "Verifications.", counts.verifications)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", counts.proposed)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts that stood.", sum(counts.accepted))
        made = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by position.", labels=["model_name", "position"]
        )
        for at, count in enumerate(counts.accepted):
            made.add_metric([self._model, str(at)], count)
        yield made

    def _ours(self, stats: EngineStats) -> Iterator[Metric]:
        counts = stats.counts
        yield self._counter("rorqual:replayed_tokens", "Tokens found, and computed again for windows.", counts.replayed)
        yield self._counter("rorqual:restored_tokens", "Tokens found whose pages came from the store.", counts.restored)
        yield self._counter("rorqual:computed_tokens", "Rows run, replayed and rejected ones too.", counts.computed)
        yield self._counter("rorqual:layer_tokens", "Rows times the layers that they ran.", counts.layer_tokens)
        yield self._counter("rorqual:engram_rows_read", "Rows read of Engram's tables.", counts.engram_rows)
        yield self._counter("rorqual:evictions", "Cached pages that made room.", stats.evictions)
        made = GaugeMetricFamily("rorqual:cache_bytes", "Allocated bytes.", labels=["model_name", "group"])
        for group, size in stats.bytes_by_group.items():
            made.add_metric([self._model, group], size)
        yield made
        made = GaugeMetricFamily("rorqual:pages", "Pages by state.", labels=["model_name", "state"])
        states = {"free": stats.pages_free, "used": stats.pages_used, "cached": stats.pages_cached}
        for state, count in states.items():
            made.add_metric([self._model, state], count)
        yield made
        if stats.store is not None:
            yield from self._store(stats.store)

    def _store(self, store: StoreStat) -> Iterator[Metric]:
        yield self._gauge("rorqual:store_pages", "Pages in the store.", store.pages)
        yield self._gauge("rorqual:store_bytes", "Bytes of the pages in the store.", store.bytes)
        made = CounterMetricFamily("rorqual:store_events", "What became of pages.", labels=["model_name", "event"])
        for event in ("puts", "gets", "hits", "dropped", "evicted", "expired", "damaged"):
            made.add_metric([self._model, event], getattr(store, event))
        yield made

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        made = GaugeMetricFamily(name, about, labels=["model_name"])
        made.add_metric([self._model], value)
        return made

    def _counter(self, name: str, about: str, value: float) -> Metric:
        made = CounterMetricFamily(name, about, labels=["model_name"])
        made.add_metric([self._model], value)
        return made
