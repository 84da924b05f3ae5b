"""``what_fits``: which weights, K/V, lengths and slots fit into the memory of a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.builder.estimate import PackedModel
from trt_kvcache.builder.options import default_sequence_length
from trt_kvcache.cache.estimate import largest_number
from trt_kvcache.cache.hybrid_config import HybridCacheConfig
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.stored_format import stored_format
from trt_kvcache.engine.decoder_tensors import decoder_cache_config
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_BATCH_SIZE
from trt_kvcache.model import ModelConfig

#: How the weights of a checkpoint in 16 bits are rounded in the rows of an answer.
ROUNDINGS = ("int8", "int4:32", "int4:128")

#: The last row of them, with a head that is tied to the embedding and with one of its own. TensorRT packs a tied embedding twice, so that
#: int8 saves nothing.
SMALLEST = {True: "int4:128,embedding=int4:128", False: "int4:128,embedding=int8,head=int8"}

#: K and V of any checkpoint beside those in the dtype of the engine. float8_e4m3fn takes the bytes of int8.
KV_BY_TOKEN = ("int8", "token")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits with one format of weights, and one of K and V.

    Parameters
    ----------
    weights : str
        How weights are rounded, as ``quantize=`` takes it; or how the checkpoint has them.
    kv_dtype : str
        Of K and V. What fits with ``"int8"`` and scales by token fits with ``"float8_e4m3fn"``.
    kv_scales : str or None
        What of K and V shares a scale: see :class:`~trt_kvcache.KVCacheConfig`.
    weights_nbytes : int
        Bytes of the weights.
    longest_sequence : int
        Tokens that a slot can hold with the slots that were asked for; 0 if not even one fits.
    largest_batch : int
        Slots of the length that was asked for; 0 if not even one fits.
    """

    weights: str
    kv_dtype: str
    kv_scales: str | None
    weights_nbytes: int
    longest_sequence: int
    largest_batch: int


def what_fits(
    model_path: str | os.PathLike[str],
    nbytes: int,
    *,
    max_batch_size: int = 1,
    max_sequence_length: int | None = None,
    dtype: str | None = None,
    compute_capabilities: Sequence[str] | None = None,
) -> tuple[Fit, ...]:
    """Return which formats of weights and of K and V fit into a memory, how long their sequences can be, and how many.

    Counted is what a session on an engine takes of the GPU: plan, constants, activations and cache, as :func:`~trt_kvcache.estimate_build`
    has them. What the driver and TensorRT take beside them is not.

    Parameters
    ----------
    model_path : path
        A Hugging Face folder. Only ``config.json`` is read, and where weights are stored quantized the shapes of all tensors.
    nbytes : int
        Bytes of the memory.
    max_batch_size : int
        Slots for which the longest sequence is found.
    max_sequence_length : int, optional
        Tokens of a slot for which the largest batch is found; the positions of the model if left out, at most 2048.
    dtype : str, optional
        What the engine computes in; that of the checkpoint if left out.
    compute_capabilities : sequence of str, optional
        As for :func:`~trt_kvcache.estimate_build`: whether FP4 is stored as it is.

    Returns
    -------
    tuple of Fit
        A checkpoint in 16 bits first as it is and then rounded in several ways; a quantized one as it is. Each with K and V in the dtype
        of the engine and, where plugin attention has the model, in 8 bits: with a scale for each token, and with static scales if the
        checkpoint has some.

    Raises
    ------
    RangeError
        ``nbytes`` is negative.
    ConfigError, CheckpointError
        As for :func:`~trt_kvcache.estimate_build`.

    Examples
    --------
    >>> from trt_kvcache import what_fits
    >>> fit = what_fits("examples/tiny-llama", 12_000_000)[0]
    >>> fit.weights, fit.kv_dtype, fit.weights_nbytes, fit.longest_sequence
    ('float16', 'float16', 60736, 512)
    """
    budget = int_in_range("nbytes", nbytes, 0)
    model, sources = _sources(Path(model_path), compute_capabilities)
    length = default_sequence_length(model) if max_sequence_length is None else max_sequence_length
    fits = (
        _fit(source, weights, kv, budget, slots=max_batch_size, length=length, dtype=dtype or model.dtype)
        for weights, source in sources
        for kv in ((dtype or model.dtype, None), KV_BY_TOKEN, *(() if source.static_kv is None else (source.static_kv,)))
    )
    return tuple(fit for fit in fits if fit is not None)


def _fit(source: PackedModel, weights: str, kv: tuple[str, str | None], budget: int, *, slots: int, length: int, dtype: str) -> Fit | None:
    """Return what fits with one format of weights, and one of K and V; None where plugin attention does not have the model."""
    kv_dtype, scales = kv

    def fits(batch: int, tokens: int) -> bool:
        return _device_nbytes(source, dtype, kv_dtype, scales, batch, tokens) <= budget

    try:
        is_any = fits(1, 1)
    except ConfigError:
        if scales is None:
            raise
        return None
    positions, attention = source.model.max_position_embeddings, None if scales is None else "plugin"
    return Fit(
        weights=weights,
        kv_dtype=kv_dtype,
        kv_scales=scales,
        weights_nbytes=source.estimate(max_batch_size=1, max_sequence_length=1, dtype=dtype, attention=attention).weights_nbytes,
        longest_sequence=largest_number(positions, lambda tokens: fits(slots, tokens)) if is_any else 0,
        largest_batch=largest_number(MAX_BATCH_SIZE, lambda batch: fits(batch, length)) if is_any else 0,
    )


def _sources(path: Path, compute_capabilities: Sequence[str] | None) -> tuple[ModelConfig, list[tuple[str, PackedModel]]]:
    """Return the model, and its weights in each format: what an answer calls it, and the bytes."""
    data = read_json(path / "config.json")
    stored, source = stored_format(data, path), PackedModel.read(path, compute_capabilities=compute_capabilities)
    if stored is not None:
        return source.model, [(stored.title, source)]
    roundings = (*ROUNDINGS, SMALLEST[source.model.tie_word_embeddings])
    return source.model, [(source.model.dtype, source), *((one, PackedModel.read(path, quantize=one)) for one in roundings)]


def _device_nbytes(source: PackedModel, dtype: str, kv_dtype: str, scales: str | None, slots: int, length: int) -> int:
    """Return the GPU memory of a session."""
    attention = None if scales is None else "plugin"
    estimate = source.estimate(max_batch_size=slots, max_sequence_length=length, dtype=dtype, attention=attention)
    if attention is None:
        return estimate.device_nbytes
    cache = decoder_cache_config(source.model, max_batch_size=slots, max_sequence_length=length, dtype=dtype, attention=attention)
    if cache.kv is None:
        raise ConfigError("K and V: expected a model with attention, got one with states alone.")
    kv = replace(cache.kv, dtype=kv_dtype, scales=scales)
    packed = replace(cache, kv=kv) if isinstance(cache, HybridCacheConfig) else kv
    return estimate.device_nbytes - estimate.cache_nbytes + packed.nbytes
