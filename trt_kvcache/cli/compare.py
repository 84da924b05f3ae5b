"""``trt-kvcache compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache import opening
from trt_kvcache.attention_plugin import AttentionFields
from trt_kvcache.checkpoint import Checkpoint, ModelConfig
from trt_kvcache.cli.console import messages, say, warn
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.opening import (
    AttentionName,
    AttentionOption,
    DTypeName,
    DTypeOption,
    EngineName,
    EngineOption,
    FlavourName,
    FlavourOption,
    Folder,
    MaxSequenceLength,
    session_source,
)
from trt_kvcache.cli.prompts import PromptIds, Prompts, read_prompts
from trt_kvcache.engine_folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.attention_tiles import ELEMENTS
from trt_kvcache.session_source import SessionSource

DIFFERS = 3


def compare(
    folder: Folder,
    prompt: Prompts = None,
    prompt_ids: PromptIds = None,
    steps: Annotated[int, typer.Option(min=0, help="Decode steps after the prefill.")] = 16,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference, relative to the largest value of the slot and head; by dtype if left out."),
    ] = None,
    engine: EngineOption = EngineName.auto,
    flavour: FlavourOption = FlavourName.auto,
    max_sequence_length: MaxSequenceLength = None,
    dtype: DTypeOption = None,
    attention: AttentionOption = None,
) -> None:
    """Compare ways to run a model on the same tokens: reference engine, full recomputation, and TensorRT where a GPU is.

    Attention runs as TensorRT's own and as the plugin's, beside each other, unless --attention names one. Where logits or live
    cache rows differ, the first step, layer, slot and head are named, and the exit code is 3.
    """
    from trt_kvcache.compare import TOLERANCES, compare_paths
    from trt_kvcache.comparison import comparison_lines
    from trt_kvcache.runner import RecomputeRunner, SessionRunner

    prompts = read_prompts(prompt, prompt_ids)
    if tolerance is not None and not tolerance >= 0:
        raise typer.BadParameter(f"expected 0 or more, got {tolerance}.", param_hint="--tolerance")

    def source(which: EngineName, attention: AttentionName | None = attention) -> SessionSource:
        return session_source(
            folder,
            slots=len(prompts),
            engine=which,
            flavour=flavour,
            max_batch_size=None,
            max_sequence_length=max_sequence_length,
            dtype=dtype,
            attention=attention,
        )

    reference = source(EngineName.reference)
    paths = [SessionRunner(reference, "reference"), RecomputeRunner(reference, "full recomputation")]
    if attention is None and is_engine_folder(folder):
        other = _other_reference(EngineFolder.open(folder))
        paths.append(SessionRunner(other, f"{other.attention} reference"))
    elif attention is None:
        paths.append(SessionRunner(source(EngineName.reference, AttentionName.plugin), "plugin reference"))
    if _with_tensorrt(engine, folder, flavour):
        paths.insert(0, SessionRunner(source(EngineName.tensorrt), "TensorRT"))
        if attention is None and _plugin_runs(folder, dtype):
            paths.insert(1, SessionRunner(source(EngineName.tensorrt, AttentionName.plugin), "plugin TensorRT"))
    with messages().status("prefill") as status:
        comparison = compare_paths(
            paths,
            prompts,
            steps=steps,
            tolerances=TOLERANCES if tolerance is None else dict.fromkeys(TOLERANCES, tolerance),
            on_step=lambda step: status.update(f"step {step} of {steps}"),
        )
    for line in comparison_lines(comparison):
        say(line)
    if not comparison.agrees:
        raise typer.Exit(DIFFERS)


def _with_tensorrt(engine: EngineName, folder: Path, flavour: FlavourName) -> bool:
    """Tell whether TensorRT takes part; for ``auto`` where it cannot run, warn why not."""
    if engine is not EngineName.auto:
        return engine is EngineName.tensorrt
    built_by = EngineFolder.open(folder).config.tensorrt_flavour if is_engine_folder(folder) else "auto"
    with held_interrupts():  # it imports TensorRT
        reason = opening.why_no_tensorrt(built_by if flavour is FlavourName.auto else flavour.value)
    if reason is not None:
        warn(f"comparing without TensorRT: {reason}")
    return reason is None


def _other_reference(engine: EngineFolder) -> SessionSource:
    """Return the reference engine of the same model and sizes with the attention that the engine was not built with."""
    config = engine.config
    return SessionSource(
        engine.checkpoint_path if engine.checkpoint_path.is_dir() else config.checkpoint.path,
        engine="reference",
        max_batch_size=config.cache.max_batch_size,
        max_sequence_length=config.cache.max_sequence_length,
        max_prefill_length=config.max_prefill_length,
        dtype=config.dtype,
        attention="native" if config.attention_variant == "plugin" else "plugin",
    )


def _plugin_runs(folder: Path, dtype: DTypeName | None) -> bool:
    """Tell whether TensorRT can run the plugin's attention in a model folder; where its kernels do not serve the model, warn why."""
    if is_engine_folder(folder):
        return False
    with Checkpoint.open(folder) as checkpoint:
        model = checkpoint.config
    try:
        _check_kernels(model, dtype.value if dtype else model.dtype)
    except ConfigError as error:
        warn(f"comparing without TensorRT's plugin attention: {error}")
        return False
    return True


def _check_kernels(model: ModelConfig, dtype: str) -> None:
    AttentionFields(
        num_heads=model.num_attention_heads, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, rotary_dim=model.head_dim
    )
    if dtype not in ELEMENTS:
        raise ConfigError(f"dtype: expected one of {', '.join(ELEMENTS)}, got {dtype}.")
