"""``LoadedPlan``: a serialised engine ("plan") in TensorRT, with an execution context for each optimisation profile, or two."""

from collections.abc import Callable, Sequence
from typing import Any

from trt_kvcache.errors import EngineError
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME
from trt_kvcache.trt.runtime_cache import RuntimeCacheFile, gpu_identity
from trt_kvcache.trt.tensors import read_ranges, read_tensors


class LoadedPlan:
    """A deserialised plan (implements :class:`~trt_kvcache.trt.engine_bindings.BindingTarget`).

    Its contexts work in context memory that the caller provides. Several plans may share that memory if they are enqueued on one
    stream.

    Parameters
    ----------
    tensorrt : TensorRT
        The imported TensorRT.
    plan : buffer
        The serialised engine. TensorRT copies what it needs.
    resources : EngineResources
        Of the engine that this plan belongs to; its device is current. TensorRT's objects are released with it.
    built_by : str
        What built the plan, for the message of a refusal.

    Attributes
    ----------
    tensors : dict of str to TensorSpec
        Inputs and outputs by name, the inputs first.
    ranges : list of ProfileRanges
        Shapes that the inputs take, by profile.

    Raises
    ------
    EngineError
        TensorRT refuses the plan; the text holds what it logged.

    Notes
    -----
    ``IRuntime.deserialize_cuda_engine``. There is one context for each profile because
    ``IExecutionContext.set_optimization_profile_async`` forgets the shapes that were set for the profile before. Where states have two
    buffers there are as many again, for the other buffer: so that no step sets an address.
    """

    def __init__(self, tensorrt: TensorRT, plan: Any, *, resources: EngineResources, built_by: str = "") -> None:
        self._tensorrt = tensorrt
        self._resources = resources
        self._messages = resources.messages
        self._contexts: list[Any] = []
        resources.callback(self._release_engine)
        try:
            self._runtime = tensorrt.create("Runtime")
        except (TypeError, RuntimeError):
            self._messages.fail(EngineError, f"{tensorrt} cannot start")
        self._engine = self._deserialize(plan, f"{tensorrt} refuses this engine{built_by}")
        self.tensors = read_tensors(tensorrt, self._engine)
        self.ranges = read_ranges(self._engine, self.tensors)

    def _deserialize(self, plan: Any, failure: str) -> Any:
        """Return the ``ICudaEngine`` of a plan."""
        try:
            return self._create(failure, self._runtime.deserialize_cuda_engine, plan)
        except EngineError as error:
            if PLUGIN_NAME in str(error) and error.__cause__ is None:  # TensorRT does not know the plugin: the plan has no folder
                raise EngineError(
                    f"{error} The engine has plugin layers of this package. Open its engine folder, which says so; for a plan alone, call "
                    "trt_kvcache.trt.plugin.register(trt_kvcache.trt.module.load('tensorrt')) before."
                ) from None
            raise

    @property
    def context_memory_nbytes(self) -> int:
        """Bytes of context memory (activations) that the profile with the largest need takes."""
        return max(int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in range(len(self.ranges)))

    def create_contexts(
        self, address: int, nbytes: int, *, plan_sha256: str, stream: Any, capturable: bool = False, num_sets: int = 1
    ) -> None:
        """Create an execution context for each optimisation profile, in each set of bindings: those of the first set first.

        Parameters
        ----------
        address, nbytes : int
            Device address and size of the context memory, at least :attr:`context_memory_nbytes`.
        plan_sha256 : str
            Part of the name of the runtime cache file of TensorRT for RTX.
        stream : cuda.core.Stream
            The profiles are set on it; the call does not wait.
        capturable : bool
            Whether enqueues will be captured in CUDA graphs. TensorRT for RTX then makes no graphs itself, and compiles the kernels
            of a shape at its first enqueue instead of later.
        num_sets : int
            Sets of bindings: 2 for an engine whose states have two buffers.

        Raises
        ------
        EngineError
            TensorRT refuses a context; the text holds what it logged.

        Notes
        -----
        ``ICudaEngine.create_execution_context`` with ``ExecutionContextAllocationStrategy.USER_MANAGED``, for TensorRT for RTX by way
        of ``IRuntimeConfig``; then ``set_optimization_profile_async`` and ``set_device_memory`` of each context.
        """
        self._resources.callback(self._contexts.clear)
        argument = self._context_argument(plan_sha256, capturable)
        _, handle = stream.__cuda_stream__()
        for index in [*range(len(self.ranges))] * num_sets:
            context = self._create("the execution context was refused", self._engine.create_execution_context, argument)
            self._contexts.append(context)
            self._call(f"profile {index} was refused", context.set_optimization_profile_async, index, int(handle))
            self._call("the activation memory was refused", context.set_device_memory, address, nbytes)

    def _context_argument(self, plan_sha256: str, capturable: bool) -> Any:
        """Return the argument of ``create_execution_context``: the allocation strategy, or a runtime configuration that has it."""
        trt = self._tensorrt.module
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._tensorrt.is_rtx:
            return strategy
        config = self._create("the runtime configuration was refused", self._engine.create_runtime_config)
        self._call("the allocation strategy was refused", config.set_execution_context_allocation_strategy, strategy)
        if capturable:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        cache = self._create("the runtime cache was refused", config.create_runtime_cache)
        identity = gpu_identity(self._resources.memory.device)
        file = RuntimeCacheFile((plan_sha256, *identity, self._tensorrt.flavour, self._tensorrt.version))
        saved = file.read()
        if saved is not None and not cache.deserialize(saved):
            file.warn("was refused by TensorRT")
            saved = None
        self._call("the runtime cache was refused", config.set_runtime_cache, cache)
        self._resources.callback(_save_runtime_cache, cache, file, saved)  # runs before the contexts are released
        return config

    def set_tensor_address(self, context: int, name: str, address: int) -> None:
        """Set the device address of a tensor.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input or output.
        address : int
            Device address.

        Raises
        ------
        EngineError
            TensorRT refuses the address; the text is what it logged.

        Notes
        -----
        ``IExecutionContext.set_tensor_address``.
        """
        self._call(f"the address of `{name}` was refused", self._contexts[context].set_tensor_address, name, address)

    def set_input_shape(self, context: int, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input.
        shape : sequence of int
            Its new shape.

        Raises
        ------
        EngineError
            TensorRT refuses the shape; the text is what it logged.

        Notes
        -----
        ``IExecutionContext.set_input_shape``.
        """
        shape = tuple(shape)
        self._call(f"the shape {shape} of `{name}` was refused", self._contexts[context].set_input_shape, name, shape)

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """Return the current shape of a tensor.

        Parameters
        ----------
        context : int
            Index of the execution context.
        name : str
            An input or output.

        Returns
        -------
        tuple of int
            ``-1`` for sizes that are not known yet.

        Notes
        -----
        ``IExecutionContext.get_tensor_shape``.
        """
        return tuple(self._contexts[context].get_tensor_shape(name))

    def enqueue(self, context: int, stream: int) -> None:
        """Enqueue the plan in one context; does not wait.

        Parameters
        ----------
        context : int
            Index of the execution context.
        stream : int
            The ``cudaStream_t``.

        Raises
        ------
        EngineError
            TensorRT failed; the text is what it logged.

        Notes
        -----
        ``IExecutionContext.execute_async_v3`` (``enqueueV3`` in C++).
        """
        self._call("the step failed", self._contexts[context].execute_async_v3, stream)

    def is_capturable(self, context: int, stream: int) -> bool:
        """Return whether an enqueue can be captured in a CUDA graph with the current addresses and shapes.

        Parameters
        ----------
        context : int
            Index of the execution context.
        stream : int
            The ``cudaStream_t``.

        Returns
        -------
        bool
            Full TensorRT always can; TensorRT for RTX is asked.

        Notes
        -----
        ``IExecutionContext.is_stream_capturable``.
        """
        return not self._tensorrt.is_rtx or bool(self._contexts[context].is_stream_capturable(stream))

    def _call(self, failure: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call TensorRT; raise EngineError where it returns False, raises, or logs an error."""
        self._messages.clear_errors()
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
        self._engine = self._runtime = None


def _save_runtime_cache(cache: Any, file: RuntimeCacheFile, saved: bytes | None) -> None:
    """Write what TensorRT for RTX compiled, unless it equals what was read."""
    content = cache.serialize()
    if content is None:
        file.warn("could not be serialised by TensorRT")
    elif (blob := bytes(content)) != saved:
        file.write(blob)
