"""How many bytes a cache takes, before anything is allocated, and the inverse questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trt_kvcache.checks import int_in_range
from trt_kvcache.config import CacheConfig, KVCacheConfig
from trt_kvcache.errors import CapacityError
from trt_kvcache.layout import MAX_DIMENSION, row_nbytes, slot_kv_nbytes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a cache.

    Parameters
    ----------
    bytes_per_token : int
        K and V of one token over all layers.
    bytes_per_sequence : int
        K and V of one slot over all layers at ``max_sequence_length``, without padding.
    bytes_per_layer : tuple of int
        As allocated, padding included, one entry per attention layer.
    scales_nbytes : int
        Scales as allocated; 0 for a dtype without.
    nbytes : int
        All of it as allocated: equal to ``config.nbytes``.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    bytes_per_layer: tuple[int, ...]
    scales_nbytes: int
    nbytes: int


def _per_layer(config: KVCacheConfig | CacheConfig) -> KVCacheConfig:
    return config.kv if isinstance(config, CacheConfig) else config


def estimate_memory(config: KVCacheConfig | CacheConfig) -> MemoryEstimate:
    """Return the bytes of a cache of this configuration."""
    kv = _per_layer(config)
    return MemoryEstimate(
        bytes_per_token=sum(2 * layer.num_kv_heads * row_nbytes(layer.head_dim, kv.dtype) for layer in kv.layers),
        bytes_per_sequence=sum(
            2 * slot_kv_nbytes(layer.num_kv_heads, kv.max_sequence_length, layer.head_dim, kv.dtype) for layer in kv.layers
        ),
        bytes_per_layer=tuple(storage.nbytes for storage in kv.storages),
        scales_nbytes=kv.scales_nbytes,
        nbytes=kv.nbytes,
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to ``MAX_DIMENSION`` with ``fits(n)``, for a condition that holds up to some n and then no more."""
    low, high = 0, MAX_DIMENSION + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_sequence(config: KVCacheConfig | CacheConfig, nbytes: int) -> int:
    """Return the largest ``max_sequence_length`` with which a cache of this batch size takes at most ``nbytes``.

    Raises :class:`CapacityError` if not even one token per slot fits.
    """
    budget = int_in_range("nbytes", nbytes, 0)
    length = _largest(lambda n: replace(config, max_sequence_length=n).nbytes <= budget)
    if not length:
        raise CapacityError(f"{budget} bytes do not hold one token for each of {config.max_batch_size} slots. Lower max_batch_size.")
    return length


def largest_batch(config: KVCacheConfig | CacheConfig, nbytes: int) -> int:
    """Return the largest ``max_batch_size`` with which a cache of this sequence length takes at most ``nbytes``.

    Raises :class:`CapacityError` if not even one slot fits.
    """
    budget = int_in_range("nbytes", nbytes, 0)
    batch = _largest(lambda n: replace(config, max_batch_size=n).nbytes <= budget)
    if not batch:
        raise CapacityError(f"{budget} bytes do not hold one slot of {config.max_sequence_length} tokens. Lower max_sequence_length.")
    return batch
