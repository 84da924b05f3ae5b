"""``StateInfos``: addresses and sizes of the recurrent (or conv) states of all layers, for kernels over all of them in one launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels.device_infos import DeviceInfos
from trt_kvcache.kernels.layer_views import check_memory, check_open
from trt_kvcache.memory.shapes import dense_nbytes, is_dense
from trt_kvcache.memory.tensor import DeviceTensor


class StateInfo(NamedTuple):
    """Address and sizes of the states of one layer. On the device: three 64-bit integers (``State`` in ``plugins/states.cu``)."""

    #: Address of slot 0.
    data: int
    #: Bytes from one slot to the next.
    slot_stride: int
    #: Bytes of one slot's state: a row, of any size.
    row_nbytes: int


def _info(name: str, view: DeviceTensor) -> StateInfo:
    if view.ndim < 2 or 0 in view.shape:
        raise ShapeError(f"{name}: expected a tensor [B, ...] with elements, got {view!r}.")
    row = dense_nbytes(view.shape[1:], view.dtype)
    slot_stride = view.strides[0] * itemsize(view.dtype) if len(view) > 1 else row
    if not is_dense(view.shape[1:], view.strides[1:]):
        raise LayoutError(f"{name}: expected dense states, got {view!r}.")
    if slot_stride < row:
        raise LayoutError(f"{name}: slots overlap: {view!r}.")
    return StateInfo(view.ptr, slot_stride, row)


class StateInfos(DeviceInfos[StateInfo]):
    """The states of one kind: addresses, strides and sizes, on the host and on the device.

    Parameters
    ----------
    views : sequence of DeviceTensor ``[B, ...]``
        One per recurrent layer, of one memory and B; a slot's state is dense and may have any size.
    stream : cuda.core.Stream
        The device array is made on it, once.

    Raises
    ------
    ShapeError, PlaceError, LayoutError
        There are no views, or they do not belong together.
    CapacityError, CaptureError
        The device array could not be allocated.
    """

    def __init__(self, views: Sequence[DeviceTensor], *, stream: Any) -> None:
        if isinstance(views, DeviceTensor) or not views:
            raise ShapeError("views: expected a sequence of states, at least one.")
        for index, view in enumerate(views):
            if not isinstance(view, DeviceTensor):
                raise PlaceError(f"views[{index}]: expected a DeviceTensor, got {type(view).__name__}.")
            check_memory(f"views[{index}]", view, views[0].memory)
            check_open(f"views[{index}]", view)
        infos = [_info(f"views[{index}]", view) for index, view in enumerate(views)]
        first = views[0]
        for index, view in enumerate(views):
            if len(view) != len(first):
                raise ShapeError(f"views[{index}]: expected {len(first)} slots as views[0], got {len(view)}.")
        first.memory.check_stream(stream)
        super().__init__(views, infos, stream=stream)
        #: Slots, B.
        self.max_batch_size = len(first)
        #: Bytes of the largest state of a slot.
        self.max_row_nbytes = max(info.row_nbytes for info in self._host)

    @property
    def device_state_infos(self) -> DeviceTensor:
        """The infos in the memory of the states, int64 ``[num_layers, 3]``."""
        return self._device_infos()


def check_states(name: str, states: StateInfos) -> None:
    """Check that this is a StateInfos."""
    if not isinstance(states, StateInfos):
        raise ShapeError(f"{name}: expected StateInfos, got {type(states).__name__}.")
