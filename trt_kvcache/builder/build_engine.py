"""``build_engine``: from a Hugging Face checkpoint to an engine folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache._util.peak_memory import peak_memory_nbytes
from trt_kvcache._util.progress import Progress
from trt_kvcache.builder.checked_build import CheckedBuild, checked_build, use_device
from trt_kvcache.builder.definition import DecoderDefinition, define_constants, define_decoder, define_segments
from trt_kvcache.builder.options import BuildKeywords, BuildOptions, takes_build_options
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.serialization import make_config, serialize
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.folder import EngineFiles, write_engine_folder
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, with_padding
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.errors import BuildError
from trt_kvcache.ops.segments import CustomOpNode
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.plugin_library import use_library
from trt_kvcache.trt.plugin.versions import PLUGIN_VERSION, QUANTIZED_VERSION

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Names of the stages, the first argument of ``progress``.
READING, DEFINING, BUILDING, WRITING = "read checkpoint", "define network", "build engine", "write engine folder"


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """Results of a build: the engine folder, sizes, time and memory.

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
        Attention of each layer that has one: its variant, and whether TensorRT may decompose it.
    warnings : tuple of str
        Warnings that TensorRT logged.
    """

    path: Path
    tensorrt: str
    seconds: float
    peak_memory_nbytes: int | None
    plan_nbytes: int
    weights_nbytes: int
    attention: tuple[AttentionLayerConfig, ...]
    warnings: tuple[str, ...]


@takes_build_options
def build_engine(
    model_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **options: Unpack[BuildKeywords],
) -> BuildReport:
    """Build a TensorRT engine from a Hugging Face folder.

    Parameters
    ----------
    model_path : path
        The checkpoint.
    engine_path : path
        The engine folder to make. An engine folder of this name is replaced once the new one is complete.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`.
    progress : callable, optional
        Called as ``progress(stage, fraction)``; ``fraction`` is None while it is not known. An exception that it raises
        stops the build and is raised by this function.

    Returns
    -------
    BuildReport
        The engine folder, sizes, time and memory of the build, the attention of each layer, and warnings of TensorRT.

    Raises
    ------
    ConfigError
        An option is out of range or not supported. Nothing was written.
    CheckpointError
        The checkpoint is damaged or not supported. Nothing was written.
    BuildError
        TensorRT is not there, or refused something; the text says which ``attention`` to try. Nothing is left on disk.

    Warns
    -----
    UserWarning
        A variant that ``attention="auto"`` chose could not be built: the next one is built.

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
    build = checked_build(model_path, target, BuildOptions.of(options))
    tensorrt = build.tensorrt
    assert tensorrt is not None
    with closing(build), tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
        use_device(tensorrt, build.options.device)
        head = None if build.draft_head is None else _built(build.draft_head, tensorrt, messages, report)
        files = _built(build, tensorrt, messages, report)
        config, checkpoint = files.config, files.checkpoint
        report(WRITING, None)
        if head is not None:
            config = replace(config, draft_head=head.config.checkpoint.fingerprint)
        write_engine_folder(target, config=config, plans=files.plans, checkpoint=checkpoint, constants=files.constants, draft_head=head)
        return BuildReport(
            path=target,
            tensorrt=str(tensorrt),
            seconds=time.perf_counter() - started,
            peak_memory_nbytes=peak_memory_nbytes(),
            plan_nbytes=config.plan.nbytes,
            weights_nbytes=checkpoint.nbytes,
            attention=config.attention,
            warnings=tuple(messages.warnings),
        )


def _built(build: CheckedBuild, tensorrt: TensorRT, messages: Messages, report: Progress) -> EngineFiles:
    """Build the engine of a model or of a draft head."""
    checkpoint = build.checkpoint
    report(DEFINING, None)
    library = _use_library(build, tensorrt)
    messages.clear_errors()  # creators that are looked up, and not registered yet, are errors in some logs
    build, definition, plans = _built_variant(build, tensorrt, messages, report)
    report(BUILDING, 1.0)
    fingerprint = checkpoint.fingerprint(lambda done, total: report(READING, done / total))
    constants = define_constants(checkpoint, build.cache, dtype=build.options.dtype) if build.options.in_segments else None
    chunks = with_padding(plans)
    config = _config(build, tensorrt, definition, plan=FileRecord.of(chunks), fingerprint=fingerprint, library=library)
    if constants is not None:
        config = replace(config, segments=_segments_record(config, plans, constants, build.options.operations or {}))
    return EngineFiles(config=config, plans=chunks, checkpoint=checkpoint, constants=constants)


def _use_library(build: CheckedBuild, tensorrt: TensorRT) -> FileRecord | None:
    """Load the plugin library of a build, which must have the plugin of its cache; None for a build without one."""
    path, kv = build.options.plugin_library, build.cache.kv
    if path is None:
        return None
    return use_library(tensorrt, path, QUANTIZED_VERSION if kv is not None and kv.has_scales else PLUGIN_VERSION)


def _built_variant(
    build: CheckedBuild, tensorrt: TensorRT, messages: Messages, report: Progress
) -> tuple[CheckedBuild, DecoderDefinition, list[Any]]:
    """Build the networks. If TensorRT's compiler fails, ``auto`` builds the next variant; a variant that was named is left with advice."""
    while True:
        definitions = _define(build, tensorrt, messages)
        # Outside of the try: a profile, a GPU or a timing cache that TensorRT refuses here, it refuses for every variant.
        configs = [make_config(definition, build.options, tensorrt, messages) for definition in definitions]
        try:
            return build, definitions[0], _plans(definitions, configs, build.options, tensorrt, messages, report)
        except BuildError as error:
            choice, options = build.options.choice, build.options.next_attention()
            if options is None:
                advice = f" Build with --attention {' or '.join(choice.others)}." if choice.others else ""
                raise BuildError(f"{error}{advice}") from error
            warn_caller(f"building {options.attention} attention, because {options.choice.reason}: {error}", UserWarning)
            messages.clear_errors()
            build = replace(build, options=options, cache=options.cache_for(build.checkpoint.config))
            del definitions, configs  # and with it the weights of the network


def _plans(
    definitions: Sequence[DecoderDefinition],
    configs: Sequence[Any],
    options: ResolvedOptions,
    tensorrt: TensorRT,
    messages: Messages,
    report: Progress,
) -> list[Any]:
    """Serialise the engine of each network."""
    plans = []
    for index, (definition, config) in enumerate(zip(definitions, configs, strict=True)):
        report(BUILDING, index / len(definitions))
        plans.append(serialize(definition, config, options, tensorrt, messages, _progress_of_part(report, index, len(definitions))))
    return plans


def _define(build: CheckedBuild, tensorrt: TensorRT, messages: Messages) -> tuple[DecoderDefinition, ...]:
    """Define the network of the decoder, or one for each of its segments."""
    if build.options.in_segments:
        return define_segments(build.checkpoint, build.options, build.cache, tensorrt, messages)
    return (define_decoder(build.checkpoint, build.options, build.cache, tensorrt, messages, tensors=build.tensors),)


def _config(
    build: CheckedBuild,
    tensorrt: TensorRT,
    definition: DecoderDefinition,
    *,
    plan: FileRecord,
    fingerprint: str,
    library: FileRecord | None,
) -> EngineFolderConfig:
    """Return ``config.json`` of an engine in one piece."""
    checkpoint, options = build.checkpoint, build.options
    cache, names = build.cache, definition.names
    return EngineFolderConfig(
        model=checkpoint.config,
        cache=cache,
        names=names,
        tensors=decoder_tensors(checkpoint.config, cache, names, max_logits_per_slot=options.max_logits_per_slot),
        profiles=definition.profiles,
        attention_variant=options.attention,
        attention_reason=options.choice.reason,
        attention=definition.attention,
        tensorrt_flavour=tensorrt.flavour,
        tensorrt_version=tensorrt.version,
        compute_capabilities=options.compute_capabilities,
        plan=plan,
        checkpoint=CheckpointRecord(
            path=os.path.abspath(checkpoint.path),
            fingerprint=fingerprint,
            nbytes=checkpoint.nbytes,
            embedded=options.embed_weights,
            weights=checkpoint.weights.format,
            quantize=options.quantize or "",
            adapter="" if checkpoint.adapter is None else os.path.abspath(checkpoint.adapter.path),
            adapter_fingerprint="" if checkpoint.adapter is None else checkpoint.adapter.fingerprint(),
        ),
        v_outputs=v_outputs(checkpoint.config, options.dtype) if options.v_outputs else (),
        computed_dtype=options.dtype if cache.kv is not None and cache.kv.has_scales else None,
        plugin_library=library,
        adapters=options.adapter_inputs,
        hidden_layers=options.hidden_layers,
        max_embeddings=options.max_embeddings,
        draft_tree=options.draft_tree,
    )


def _segments_record(
    config: EngineFolderConfig, plans: Sequence[Any], constants: Sequence[Any], operations: Mapping[str, str]
) -> SegmentsRecord:
    """Return the stages of an engine in segments, and the sizes of their plans."""
    stages = tuple(
        replace(stage, operation=operations.get(stage.operation, stage.operation)) if isinstance(stage, CustomOpNode) else stage
        for stage in config.stages_of_model()
    )
    return SegmentsRecord(stages=stages, plans=tuple(plan.nbytes for plan in plans), constants=FileRecord.of(constants))


def _progress_of_part(report: Progress, index: int, count: int) -> Callable[[float], object]:
    """Return a callable that reports the progress of one network as a fraction of the whole build."""
    return lambda done: report(BUILDING, (index + done) / count)
