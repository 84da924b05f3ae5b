"""``build_engine``: from a Hugging Face checkpoint to an engine folder."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trt_kvcache._util.peak_memory import peak_memory_nbytes
from trt_kvcache.builder.checked_build import checked_build
from trt_kvcache.builder.definition import DecoderDefinition, define_constants, define_decoder, define_segments
from trt_kvcache.builder.options import DEFAULT_MAX_BATCH_SIZE, BuildOptions
from trt_kvcache.builder.serialization import serialize
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.decoder_segments import decoder_stages
from trt_kvcache.engine_folder.folder import write_engine_folder
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, with_padding
from trt_kvcache.trt.plugin import can_add_plugins

#: Called as ``progress(stage, done)`` with what is being done, and the fraction of it that is done (None where that is not known).
Progress = Callable[[str, float | None], object]

#: Values of ``stage``.
READING, DEFINING, BUILDING, WRITING = "read checkpoint", "define network", "build engine", "write engine folder"


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build produced, and what it took.

    Parameters
    ----------
    path : Path
        The engine folder.
    tensorrt : str
        Flavour and version of TensorRT.
    seconds : float
        Wall time of the whole build.
    peak_memory_nbytes : int or None
        Peak resident set of this process since it started, in bytes; None where the system does not say.
    plan_nbytes, weights_nbytes : int
        Size of the serialised engine, and of the checkpoint's weights, in bytes.
    attention : tuple of AttentionLayerConfig
        How the attention of each layer that has one was built.
    warnings : tuple of str
        What TensorRT warned of.
    """

    path: Path
    tensorrt: str
    seconds: float
    peak_memory_nbytes: int | None
    plan_nbytes: int
    weights_nbytes: int
    attention: tuple[AttentionLayerConfig, ...]
    warnings: tuple[str, ...]


def build_engine(
    model_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str],
    *,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_sequence_length: int | None = None,
    max_prefill_length: int | None = None,
    max_logits_per_slot: int | Literal["all"] = 1,
    dtype: str | None = None,
    attention: str | None = None,
    flavour: str = "auto",
    embed_weights: bool = False,
    compute_capabilities: Sequence[str] | None = None,
    builder_optimization_level: int | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    kv_scales: str | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build a TensorRT engine from a Hugging Face folder.

    Parameters
    ----------
    model_path : path
        The checkpoint.
    engine_path : path
        The engine folder to make. An engine folder of this name is replaced once the new one is complete.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int, optional
        Tokens that a slot can hold, S. If left out the model's ``max_position_embeddings``, at most 2048 if it has attention.
    max_prefill_length : int, optional
        Most new tokens per slot in one enqueue; at most S. Longer prompts are prefilled in chunks. If left out S, at most 512.
    max_logits_per_slot : int or "all"
        Most new tokens per slot whose logits one enqueue returns, for ``score`` and ``verify``; ``"all"`` for all that it takes. See
        :class:`~trt_kvcache.builder.options.BuildOptions` for the bytes.
    dtype : str, optional
        What the engine computes in, and its cache holds: ``"float16"``, ``"bfloat16"`` or ``"float32"``. That of the checkpoint if left
        out.
    attention : str, optional
        ``"native"``, ``"mask"`` or ``"plugin"``: see :mod:`trt_kvcache.engine.attention_variants`. If left out ``"native"``, and
        ``"mask"`` for a model with windows smaller than S, or with soft caps of scores, which native attention has not.
    flavour : str
        ``"tensorrt"``, ``"tensorrt_rtx"`` or ``"auto"``: see ``trt_kvcache.trt.module.load``.
    embed_weights : bool
        Whether to copy the checkpoint into the engine folder, so that the reference engine and ``compare`` work where the checkpoint is
        not.
    compute_capabilities : sequence of str, optional
        GPUs to build for, such as ``("8.6", "12.0")``; for TensorRT for RTX only. If left out all that it knows, of those that have the
        type of quantized weights. Full TensorRT builds for the GPU that it runs on.
    builder_optimization_level : int, optional
        How hard TensorRT searches for fast kernels, from 0 (shortest build) to 5; TensorRT's default, 3, if left out.
    timing_cache : path, optional
        For full TensorRT only: a file with measurements of kernels, from which a build starts and to which it adds, so that the next one
        is shorter. It need not exist.
    quantize : str, optional
        Round weights to the nearest integers of a scale, such as ``"int8"``, ``"int4"``, ``"int4:128"`` or ``"int4,head=int8"``: see
        ``docs/quantization.md``. For a checkpoint that is not quantized.
    kv_dtype : {"fp8", "float8_e4m3fn", "int8"}, optional
        Quantize K and V, with plugin attention. If left out they are in ``dtype``.
    kv_scales : {"tensor", "head", "token"}, optional
        As for :class:`~trt_kvcache.session.session_options.SessionOptions`.
    progress : callable, optional
        Called as ``progress(stage, fraction)``; ``fraction`` is None while it is not known. An exception that it raises
        stops the build and is raised by this function.

    Returns
    -------
    BuildReport
        The folder that was written, what the build took, how the attention of each layer was built, and what TensorRT warned of.

    Raises
    ------
    ConfigError
        An option is out of range or not supported. Nothing was written.
    CheckpointError
        The checkpoint is damaged or not supported. Nothing was written.
    BuildError
        TensorRT is not there, or refused something. Nothing is left on disk.

    Notes
    -----
    The network is made with ``INetworkDefinition`` and built with ``IBuilder.build_serialized_network``. TensorRT for RTX builds without
    a GPU.

    Examples
    --------
    >>> from trt_kvcache import build_engine
    >>> report = build_engine(
    ...     "examples/tiny-llama", "tiny-engine", max_batch_size=4, max_sequence_length=256, flavour="tensorrt_rtx"
    ... )  # doctest: +SKIP
    >>> report.attention[0].variant  # doctest: +SKIP
    'native'
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done: None)
    target = Path(engine_path)
    checked = checked_build(
        model_path,
        target,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        max_prefill_length=max_prefill_length,
        max_logits_per_slot=max_logits_per_slot,
        dtype=dtype,
        attention=attention,
        flavour=flavour,
        compute_capabilities=compute_capabilities,
        builder_optimization_level=builder_optimization_level,
        timing_cache=timing_cache,
        quantize=quantize,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
    )
    options, tensorrt, quantized = checked.options, checked.tensorrt, checked.quantized
    assert tensorrt is not None
    with checked.checkpoint as checkpoint, tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
        report(DEFINING, None)
        in_segments = options.attention == "plugin" and not can_add_plugins(tensorrt)
        definitions: tuple[DecoderDefinition, ...]
        if in_segments:
            definitions = define_segments(checkpoint, options, tensorrt, messages, quantized=quantized)
        else:
            definitions = (define_decoder(checkpoint, options, tensorrt, messages, quantized=quantized),)
        definition = definitions[0]
        plans = []
        for index, part in enumerate(definitions):
            report(BUILDING, index / len(definitions))
            plans.append(serialize(part, options, tensorrt, messages, _progress_of_part(report, index, len(definitions))))
        report(BUILDING, 1.0)
        fingerprint = checkpoint.fingerprint(lambda done, total: report(READING, done / total))
        report(WRITING, None)
        constants = define_constants(checkpoint, definition.cache, dtype=options.dtype or checkpoint.config.dtype) if in_segments else None
        chunks = with_padding(plans)
        config = EngineFolderConfig(
            model=checkpoint.config,
            cache=definition.cache,
            names=definition.names,
            tensors=decoder_tensors(checkpoint.config, definition.cache, definition.names, max_logits_per_slot=options.logits_per_slot),
            profiles=definition.profiles,
            attention_variant=options.attention,
            attention=definition.attention,
            tensorrt_flavour=tensorrt.flavour,
            tensorrt_version=tensorrt.version,
            compute_capabilities=options.compute_capabilities,
            plan=FileRecord.of(chunks),
            checkpoint=CheckpointRecord(
                path=os.path.abspath(model_path),
                fingerprint=fingerprint,
                nbytes=checkpoint.nbytes,
                embedded=embed_weights,
                weights=checkpoint.weights.format,
                quantize=checked.rounding or "",
            ),
            computed_dtype=None if quantized is None else options.dtype or checkpoint.config.dtype,
            segments=None if constants is None else _segments_record(checkpoint, definition, options, plans, constants),
        )
        write_engine_folder(target, config=config, plans=chunks, checkpoint=checkpoint, constants=constants)
        return BuildReport(
            path=target,
            tensorrt=str(tensorrt),
            seconds=time.perf_counter() - started,
            peak_memory_nbytes=peak_memory_nbytes(),
            plan_nbytes=config.plan.nbytes,
            weights_nbytes=checkpoint.nbytes,
            attention=definition.attention,
            warnings=tuple(messages.warnings),
        )


def _segments_record(
    checkpoint: Checkpoint, definition: DecoderDefinition, options: BuildOptions, plans: Sequence[Any], constants: Sequence[Any]
) -> SegmentsRecord:
    """Return what ``config.json`` records of an engine in segments."""
    stages = decoder_stages(
        checkpoint.config,
        definition.cache,
        definition.names,
        max_logits_per_slot=options.logits_per_slot,
        dtype=options.dtype or checkpoint.config.dtype,
    )
    return SegmentsRecord(stages=stages, plans=tuple(plan.nbytes for plan in plans), constants=FileRecord.of(constants))


def _progress_of_part(report: Progress, index: int, count: int) -> Callable[[float], object]:
    """Return a callable that reports the progress of one network of a build as that of the whole."""
    return lambda done: report(BUILDING, (index + done) / count)
