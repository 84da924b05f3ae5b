"""``checked_build``: checks of options, TensorRT and checkpoint before a build or its dry run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.builder.capable_gpus import with_capable_gpus
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.timing_cache import check_timing_cache
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint import Checkpoint, GenerationDefaults, Tokenizer
from trt_kvcache.checkpoint.model_files import CONFIG_FILE, ModelFiles
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.registry import quantized_format
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_weights
from trt_kvcache.checkpoint.weight_files import has_weight_files
from trt_kvcache.engine.kv_options import quantized_kv
from trt_kvcache.engine_folder.folder import check_target
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.trt.module import TensorRT, load


@dataclass(frozen=True, kw_only=True)
class CheckedBuild:
    """A validated build: everything that could be checked before the network is defined."""

    options: ResolvedOptions
    tensorrt: TensorRT | None  # None in a dry run where it is not installed
    checkpoint: Checkpoint  # open; the caller closes it
    cache: DecoderCacheConfig


def checked_build(
    model_path: str | os.PathLike[str], engine_path: str | os.PathLike[str] | None, given: BuildOptions, *, dry_run: bool = False
) -> CheckedBuild:
    """Validate a build, and open its checkpoint. A dry run needs neither TensorRT nor weights."""
    model = Path(model_path)
    options = ResolvedOptions.of_model(given, Checkpoint.read_config(model))
    if engine_path is not None:
        check_target(Path(engine_path), model)
    if options.timing_cache is not None:
        check_timing_cache(options.timing_cache)
    tensorrt = installed_tensorrt(given.flavour) if dry_run else load(given.flavour, error=BuildError)
    if tensorrt is not None:
        options.check_tensorrt(tensorrt)
    checkpoint = open_checkpoint(model, given.quantize, needs_weights=not dry_run)
    try:
        # again: weights may be stored in another dtype than config.json says
        options = with_capable_gpus(ResolvedOptions.of_model(given, checkpoint.config), checkpoint.code_kinds, tensorrt)
        try:
            options.check_kernels(checkpoint.config)
        except ConfigError as error:
            if given.kv_dtype is None:
                raise
            raise ConfigError(f"{error} kv_dtype={given.kv_dtype} chose plugin attention: no other takes K and V in 8 bits.") from None
        Tokenizer.open(checkpoint.path)  # damaged files that are copied are reported before the work, not by the first prompt
        GenerationDefaults.open(checkpoint.path)
        cache = options.cache_for(checkpoint.config, quantized_kv(checkpoint, given.kv_dtype, given.kv_scales))
    except BaseException:
        checkpoint.close()
        raise
    return CheckedBuild(options=options, tensorrt=tensorrt, checkpoint=checkpoint, cache=cache)


def installed_tensorrt(flavour: str) -> TensorRT | None:
    """Return TensorRT, or None if it is not installed."""
    try:
        return load(flavour, error=BuildError)
    except BuildError:
        return None


def open_checkpoint(model: Path, quantize: str | None, *, needs_weights: bool) -> Checkpoint:
    """Open a checkpoint; without weights in the folder, one of ``config.json`` alone if it says enough."""
    if needs_weights or has_weight_files(model) or quantized_format(ModelFiles(model).json(CONFIG_FILE), model) is not None:
        return Checkpoint.open(model, quantize=quantize)
    config = Checkpoint.read_config(model)
    return Checkpoint(model, config, {}, None if quantize is None else rounded_weights(config, Quantization.parse(quantize), {}))
