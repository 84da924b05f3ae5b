"""``LoadedPlan``: a serialised engine ("plan") in TensorRT, with one or two execution contexts for each optimisation profile."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.errors import EngineError
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME
from trt_kvcache.trt.runtime_cache import RuntimeCache
from trt_kvcache.trt.tensors import read_ranges, read_tensors


class LoadedPlan:
    """A deserialised plan (implements :class:`~trt_kvcache.trt.engine_bindings.BindingTarget`).

    Plans may share their caller's context memory if they are enqueued on one stream.
    """

    def __init__(self, tensorrt: TensorRT, plan: Any, *, resources: EngineResources, built_by: str = "", has_library: bool = False) -> None:
        self._tensorrt = tensorrt
        self._resources = resources
        self._messages = resources.messages
        self._contexts: dict[int, Any] = {}
        self._arguments: dict[bool, Any] = {}
        resources.callback(self._release_engine)
        try:
            self._runtime = tensorrt.create("Runtime")
        except (TypeError, RuntimeError):
            self._messages.fail(EngineError, f"{tensorrt} cannot start")
        if has_library:  # TensorRT loads the library in a plan only with this permission
            self._runtime.engine_host_code_allowed = True
        self._engine = self._deserialize(plan, f"{tensorrt} refuses this engine{built_by}", has_library=has_library)
        self.tensors = read_tensors(tensorrt, self._engine)
        self.ranges = read_ranges(self._engine, self.tensors)

    def _deserialize(self, plan: Any, failure: str, *, has_library: bool) -> Any:
        """Return the ``ICudaEngine`` of a plan."""
        try:
            return self._create(failure, self._runtime.deserialize_cuda_engine, plan)
        except EngineError as error:
            if PLUGIN_NAME not in str(error) or error.__cause__ is not None:
                raise
            if has_library:
                raise EngineError(
                    f"{error} The engine contains its plugin library. This process may have the plugin already: open the engine in another "
                    "process."
                ) from None
            raise EngineError(  # TensorRT does not know the plugin: the plan has no folder
                f"{error} The engine has plugin layers of this package. Open its engine folder, or, for a plan alone, first call "
                f"trt_kvcache.trt.plugin.register(trt_kvcache.trt.module.load({self._tensorrt.flavour!r}))."
            ) from None

    @property
    def context_memory_nbytes(self) -> int:
        """Bytes of context memory (activations) of the profile with the largest need."""
        return max(int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in range(len(self.ranges)))

    def create_contexts(
        self, address: int, nbytes: int, *, cache: RuntimeCache | None, stream: Any, repeats: Sequence[bool], num_sets: int = 1
    ) -> None:
        """Create an execution context for each optimisation profile in each set of bindings, the first set first.

        One for each, since ``set_optimization_profile_async`` discards shapes, and two sets so that no step binds an address.
        """
        self._resources.callback(self._contexts.clear)
        self._memory, self._cache = (address, nbytes), cache
        for eager in sorted(set(repeats)):
            self._arguments[eager] = self._context_argument(eager=eager)
        _, handle = stream.__cuda_stream__()
        for context, profile in enumerate([*range(len(self.ranges))] * num_sets):
            self._contexts[context] = self._new_context(profile, int(handle), eager=repeats[profile])

    def copy_context(self, context: int, copy: int, stream: int) -> None:
        """Create a context ``copy`` with the profile, addresses and shapes of another, and with kernels that are compiled at once."""
        source, made = self._contexts[context], self._new_context(context % len(self.ranges), stream, eager=True)
        self._contexts[copy] = made
        for name, spec in self.tensors.items():
            self.set_tensor_address(copy, name, source.get_tensor_address(name))
            if spec.mode is TensorMode.INPUT and -1 in spec.shape:
                self.set_input_shape(copy, name, source.get_tensor_shape(name))

    def release_context(self, context: int) -> None:
        """Release a context that :meth:`copy_context` created, if it did. It is not in use."""
        self._contexts.pop(context, None)

    def _new_context(self, profile: int, stream: int, *, eager: bool) -> Any:
        """Create a context over the shared activation memory."""
        if eager not in self._arguments:
            self._arguments[eager] = self._context_argument(eager=eager)
        context = self._create("the execution context was refused", self._engine.create_execution_context, self._arguments[eager])
        self._call(f"profile {profile} was refused", context.set_optimization_profile_async, profile, stream)
        self._call("the activation memory was refused", context.set_device_memory, *self._memory)
        return context

    def _context_argument(self, *, eager: bool) -> Any:
        """Return the argument of ``create_execution_context``: the allocation strategy, or a runtime configuration that has it."""
        trt = self._tensorrt.module
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            return strategy
        config = self._create("the runtime configuration was refused", self._engine.create_runtime_config)
        self._call("the allocation strategy was refused", config.set_execution_context_allocation_strategy, strategy)
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        # A graph would freeze the kernels that LAZY runs until those of the shape are compiled. A prefill does not wait for them.
        specialization = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = specialization.EAGER if eager else specialization.LAZY
        shared = self._cache.open(partial(self._create, "the runtime cache was refused", config.create_runtime_cache))
        self._call("the runtime cache was refused", config.set_runtime_cache, shared)
        return config

    def set_tensor_address(self, context: int, name: str, address: int) -> None:
        """Set the device address of a tensor."""
        self._call(f"the address of `{name}` was refused", self._contexts[context].set_tensor_address, name, address)

    def set_input_shape(self, context: int, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input."""
        shape = tuple(shape)
        self._call(f"the shape {shape} of `{name}` was refused", self._contexts[context].set_input_shape, name, shape)

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """Return the current shape of a tensor."""
        return tuple(self._contexts[context].get_tensor_shape(name))

    def enqueue(self, context: int, stream: int) -> None:
        """Enqueue the plan in one context (``execute_async_v3``); does not wait."""
        self._call("the step failed", self._contexts[context].execute_async_v3, stream)

    def capture_refusal(self, context: int, stream: int) -> str | None:
        """Return why an enqueue cannot be captured with the current addresses and shapes, None if it can. TensorRT for RTX is asked."""
        self._messages.begin_call()
        self._messages.warnings.clear()  # of other steps
        if not self._tensorrt.is_rtx or self._contexts[context].is_stream_capturable(stream):
            return None
        return self._messages.text

    def _call(self, failure: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call TensorRT; raise EngineError where it returns False, raises, or logs an error."""
        self._messages.begin_call()
        try:
            result = function(*arguments)
        except (RuntimeError, ValueError) as error:  # the Python bindings turn some refusals into exceptions
            self._messages.add(str(error), is_error=True)
            result = False
        if result is False or self._messages.errors:
            self._messages.fail(EngineError, failure)
        return result

    def _create(self, failure: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call TensorRT for an object; None is a failure too."""
        created = self._call(failure, function, *arguments)
        if created is None:
            self._messages.fail(EngineError, failure)
        return created

    def _release_engine(self) -> None:
        self._arguments.clear()
        self._engine = self._runtime = None
