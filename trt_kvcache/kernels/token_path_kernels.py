"""The accepted path of a tree of draft tokens: its K and V move to the front of the rows of the step, in place."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.kernels.host_arrays import array_of, bytes_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, launch
from trt_kvcache.kernels.layer_infos import KVLayerInfos, check_kind
from trt_kvcache.kernels.layer_views import check_place
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor


def keep_kv_cache_paths_batched(
    layer_infos: KVLayerInfos, starts: DeviceTensor, paths: DeviceTensor, counts: DeviceTensor, *, stream: Any
) -> None:
    """Move the rows of a path of draft tokens of each slot to the front of its new rows, in all layers of a head-dim group, in place.

    Row ``starts[b] + paths[b, i]`` moves to row ``starts[b] + i``, for each i below ``counts[b]``. All numbers are read on the device.

    Parameters
    ----------
    layer_infos : KVLayerInfos
        The cache's layers, or their scales by token; their heads may differ.
    starts : DeviceTensor (n,) int32
        Live rows of the first n slots before the step that ran the trees (:func:`attend` with ``ancestors``). Not changed.
    paths : DeviceTensor ``[n, 64]`` int32
        Contiguous. New tokens of a slot, from the root on; they increase. An entry that is not above its index, or past the rows of the
        slot, moves nothing.
    counts : DeviceTensor (n,) int32
        Tokens of each path; 0 for a slot without one.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it; the call neither waits nor allocates, and can be captured in a CUDA graph.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    Afterwards ``increment_length_tensor(starts, counts)`` makes the path live.
    """
    check_kind("layer_infos", layer_infos, saved=False)
    layer_infos.check_open()
    slots = layer_infos.max_batch_size
    for name, tensor in (("starts", starts), ("paths", paths), ("counts", counts)):
        check_place(name, tensor, layer_infos.views[0])
        if tensor.dtype != "int32":
            raise DTypeError(f"{name}: expected int32, got {tensor.dtype}.")
    if starts.ndim != 1 or len(starts) > slots or not starts.is_contiguous:
        raise ShapeError(f"starts: expected a dense tensor of shape (n,) with n <= {slots}, got {starts!r}.")
    for name, tensor, shape in (("paths", paths, (len(starts), MAX_TREE_TOKENS)), ("counts", counts, (len(starts),))):
        if tensor.shape != shape or not tensor.is_contiguous:
            raise ShapeError(f"{name}: expected a dense tensor of shape {shape}, got {tensor!r}.")
    layer_infos.memory.check_stream(stream)
    if len(starts):
        keep_paths_kernel(layer_infos, starts, paths, counts, stream)


# --- NumPy, for host memory ---


def _keep_paths_on_host(layers: KVLayerInfos, starts: DeviceTensor, paths: DeviceTensor, counts: DeviceTensor, stream: Any) -> None:
    rows_of_slots = list(zip(array_of(starts).tolist(), array_of(paths).tolist(), array_of(counts).tolist(), strict=True))
    for layer in map(bytes_of, layers.views):
        for slot, (start, path, count) in enumerate(rows_of_slots):
            tokens = layer[slot].reshape(*layer.shape[1:3], layer.shape[3] * layers.tokens_per_row, -1)
            room = tokens.shape[2] - start if start >= 0 else 0
            moves = [(place, token) for place, token in enumerate(path[: max(count, 0)]) if place < token < room]
            for place, token in moves:
                tokens[:, :, start + place] = tokens[:, :, start + token]


# --- CUDA: launches of plugins/kv.cu ---


def _keep_paths_on_device(layers: KVLayerInfos, starts: DeviceTensor, paths: DeviceTensor, counts: DeviceTensor, stream: Any) -> None:
    token_nbytes = layers.row_nbytes // layers.tokens_per_row
    vector_nbytes = ROW_GRANULE if layers.tokens_per_row == 1 else itemsize(layers.dtype)
    threads = 2 * layers.max_kv_heads * (token_nbytes // vector_nbytes)
    arguments = (layers.device_layer_infos.ptr, layers.row_nbytes, layers.tokens_per_row, starts.ptr, paths.ptr, counts.ptr)
    grid = (-(-threads // THREADS_PER_BLOCK), len(starts), layers.num_layers)
    launch(layers.memory, "kv", "keep_paths", grid, arguments, stream)


#: Move the rows of the path of each slot: layers, starts, paths, counts, stream.
keep_paths_kernel = Kernel(_keep_paths_on_host, _keep_paths_on_device)
