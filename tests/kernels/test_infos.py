"""Infos: what a kernel is told about layers and states, and which views cannot be told."""

import pytest

from trt_kvcache import DeviceTensor, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.errors import KVCacheError, LayoutError
from trt_kvcache.kernels import KVLayerInfos, StateInfos


def tensor(memory, stream, shape, dtype="float16", **view):
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


# Shapes of views, float16, with strides or an offset of the last one.
KV = (2, 2, 1, 3, 8)
ROWS, PLACES = "expected rows of a multiple of 16 bytes, got ", "expected slots, K and V at multiples of 16 bytes, got "
REFUSED = {
    KVLayerInfos: [
        ([(2, 2, 1, 3, 4)], {}, f"ShapeError: views[0]: {ROWS}"),
        ([KV], {"offset": 8}, f"LayoutError: views[0]: {PLACES}"),
        ([(2, 2, 2, 3, 8)], {"strides": (96, 48, 8, 16, 1)}, "LayoutError: views[0]: expected dense heads [H, S, D], got "),
        ([KV], {"strides": (0, 24, 24, 8, 1)}, "LayoutError: views[0]: slots, or K and V, overlap: "),
        ([(2, 1, 3, 8)], {"strides": (32, 24, 8, 1)}, "LayoutError: views[0]: expected a dense tensor [2, H, n, D], got "),
        ([KV, (2, 2, 1, 3, 16)], {}, "ShapeError: views[1]: expected head_dim 8 as views[0], got 16."),
        ([KV, KV], {"dtype": "bfloat16"}, "DTypeError: views[1]: expected float16 as views[0], got bfloat16."),
    ],
    StateInfos: [
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
