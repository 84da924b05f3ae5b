"""``TensorRTEngine``: runs a TensorRT engine, of either flavour, built by this package or not.

Importing this module needs neither TensorRT nor CUDA. Its calls of TensorRT follow the documentation and are tested against
a recording stand-in; no engine has run on a GPU yet (see docs/gpu.md).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trt_kvcache.bindable import check_bindable
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_config import EngineConfig
from trt_kvcache.engine_folder import EngineFolder
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.memory import Memory
from trt_kvcache.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.runtime_cache import RuntimeCacheFile, gpu_identity
from trt_kvcache.tensor import DeviceTensor
from trt_kvcache.trt_module import TensorRT, load
from trt_kvcache.trt_tensors import ProfileRanges, compare_profiles, compare_tensors, read_profiles, read_ranges, read_tensors


@dataclass(eq=False)
class _ProfileContext:
    """One execution context, what is bound in it, and whether that was checked since it changed."""

    context: Any
    ranges: ProfileRanges
    bound: dict[str, DeviceTensor] = field(default_factory=dict)
    checked: bool = False


class TensorRTEngine:
    """A deserialised TensorRT engine (implements :class:`trt_kvcache.engine.Engine`). Not thread-safe.

    Each profile has an execution context of its own, because switching a context's profile would forget its shapes. The
    contexts share one activation memory: enqueue all of them on one stream, or wait between.

    Made by :meth:`open`; a context manager.

    Attributes
    ----------
    config : EngineConfig or None
        Of the engine folder; None for a plan without one.
    names : TensorNames
        What the engine calls its tensors.
    """

    def __init__(
        self, tensorrt: TensorRT, plan: Any, *, memory: Memory, names: TensorNames, config: EngineConfig | None, plan_sha256: str
    ) -> None:
        self.config = config
        self.names = names
        self._tensorrt = tensorrt
        self._memory = memory
        self._stream: Any = None
        self._contexts: list[_ProfileContext] = []
        self._active: _ProfileContext | None = None
        self._resources = ExitStack()
        try:
            self._messages = self._resources.enter_context(tensorrt.log.collect())
            stream = memory.create_stream()  # makes the device current, on which TensorRT then works
            self._deserialize(plan)
            self._make_contexts(plan_sha256, stream)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | EngineFolder | bytes,
        *,
        memory: Memory,
        flavour: str = "auto",
        names: TensorNames | None = None,
    ) -> TensorRTEngine:
        """Deserialise an engine.

        Parameters
        ----------
        source : path, EngineFolder or bytes
            An engine folder, the file of a serialised engine (a "plan"), or its bytes.
        memory : CudaMemory
            The GPU to run on.
        flavour : str
            ``"tensorrt"``, ``"tensorrt_rtx"``, or ``"auto"``: what the engine folder says, for a plan what is installed.
        names : TensorNames, optional
            What the engine calls its tensors; needed where it was not built by this package.

        Raises
        ------
        PlaceError
            ``memory`` is not that of a GPU.
        EngineError
            TensorRT is not there, or refuses the engine; or the engine is not what its folder says. The text holds what
            TensorRT logged.
        """
        if memory.is_host:
            raise PlaceError(f"TensorRTEngine: expected the memory of a GPU (CudaMemory), got memory on {memory.device}.")
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            if not path.is_dir():
                with _map_file(path) as plan:
                    return cls._of_plan(plan, memory, flavour, names)
            source = EngineFolder.open(path)
        if not isinstance(source, EngineFolder):
            return cls._of_plan(source, memory, flavour, names)
        config = source.config
        if flavour not in ("auto", config.tensorrt_flavour):
            raise EngineError(f"{source.path}: expected flavour {config.tensorrt_flavour}, which built this engine, got {flavour}.")
        tensorrt = load(config.tensorrt_flavour)
        with source.read_plan() as plan:
            return cls(tensorrt, plan, memory=memory, names=names or config.names, config=config, plan_sha256=config.plan.sha256)

    @classmethod
    def _of_plan(cls, plan: bytes | mmap.mmap, memory: Memory, flavour: str, names: TensorNames | None) -> TensorRTEngine:
        digest = hashlib.sha256(plan).hexdigest()
        return cls(load(flavour), plan, memory=memory, names=names or DEFAULT_NAMES, config=None, plan_sha256=digest)

    def _deserialize(self, plan: Any) -> None:
        trt, log = self._tensorrt.module, self._tensorrt.log
        self._resources.callback(self._drop_engine)
        try:
            self._runtime = trt.Runtime(log.logger)
        except (TypeError, RuntimeError):
            self._messages.fail(EngineError, f"{self._tensorrt} cannot start")
        built = "" if self.config is None else f" built with {self.config.tensorrt_flavour} {self.config.tensorrt_version}"
        self._engine = self._make(f"{self._tensorrt} refuses this engine{built}", self._runtime.deserialize_cuda_engine, plan)
        self._tensors = read_tensors(self._tensorrt, self._engine)
        self._ranges = read_ranges(self._engine, self._tensors)
        self._profiles = read_profiles(self._ranges, self.names.input_ids)
        if self.config is not None:
            compare_tensors(self._tensors, self.config.tensors)
            compare_profiles(self._profiles, self.config.profiles)

    def _make_contexts(self, plan_sha256: str, stream: Any) -> None:
        """Make a context per profile over one activation memory, which belongs to us."""
        engine, memory = self._engine, self._memory
        nbytes = max(engine.get_device_memory_size_for_profile_v2(index) for index in range(len(self._profiles)))
        activations = memory.allocate(nbytes, stream=stream)
        self._resources.callback(activations.close)
        self._resources.callback(self._drop_contexts)
        argument = self._context_argument(plan_sha256)
        for index, ranges in enumerate(self._ranges):
            context = self._make("the execution context was refused", engine.create_execution_context, argument)
            self._contexts.append(_ProfileContext(context, ranges))
            self._call(f"profile {index} was refused", context.set_optimization_profile_async, index, _handle(stream))
            self._call("the activation memory was refused", context.set_device_memory, activations.ptr, nbytes)
        memory.synchronize(stream)
        self._active = self._contexts[0]

    def _context_argument(self, plan_sha256: str) -> Any:
        """Return what contexts are made with: activation memory is ours; a runtime cache where TensorRT compiles at run time."""
        strategy = self._tensorrt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._tensorrt.is_rtx:
            return strategy
        config = self._make("the runtime configuration was refused", self._engine.create_runtime_config)
        self._call("the allocation strategy was refused", config.set_execution_context_allocation_strategy, strategy)
        cache = self._make("the runtime cache was refused", config.create_runtime_cache)
        file = RuntimeCacheFile((plan_sha256, *gpu_identity(self._memory.device), self._tensorrt.flavour, self._tensorrt.version))
        saved = file.read()
        if saved is not None and not cache.deserialize(saved):
            file.warn("was refused by TensorRT")
            saved = None
        self._call("the runtime cache was refused", config.set_runtime_cache, cache)
        self._resources.callback(_save, cache, file, saved)  # before the contexts go
        return config

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Inputs and outputs by name, inputs first."""
        return self._tensors

    @property
    def profiles(self) -> Sequence[EngineProfile]:
        """The optimisation profiles, by index."""
        return self._profiles

    @property
    def memory(self) -> Memory:
        """The GPU memory that bound tensors must be in."""
        return self._memory

    def use_profile(self, index: int) -> None:
        """Choose the profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on."""
        if not 0 <= index < len(self._contexts):
            self._require_active()
            raise BindingError(f"profile {index}: expected 0 <= index < {len(self._contexts)}.")
        self._active = self._contexts[index]

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Read or write ``name`` at the address of ``tensor``, in the profile in use, and keep ``tensor`` alive.

        Raises
        ------
        BindingError
            There is no such tensor, or it has another dtype or is in another memory.
        LayoutError
            The view is not dense, or not aligned to 256 bytes.
        EngineError
            TensorRT refuses the address.
        """
        active = self._require_active()
        check_bindable(self._spec(name), tensor, self._memory)
        self._call(f"the address of `{name}` was refused", active.context.set_tensor_address, name, tensor.ptr)
        active.bound[name] = tensor
        active.checked = False

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues of the profile in use.

        Raises :class:`BindingError` for a name that is not an input, or a shape outside the profile.
        """
        active = self._require_active()
        if self._spec(name).mode is not TensorMode.INPUT:
            raise BindingError(f"`{name}`: expected an input, it is an output; its shape follows from the inputs.")
        active.ranges.check(name, shape)
        self._call(f"the shape {tuple(shape)} of `{name}` was refused", active.context.set_input_shape, name, tuple(shape))
        active.checked = False

    def enqueue(self, stream: Any) -> None:
        """Run one step on ``stream``, a stream or graph builder of the engine's memory. Does not wait.

        Raises
        ------
        BindingError
            Something is not bound, has no shape, is too small for its shape, or an output is not bound where the input that
            it shares memory with is. Nothing was enqueued.
        EngineError
            TensorRT failed; the text is what it logged.
        """
        active = self._require_active()
        handle = _handle(stream)
        if not active.checked:
            self._check_bindings(active)
            active.checked = True
        self._stream = stream
        self._call("the step failed", active.context.execute_async_v3, handle)

    def _check_bindings(self, active: _ProfileContext) -> None:
        """Check what an enqueue would read and write: once after each change, not per step."""
        for name, spec in self._tensors.items():
            tensor = active.bound.get(name)
            if tensor is None:
                raise BindingError(f"`{name}`: it is not bound in this profile.")
            shape = tuple(active.context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise BindingError(f"`{name}`: its shape {shape} is not known. Set the shape of every input of this profile.")
            needed = math.prod(shape) * itemsize(spec.dtype)
            if needed > tensor.nbytes:
                raise BindingError(f"`{name}`: shape {shape} takes {needed} bytes, what is bound has {tensor.nbytes}.")
            if spec.alias is not None and active.bound[spec.alias].ptr != tensor.ptr:
                raise BindingError(f"`{name}`: expected the address of `{spec.alias}`, whose memory it shares.")

    def close(self) -> None:
        """Wait for the last step, save what TensorRT compiled, and let go of everything. Idempotent."""
        stream, self._stream = self._stream, None
        with self._resources:  # let go in reverse order, whatever the wait says
            if hasattr(stream, "sync") and not getattr(stream, "is_closed", False):  # not a graph builder
                self._memory.synchronize(stream)

    def __enter__(self) -> TensorRTEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _spec(self, name: str) -> TensorSpec:
        spec = self._tensors.get(name)
        if spec is None:
            raise BindingError(f"`{name}`: the engine has no such tensor, it has {', '.join(f'`{known}`' for known in self._tensors)}.")
        return spec

    def _require_active(self) -> _ProfileContext:
        if self._active is None:
            raise ClosedError("this TensorRTEngine is closed.")
        return self._active

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

    def _drop_contexts(self) -> None:
        self._contexts.clear()
        self._active = None

    def _drop_engine(self) -> None:
        self._engine = self._runtime = None


def _handle(stream: Any) -> int:
    """Return the address of a stream (cuda.core's ``Stream`` and ``GraphBuilder`` both tell it so)."""
    try:
        _, handle = stream.__cuda_stream__()
    except AttributeError:
        raise PlaceError(f"stream: expected a CUDA stream or graph builder, got {type(stream).__name__}.") from None
    return int(handle)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: expected an engine folder or a serialised engine, cannot read it: {error}.") from error


def _save(cache: Any, file: RuntimeCacheFile, saved: bytes | None) -> None:
    content = cache.serialize()
    if content is None:
        file.warn("could not be serialised by TensorRT")
    elif (blob := bytes(content)) != saved:
        file.write(blob)
