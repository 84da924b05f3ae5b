"""Infos: what a kernel is told about layers and states, and which views cannot be told."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from trt_kvcache import DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.errors import ClosedError, KVCacheError, LayoutError
from trt_kvcache.kernels import KVLayerInfos, StateInfos


def tensor(memory: Any, stream: Any, shape: tuple[int, ...], dtype: str = "float16", **view: Any) -> DeviceTensor:
    """A view at the start of 64 KiB."""
    return DeviceTensor(memory.allocate(65536, zeroed=True, stream=stream), shape=shape, dtype=dtype, **view)


@pytest.mark.parametrize(
    ("layout", "strides"), [(KVLayout.COMBINED, [(640, 320), (1920, 960)]), (KVLayout.SEPARATE, [(320, 1024), (960, 3072)])]
)
def test_of_a_cache(memory, stream, layout, strides):
    layers = [KVLayerConfig(num_kv_heads=heads, head_dim=32) for heads in (1, 3)]
    config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=5, dtype="float16", layout=layout)
    with KVCacheManager(config, memory=memory) as cache:
        views = [cache.get_combined_kv_cache(index) for index in range(2)]
        infos = KVLayerInfos(views, stream=stream)
        rows = [[view.ptr, *stride, heads, 5] for view, stride, heads in zip(views, strides, (1, 3), strict=True)]
        array = infos.device_layer_infos
        assert [list(info) for info in infos.host] == array.numpy().tolist() == rows
        assert (array.dtype, array.memory, infos.views) == ("int64", memory, tuple(views))
        assert (infos.num_layers, infos.head_dim, infos.max_kv_heads, infos.max_batch_size) == (2, 32, 3, 3)
        assert (infos.dtype, infos.memory, infos.is_saved, infos.row_nbytes) == ("float16", memory, False, 64)
        assert infos.shortest_sequence == 5


def test_of_saved_tensors_nothing_is_allocated(memory, stream):
    views = [tensor(memory, stream, (2, heads, 3, 8)) for heads in (2, 1)]
    before = memory.live_nbytes
    infos = KVLayerInfos(views, stream=stream)
    assert memory.live_nbytes == before
    assert (infos.is_saved, infos.max_batch_size, infos.shortest_sequence, infos.max_kv_heads) == (True, 1, 3, 2)
    rows = [(info.data, info.num_kv_heads, info.max_sequence_length) for info in infos.host]
    assert rows == [(views[0].ptr, 2, 3), (views[1].ptr, 1, 3)]
    with pytest.raises(LayoutError, match=r"^KVLayerInfos of saved tensors have no device array: "):
        _ = infos.device_layer_infos


def test_of_states(memory, stream):
    views = [tensor(memory, stream, (3, 2, 5), "float32"), tensor(memory, stream, (3, 7), "int8", strides=(9, 1))]
    infos = StateInfos(views, stream=stream)
    rows = [[views[0].ptr, 40, 40], [views[1].ptr, 9, 7]]
    assert [list(info) for info in infos.host] == infos.device_state_infos.numpy().tolist() == rows
    assert (infos.num_layers, infos.max_batch_size, infos.max_row_nbytes, infos.memory) == (2, 3, 40, memory)


def test_strides_of_dimensions_of_size_1_mean_nothing(memory, stream):
    view = tensor(memory, stream, (1, 2, 1, 3, 8), strides=(7, 24, 5, 8, 1))
    assert KVLayerInfos([view], stream=stream).host[0].kv_stride == 48
    view = tensor(memory, stream, (2, 3, 1), "float32", strides=(5, 1, 9))
    assert StateInfos([view], stream=stream).host[0].row_nbytes == 12


KINDS = pytest.mark.parametrize(("kind", "shape"), [(KVLayerInfos, (2, 2, 1, 3, 8)), (StateInfos, (3, 8))])


@KINDS
def test_life(memory, stream, kind, shape):
    view = tensor(memory, stream, shape)
    infos, closed = kind([view], stream=stream), kind([view], stream=stream)
    with pytest.raises(TypeError):
        copy(infos)
    closed.close()
    closed.close()
    array = {KVLayerInfos: "device_layer_infos", StateInfos: "device_state_infos"}[kind]
    with pytest.raises(ClosedError, match=rf"^these {kind.__name__}, or the memory behind them, are closed\.$"):
        closed.check_open()
    with pytest.raises(ClosedError, match=rf"^these {kind.__name__} are closed\.$"):
        getattr(closed, array)
    infos.check_open()
    view.allocation.close()
    with pytest.raises(ClosedError):
        infos.check_open()
    with pytest.raises(ClosedError, match=r"^views\[0\]: the memory behind it is closed\.$"):
        kind([view], stream=stream)


@KINDS
def test_places(memory, stream, kind, shape):
    host = HostMemory()
    mine, other = tensor(memory, stream, shape), tensor(host, host.create_stream(), shape)
    before = memory.live_nbytes
    for views, on, message in (
        ([mine, other], stream, f"PlaceError: views[1]: expected a tensor of {memory.device}, got one of cpu."),
        ([mine, None], stream, "PlaceError: views[1]: expected a DeviceTensor, got NoneType."),
        ([mine], None, "PlaceError: stream: expected "),
        (mine, stream, "ShapeError: views: expected a sequence of "),
        ([], stream, "ShapeError: views: expected a sequence of "),
    ):
        with pytest.raises(KVCacheError) as caught:
            kind(views, stream=on)
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
    assert memory.live_nbytes == before


# Shapes of views, float16, with strides or an offset of the last one.
KV = (2, 2, 1, 3, 8)
SAVED, CACHE = "expected a tensor [2, H, n, D], got ", "expected a tensor [B, 2, H, S, D], got "
ROWS, PLACES = "expected rows of a multiple of 16 bytes, got ", "expected slots, K and V at multiples of 16 bytes, got "
REFUSED: dict[Any, list[tuple[list[tuple[int, ...]], dict[str, Any], str]]] = {
    KVLayerInfos: [
        ([(2, 1, 3, 8), KV], {}, f"ShapeError: views[1]: {SAVED}"),
        ([(3, 1, 3, 8)], {}, f"ShapeError: views[0]: {SAVED}"),
        ([(2, 3, 1, 3, 8)], {}, f"ShapeError: views[0]: {CACHE}"),
        ([(2, 2, 0, 3, 8)], {}, f"ShapeError: views[0]: {CACHE}"),
        ([(2, 2, 3)], {}, f"ShapeError: views[0]: {SAVED}"),
        ([(2, 2, 1, 3, 4)], {}, f"ShapeError: views[0]: {ROWS}"),
        ([(2, 2, 1, 3, 0)], {}, f"ShapeError: views[0]: {ROWS}"),
        ([KV], {"offset": 8}, f"LayoutError: views[0]: {PLACES}"),
        ([KV], {"strides": (52, 24, 24, 8, 1)}, f"LayoutError: views[0]: {PLACES}"),
        ([(2, 2, 2, 3, 8)], {"strides": (96, 48, 8, 16, 1)}, "LayoutError: views[0]: expected dense heads [H, S, D], got "),
        ([KV], {"strides": (0, 24, 24, 8, 1)}, "LayoutError: views[0]: slots, or K and V, overlap: "),
        ([KV], {"strides": (24, 32, 24, 8, 1)}, "LayoutError: views[0]: slots, or K and V, overlap: "),
        ([(2, 1, 3, 8)], {"strides": (32, 24, 8, 1)}, "LayoutError: views[0]: expected a dense tensor [2, H, n, D], got "),
        ([KV, (2, 2, 1, 3, 16)], {}, "ShapeError: views[1]: expected head_dim 8 as views[0], got 16."),
        ([KV, KV], {"dtype": "bfloat16"}, "DTypeError: views[1]: expected float16 as views[0], got bfloat16."),
        ([KV, (3, 2, 1, 3, 8)], {}, "ShapeError: views[1]: expected 2 slots as views[0], got 3."),
        ([(2, 1, 3, 8), (2, 1, 4, 8)], {}, "ShapeError: views[1]: expected 3 tokens as views[0], got 4."),
    ],
    StateInfos: [
        ([(3,)], {}, "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
        ([(3, 0)], {}, "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
        ([(0, 3)], {}, "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
        ([(3, 2, 4)], {"strides": (16, 1, 2)}, "LayoutError: views[0]: expected dense states, got "),
        ([(3, 8)], {"strides": (7, 1)}, "LayoutError: views[0]: slots overlap: "),
        ([(3, 8), (2, 8)], {}, "ShapeError: views[1]: expected 3 slots as views[0], got 2."),
    ],
}


@pytest.mark.parametrize(("kind", "shapes", "last", "message"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases])
def test_refused(memory, stream, kind, shapes, last, message):
    views = [tensor(memory, stream, shape) for shape in shapes[:-1]] + [tensor(memory, stream, shapes[-1], **last)]
    with pytest.raises(KVCacheError) as caught:
        kind(views, stream=stream)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert text == message or (text.startswith(message) and message.endswith(" "))
