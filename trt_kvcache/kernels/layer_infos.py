"""``KVLayerInfos``: addresses and strides of the K/V layers of one head-dim group, for kernels over all of them in one launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.device_infos import DeviceInfos
from trt_kvcache.kernels.layer_views import CACHE_NDIM, SAVED_NDIM, check_layer, check_same
from trt_kvcache.memory.shapes import row_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class KVLayerInfo(NamedTuple):
    """Address and strides of one layer. On the device: five 64-bit integers in this order (``KVLayer`` in ``plugins/kv.cu``)."""

    #: Address of K of slot 0.
    data: int
    #: Bytes from one slot to the next.
    slot_stride: int
    #: Bytes from K to V of a slot.
    kv_stride: int
    #: Heads of this layer, H.
    num_kv_heads: int
    #: Rows from one head to the next: S, or S divided by the tokens of a row.
    max_sequence_length: int


def _info(view: DeviceTensor) -> KVLayerInfo:
    heads, sequence_length = view.shape[-3:-1]
    slot_stride, kv_stride = ([0] * CACHE_NDIM + [stride * itemsize(view.dtype) for stride in view.strides[:-3]])[-2:]
    return KVLayerInfo(view.ptr, slot_stride, kv_stride, heads, sequence_length)


class KVLayerInfos(DeviceInfos[KVLayerInfo]):
    """The layers of one head-dim group: addresses and strides, on the host and on the device.

    Parameters
    ----------
    views : sequence of DeviceTensor ``[B, 2, H_i, S_i, D]``, or of saved tensors ``[2, H_i, n, D]``
        Of one head dim, dtype and memory. Cache layers share B; any layout: their slots and K/V may be strided. Saved tensors
        are dense and share n; they count as one slot.
    tokens_per_row : int
        Tokens of a row: 1 for K and V, 4 for scales (``trt_kvcache/kernels/scale_views.py``). Functions that take tokens move every
        row with one of them.
    stream : cuda.core.Stream
        The device array is made on it, once. Saved tensors need none, so nothing is allocated for them: their addresses are arguments
        of a launch.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, LayoutError
        There are no views, or they do not belong together, or cannot be addressed in steps of 16 bytes.
    CapacityError, CaptureError
        The device array could not be allocated.

    Notes
    -----
    ``KVLayerInfo`` and ``KVHeadDimGroupView`` of TensorRT Edge-LLM.
    """

    def __init__(self, views: Sequence[DeviceTensor], *, tokens_per_row: int = 1, stream: Any) -> None:
        if isinstance(views, DeviceTensor) or not views:
            raise ShapeError("views: expected a sequence of layers, at least one.")
        first = views[0]
        ndim = CACHE_NDIM if getattr(first, "ndim", None) == CACHE_NDIM else SAVED_NDIM
        for index, view in enumerate(views):
            check_layer(f"views[{index}]", view, ndim)
            check_same("views[0]", first, f"views[{index}]", view)
            axis, what = (0, "slots") if ndim == CACHE_NDIM else (2, "tokens")
            if view.shape[axis] != first.shape[axis]:
                raise ShapeError(f"views[{index}]: expected {first.shape[axis]} {what} as views[0], got {view.shape[axis]}.")
        first.memory.check_stream(stream)
        super().__init__(views, [_info(view) for view in views], stream=stream, on_device=ndim == CACHE_NDIM)
        #: The dtype of all layers.
        self.dtype = first.dtype
        #: True for saved tensors ``[2, H_i, n, D]``, False for layers of a cache.
        self.is_saved = ndim == SAVED_NDIM
        #: Elements of a row, the same in all layers.
        self.head_dim = first.shape[-1]
        #: Bytes of a row: one token of one head.
        self.row_nbytes = row_nbytes(self.head_dim, self.dtype)
        #: The largest number of heads of a layer.
        self.max_kv_heads = max(info.num_kv_heads for info in self._host)
        #: Slots, B; 1 for saved tensors.
        self.max_batch_size = 1 if self.is_saved else first.shape[0]
        #: Tokens of a row.
        self.tokens_per_row = tokens_per_row
        #: Rows of a head in the layer with the fewest.
        self.shortest_rows = min(info.max_sequence_length for info in self._host)
        #: Tokens that fit into a slot of every layer: the smallest S_i, or n.
        self.shortest_sequence = self.shortest_rows * tokens_per_row

    def rows(self, tokens: int) -> int:
        """Return the rows of a head for some tokens, rounded up."""
        return -(-tokens // self.tokens_per_row)

    @property
    def device_layer_infos(self) -> DeviceTensor:
        """The infos in the memory of the layers, int64 ``[num_layers, 5]``: ``KVLayer const*`` of a kernel.

        Raises
        ------
        LayoutError
            These are saved tensors.
        ClosedError
        """
        return self._device_infos()


def check_kind(name: str, infos: KVLayerInfos, *, saved: bool) -> None:
    """Check that these are the layers of saved tensors, or of a cache."""
    if not isinstance(infos, KVLayerInfos):
        raise ShapeError(f"{name}: expected KVLayerInfos, got {type(infos).__name__}.")
    if infos.is_saved is not saved:
        expected, got = ("[2, H, n, D]", "[B, 2, H, S, D]") if saved else ("[B, 2, H, S, D]", "[2, H, n, D]")
        raise ShapeError(f"{name}: expected KVLayerInfos of tensors {expected}, got {got}.")
