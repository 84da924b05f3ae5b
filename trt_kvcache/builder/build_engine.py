"""From a checkpoint to an engine folder."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from trt_kvcache.builder.network import Graph, Weights, add_decoder, add_segments
from trt_kvcache.builder.network.rope import cos_sin
from trt_kvcache.builder.options import BuildOptions, known_compute_capabilities
from trt_kvcache.builder.progress import BuildProgress, make_monitor
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint import Checkpoint, ModelConfig, Tokenizer
from trt_kvcache.engine.attention_variants import AttentionChoice
from trt_kvcache.engine.decoder_tensors import MIN_BATCH_SIZE, decoder_profiles, decoder_tensors
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_folder.config import CheckpointRecord, EngineConfig
from trt_kvcache.engine_folder.folder import check_target, write_engine_folder
from trt_kvcache.engine_folder.records import FileRecord, SegmentsRecord, with_padding
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.ops.segments import COS_SIN, EMBEDDING, SegmentStep, decoder_steps, shape_at
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin import allow_aliasing, can_add_plugins

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
    attention : tuple of AttentionChoice
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
    attention: tuple[AttentionChoice, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderDefinition:
    """A decoder, or a segment of one, as a TensorRT network, not built yet. Keep it until the build is done: it owns the weights.

    Parameters
    ----------
    builder : IBuilder
    network : INetworkDefinition
    graph : Graph
        Owner of the arrays that ``network`` points at.
    cache : KVCacheConfig
    names : TensorNames
    tensors : tuple of TensorSpec
    profiles : tuple of EngineProfile
    attention : tuple of AttentionChoice
    """

    builder: Any
    network: Any
    graph: Graph
    cache: KVCacheConfig
    names: TensorNames
    tensors: tuple[TensorSpec, ...]
    profiles: tuple[EngineProfile, ...]
    attention: tuple[AttentionChoice, ...]


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
            steps = decoder_steps(checkpoint.config, definition.cache, definition.names)
            segments = SegmentsRecord(steps=steps, plans=tuple(plan.nbytes for plan in plans), constants=FileRecord.of([constants]))
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


def define_decoder(
    checkpoint: Checkpoint, options: BuildOptions, tensorrt: TensorRT, messages: Messages, names: TensorNames = DEFAULT_NAMES
) -> DecoderDefinition:
    """Make the network of a checkpoint. Raises :class:`ConfigError` before it starts, :class:`BuildError` at a layer."""
    model = checkpoint.config
    cache = options.cache_for(model)
    if options.attention == "plugin" and not can_add_plugins(tensorrt):
        raise ConfigError(
            f"attention: expected native or mask in one network, got plugin: {tensorrt} has no plugin layers. Build segments."
        )
    builder, begin = _networks(model, tensorrt, messages)
    network = begin()
    graph = Graph(tensorrt, network, messages, dtype=cache.dtype)
    choices = add_decoder(
        graph,
        Weights(checkpoint, cache.dtype),
        model,
        max_sequence_length=cache.max_sequence_length,
        attention=options.attention,
        min_batch_size=MIN_BATCH_SIZE,
        names=names,
    )
    return DecoderDefinition(
        builder=builder,
        network=network,
        graph=graph,
        cache=cache,
        names=names,
        tensors=decoder_tensors(model, cache, names),
        profiles=decoder_profiles(max_batch_size=cache.max_batch_size, max_prefill_length=options.max_prefill_length),
        attention=choices,
    )


def define_segments(
    checkpoint: Checkpoint, options: BuildOptions, tensorrt: TensorRT, messages: Messages, names: TensorNames = DEFAULT_NAMES
) -> tuple[DecoderDefinition, ...]:
    """Make the networks of a checkpoint's segments, each with the tensors of that segment. Raises as :func:`define_decoder`."""
    model = checkpoint.config
    cache = options.cache_for(model)
    builder, begin = _networks(model, tensorrt, messages)
    networks = [begin()]

    def begin_next() -> Any:
        networks.append(begin())
        return networks[-1]

    graph = Graph(tensorrt, networks[0], messages, dtype=cache.dtype)
    choices = add_segments(
        graph, Weights(checkpoint, cache.dtype), model, begin_next, max_sequence_length=cache.max_sequence_length, names=names
    )
    segments = [step for step in decoder_steps(model, cache, names) if isinstance(step, SegmentStep)]
    profiles = decoder_profiles(max_batch_size=cache.max_batch_size, max_prefill_length=options.max_prefill_length)
    make = partial(DecoderDefinition, builder=builder, graph=graph, cache=cache, names=names, profiles=profiles, attention=choices)
    return tuple(make(network=network, tensors=segment.tensors) for network, segment in zip(networks, segments, strict=True))


def define_constants(checkpoint: Checkpoint, cache: KVCacheConfig) -> bytes:
    """Return the safetensors file of what segments and operations read besides: the embedding table, and the angles of RoPE."""
    table = Weights(checkpoint, cache.dtype)(EMBEDDING)
    return save({EMBEDDING: table, COS_SIN: cos_sin(checkpoint.config, length=cache.max_sequence_length)})


def _define_one(checkpoint: Checkpoint, options: BuildOptions, tensorrt: TensorRT, messages: Messages) -> tuple[DecoderDefinition]:
    return (define_decoder(checkpoint, options, tensorrt, messages),)


def _networks(model: ModelConfig, tensorrt: TensorRT, messages: Messages) -> tuple[Any, Callable[[], Any]]:
    """Return a builder, and what makes an empty network of it."""
    builder = _require(tensorrt.module.Builder, messages, "TensorRT cannot start a builder", tensorrt.log.logger)
    flags = 0 if tensorrt.is_rtx else 1 << int(tensorrt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # RTX always is

    def begin() -> Any:
        network = _require(builder.create_network, messages, "TensorRT cannot make a network", flags)
        network.name = model.family
        return network

    return builder, begin


def _share(report: Progress, index: int, count: int) -> Callable[[float], object]:
    """Return what reports the progress of one part of a build as that of the whole."""
    return lambda done: report(BUILDING, (index + done) / count)


def make_config(definition: DecoderDefinition, options: BuildOptions, tensorrt: TensorRT, messages: Messages) -> Any:
    """Return the ``IBuilderConfig`` of a definition: its profiles, its GPUs, and float32 that is float32.

    Raises
    ------
    BuildError
        TensorRT refused a profile or a compute capability; the text is what it logged.
    """
    config = _require(definition.builder.create_builder_config, messages, "TensorRT cannot make a builder configuration")
    for profile in definition.profiles:
        _add_profile(definition, config, profile, messages)
    if options.compute_capabilities is not None:
        known = known_compute_capabilities(tensorrt)
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, name in enumerate(options.compute_capabilities):
            if not config.set_compute_capability(known[name], index):
                messages.fail(BuildError, f"compute capability {name}: TensorRT refused it")
    if definition.attention[0].variant == "plugin" and can_add_plugins(tensorrt):
        allow_aliasing(tensorrt, config)
    elif definition.attention[0].variant == "plugin":
        flag = getattr(tensorrt.module.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
        if flag is not None:  # else a capture may refuse what TensorRT allocates in an enqueue
            config.set_flag(flag)
    config.clear_flag(tensorrt.module.BuilderFlag.TF32)  # on by default; it keeps 10 bits of a float32's fraction
    return config


def serialize(
    definition: DecoderDefinition, options: BuildOptions, tensorrt: TensorRT, messages: Messages, progress: Callable[[float], object]
) -> Any:
    """Build a defined network.

    Returns
    -------
    IHostMemory
        The serialised engine, as a buffer.

    Raises
    ------
    BuildError
        TensorRT refused a profile or the network; the text is what it logged.
    """
    config = make_config(definition, options, tensorrt, messages)
    watcher = BuildProgress(progress)
    config.progress_monitor = make_monitor(tensorrt.module, watcher)
    plan = definition.builder.build_serialized_network(definition.network, config)
    if watcher.interruption is not None:
        raise watcher.interruption
    if plan is None:
        messages.fail(BuildError, "the engine could not be built")
    messages.check(BuildError, "the engine could not be built")
    return plan


def _add_profile(definition: DecoderDefinition, config: Any, profile: EngineProfile, messages: Messages) -> None:
    """Add one optimisation profile, tuned for its largest enqueue."""
    smallest, largest = (profile.min_batch, profile.min_width), (profile.max_batch, profile.max_width)
    made = definition.builder.create_optimization_profile()
    for spec in definition.tensors:
        if spec.mode is TensorMode.INPUT:
            low, high = (shape_at(spec.shape, *size) for size in (smallest, largest))
            try:
                made.set_shape(spec.name, low, high, high)
            except (RuntimeError, ValueError) as error:
                messages.add(f"`{spec.name}`: {error}", is_error=True)
                messages.fail(BuildError, f"optimisation profile {profile.name}: TensorRT refused it")
    if not made or config.add_optimization_profile(made) < 0:
        messages.fail(BuildError, f"optimisation profile {profile.name}: TensorRT refused it")


def _require(make: Callable[..., Any], messages: Messages, what: str, *arguments: Any) -> Any:
    """Call something that returns None, or raises a bare TypeError, where TensorRT cannot do it."""
    try:
        made = make(*arguments)
    except (TypeError, RuntimeError):
        made = None
    if made is None:
        messages.fail(BuildError, what)
    return made


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
