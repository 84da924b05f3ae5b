"""What is checked before a build: the options, TensorRT, and the checkpoint. A dry run makes the same checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trt_kvcache.builder.code_types import for_codes
from trt_kvcache.builder.options import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_PREFILL_LENGTH,
    BuildOptions,
    default_sequence_length,
)
from trt_kvcache.builder.timing_cache import check_timing_cache
from trt_kvcache.checkpoint import Checkpoint, GenerationDefaults, Tokenizer
from trt_kvcache.checkpoint.model_files import CONFIG_FILE, ModelFiles
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.registry import quantized_format
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_weights
from trt_kvcache.checkpoint.weight_files import has_weight_files
from trt_kvcache.engine.attention_variants import default_attention
from trt_kvcache.engine.kv_options import quantized_kv
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.folder import check_target
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.trt.module import TensorRT, load


@dataclass(frozen=True, kw_only=True)
class CheckedBuild:
    """A build that nothing which is checked before it stands against."""

    options: BuildOptions
    tensorrt: TensorRT | None
    checkpoint: Checkpoint
    quantized: QuantizedKV | None
    rounding: str | None


def checked_build(
    model_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str] | None,
    *,
    dry_run: bool = False,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_sequence_length: int | None = None,
    max_prefill_length: int | None = None,
    max_logits_per_slot: int | Literal["all"] = 1,
    dtype: str | None = None,
    attention: str | None = None,
    flavour: str = "auto",
    compute_capabilities: Sequence[str] | None = None,
    builder_optimization_level: int | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    kv_scales: str | None = None,
) -> CheckedBuild:
    """Check a build, and open its checkpoint."""
    rounding = None if quantize is None else str(Quantization.parse(quantize))
    model = Path(model_path)
    length = default_sequence_length(Checkpoint.read_config(model)) if max_sequence_length is None else max_sequence_length
    options = BuildOptions(
        max_batch_size=max_batch_size,
        max_sequence_length=length,
        max_prefill_length=_default_prefill_length(length) if max_prefill_length is None else max_prefill_length,
        max_logits_per_slot=max_logits_per_slot,
        dtype=dtype,
        attention=attention or ("plugin" if kv_dtype else "native"),
        flavour=flavour,
        compute_capabilities=None if compute_capabilities is None else _as_tuple(compute_capabilities),
        builder_optimization_level=builder_optimization_level,
        timing_cache=None if timing_cache is None else Path(timing_cache),
    )
    if attention is None and kv_dtype is None:
        options = replace(options, attention=default_attention(Checkpoint.read_config(model), options.max_sequence_length))
    if engine_path is not None:
        check_target(Path(engine_path), model)
    if options.timing_cache is not None:
        check_timing_cache(options.timing_cache)
    tensorrt = installed_tensorrt(flavour) if dry_run else load(flavour, error=BuildError)
    if tensorrt is not None:
        options.check_tensorrt(tensorrt)
    checkpoint = open_checkpoint(model, rounding, needs_weights=not dry_run)
    try:
        options = for_codes(options, checkpoint.code_kinds, tensorrt, rounded=rounding is not None)
        try:
            options.check_kernels(checkpoint.config)
        except ConfigError as error:
            if kv_dtype is None:
                raise
            raise ConfigError(f"{error} kv_dtype={kv_dtype} chose plugin attention: no other takes K and V in 8 bits.") from None
        Tokenizer.open(checkpoint.path)  # damaged files that are copied are reported before the work, not by the first prompt
        GenerationDefaults.open(checkpoint.path)
        quantized = quantized_kv(checkpoint, kv_dtype, kv_scales)
        options.cache_for(checkpoint.config, quantized)
    except BaseException:
        checkpoint.close()
        raise
    return CheckedBuild(options=options, tensorrt=tensorrt, checkpoint=checkpoint, quantized=quantized, rounding=rounding)


def installed_tensorrt(flavour: str) -> TensorRT | None:
    """Return TensorRT, or None if it is not there."""
    try:
        return load(flavour, error=BuildError)
    except BuildError:
        return None


def open_checkpoint(model: Path, rounding: str | None, *, needs_weights: bool) -> Checkpoint:
    """Open a checkpoint, or what ``config.json`` alone says of it."""
    if needs_weights or has_weight_files(model) or quantized_format(ModelFiles(model).json(CONFIG_FILE), model) is not None:
        return Checkpoint.open(model, quantize=rounding)
    config = Checkpoint.read_config(model)
    return Checkpoint(model, config, {}, None if rounding is None else rounded_weights(config, Quantization.parse(rounding), {}))


def _default_prefill_length(sequence_length: Any) -> int:
    """Return at most S. What is no number is refused later, by ``BuildOptions``."""
    return min(sequence_length, DEFAULT_MAX_PREFILL_LENGTH) if isinstance(sequence_length, int) else DEFAULT_MAX_PREFILL_LENGTH


def _as_tuple(compute_capabilities: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple; a string is one capability."""
    return (compute_capabilities,) if isinstance(compute_capabilities, str) else tuple(compute_capabilities)
