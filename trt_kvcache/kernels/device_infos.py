"""``DeviceInfos``: addresses and sizes of the tensors of several layers, on host and device, for kernels over all of them in one launch."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import ClosedError, LayoutError
from trt_kvcache.memory.tensor import DeviceTensor

_Info = TypeVar("_Info", bound=tuple[int, ...])


class DeviceInfos(Uncopyable, Generic[_Info]):
    """One info of 64-bit integers per view. It keeps the memory of the views alive, but does not keep their owner open."""

    def __init__(self, views: Sequence[DeviceTensor], infos: Sequence[_Info], *, stream: Any, on_device: bool = True) -> None:
        self._views = tuple(views)
        self._host = tuple(infos)
        self._closed = False
        self._allocations = tuple({id(view.allocation): view.allocation for view in views}.values())
        #: Memory of the views.
        self.memory = views[0].memory
        #: Layers.
        self.num_layers = len(views)
        self._device = self.memory.to_device(np.array(self._host, np.int64), stream=stream) if on_device else None

    @property
    def views(self) -> tuple[DeviceTensor, ...]:
        """The tensors of the layers."""
        return self._views

    @property
    def host(self) -> tuple[_Info, ...]:
        """One info per layer."""
        return self._host

    def _device_infos(self) -> DeviceTensor:
        if self._closed:
            raise ClosedError(f"these {type(self).__name__} are closed.")
        if self._device is None:
            raise LayoutError(
                f"{type(self).__name__} of saved tensors have no device array: their addresses are passed as arguments of the launch."
            )
        return self._device

    def check_open(self) -> None:
        """Raise :class:`ClosedError` if this, or the owner of a view, is closed."""
        closed = self._closed
        for allocation in self._allocations:
            closed = closed or allocation.closed
        if closed:
            raise ClosedError(f"these {type(self).__name__}, or their memory, are closed.")

    def close(self) -> None:
        """Release the device array, not the views. Idempotent."""
        self._closed = True
        if self._device is not None:
            self._device.allocation.close()
