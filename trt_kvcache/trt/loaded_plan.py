"""``PlanExecution``: one serialised TensorRT engine, deserialised, with an execution context per profile."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from trt_kvcache.errors import EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.runtime_cache import RuntimeCacheFile, gpu_identity
from trt_kvcache.trt.tensors import read_ranges, read_tensors


class PlanExecution:
    """Contexts over activation memory of somebody else: those of several plans may share it, if they run on one stream.

    Parameters
    ----------
    tensorrt : TensorRT
    plan : buffer
    memory : Memory
        Its device is current.
    messages : Messages
        Open as long as this.
    resources : ExitStack
        Where what is made is let go of, in reverse order.
    built_by : str
        For the message of a refusal.

    Raises
    ------
    EngineError
        TensorRT refuses the plan; the text holds what it logged.
    """

    def __init__(
        self, tensorrt: TensorRT, plan: Any, *, memory: Memory, messages: Messages, resources: ExitStack, built_by: str = ""
    ) -> None:
        self._tensorrt = tensorrt
        self._memory = memory
        self._messages = messages
        self._resources = resources
        self._contexts: list[Any] = []
        resources.callback(self._drop_engine)
        try:
            self._runtime = tensorrt.module.Runtime(tensorrt.log.logger)
        except (TypeError, RuntimeError):
            messages.fail(EngineError, f"{tensorrt} cannot start")
        self._engine = self._make(f"{tensorrt} refuses this engine{built_by}", self._runtime.deserialize_cuda_engine, plan)
        #: Inputs and outputs by name, inputs first.
        self.tensors = read_tensors(tensorrt, self._engine)
        #: Shapes that the inputs take, per profile.
        self.ranges = read_ranges(self._engine, self.tensors)

    @property
    def activation_nbytes(self) -> int:
        """Bytes of activation memory that a context wants, at most."""
        return max(int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in range(len(self.ranges)))

    def start(self, activations: int, nbytes: int, *, plan_sha256: str, stream: Any, capturable: bool = False) -> None:
        """Make a context per profile.

        Parameters
        ----------
        activations, nbytes : int
            Address and size of the activation memory.
        plan_sha256 : str
            What a runtime cache is kept under.
        stream : cuda.core.Stream
        capturable : bool
            Whether enqueues are to be captured in CUDA graphs: then TensorRT for RTX makes none itself, and compiles what a
            shape needs at its first enqueue, not later.
        """
        self._resources.callback(self._contexts.clear)
        argument = self._context_argument(plan_sha256, capturable)
        for index in range(len(self.ranges)):
            context = self._make("the execution context was refused", self._engine.create_execution_context, argument)
            self._contexts.append(context)
            self._call(f"profile {index} was refused", context.set_optimization_profile_async, index, int(stream.__cuda_stream__()[1]))
            self._call("the activation memory was refused", context.set_device_memory, activations, nbytes)

    def _context_argument(self, plan_sha256: str, capturable: bool) -> Any:
        """Return what contexts are made with: activation memory is ours; a runtime cache where TensorRT compiles at run time."""
        trt = self._tensorrt.module
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._tensorrt.is_rtx:
            return strategy
        config = self._make("the runtime configuration was refused", self._engine.create_runtime_config)
        self._call("the allocation strategy was refused", config.set_execution_context_allocation_strategy, strategy)
        if capturable:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        cache = self._make("the runtime cache was refused", config.create_runtime_cache)
        file = RuntimeCacheFile((plan_sha256, *gpu_identity(self._memory.device), self._tensorrt.flavour, self._tensorrt.version))
        saved = file.read()
        if saved is not None and not cache.deserialize(saved):
            file.warn("was refused by TensorRT")
            saved = None
        self._call("the runtime cache was refused", config.set_runtime_cache, cache)
        self._resources.callback(_save, cache, file, saved)  # before the contexts go
        return config

    def bind(self, profile: int, name: str, address: int) -> None:
        """Set the address of a tensor. Raises :class:`EngineError`."""
        self._call(f"the address of `{name}` was refused", self._contexts[profile].set_tensor_address, name, address)

    def set_shape(self, profile: int, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input. Raises :class:`EngineError`."""
        shape = tuple(shape)
        self._call(f"the shape {shape} of `{name}` was refused", self._contexts[profile].set_input_shape, name, shape)

    def shape(self, profile: int, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is now; ``-1`` where it is not known."""
        return tuple(self._contexts[profile].get_tensor_shape(name))

    def enqueue(self, profile: int, stream: int) -> None:
        """Run it on the stream at an address. Raises :class:`EngineError`."""
        self._call("the step failed", self._contexts[profile].execute_async_v3, stream)

    def is_capturable(self, profile: int, stream: int) -> bool:
        """Tell whether TensorRT can be captured as it is bound and shaped now. Full TensorRT always can."""
        return not self._tensorrt.is_rtx or bool(self._contexts[profile].is_stream_capturable(stream))

    def _call(self, failure: str, function: Any, *arguments: Any) -> Any:
        """Call TensorRT; raise :class:`EngineError` where it returns False, raises, or logs an error."""
        self._messages.errors.clear()
        try:
            result = function(*arguments)
        except (RuntimeError, ValueError) as error:  # how the Python binding passes some refusals on
            self._messages.add(str(error), is_error=True)
            result = False
        if result is False or self._messages.errors:
            self._messages.fail(EngineError, failure)
        return result

    def _make(self, failure: str, function: Any, *arguments: Any) -> Any:
        """Call TensorRT for an object; None is a failure too."""
        made = self._call(failure, function, *arguments)
        if made is None:
            self._messages.fail(EngineError, failure)
        return made

    def _drop_engine(self) -> None:
        self._engine = self._runtime = None


def _save(cache: Any, file: RuntimeCacheFile, saved: bytes | None) -> None:
    content = cache.serialize()
    if content is None:
        file.warn("could not be serialised by TensorRT")
    elif (blob := bytes(content)) != saved:
        file.write(blob)
