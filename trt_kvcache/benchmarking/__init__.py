"""Benchmarks of a session: prefill and decode tokens per second, latencies, memory, and the share of the memory bandwidth limit."""

from trt_kvcache.benchmarking.cache_traffic import CacheTraffic
from trt_kvcache.benchmarking.cases import BenchmarkCase
from trt_kvcache.benchmarking.copy_speed import copy_bytes_per_second
from trt_kvcache.benchmarking.environment import describe_environment
from trt_kvcache.benchmarking.measure import BenchmarkRow, measure
from trt_kvcache.benchmarking.memory_limit import MemoryLimit
from trt_kvcache.benchmarking.memory_use import MemoryUse
from trt_kvcache.benchmarking.spread import MeanDeviation, Percentiles

__all__ = [
    "BenchmarkCase",
    "BenchmarkRow",
    "MeanDeviation",
    "CacheTraffic",
    "MemoryLimit",
    "MemoryUse",
    "Percentiles",
    "copy_bytes_per_second",
    "describe_environment",
    "measure",
]
