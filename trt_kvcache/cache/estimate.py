"""Bytes of a cache before it is allocated, and the largest cache of a number of bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.errors import CapacityError
from trt_kvcache.memory.shapes import MAX_BATCH_SIZE, MAX_DIMENSION


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a cache."""

    #: K and V of one token over all layers, and its scales by token.
    bytes_per_token: int
    #: K, V and scales of one slot at ``max_sequence_length``, and its states, without padding.
    bytes_per_sequence: int
    #: K and V of each attention layer as allocated, padding included.
    bytes_per_layer: tuple[int, ...]
    #: Scales as allocated, static or by token; 0 for a dtype without scales.
    scales_nbytes: int
    #: Recurrent and conv states as allocated, both buffers of ``ping_pong``; 0 without recurrent layers.
    states_nbytes: int
    #: All of it as allocated: equal to ``config.nbytes``.
    nbytes: int


def estimate_memory(config: DecoderCacheConfig) -> MemoryEstimate:
    """Return the bytes of a cache of this configuration.

    Parameters
    ----------
    config : KVCacheConfig, CacheConfig, MambaCacheConfig or HybridCacheConfig
        The cache.

    Returns
    -------
    MemoryEstimate
        Its bytes by token, sequence and layer, and as allocated.

    Examples
    --------
    LLaMA-7B at 2048 tokens in float16 takes 1 GiB per sequence:

    >>> from trt_kvcache import CacheConfig, estimate_memory
    >>> config = CacheConfig(num_attention_layers=32, max_batch_size=4, max_sequence_length=2048, num_kv_heads=32, head_dim=128)
    >>> estimate = estimate_memory(config)
    >>> estimate.bytes_per_token, estimate.bytes_per_sequence, estimate.nbytes == config.nbytes
    (524288, 1073741824, True)
    """
    kv, mamba = config.kv, config.mamba
    per_token = per_sequence = 0
    if kv is not None:
        per_token = sum(layer.token_nbytes(kv.dtype, scaled=kv.scales_by_token) for layer in kv.layers)
        per_sequence = kv.max_sequence_length * per_token
    return MemoryEstimate(
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence + (0 if mamba is None else mamba.slot_nbytes),
        bytes_per_layer=() if kv is None else tuple(storage.nbytes for storage in kv.storages),
        scales_nbytes=0 if kv is None else kv.scales_nbytes,
        states_nbytes=0 if mamba is None else mamba.nbytes,
        nbytes=config.nbytes,
    )


def longest_sequence(config: DecoderCacheConfig, nbytes: int) -> int:
    """Return the largest ``max_sequence_length`` with which a cache of this batch size takes at most ``nbytes``.

    Parameters
    ----------
    config : KVCacheConfig, CacheConfig, MambaCacheConfig or HybridCacheConfig
        The cache. Its own ``max_sequence_length`` does not matter.
    nbytes : int
        Bytes that the cache may take as allocated.

    Returns
    -------
    int
        Tokens, from 1 to the largest int32; the largest int32 if the bytes do not depend on the length.

    Raises
    ------
    CapacityError
        Not even one token per slot fits.
    RangeError
        ``nbytes`` is negative.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig, longest_sequence
    >>> config = CacheConfig(num_attention_layers=32, max_batch_size=4, max_sequence_length=1, num_kv_heads=32, head_dim=128)
    >>> longest_sequence(config, 8 * 2**30)
    4096
    """
    budget = int_in_range("nbytes", nbytes, 0)
    length = largest_number(MAX_DIMENSION, lambda n: config.with_max_sequence_length(n).nbytes <= budget)
    if not length:
        raise CapacityError(f"{budget} bytes do not hold one token for each of {config.max_batch_size} slots. Lower max_batch_size.")
    return length


def largest_batch(config: DecoderCacheConfig, nbytes: int) -> int:
    """Return the largest ``max_batch_size`` with which a cache of this sequence length takes at most ``nbytes``.

    Parameters
    ----------
    config : KVCacheConfig, CacheConfig, MambaCacheConfig or HybridCacheConfig
        The cache. Its own ``max_batch_size`` does not matter.
    nbytes : int
        Bytes that the cache may take as allocated.

    Returns
    -------
    int
        Slots, from 1 to 65535, the most that a cache can have.

    Raises
    ------
    CapacityError
        Not even one slot fits.
    RangeError
        ``nbytes`` is negative.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig, largest_batch
    >>> config = CacheConfig(num_attention_layers=32, max_batch_size=1, max_sequence_length=2048, num_kv_heads=32, head_dim=128)
    >>> largest_batch(config, 8 * 2**30)
    8
    """
    budget = int_in_range("nbytes", nbytes, 0)
    batch = largest_number(MAX_BATCH_SIZE, lambda n: config.with_max_batch_size(n).nbytes <= budget)
    if not batch:
        kv = config.kv
        slot = "the states of one slot." if kv is None else f"one slot of {kv.max_sequence_length} tokens. Lower max_sequence_length."
        raise CapacityError(f"{budget} bytes do not hold {slot}")
    return batch


def largest_number(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to ``limit`` with ``fits(n)``, by bisection. 0 always fits, and is not tried."""
    low, high = 0, limit + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
