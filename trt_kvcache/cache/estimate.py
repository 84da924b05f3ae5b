"""How many bytes a cache takes, before anything is allocated, and the inverse questions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import CacheConfig, KVCacheConfig
from trt_kvcache.cache.hybrid_config import HybridCacheConfig
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.errors import CapacityError
from trt_kvcache.memory.shapes import MAX_DIMENSION, row_nbytes, slot_kv_nbytes

AnyCacheConfig = KVCacheConfig | CacheConfig | MambaCacheConfig | HybridCacheConfig


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a cache.

    Parameters
    ----------
    bytes_per_token
        K and V of one token over all layers.
    bytes_per_sequence
        K and V of one slot over all layers at ``max_sequence_length``, and its states, without padding.
    bytes_per_layer : tuple of int
        K and V as allocated, padding included, one entry per attention layer.
    scales_nbytes
        Scales as allocated; 0 for a dtype without.
    states_nbytes
        Recurrent and conv states as allocated, both buffers of ``ping_pong``; 0 without recurrent layers.
    nbytes
        All of it as allocated: equal to ``config.nbytes``.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    bytes_per_layer: tuple[int, ...]
    scales_nbytes: int
    states_nbytes: int
    nbytes: int


def _parts(config: AnyCacheConfig) -> tuple[KVCacheConfig | None, MambaCacheConfig | None]:
    if isinstance(config, KVCacheConfig):
        return config, None
    if isinstance(config, MambaCacheConfig):
        return None, config
    return config.kv, config.mamba


def estimate_memory(config: AnyCacheConfig) -> MemoryEstimate:
    """Return the bytes of a cache of this configuration."""
    kv, mamba = _parts(config)
    per_token = per_sequence = 0
    if kv is not None:
        per_token = sum(2 * layer.num_kv_heads * row_nbytes(layer.head_dim, kv.dtype) for layer in kv.layers)
        per_sequence = sum(2 * slot_kv_nbytes(layer.num_kv_heads, kv.max_sequence_length, layer.head_dim, kv.dtype) for layer in kv.layers)
    return MemoryEstimate(
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence + (0 if mamba is None else mamba.slot_nbytes),
        bytes_per_layer=() if kv is None else tuple(storage.nbytes for storage in kv.storages),
        scales_nbytes=0 if kv is None else kv.scales_nbytes,
        states_nbytes=0 if mamba is None else mamba.nbytes,
        nbytes=config.nbytes,
    )


def _with_batch(config: AnyCacheConfig, max_batch_size: int) -> AnyCacheConfig:
    if not isinstance(config, HybridCacheConfig):
        return replace(config, max_batch_size=max_batch_size)
    kv = None if config.kv is None else replace(config.kv, max_batch_size=max_batch_size)
    mamba = None if config.mamba is None else replace(config.mamba, max_batch_size=max_batch_size)
    return replace(config, kv=kv, mamba=mamba)


def _with_length(config: AnyCacheConfig, max_sequence_length: int) -> AnyCacheConfig:
    """Return the configuration for other sequences. States do not depend on their length."""
    if isinstance(config, KVCacheConfig | CacheConfig):
        return replace(config, max_sequence_length=max_sequence_length)
    if isinstance(config, HybridCacheConfig) and config.kv is not None:
        return replace(config, kv=replace(config.kv, max_sequence_length=max_sequence_length))
    return config


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to ``MAX_DIMENSION`` with ``fits(n)``, for a condition that holds up to some n and then no more."""
    low, high = 0, MAX_DIMENSION + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_sequence(config: AnyCacheConfig, nbytes: int) -> int:
    """Return the largest ``max_sequence_length`` with which a cache of this batch size takes at most ``nbytes``.

    Raises :class:`CapacityError` if not even one token per slot fits.
    """
    budget = int_in_range("nbytes", nbytes, 0)
    length = _largest(lambda n: _with_length(config, n).nbytes <= budget)
    if not length:
        raise CapacityError(f"{budget} bytes do not hold one token for each of {config.max_batch_size} slots. Lower max_batch_size.")
    return length


def largest_batch(config: AnyCacheConfig, nbytes: int) -> int:
    """Return the largest ``max_batch_size`` with which a cache of this sequence length takes at most ``nbytes``.

    Raises :class:`CapacityError` if not even one slot fits.
    """
    budget = int_in_range("nbytes", nbytes, 0)
    batch = _largest(lambda n: _with_batch(config, n).nbytes <= budget)
    if not batch:
        kv, _ = _parts(config)
        slot = "the states of one slot." if kv is None else f"one slot of {kv.max_sequence_length} tokens. Lower max_sequence_length."
        raise CapacityError(f"{budget} bytes do not hold {slot}")
    return batch
