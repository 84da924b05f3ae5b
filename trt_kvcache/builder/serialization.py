"""From a network to a serialised engine: builder configuration, optimisation profiles, the build itself."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.builder.definition import DecoderDefinition
from trt_kvcache.builder.options import BuildOptions, known_compute_capabilities
from trt_kvcache.builder.progress import BuildProgress, make_monitor
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine.protocol import EngineProfile, TensorMode
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import allow_aliasing, can_add_plugins


def make_config(definition: DecoderDefinition, options: BuildOptions, tensorrt: TensorRT, messages: Messages) -> Any:
    """Return the ``IBuilderConfig`` of a definition: its profiles, its GPUs, and float32 that is float32.

    Raises
    ------
    BuildError
        TensorRT refused a profile or a compute capability; the text is what it logged.
    """
    config = require(definition.builder.create_builder_config, messages, "TensorRT cannot make a builder configuration")
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
