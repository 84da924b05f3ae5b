"""``SegmentedEngine``: runs an engine in segments, with custom operations between them.

A step runs all stages in order on one stream: the operation of the embedding, then segments with operations between them. Calls of
TensorRT follow its documentation and are tested against a recording stand-in; no engine has run on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.embedding_rows import EMBEDDING_ROWS
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.decoder_segments import decoder_constants
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import SegmentsRecord
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.segments import CustomOpNode, Segment, intermediate_tensors
from trt_kvcache.trt.engine_bindings import EngineBindings, ProfileBindings
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.engine_sources import load_tensorrt_for, require_gpu_memory, require_kernels
from trt_kvcache.trt.graph_engine import Enqueue, GraphEngine
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.op_instances import OpInstances
from trt_kvcache.trt.runtime_cache import network_key
from trt_kvcache.trt.segment_plans import SegmentPlans
from trt_kvcache.trt.shared_tensors import SharedTensors
from trt_kvcache.trt.tensors import ProfileRanges, compare_tensors, count_binding_sets


class SegmentedEngine(GraphEngine):
    """An engine in segments (implements :class:`trt_kvcache.engine.protocol.StatefulEngine`).

    It has the inputs, outputs and profiles of the same engine in one piece. Made by :meth:`open`; a context manager. Not thread-safe.

    Parameters
    ----------
    tensorrt : TensorRT
        The TensorRT that deserialises the plans.
    plan : buffer
        The plans of all segments, as ``engine.plan`` has them.
    memory : Memory
        The GPU memory that it runs in.
    config : EngineFolderConfig
        ``config.json`` of its engine folder.
    constants : mapping of str to ndarray
        ``EngineFolder.read_constants``.
    cuda_graphs : bool
        True to run decode steps as CUDA graphs: see :meth:`open`.

    Attributes
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs by name, inputs first; of the whole engine.
    profiles : sequence of EngineProfile
        The optimisation profiles, by index.
    memory : Memory
        The GPU memory that bound tensors must be in.
    config : EngineFolderConfig
        As given.
    names : TensorNames
        Names of the engine's tensors.
    embeddings : EmbeddingRows or None
        Rows of token ids past the vocabulary, of an engine that was built with ``max_embeddings``.

    Notes
    -----
    The segments share one context memory, intermediate tensors lie in one allocation, and each constant is in memory once.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        plan: Any,
        *,
        memory: Memory,
        config: EngineFolderConfig,
        constants: Mapping[str, np.ndarray[Any, Any]],
        cuda_graphs: bool = True,
    ) -> None:
        assert config.segments is not None
        super().__init__(memory, tensorrt, network=network_key(config.network_facts()), cuda_graphs=cuda_graphs)
        self.config = config
        self.names = config.names
        self._stages = config.segments.stages
        self.profiles = config.profiles
        self.tensors = {spec.name: spec for spec in config.tensors}
        self._num_sets = count_binding_sets(self.tensors, config.names)
        try:
            stream = memory.create_stream()  # makes the device current, which TensorRT then uses
            plans = list(_load_plans(tensorrt, plan, config, config.segments, self._resources))
            constant_specs = decoder_constants(config.model, config.cache, dtype=config.dtype)
            intermediates = intermediate_tensors(self._stages, (*config.tensors, *constant_specs))
            self._shared = SharedTensors(
                self._stages,
                constants=constants,
                intermediates=intermediates,
                profiles=config.profiles,
                resources=self._resources,
                stream=stream,
            )
            known = {**self.tensors, **intermediates, **{spec.name: spec for spec in constant_specs}}
            self._ops = OpInstances(self._stages, tensors=known, profiles=config.profiles, resources=self._resources, stream=stream)
            self._create_contexts(plans, num_sets=self._num_sets, stream=stream)
            if config.max_embeddings:
                self.embeddings = self._make_embeddings(config)
            self._bind_intermediates(plans)
            memory.synchronize(stream)
            self._plans = SegmentPlans(plans, tensors=self.tensors, intermediates=intermediates, names=self.names)
            ranges = [_profile_ranges(config.tensors, profile, self.names) for profile in config.profiles]
            self._bindings = EngineBindings(
                type(self).__name__,
                tensors=self.tensors,
                ranges=ranges,
                memory=memory,
                target=self._plans,
                num_sets=self._num_sets,
            )
        except BaseException:
            self._resources.close()
            raise

    @classmethod
    def open(
        cls, source: str | os.PathLike[str] | EngineFolder, *, memory: Memory, flavour: str = "auto", cuda_graphs: bool = True
    ) -> SegmentedEngine:
        """Deserialise the segments of an engine folder. Waits until they are ready.

        Parameters
        ----------
        source : path or EngineFolder
            The engine folder.
        memory : CudaMemory
            The GPU to run on.
        flavour : str
            ``"auto"``, or the flavour that built the folder.
        cuda_graphs : bool
            True to run steps as CUDA graphs. When a decode or verify step is repeated, it gets execution contexts of its own, which no
            other shape changes: it runs there once, is captured the next time, and is replayed from then on. So is a prefill that is
            repeated often. A step that cannot be captured runs eagerly, with a warning, and is tried again after more steps;
            ``graph_refusals`` has the reasons.

        Returns
        -------
        SegmentedEngine
            Ready to be bound. Close it after use.

        Raises
        ------
        PlaceError
            ``memory`` is not GPU memory.
        EngineError
            The engine is in one piece; the GPU is too old for the kernels; TensorRT is not there, or refuses a segment; or a segment
            is not what the folder says. The text holds what TensorRT logged.

        Examples
        --------
        >>> from trt_kvcache import CudaMemory
        >>> with SegmentedEngine.open("my-engine", memory=CudaMemory(0)) as engine:  # doctest: +SKIP
        ...     print([profile.name for profile in engine.profiles])
        ['prefill', 'decode']
        """
        require_gpu_memory(cls.__name__, memory)
        require_kernels(cls.__name__, memory)
        folder = source if isinstance(source, EngineFolder) else EngineFolder.open(source)
        if folder.config.segments is None:
            raise EngineError(f"{folder.path}: expected an engine in segments, got one in one piece. Open it with TensorRTEngine.")
        constants = folder.read_constants()
        tensorrt = load_tensorrt_for(folder, flavour)
        with folder.read_plan() as plan:
            return cls(tensorrt, plan, memory=memory, config=folder.config, constants=constants, cuda_graphs=cuda_graphs)

    def _bind_intermediates(self, plans: Sequence[LoadedPlan]) -> None:
        """Bind the tensors that no caller binds."""
        rows = {} if self.embeddings is None else {EMBEDDING_ROWS: self.embeddings.table}
        for plan in plans:
            for context in range(self._num_sets * len(self.config.profiles)):
                for name in plan.tensors.keys() - self.tensors.keys():
                    tensor = rows[name] if name in rows else self._shared.tensor(name, 1, 1)
                    plan.set_tensor_address(context, name, tensor.ptr)

    def _step(self, active: ProfileBindings) -> Enqueue:
        """Check that the shapes fit each other, and make the launches of all stages."""
        batch, width = self._plans.tensor_shape(active.context, self.names.input_ids)
        _, logits = self._plans.tensor_shape(active.context, self.names.last_token_ids)
        for name, spec in self.tensors.items():
            expected = step_shape(spec, self.names, batch=batch, width=width, logits=logits)
            got = self._plans.tensor_shape(active.context, name)
            if got != expected:
                raise BindingError(f"`{name}`: expected shape {expected} with `{self.names.input_ids}` {(batch, width)}, got {got}.")

        def tensor(name: str) -> DeviceTensor:
            bound = active.tensors.get(name)
            if bound is None:
                return self._shared.tensor(name, batch, width)
            shape = self._plans.tensor_shape(active.context, name)
            return DeviceTensor(bound.allocation, shape=shape, dtype=bound.dtype, offset=bound.offset)

        launches: list[Enqueue] = []
        plans = iter(self._plans.plans)
        for stage in self._stages:
            if isinstance(stage, Segment):
                launches.append(partial(_enqueue_segment, next(plans)))
            else:
                launches.append(self._op_launch(stage, [tensor(name) for name in stage.inputs], [tensor(name) for name in stage.outputs]))
        return partial(_enqueue_all, launches)

    def _op_launch(self, node: CustomOpNode, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor]) -> Enqueue:
        """Check the inputs of an operation once, and return its launch."""
        op = self._ops.op(node)
        op.outputs([TensorType(one.shape, one.dtype) for one in inputs])
        return partial(_enqueue_op, op, inputs, outputs, self._ops.workspace(op))


def _enqueue_all(launches: Sequence[Enqueue], context: int, stream: Any, handle: int) -> None:
    for launch in launches:
        launch(context, stream, handle)


def _enqueue_segment(plan: LoadedPlan, context: int, stream: Any, handle: int) -> None:
    plan.enqueue(context, handle)


def _enqueue_op(
    op: CustomOp,
    inputs: Sequence[DeviceTensor],
    outputs: Sequence[DeviceTensor],
    workspace: DeviceTensor,
    context: int,
    stream: Any,
    handle: int,
) -> None:
    op.enqueue(inputs, outputs, workspace, stream)


def _load_plans(
    tensorrt: TensorRT, plan: Any, config: EngineFolderConfig, record: SegmentsRecord, resources: EngineResources
) -> Iterator[LoadedPlan]:
    """Deserialise the segments one after another, and compare each with its record."""
    built_by = f" built with {config.tensorrt_flavour} {config.tensorrt_version}"
    segments = [stage for stage in record.stages if isinstance(stage, Segment)]
    with memoryview(plan) as whole:
        for segment, (start, end) in zip(segments, record.spans, strict=True):
            with whole[start:end] as part:
                loaded = LoadedPlan(tensorrt, part, resources=resources, built_by=built_by)
            _compare_segment(loaded, segment, config.profiles, config.names)
            yield loaded


def _profile_ranges(tensors: Sequence[TensorSpec], profile: EngineProfile, names: TensorNames) -> ProfileRanges:
    """Return the shapes that the inputs of an engine of this package take in a profile."""
    low = {"batch": profile.min_batch, "width": profile.min_width, "logits": 1}
    high = {"batch": profile.max_batch, "width": profile.max_width, "logits": profile.max_logits}
    inputs = [spec for spec in tensors if spec.mode is TensorMode.INPUT]
    return ProfileRanges({spec.name: (step_shape(spec, names, **low), step_shape(spec, names, **high)) for spec in inputs})


def _compare_segment(loaded: LoadedPlan, segment: Segment, profiles: Sequence[EngineProfile], names: TensorNames) -> None:
    """Raise EngineError where a deserialised segment is not what was built."""
    loaded.tensors = compare_tensors(loaded.tensors, segment.tensors)
    expected = [_profile_ranges(segment.tensors, profile, names) for profile in profiles]
    if loaded.ranges != expected:
        raise EngineError(f"the engine is not what its config.json says: expected shapes {expected}, got {loaded.ranges}.")
