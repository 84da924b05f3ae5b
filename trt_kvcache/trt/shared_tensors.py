"""The internal device tensors of an engine in segments: its constants, and the tensors that its stages hand to each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.segments import Stage
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.memory_plan import assign_offsets


class SharedTensors:
    """Constants, each in memory once, and intermediate tensors in one allocation.

    Intermediate tensors whose lifetimes do not overlap share bytes: see :func:`~trt_kvcache.trt.memory_plan.assign_offsets`.

    Parameters
    ----------
    stages : sequence of Segment or CustomOpNode
        In the order in which they run.
    constants : mapping of str to ndarray
        Host arrays; they are uploaded.
    intermediates : mapping of str to TensorSpec
        What one stage writes and a later one reads.
    profiles : sequence of EngineProfile
        Intermediate tensors are sized for the largest enqueue of all profiles.
    resources : EngineResources
        Owner of the memory.
    stream : cuda.core.Stream
        Allocations and uploads are ordered on it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        constants: Mapping[str, np.ndarray[Any, Any]],
        intermediates: Mapping[str, TensorSpec],
        profiles: Sequence[EngineProfile],
        resources: EngineResources,
        stream: Any,
    ) -> None:
        self._constants: dict[str, DeviceTensor] = {}
        for name, array in constants.items():
            self._constants[name] = resources.memory.to_device(array, stream=stream)
            resources.callback(self._constants[name].allocation.close)
        self._intermediates = intermediates
        nbytes_by_tensor = {
            name: max(dense_nbytes(shape_at(spec.shape, one.max_batch, one.max_width), spec.dtype) for one in profiles)
            for name, spec in intermediates.items()
        }
        self._offsets, nbytes = assign_offsets(stages, nbytes_by_tensor)
        self._allocation = resources.allocate(nbytes, stream=stream)

    def tensor(self, name: str, batch: int, width: int) -> DeviceTensor:
        """Return a constant or an intermediate tensor.

        Parameters
        ----------
        name : str
            A constant or an intermediate tensor.
        batch, width : int
            Slots and new tokens per slot of the enqueue. The address does not depend on them.

        Returns
        -------
        DeviceTensor
            Contiguous, in device memory of the engine. A constant has its own shape, an intermediate tensor the shape of this enqueue.
        """
        if name in self._constants:
            return self._constants[name]
        spec = self._intermediates[name]
        shape = shape_at(spec.shape, batch, width)
        return DeviceTensor(self._allocation, shape=shape, dtype=spec.dtype, offset=self._offsets[name])
