"""``checked_build``: checks of options, TensorRT and checkpoint before a build or its dry run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from trt_kvcache.builder.attention_choice import BuildTarget
from trt_kvcache.builder.capable_gpus import with_capable_gpus
from trt_kvcache.builder.draft_head import JoinedTensors, open_draft_head
from trt_kvcache.builder.network.weights import TensorSource
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
from trt_kvcache.engine.doctor_verdict import gpu_and_driver, read_verdict
from trt_kvcache.engine.kv_options import quantized_kv
from trt_kvcache.engine.step_rows import hidden_layers_of
from trt_kvcache.engine_folder.folder import check_target
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.memory.cuda_driver import compute_capability, find_gpu, make_current
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin.plugin_library import check_library_file


@dataclass(frozen=True, kw_only=True)
class CheckedBuild:
    """A validated build: everything that could be checked before the network is defined."""

    options: ResolvedOptions
    tensorrt: TensorRT | None  # None in a dry run where it is not installed
    checkpoint: Checkpoint  # open; the caller closes it
    cache: DecoderCacheConfig
    tensors: TensorSource  # the weights: of the checkpoint, and of the other one of a model and its draft head
    draft_head: CheckedBuild | None = None  # build of the draft head, which returns hidden states of its own

    def close(self) -> None:
        """Close the checkpoints. Idempotent."""
        self.checkpoint.close()
        if self.draft_head is not None:
            self.draft_head.close()


def checked_build(
    model_path: str | os.PathLike[str], engine_path: str | os.PathLike[str] | None, given: BuildOptions, *, dry_run: bool = False
) -> CheckedBuild:
    """Validate a build, and open its checkpoints. A dry run needs neither TensorRT nor weights."""
    model = Path(model_path)
    Checkpoint.read_config(model)  # a model that is not supported is reported before TensorRT is imported
    if engine_path is not None:
        check_target(Path(engine_path), model, None if given.adapter is None else Path(given.adapter))
    if given.timing_cache is not None:
        check_timing_cache(Path(given.timing_cache))
    if given.plugin_library is not None:
        check_library_file(Path(given.plugin_library))
    tensorrt = installed_tensorrt(given.flavour) if dry_run else load(given.flavour, error=BuildError)
    with ExitStack() as undo:
        checkpoint = open_checkpoint(model, given.quantize, given.adapter, needs_weights=not dry_run)
        undo.callback(checkpoint.close)
        # of the open checkpoint: weights may be stored in another dtype than config.json says
        options = ResolvedOptions.of_model(given, checkpoint.config, None if tensorrt is None else build_target(tensorrt, given))
        if tensorrt is not None:
            options.check_tensorrt(tensorrt)
        options = with_capable_gpus(options, checkpoint.value_kinds, tensorrt)
        Tokenizer.open(checkpoint.path)  # damaged files that are copied are reported before the work, not by the first prompt
        GenerationDefaults.open(checkpoint.path)
        cache = options.cache_for(checkpoint.config, quantized_kv(checkpoint, given.kv_dtype, given.kv_scales))
        build = CheckedBuild(options=options, tensorrt=tensorrt, checkpoint=checkpoint, cache=cache, tensors=checkpoint)
        if given.draft_head is not None:
            build = _with_draft_head(build, given, undo)
        undo.pop_all()
    return build


def _with_draft_head(build: CheckedBuild, given: BuildOptions, undo: ExitStack) -> CheckedBuild:
    """Add the build of the draft head, with the sizes of the model as far as the head has positions."""
    options, checkpoint, tensorrt, name = build.options, build.checkpoint, build.tensorrt, str(given.draft_head)
    head = open_draft_head(name, checkpoint.path, quantize=given.quantize)
    undo.callback(head.close)
    states = hidden_layers_of(head.config, checkpoint.config, option=f"draft_head: {name}")
    of_head = options.of_draft_head(head.config, None if tensorrt is None else build_target(tensorrt, given))
    return replace(
        build,
        options=replace(options, hidden_layers=states),
        tensors=checkpoint if states == "final_norm" else JoinedTensors.of_model(checkpoint, head),
        draft_head=CheckedBuild(
            options=of_head,
            tensorrt=tensorrt,
            checkpoint=head,
            cache=of_head.cache_for(head.config),
            tensors=JoinedTensors.of_head(head, checkpoint),
        ),
    )


def build_target(tensorrt: TensorRT, options: BuildOptions) -> BuildTarget:
    """Return the target of a build on this machine: with the GPU and doctor's verdict on it, if it has one."""
    found = gpu_and_driver(options.device)
    gpu = None if found is None else compute_capability(options.device)
    verdict = None if found is None else read_verdict(*found, str(tensorrt))
    is_for_gpu = options.compute_capabilities is None or gpu in options.compute_capabilities
    return BuildTarget(
        tensorrt=str(tensorrt),
        is_rtx=tensorrt.is_rtx,
        release=tensorrt.release,
        compute_capabilities=None if tensorrt.is_rtx or gpu is None else (gpu,),  # full TensorRT builds for the GPU at hand
        doctor_passed=verdict is not None and verdict.passed and is_for_gpu,
    )


def use_device(tensorrt: TensorRT, device: int) -> None:
    """Make a GPU the one that full TensorRT builds for; TensorRT for RTX needs none. Raises ConfigError if there is no such GPU."""
    if tensorrt.is_rtx:
        return
    reason = find_gpu(device)
    if reason is None:
        make_current(device)
    elif device:  # without cuda-python, or where TensorRT will say why there is none, it builds for the first
        raise ConfigError(f"device: expected a GPU that {tensorrt} can build for, got {device}: {reason}")


def installed_tensorrt(flavour: str) -> TensorRT | None:
    """Return TensorRT, or None if it is not installed."""
    try:
        return load(flavour, error=BuildError)
    except BuildError:
        return None


def open_checkpoint(model: Path, quantize: str | None, adapter: str | os.PathLike[str] | None = None, *, needs_weights: bool) -> Checkpoint:
    """Open a checkpoint; without weights in the folder, one of ``config.json`` alone if it says enough."""
    is_quantized = quantized_format(ModelFiles(model).json(CONFIG_FILE), model) is not None
    if needs_weights or adapter is not None or has_weight_files(model) or is_quantized:
        return Checkpoint.open(model, quantize=quantize, adapter=adapter)
    config = Checkpoint.read_config(model)
    return Checkpoint(model, config, {}, None if quantize is None else rounded_weights(config, Quantization.parse(quantize), {}))
