"""``DecoderBindings``: the bindings of an engine that runs a checkpoint itself, for each profile and each buffer of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.engine.bound_tensors import BoundTensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.errors import ClosedError, RangeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor


class DecoderBindings:
    """Bound tensors of each profile, in two sets for states with two buffers, so that a step after a step binds nothing."""

    def __init__(
        self,
        owner: str,
        tensors: Mapping[str, TensorSpec],
        profiles: Sequence[EngineProfile],
        *,
        cache: DecoderCacheConfig,
        names: TensorNames,
        memory: Memory,
    ) -> None:
        self._owner = owner  # name of the engine's class, for messages
        num_sets = 1 if cache.mamba is None else cache.mamba.num_buffers
        self._sets = [
            [BoundTensors(tensors, profile, cache=cache, names=names, memory=memory) for profile in profiles] for _ in range(num_sets)
        ]
        self._profile, self._set = 0, 0
        self.closed = False

    @property
    def active(self) -> BoundTensors:
        """The tensors of profile and set in use."""
        self.check_open()
        return self._sets[self._set][self._profile]

    def check_open(self) -> None:
        """Raise ClosedError after :meth:`release`."""
        if self.closed:
            raise ClosedError(f"this {self._owner} is closed.")

    def use_profile(self, index: int) -> None:
        """Choose a profile."""
        self.check_open()
        self._profile = int_in_range("profile", index, 0, len(self._sets[0]) - 1, error=RangeError)

    def use_bindings(self, index: int) -> None:
        """Choose a set."""
        self.check_open()
        self._set = int_in_range("bindings", index, 0, len(self._sets) - 1, error=RangeError)

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Bind a tensor in the profile and set in use."""
        self.active.bind(name, tensor)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input in the profile and set in use."""
        self.active.set_input_shape(name, shape)

    def release(self) -> None:
        """Release what is bound. Idempotent."""
        self.closed = True
        for profiles in self._sets:
            for bound in profiles:
                bound.release()
