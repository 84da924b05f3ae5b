"""``what_fits``: formats of weights and K/V, lengths and slots that fit into the memory of a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.builder.attention_choice import BuildTarget
from trt_kvcache.builder.capable_gpus import have_fp4, with_capable_gpus
from trt_kvcache.builder.checked_build import build_target, installed_tensorrt, open_checkpoint
from trt_kvcache.builder.draft_head import open_draft_head
from trt_kvcache.builder.estimate import BYTES, BuildEstimate, PackedModel
from trt_kvcache.builder.options import DEFAULT_MAX_PREFILL_LENGTH, BuildOptions, default_sequence_length
from trt_kvcache.builder.resolved_options import COMPUTED_FEATURES, ResolvedOptions, check_capabilities
from trt_kvcache.builder.torch_memory import TorchMemory
from trt_kvcache.cache.estimate import largest_number
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AUTO
from trt_kvcache.engine.kv_options import quantized_kv
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine.step_rows import hidden_layers_of
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_BATCH_SIZE
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.model.features import first_missing
from trt_kvcache.trt.module import TensorRT

#: Roundings of the weights of a 16-bit checkpoint, one row of the result each.
ROUNDINGS = ("int8", "int4:32", "int4:128")

#: The last row of them, with a head that is tied to the embedding and with one of its own. TensorRT packs a tied embedding twice, so that
#: int8 saves nothing.
SMALLEST = {True: "int4:128,embedding=int4:128", False: "int4:128,embedding=int8,head=int8"}

#: Weights as they are stored, by that option of a build, which TensorRT's own layers would widen.
PACKED_KERNELS = "as stored, --packed-kernels"

#: Quantized K and V of any checkpoint. float8_e4m3fn takes the bytes of int8.
KV_BY_TOKEN = QuantizedKV("int8", "token")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Longest sequence and largest batch that fit with one format of weights, and one of K and V.

    Parameters
    ----------
    weights : str
        Rounding of weights, as ``quantize=`` takes it, the format of the checkpoint, or ``"as stored, --packed-kernels"``.
    kv_dtype : str
        Dtype of K and V. A fit with ``"int8"`` and scales by token is one with ``"float8_e4m3fn"`` too.
    kv_scales : str or None
        Elements of K and V that share a scale: see :class:`~trt_kvcache.KVCacheConfig`.
    weights_nbytes : int
        Bytes of the weights.
    longest_sequence : int
        Tokens that a slot can hold with the requested number of slots; 0 if not even one fits.
    largest_batch : int
        Slots of the requested length; 0 if not even one fits.
    engine : {"tensorrt", "torch"}
        The engine of the session.
    """

    weights: str
    kv_dtype: str
    kv_scales: str | None
    weights_nbytes: int
    longest_sequence: int
    largest_batch: int
    engine: str = "tensorrt"


def what_fits(
    model_path: str | os.PathLike[str],
    nbytes: int,
    *,
    max_batch_size: int = 1,
    max_sequence_length: int | None = None,
    dtype: str | None = None,
    compute_capabilities: Sequence[str] | None = None,
    adapters_rank: int | None = None,
    per_layer_table: Literal["device", "host"] = "device",
    draft_head: str | os.PathLike[str] | None = None,
) -> tuple[Fit, ...]:
    """Return which formats of weights and of K and V fit into a memory, how long their sequences can be, and how many.

    With TensorRT a session takes the GPU memory of plan, constants, activations and cache: see :func:`~trt_kvcache.estimate_build`. As for
    a build, attention and ``v_outputs`` depend on the TensorRT that is installed, if any, and on its GPU. If TensorRT does not build the
    model, for example one with experts and head dims that plugin attention does not have, the estimate is of a session with the PyTorch
    engine on compute capability 8.0 or newer: weights, activations, CUDA graphs and cache. Adapters are counted in both. Memory of the
    driver, of TensorRT and of PyTorch is not counted.

    Parameters
    ----------
    model_path : path
        A Hugging Face folder. Names, shapes and dtypes of its weights are read; ``config.json`` alone is enough where they are
        not stored quantized.
    nbytes : int
        Bytes of the memory.
    max_batch_size : int
        Slots for which the longest sequence is found.
    max_sequence_length : int, optional
        Tokens of a slot for which the largest batch is found; the positions of the model if left out, at most 2048.
    dtype : str, optional
        Dtype of computation; the checkpoint's if left out.
    compute_capabilities : sequence of str, optional
        As for :func:`~trt_kvcache.estimate_build`. The formats of weights depend on them, and so does the storage of FP4.
    adapters_rank : int, optional
        Ranks of all LoRA adapters of a session together, in all linear layers, as for :func:`~trt_kvcache.estimate_build`. If left out,
        there are no adapters.
    per_layer_table : {"device", "host"}
        Place of the table of a model with per-layer embeddings. ``"host"`` is not counted, and the estimate is of a session with the
        PyTorch engine, as TensorRT has it in the plan.
    draft_head : "mtp" or path, optional
        The draft head of the session, with its cache, and the hidden states that it reads, as for :func:`~trt_kvcache.estimate_build`. If
        left out, there is none.

    Returns
    -------
    tuple of Fit
        A checkpoint in 16 bits first as it is, then rounded to formats that the GPUs support; a quantized one as it is. Matrices in
        super-blocks of GGUF, or in FP4, first as TensorRT's layers store them, then packed with ``packed_kernels``; super-blocks then
        rounded. Each with K and V in the dtype of the engine and, if plugin attention supports the model, in 8 bits: with a scale for
        each token, and with static scales if the checkpoint has some.

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
    one_of("per_layer_table", per_layer_table, ("device", "host"))
    options = BuildOptions(dtype=dtype, compute_capabilities=compute_capabilities, adapters_rank=adapters_rank, draft_head=draft_head)
    tensorrt = installed_tensorrt(options.flavour)
    if tensorrt is not None:
        check_capabilities(options, tensorrt)
    with open_checkpoint(Path(model_path), None, needs_weights=False) as checkpoint:
        with_capable_gpus(options, checkpoint.value_kinds, tensorrt)  # is checked
        model, stored = checkpoint.config, checkpoint.weights
        has_host_table = per_layer_table == "host"
        if has_host_table and model.per_layer_embedding is None:
            raise ConfigError(f"per_layer_table: expected device for a model without per-layer embeddings, got host for {model.family}.")
        target = None if tensorrt is None else build_target(tensorrt, options)
        with ExitStack() as opened:
            head = None
            if options.draft_head is not None:
                head = opened.enter_context(open_draft_head(str(options.draft_head), checkpoint.path, quantize=None))
                hidden_layers_of(head.config, model, option=f"draft_head: {options.draft_head}")
            is_built = all(_builds(one, options, target) for one in (model, *([head.config] if head else [])))
            has_fp4, is_quantized = have_fp4(compute_capabilities), bool(checkpoint.quantized_names)
            source = PackedModel.of(checkpoint, has_fp4=has_fp4, head=head)
            in_layers = PackedModel.of(checkpoint, has_fp4=has_fp4, packed_kernels=True, head=head)
            in_torch = None
            if has_host_table or not is_built:
                in_torch = TorchMemory.of(checkpoint, adapters_rank=adapters_rank, has_host_table=has_host_table, head=head)
        static = _static_kv(checkpoint)
        format_ = stored.format if is_quantized else model.dtype
        packed = source.packed if in_torch is None else in_torch.packed
        if any(checkpoint.block_type(name) is not None for name in packed):
            format_ = "GGUF"
    if in_torch is not None:
        length = default_sequence_length(model) if max_sequence_length is None else max_sequence_length
        return _fits_in_torch(in_torch, format_, (None, KV_BY_TOKEN, *static), budget, slots=max_batch_size, length=length, dtype=dtype)
    roundings = () if is_quantized else (*ROUNDINGS, SMALLEST[model.tie_word_embeddings])
    rounded = ((one, source.rounded(one)) for one in roundings)
    sources = [(format_, source, options), *((one, packed, options) for one, packed in rounded if _exists(packed, options, tensorrt))]
    if in_layers.weights_nbytes(dtype or model.dtype) < source.weights_nbytes(dtype or model.dtype):
        sources.insert(1, (PACKED_KERNELS, in_layers, replace(options, packed_kernels=True)))
    length = default_sequence_length(model) if max_sequence_length is None else max_sequence_length
    fits = (
        _fit(source, weights, quantized, budget, slots=max_batch_size, length=length, options=of_weights, target=target)
        for weights, source, of_weights in sources
        for quantized in (None, KV_BY_TOKEN, *static)
    )
    return tuple(fit for fit in fits if fit is not None)


def _builds(model: ModelConfig, options: BuildOptions, target: BuildTarget | None) -> bool:
    """Return False for a model that TensorRT's networks do not compute, or that has experts and no plugin layers that do."""
    if first_missing(model, COMPUTED_FEATURES) is not None:
        return False
    if not any(isinstance(layer.mlp, RoutedMlpConfig) for layer in model.layers):
        return True
    try:
        ResolvedOptions.of_model(options, model, target)
    except ConfigError:
        return False
    return True


def _fit(
    source: PackedModel,
    weights: str,
    quantized: QuantizedKV | None,
    budget: int,
    *,
    slots: int,
    length: int,
    options: BuildOptions,
    target: BuildTarget | None,
) -> Fit | None:
    """Return the lengths and slots that fit with one format of weights, and one of K and V; None if it needs plugin attention in vain."""
    model = source.model

    def estimate(batch: int, tokens: int) -> BuildEstimate:
        attention = AUTO if quantized is None else "plugin"
        asked = replace(options, max_batch_size=batch, max_sequence_length=tokens, attention=attention)
        resolved = ResolvedOptions.of_model(asked, model, target)
        return source.estimate(resolved, resolved.cache_for(model, quantized))

    def fits(batch: int, tokens: int) -> bool:
        return estimate(batch, tokens).device_nbytes <= budget

    try:
        smallest = estimate(1, 1)
    except ConfigError:
        if quantized is None and not options.packed_kernels:
            raise
        return None
    is_any = smallest.device_nbytes <= budget
    return Fit(
        weights=weights,
        kv_dtype=options.dtype or model.dtype if quantized is None else quantized.dtype,
        kv_scales=None if quantized is None else quantized.scales,
        weights_nbytes=smallest.weights_nbytes,
        longest_sequence=largest_number(model.max_position_embeddings, lambda tokens: fits(slots, tokens)) if is_any else 0,
        largest_batch=largest_number(MAX_BATCH_SIZE, lambda batch: fits(batch, length)) if is_any else 0,
    )


def _fits_in_torch(
    source: TorchMemory,
    format_: str,
    kv: Sequence[QuantizedKV | None],
    budget: int,
    *,
    slots: int,
    length: int,
    dtype: str | None,
) -> tuple[Fit, ...]:
    """Return the fits of a model that TensorRT does not build: with the PyTorch engine."""
    computed = dtype or source.model.dtype
    sources = [(format_, source), *((one, source.rounded(one)) for one in (() if source.packed else ROUNDINGS))]
    found = []
    for weights, of_weights in sources:
        for quantized in kv:

            def fits(batch: int, tokens: int, of_weights: TorchMemory = of_weights, quantized: QuantizedKV | None = quantized) -> bool:
                cache = of_weights.cache_for(batch, tokens, computed, quantized)
                assert cache is not None
                width = min(tokens, DEFAULT_MAX_PREFILL_LENGTH)
                return of_weights.device_nbytes(cache, computed, max_prefill_length=width, gpu_nbytes=budget) <= budget

            if of_weights.cache_for(1, 1, computed, quantized) is None:
                continue
            found.append(
                Fit(
                    weights=weights,
                    kv_dtype=computed if quantized is None else quantized.dtype,
                    kv_scales=None if quantized is None else quantized.scales,
                    weights_nbytes=of_weights.weights_nbytes(computed),
                    longest_sequence=largest_number(source.model.max_position_embeddings, partial(fits, slots)),
                    largest_batch=largest_number(MAX_BATCH_SIZE, lambda batch, fits=fits: fits(batch, length)),  # type: ignore[misc]
                    engine="torch",
                )
            )
    return tuple(found)


def _exists(source: PackedModel, options: BuildOptions, tensorrt: TensorRT | None) -> bool:
    """Return whether the GPUs of a build have the types of rounded weights."""
    try:
        with_capable_gpus(options, {packed.type for packed in source.packed.values()} - {BYTES}, tensorrt)
    except ConfigError:
        return False
    return True


def _static_kv(checkpoint: Checkpoint) -> list[QuantizedKV]:
    """Return K and V quantized with the static scales of a checkpoint, if it has them."""
    if checkpoint.kv_dtype is None:
        return []
    quantized = quantized_kv(checkpoint, checkpoint.kv_dtype, None)
    return [quantized] if quantized is not None and quantized.static else []
