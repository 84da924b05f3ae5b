"""``SegmentedEngine``: runs an engine in segments, with our own operations between them.

Per step, on one stream: operation, segment, operation, segment ... A decode step is a CUDA graph from the second time on. Its
calls of TensorRT follow the documentation and are tested against a recording stand-in; no engine has run on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BindingError, EngineError, PlaceError
from trt_kvcache.kernels.attention_tiles import MIN_ARCH, arch_number
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.segments import OperationStep, SegmentStep, decoder_constants, intermediates, shape_at
from trt_kvcache.trt.cuda_graphs import StepGraphs
from trt_kvcache.trt.execution import PlanExecution
from trt_kvcache.trt.memory_plan import place
from trt_kvcache.trt.tensorrt_engine import ProfileBindings, TensorRTEngine, stream_handle
from trt_kvcache.trt.tensors import ProfileRanges, compare_tensors

#: Enqueues one part of a step, on a stream and its address.
_Part = Callable[[Any, int], None]


@dataclass(frozen=True, eq=False)
class _Program:
    """A step as it is bound and shaped now; ``key`` is what its graph depends on, None where it is not to be captured."""

    parts: Sequence[_Part]
    key: Hashable
    can_capture: Callable[[Any], bool]

    def run(self, stream: Any) -> None:
        """Enqueue all parts."""
        handle = stream_handle(stream)
        for part in self.parts:
            part(stream, handle)


class SegmentedEngine(TensorRTEngine):
    """An engine in segments (implements :class:`trt_kvcache.engine.protocol.Engine`). Not thread-safe.

    It has the tensors and profiles of the same engine in one piece, and binds, checks and enqueues as that does. The segments
    share one activation memory, the tensors between them one block, and constants lie in memory once, whatever reads them.

    Made by :meth:`open`; a context manager.
    """

    def __init__(self, *arguments: Any, constants: Mapping[str, np.ndarray[Any, Any]], cuda_graphs: bool, **options: Any) -> None:
        self._constants = constants
        self._graphs = StepGraphs(options["memory"]) if cuda_graphs else None
        self._executions: list[PlanExecution] = []
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._warm: set[int] = set()  # profiles that ran plainly since a shape changed: TensorRT has prepared what it needs
        self._programs: dict[int, _Program] = {}
        super().__init__(*arguments, **options)

    @classmethod
    def open(  # type: ignore[override]  # a plan alone does not say how its segments are joined
        cls, source: str | os.PathLike[str] | EngineFolder, *, memory: Memory, flavour: str = "auto", cuda_graphs: bool = True
    ) -> SegmentedEngine:
        """Deserialise the segments of an engine folder.

        Parameters
        ----------
        source : path or EngineFolder
        memory, flavour
            As for :meth:`TensorRTEngine.open`.
        cuda_graphs : bool
            Whether decode steps become CUDA graphs. One whose addresses or shapes are new runs plainly, the next time it is
            captured, and from then on replayed; one that cannot be captured runs plainly, with a warning.

        Raises
        ------
        PlaceError, EngineError
            As :meth:`TensorRTEngine.open`; or the engine is in one piece.
        """
        if memory.is_host:
            raise PlaceError(f"SegmentedEngine: expected the memory of a GPU (CudaMemory), got memory on {memory.device}.")
        arch: str = memory.arch  # type: ignore[attr-defined]  # a GPU has one
        if arch_number(arch) < MIN_ARCH:
            raise EngineError(f"SegmentedEngine: expected a GPU of compute capability 8.0 or more, which our kernels need, got {arch}.")
        folder = source if isinstance(source, EngineFolder) else EngineFolder.open(source)
        if folder.config.segments is None:
            raise EngineError(f"{folder.path}: expected an engine in segments, got one in one piece. Open it with TensorRTEngine.")
        return cls._of_folder(folder, memory, flavour, folder.config.names, constants=folder.read_constants(), cuda_graphs=cuda_graphs)

    def _load(self, plan: Any, plan_sha256: str, stream: Any) -> None:
        """Deserialise all segments, then allocate what they share and make their contexts over it."""
        config = self.config
        assert config is not None
        assert config.segments is not None
        self._steps = config.segments.steps
        self._tensors = {spec.name: spec for spec in config.tensors}
        self._profiles = config.profiles
        segments = [step for step in self._steps if isinstance(step, SegmentStep)]
        self._ranges = [_ranges(config.tensors, profile) for profile in config.profiles]
        built_by = f" built with {config.tensorrt_flavour} {config.tensorrt_version}"
        with memoryview(plan) as whole:
            for step, (start, end) in zip(segments, config.segments.spans, strict=True):
                with whole[start:end] as part:
                    self._executions.append(self._make_execution(part, built_by))
                _compare(self._executions[-1], step, config.profiles)
        constants = decoder_constants(config.model, config.cache)
        self._constant_specs = {spec.name: spec for spec in constants}
        self._made = intermediates(self._steps, (*config.tensors, *constants))
        self._executions_of: dict[str, list[PlanExecution]] = {}
        for execution in self._executions:
            for name in execution.tensors:
                self._executions_of.setdefault(name, []).append(execution)
        self._allocate_shared(stream)
        nbytes = max(execution.activation_nbytes for execution in self._executions)
        activations = self._allocate(nbytes, stream)
        for index, execution in enumerate(self._executions):
            key = f"{plan_sha256}-{index}"
            execution.start(activations.ptr, nbytes, plan_sha256=key, stream=stream, capturable=self._graphs is not None)
            for profile in range(len(self._profiles)):
                for name in execution.tensors.keys() - self._tensors.keys():
                    execution.bind(profile, name, self._shared(name, 1, 1).ptr)
        if self._graphs is not None:
            self._resources.callback(self._graphs.close)  # before the contexts go

    def _allocate_shared(self, stream: Any) -> None:
        """Allocate constants, the block of the tensors between the steps, and the workspaces of the operations."""
        largest = [(profile.max_batch, profile.max_width) for profile in self._profiles]
        self._bound_once: dict[str, DeviceTensor] = {}
        for name, array in self._constants.items():
            self._bound_once[name] = self._memory.to_device(array, stream=stream)
            self._resources.callback(self._bound_once[name].allocation.close)
        sizes = {name: max(dense_nbytes(shape_at(spec.shape, *size), spec.dtype) for size in largest) for name, spec in self._made.items()}
        self._offsets, nbytes = place(self._steps, sizes)
        self._exchange = self._allocate(nbytes, stream)
        known = {**self._tensors, **self._made, **self._constant_specs}
        self._operations: dict[int, CustomOp] = {}
        made: dict[tuple[str, ...], CustomOp] = {}
        workspaces: dict[str, int] = {}
        for index, step in enumerate(self._steps):
            if isinstance(step, OperationStep):
                op = made.setdefault((step.operation, repr(sorted(step.attributes.items()))), step.make())
                self._operations[index] = op
                for size in largest:
                    types = [TensorType(shape_at(known[name].shape, *size), known[name].dtype) for name in step.inputs]
                    workspaces[op.name] = max(workspaces.get(op.name, 0), op.workspace_nbytes(types))
        self._workspaces = {
            name: DeviceTensor(self._allocate(nbytes, stream, zeroed=True), shape=(nbytes,), dtype="uint8")
            for name, nbytes in workspaces.items()
        }

    def _shared(self, name: str, batch: int, width: int) -> DeviceTensor:
        """Return a tensor that is not bound from outside, as it is in a step of ``batch`` slots by ``width`` new tokens."""
        if name in self._bound_once:
            return self._bound_once[name]
        spec = self._made[name]
        return DeviceTensor(self._exchange, shape=shape_at(spec.shape, batch, width), dtype=spec.dtype, offset=self._offsets[name])

    def _bind_address(self, active: ProfileBindings, name: str, address: int) -> None:
        for execution in self._executions_of.get(name, ()):
            execution.bind(active.index, name, address)

    def _set_shape(self, active: ProfileBindings, name: str, shape: tuple[int, ...]) -> None:
        """Set the shape of an input; that of the token ids is that of all tensors between the segments.

        Where TensorRT refuses one, all shapes of the profile are forgotten.
        """
        shapes = self._shapes.pop(active.index, {})
        self._warm.discard(active.index)
        for execution in self._executions_of.get(name, ()):
            execution.set_shape(active.index, name, shape)
        if name == self.names.input_ids:
            for other, spec in self._made.items():
                for execution in self._executions_of.get(other, ()):
                    if execution.tensors[other].mode is TensorMode.INPUT:
                        execution.set_shape(active.index, other, shape_at(spec.shape, *shape))
        self._shapes[active.index] = {**shapes, name: shape}

    def _shape(self, active: ProfileBindings, name: str) -> tuple[int, ...]:
        spec, shapes = self._tensors[name], self._shapes.get(active.index, {})
        if spec.mode is TensorMode.INPUT:
            return shapes.get(name, spec.shape)
        ids = shapes.get(self.names.input_ids)
        return spec.shape if ids is None else shape_at(spec.shape, *ids)

    def _check_bindings(self, active: ProfileBindings) -> None:
        """Check, and prepare the step, as it is bound and shaped now."""
        super()._check_bindings(active)
        batch, width = self._shape(active, self.names.input_ids)
        for name, spec in self._tensors.items():
            expected, got = shape_at(spec.shape, batch, width), self._shape(active, name)
            if got != expected:
                raise BindingError(f"`{name}`: expected shape {expected} beside `{self.names.input_ids}` {(batch, width)}, got {got}.")
        self._programs[active.index] = self._program(active, batch, width)

    def _program(self, active: ProfileBindings, batch: int, width: int) -> _Program:
        def tensor(name: str) -> DeviceTensor:
            bound = active.bound.get(name)
            if bound is None:
                return self._shared(name, batch, width)
            return DeviceTensor(bound.allocation, shape=self._shape(active, name), dtype=bound.dtype, offset=bound.offset)

        parts: list[_Part] = []
        executions = iter(self._executions)
        for index, step in enumerate(self._steps):
            if isinstance(step, SegmentStep):
                parts.append(partial(_enqueue_segment, next(executions), active.index))
            else:
                op = self._operations[index]
                inputs, outputs = [tensor(name) for name in step.inputs], [tensor(name) for name in step.outputs]
                op.outputs([TensorType(one.shape, one.dtype) for one in inputs])
                parts.append(partial(_enqueue_operation, op, inputs, outputs, self._workspaces[op.name]))
        key = (active.index, batch, *(active.bound[name].ptr for name in self._tensors)) if width == 1 else None
        return _Program(parts, key, partial(self._can_capture, active.index))

    def _can_capture(self, profile: int, stream: Any) -> bool:
        return profile in self._warm and all(execution.is_capturable(profile, stream_handle(stream)) for execution in self._executions)

    def _forget(self) -> None:
        super()._forget()
        self._programs.clear()

    def _run(self, active: ProfileBindings, stream: Any, handle: int) -> None:
        program = self._programs[active.index]
        if self._graphs is None or program.key is None:
            program.run(stream)
        elif self._graphs.run(program.key, stream, program.run, program.can_capture):
            self._warm.add(active.index)


def _enqueue_segment(execution: PlanExecution, profile: int, stream: Any, handle: int) -> None:
    execution.enqueue(profile, handle)


def _enqueue_operation(
    op: CustomOp, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any, handle: int
) -> None:
    op.enqueue(inputs, outputs, workspace, stream)


def _ranges(tensors: Sequence[TensorSpec], profile: EngineProfile) -> ProfileRanges:
    """Return the shapes that the inputs of an engine of this package take in a profile."""
    sizes = ((profile.min_batch, profile.min_width), (profile.max_batch, profile.max_width))
    low, high = ({spec.name: shape_at(spec.shape, *size) for spec in tensors if spec.mode is TensorMode.INPUT} for size in sizes)
    return ProfileRanges({name: (low[name], high[name]) for name in low})


def _compare(execution: PlanExecution, step: SegmentStep, profiles: Sequence[EngineProfile]) -> None:
    """Compare a deserialised segment with what was built. Raises :class:`EngineError`."""
    compare_tensors(execution.tensors, step.tensors)
    expected = [_ranges(step.tensors, profile) for profile in profiles]
    if execution.ranges != expected:
        raise EngineError(f"the engine is not what its config.json says: expected shapes {expected}, got {execution.ranges}.")
