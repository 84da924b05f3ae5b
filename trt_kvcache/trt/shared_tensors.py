"""The internal device tensors of an engine in segments: constants and intermediate tensors."""

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
    """Constants, each in memory once, and intermediate tensors in one allocation, sized for the largest enqueue."""

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
        """Return a constant, or an intermediate tensor in the shape of an enqueue. Addresses never change."""
        if name in self._constants:
            return self._constants[name]
        spec = self._intermediates[name]
        shape = shape_at(spec.shape, batch, width)
        return DeviceTensor(self._allocation, shape=shape, dtype=spec.dtype, offset=self._offsets[name])
