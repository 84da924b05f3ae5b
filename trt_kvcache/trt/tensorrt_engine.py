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
from typing import Any, TypeVar

from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.bindable import check_bindable
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_folder.config import EngineConfig
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.trt.loaded_plan import PlanExecution
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin import register
from trt_kvcache.trt.tensors import ProfileRanges, compare_profiles, compare_tensors, read_profiles

_AnyEngine = TypeVar("_AnyEngine", bound="TensorRTEngine")


@dataclass(eq=False)
class ProfileBindings:
    """What is bound and shaped in one profile, and whether that was checked since it changed."""

    index: int
    ranges: ProfileRanges
    bound: dict[str, DeviceTensor] = field(default_factory=dict)
    checked: bool = False


class TensorRTEngine:
    """A deserialised TensorRT engine (implements :class:`trt_kvcache.engine.protocol.Engine`). Not thread-safe.

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
        self._bindings: list[ProfileBindings] = []
        self._active: ProfileBindings | None = None
        self._resources = ExitStack()
        try:
            self._messages = self._resources.enter_context(tensorrt.log.collect())
            self._resources.callback(self._forget)
            stream = memory.create_stream()  # makes the device current, on which TensorRT then works
            self._load(plan, plan_sha256, stream)
            memory.synchronize(stream)
            self._bindings = [ProfileBindings(index, ranges) for index, ranges in enumerate(self._ranges)]
            self._active = self._bindings[0]
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
        if source.config.segments is not None:
            raise EngineError(f"{source.path}: expected an engine in one piece, got one in segments. Open it with SegmentedEngine.")
        return cls._of_folder(source, memory, flavour, names or source.config.names)

    @classmethod
    def _of_folder(
        cls: type[_AnyEngine], folder: EngineFolder, memory: Memory, flavour: str, names: TensorNames, **options: Any
    ) -> _AnyEngine:
        config = folder.config
        if flavour not in ("auto", config.tensorrt_flavour):
            raise EngineError(f"{folder.path}: expected flavour {config.tensorrt_flavour}, which built this engine, got {flavour}.")
        tensorrt = load(config.tensorrt_flavour)
        with folder.read_plan() as plan:
            return cls(tensorrt, plan, memory=memory, names=names, config=config, plan_sha256=config.plan.sha256, **options)

    @classmethod
    def _of_plan(cls, plan: bytes | mmap.mmap, memory: Memory, flavour: str, names: TensorNames | None) -> TensorRTEngine:
        digest = hashlib.sha256(plan).hexdigest()
        return cls(load(flavour), plan, memory=memory, names=names or DEFAULT_NAMES, config=None, plan_sha256=digest)

    def _load(self, plan: Any, plan_sha256: str, stream: Any) -> None:
        """Deserialise, and make a context per profile over one activation memory, which belongs to us."""
        config, built_by = self.config, ""
        if config is not None:
            built_by = f" built with {config.tensorrt_flavour} {config.tensorrt_version}"
            if config.attention_variant == "plugin":
                register(self._tensorrt)
        self._execution = self._make_execution(plan, built_by)
        self._tensors, self._ranges = self._execution.tensors, self._execution.ranges
        self._profiles = read_profiles(self._ranges, self.names.input_ids)
        if config is not None:
            compare_tensors(self._tensors, config.tensors)
            compare_profiles(self._profiles, config.profiles)
        nbytes = self._execution.activation_nbytes
        activations = self._allocate(nbytes, stream)
        self._execution.start(activations.ptr, nbytes, plan_sha256=plan_sha256, stream=stream)

    def _make_execution(self, plan: Any, built_by: str) -> PlanExecution:
        return PlanExecution(
            self._tensorrt, plan, memory=self._memory, messages=self._messages, resources=self._resources, built_by=built_by
        )

    def _allocate(self, nbytes: int, stream: Any, *, zeroed: bool = False) -> Allocation:
        """Allocate what lives as long as the engine."""
        allocation = self._memory.allocate(nbytes, zeroed=zeroed, stream=stream)
        self._resources.callback(allocation.close)
        return allocation

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
        if not 0 <= index < len(self._bindings):
            self._require_active()
            raise BindingError(f"profile {index}: expected 0 <= index < {len(self._bindings)}.")
        self._active = self._bindings[index]

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
        active.checked = False
        active.bound.pop(name, None)
        self._bind_address(active, name, tensor.ptr)
        active.bound[name] = tensor

    def _bind_address(self, active: ProfileBindings, name: str, address: int) -> None:
        self._execution.bind(active.index, name, address)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues of the profile in use.

        Raises :class:`BindingError` for a name that is not an input, or a shape outside the profile.
        """
        active = self._require_active()
        if self._spec(name).mode is not TensorMode.INPUT:
            raise BindingError(f"`{name}`: expected an input, it is an output; its shape follows from the inputs.")
        active.ranges.check(name, shape)
        active.checked = False
        self._set_shape(active, name, tuple(shape))

    def _set_shape(self, active: ProfileBindings, name: str, shape: tuple[int, ...]) -> None:
        self._execution.set_shape(active.index, name, shape)

    def enqueue(self, stream: Any) -> None:
        """Run one step on ``stream``, a stream or graph builder of the engine's memory. Does not wait.

        Raises
        ------
        BindingError
            Something is not bound, has no shape, is too small for its shape, or an output is not bound where the input that
            it shares memory with is. Nothing was enqueued.
        ClosedError
            The engine is closed, or what is bound. Nothing was enqueued.
        EngineError
            TensorRT failed; the text is what it logged.
        """
        active = self._require_active()
        handle = stream_handle(stream)
        for name, tensor in active.bound.items():
            if tensor.allocation.closed:
                raise ClosedError(f"`{name}`: the memory that is bound is closed. Bind other memory, or keep its cache open.")
        if not active.checked:
            self._check_bindings(active)
            active.checked = True
        self._stream = stream
        self._run(active, stream, handle)

    def _run(self, active: ProfileBindings, stream: Any, handle: int) -> None:
        self._execution.enqueue(active.index, handle)

    def _shape(self, active: ProfileBindings, name: str) -> tuple[int, ...]:
        return self._execution.shape(active.index, name)

    def _check_bindings(self, active: ProfileBindings) -> None:
        """Check what an enqueue would read and write: once after each change, not per step."""
        for name, spec in self._tensors.items():
            tensor = active.bound.get(name)
            if tensor is None:
                raise BindingError(f"`{name}`: it is not bound in this profile.")
            shape = self._shape(active, name)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spec(self, name: str) -> TensorSpec:
        spec = self._tensors.get(name)
        if spec is None:
            raise BindingError(f"`{name}`: the engine has no such tensor, it has {', '.join(f'`{known}`' for known in self._tensors)}.")
        return spec

    def _forget(self) -> None:
        self._bindings.clear()
        self._active = None

    def _require_active(self) -> ProfileBindings:
        if self._active is None:
            raise ClosedError(f"this {type(self).__name__} is closed.")
        return self._active


def stream_handle(stream: Any) -> int:
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
