"""From a network to a serialised engine: builder configuration, optimisation profiles, and the build."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.builder.definition import DecoderDefinition
from trt_kvcache.builder.progress import BuildProgress, make_monitor
from trt_kvcache.builder.resolved_options import ResolvedOptions, known_compute_capabilities
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.builder.timing_cache import read_timing_cache, write_timing_cache
from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.protocol import EngineProfile, TensorMode
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import allow_aliasing


def make_config(definition: DecoderDefinition, options: ResolvedOptions, tensorrt: TensorRT, messages: Messages) -> Any:
    """Return the ``IBuilderConfig`` of a network: optimisation profiles, GPUs, and flags."""
    config = require(definition.builder.create_builder_config, messages, "TensorRT cannot make a builder configuration")
    for profile in definition.profiles:
        _add_profile(definition, config, profile, messages, slots=definition.profiles[0].max_batch)
    if options.compute_capabilities is not None:
        known = known_compute_capabilities(tensorrt)
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, name in enumerate(options.compute_capabilities):
            if not config.set_compute_capability(known[name], index):
                messages.fail(BuildError, f"compute capability {name}: TensorRT refused it")
    if options.attention == "plugin":
        allow_aliasing(tensorrt, config)
    if options.plugin_library is not None:
        config.plugins_to_serialize = [str(options.plugin_library.resolve())]
    flag = getattr(tensorrt.module.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if flag is not None:  # else TensorRT may allocate in an enqueue, which a capture refuses
        config.set_flag(flag)
    if options.builder_optimization_level is not None:
        config.builder_optimization_level = options.builder_optimization_level
    if options.timing_cache is not None:
        read_timing_cache(config, options.timing_cache, messages)
    config.clear_flag(tensorrt.module.BuilderFlag.TF32)  # on by default; it rounds float32 to 10 bits of fraction
    return config


def serialize(
    definition: DecoderDefinition,
    config: Any,
    options: ResolvedOptions,
    tensorrt: TensorRT,
    messages: Messages,
    progress: Callable[[float], object],
) -> Any:
    """Build a network; return its serialised engine as a buffer. An exception of ``progress`` stops the build and is raised."""
    build_progress = BuildProgress(progress)
    config.progress_monitor = make_monitor(tensorrt.module, build_progress)
    plan = definition.builder.build_serialized_network(definition.network, config)
    if build_progress.interruption is not None:
        raise build_progress.interruption
    if plan is None:
        messages.fail(BuildError, "the engine could not be built")
    messages.check(BuildError, "the engine could not be built")
    if options.timing_cache is not None:
        write_timing_cache(config, options.timing_cache)
    return plan


def _add_profile(definition: DecoderDefinition, config: Any, profile: EngineProfile, messages: Messages, *, slots: int) -> None:
    """Add an optimisation profile that is tuned (``kOPT``) for its widest enqueue of all slots of the cache."""
    smallest = {"batch": profile.min_batch, "width": profile.min_width, "logits": 1}
    largest = {"batch": profile.max_batch, "width": profile.max_width, "logits": profile.max_logits}
    tuned = {**largest, "batch": slots}
    trt_profile = definition.builder.create_optimization_profile()
    for spec in definition.tensors:
        if spec.mode is TensorMode.INPUT:
            low, opt, high = (step_shape(spec, definition.names, **sizes) for sizes in (smallest, tuned, largest))
            try:
                trt_profile.set_shape(spec.name, low, opt, high)
            except (RuntimeError, ValueError) as error:
                messages.add(f"`{spec.name}`: {error}", is_error=True)
                messages.fail(BuildError, f"optimisation profile {profile.name}: TensorRT refused it")
    if not trt_profile or config.add_optimization_profile(trt_profile) < 0:
        messages.fail(BuildError, f"optimisation profile {profile.name}: TensorRT refused it")
