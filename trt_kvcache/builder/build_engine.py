"""From a checkpoint to an engine folder."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.builder.definition import DecoderDefinition, define_constants, define_decoder, define_segments
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.serialization import serialize
from trt_kvcache.checkpoint import Checkpoint, Tokenizer
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine_folder.config import EngineConfig
from trt_kvcache.engine_folder.decoder_segments import decoder_stages
from trt_kvcache.engine_folder.folder import check_target, write_engine_folder
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, with_padding
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin import can_add_plugins

#: Called as ``progress(stage, done)``: what is being done, and the fraction of it that is done (None: not known).
Progress = Callable[[str, float | None], object]

READING, DEFINING, BUILDING, WRITING = "read checkpoint", "define network", "build engine", "write engine folder"


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build made and took.

    Parameters
    ----------
    path : Path
        The engine folder.
    tensorrt : str
        Flavour and version.
    seconds : float
        Wall time of the whole build.
    peak_memory_nbytes : int or None
        Most memory that this process has held so far (its peak resident set, of its whole life); None where the system does
        not say.
    plan_nbytes, weights_nbytes : int
        Of the serialised engine, and of the checkpoint's weights.
    attention : tuple of AttentionLayerConfig
        Per layer.
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
    max_batch_size: int,
    max_sequence_length: int,
    max_prefill_length: int,
    dtype: str | None = None,
    attention: str = "native",
    flavour: str = "auto",
    embed_weights: bool = False,
    compute_capabilities: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build a TensorRT engine from a Hugging Face folder.

    Parameters
    ----------
    model_path : path
        The checkpoint.
    engine_path : path
        The engine folder to make. An engine folder that is there is replaced, once the new one is complete.
    max_batch_size, max_sequence_length, max_prefill_length, dtype, attention, flavour, compute_capabilities
        See :class:`~trt_kvcache.builder.options.BuildOptions`.
    embed_weights : bool
        Copy the checkpoint into the engine folder, so that the reference engine and ``compare`` work where it is not.
    progress : callable, optional
        See :data:`Progress`. What it raises ends the build and comes out of this call.

    Returns
    -------
    BuildReport

    Raises
    ------
    ConfigError
        The options cannot be served. Nothing was made.
    CheckpointError
        The checkpoint is damaged or not supported. Nothing was made.
    BuildError
        TensorRT is not there, or refused something. Nothing is left on disk.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done: None)
    options = BuildOptions(
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        max_prefill_length=max_prefill_length,
        dtype=dtype,
        attention=attention,
        flavour=flavour,
        compute_capabilities=None if compute_capabilities is None else _as_tuple(compute_capabilities),
    )
    target = Path(engine_path)
    check_target(target, Path(model_path))
    tensorrt = load(flavour, error=BuildError)
    options.check_tensorrt(tensorrt)
    with Checkpoint.open(Path(model_path)) as checkpoint, tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
        options.check_kernels(checkpoint.config)
        Tokenizer.open(checkpoint.path)  # a damaged one is named before the work, not by the first prompt
        report(DEFINING, None)
        segmented = options.attention == "plugin" and not can_add_plugins(tensorrt)
        definitions = (define_segments if segmented else _define_one)(checkpoint, options, tensorrt, messages)
        definition = definitions[0]
        plans = []
        for index, part in enumerate(definitions):
            report(BUILDING, index / len(definitions))
            share = _share(report, index, len(definitions))
            plans.append(serialize(part, options, tensorrt, messages, share))
        report(BUILDING, 1.0)
        fingerprint = checkpoint.fingerprint(lambda done, total: report(READING, done / total))
        report(WRITING, None)
        constants, segments, chunks = None, None, with_padding(plans)
        if segmented:
            constants = define_constants(checkpoint, definition.cache)
            steps = decoder_stages(checkpoint.config, definition.cache, definition.names)
            segments = SegmentsRecord(stages=steps, plans=tuple(plan.nbytes for plan in plans), constants=FileRecord.of([constants]))
        config = EngineConfig(
            model=checkpoint.config,
            cache=definition.cache,
            names=definition.names,
            tensors=decoder_tensors(checkpoint.config, definition.cache, definition.names),
            profiles=definition.profiles,
            attention=definition.attention,
            tensorrt_flavour=tensorrt.flavour,
            tensorrt_version=tensorrt.version,
            compute_capabilities=options.compute_capabilities,
            plan=FileRecord.of(chunks),
            checkpoint=CheckpointRecord(
                path=os.path.abspath(model_path), fingerprint=fingerprint, nbytes=checkpoint.nbytes, embedded=embed_weights
            ),
            segments=segments,
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


def _define_one(checkpoint: Checkpoint, options: BuildOptions, tensorrt: TensorRT, messages: Messages) -> tuple[DecoderDefinition]:
    return (define_decoder(checkpoint, options, tensorrt, messages),)


def _share(report: Progress, index: int, count: int) -> Callable[[float], object]:
    """Return what reports the progress of one part of a build as that of the whole."""
    return lambda done: report(BUILDING, (index + done) / count)


def _as_tuple(compute_capabilities: Sequence[str]) -> tuple[str, ...]:
    return (compute_capabilities,) if isinstance(compute_capabilities, str) else tuple(compute_capabilities)


def peak_memory_nbytes() -> int | None:
    """Return the peak resident set of this process in bytes, or None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
