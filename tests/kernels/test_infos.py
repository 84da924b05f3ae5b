"""Infos: what a kernel is told about layers and states, and which views cannot be told."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.errors import ClosedError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import KVLayerInfos, StateInfos


def tensor(memory: Any, stream: Any, shape: tuple[int, ...], dtype: str = "float16", **view: Any) -> DeviceTensor:
    """A view at the start of 64 KiB."""
    return DeviceTensor(memory.allocate(65536, zeroed=True, stream=stream), shape=shape, dtype=dtype, **view)


def half(*shape: int, **view: Any) -> dict[str, Any]:
    return {"shape": shape, "dtype": "float16", **view}


def refused(kind: Any, memory: Any, stream: Any, views: list[dict[str, Any] | None], message: str) -> None:
    with pytest.raises(KVCacheError) as caught:
        kind([None if view is None else tensor(memory, stream, **view) for view in views], stream=stream)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert text == message or (text.startswith(message) and message.endswith(" "))


class TestKVLayerInfos:
    @pytest.mark.parametrize(
        ("layout", "strides"),
        [(KVLayout.COMBINED, [(640, 320), (1920, 960)]), (KVLayout.SEPARATE, [(320, 1024), (960, 3072)])],
    )
    def test_of_a_cache(self, memory, stream, layout, strides):
        layers = [KVLayerConfig(num_kv_heads=heads, head_dim=32) for heads in (1, 3)]
        config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=5, dtype="float16", layout=layout)
        with KVCacheManager(config, memory=memory) as cache:
            views = [cache.get_combined_kv_cache(index) for index in range(2)]
            infos = KVLayerInfos(views, stream=stream)
            rows = [[view.ptr, *stride, heads, 5] for view, stride, heads in zip(views, strides, (1, 3), strict=True)]
            assert [list(info) for info in infos.host] == rows
            assert infos.device_layer_infos.dtype == "int64"
            assert infos.device_layer_infos.memory is memory
            assert infos.device_layer_infos.numpy().tolist() == rows
            assert (infos.num_layers, infos.head_dim, infos.max_kv_heads, infos.max_batch_size) == (2, 32, 3, 3)
            assert (infos.dtype, infos.memory, infos.is_saved, infos.row_nbytes, infos.shortest_sequence) == (
                "float16",
                memory,
                False,
                64,
                5,
            )
            assert infos.views == tuple(views)
            infos.close()
            infos.close()
            with pytest.raises(ClosedError, match=r"^these KVLayerInfos, or their memory, are closed\.$"):
                infos.check_open()
            with pytest.raises(ClosedError, match=r"^these KVLayerInfos are closed\.$"):
                _ = infos.device_layer_infos

    def test_of_saved_tensors_nothing_is_allocated(self, memory, stream):
        views = [tensor(memory, stream, (2, heads, 3, 8)) for heads in (2, 1)]
        before = memory.live_nbytes
        infos = KVLayerInfos(views, stream=stream)
        assert memory.live_nbytes == before
        assert (infos.is_saved, infos.max_batch_size, infos.shortest_sequence, infos.max_kv_heads) == (True, 1, 3, 2)
        assert [(info.data, info.num_kv_heads, info.max_sequence_length) for info in infos.host] == [
            (view.ptr, heads, 3) for view, heads in zip(views, (2, 1), strict=True)
        ]
        with pytest.raises(LayoutError, match=r"^KVLayerInfos of saved tensors have no device array: "):
            _ = infos.device_layer_infos

    def test_a_closed_layer(self, memory, stream):
        view = tensor(memory, stream, (2, 2, 1, 3, 8))
        infos = KVLayerInfos([view], stream=stream)
        view.allocation.close()
        with pytest.raises(ClosedError):
            infos.check_open()
        with pytest.raises(ClosedError, match=r"^views\[0\]: its memory is closed\.$"):
            KVLayerInfos([view], stream=stream)

    def test_not_copied(self, memory, stream):
        with pytest.raises(TypeError):
            copy(KVLayerInfos([tensor(memory, stream, (2, 2, 1, 3, 8))], stream=stream))

    @pytest.mark.parametrize(
        ("views", "message"),
        [
            ([], "ShapeError: views: expected a sequence of layers, at least one."),
            ([half(2, 2, 1, 3, 8), None], "PlaceError: views[1]: expected a DeviceTensor, got NoneType."),
            ([half(2, 1, 3, 8), half(2, 2, 1, 3, 8)], "ShapeError: views[1]: expected a tensor [2, H, n, D], got "),
            ([half(3, 1, 3, 8)], "ShapeError: views[0]: expected a tensor [2, H, n, D], got "),
            ([half(2, 3, 1, 3, 8)], "ShapeError: views[0]: expected a tensor [B, 2, H, S, D], got "),
            ([half(2, 2, 0, 3, 8)], "ShapeError: views[0]: expected a tensor [B, 2, H, S, D], got "),
            ([half(2, 2, 3)], "ShapeError: views[0]: expected a tensor [2, H, n, D], got "),
            ([half(2, 2, 1, 3, 4)], "ShapeError: views[0]: expected rows of a multiple of 16 bytes, got "),
            ([half(2, 2, 1, 3, 0)], "ShapeError: views[0]: expected rows of a multiple of 16 bytes, got "),
            ([half(2, 2, 1, 3, 8, offset=8)], "LayoutError: views[0]: expected slots, K and V at multiples of 16 bytes, got "),
            (
                [half(2, 2, 1, 3, 8, strides=(52, 24, 24, 8, 1))],
                "LayoutError: views[0]: expected slots, K and V at multiples of 16 bytes, got ",
            ),
            ([half(2, 2, 2, 3, 8, strides=(96, 48, 8, 16, 1))], "LayoutError: views[0]: expected dense heads [H, S, D], got "),
            ([half(2, 2, 1, 3, 8, strides=(0, 24, 24, 8, 1))], "LayoutError: views[0]: slots, or K and V, overlap: "),
            ([half(2, 2, 1, 3, 8, strides=(24, 32, 24, 8, 1))], "LayoutError: views[0]: slots, or K and V, overlap: "),
            ([half(2, 1, 3, 8, strides=(32, 24, 8, 1))], "LayoutError: views[0]: expected a dense tensor [2, H, n, D], got "),
            ([half(2, 2, 1, 3, 8), half(2, 2, 1, 3, 16)], "ShapeError: views[1]: expected head_dim 8 as views[0], got 16."),
            (
                [half(2, 2, 1, 3, 8), half(2, 2, 1, 3, 8, dtype="bfloat16")],
                "DTypeError: views[1]: expected float16 as views[0], got bfloat16.",
            ),
            ([half(2, 2, 1, 3, 8), half(3, 2, 1, 3, 8)], "ShapeError: views[1]: expected 2 slots as views[0], got 3."),
            ([half(2, 1, 3, 8), half(2, 1, 4, 8)], "ShapeError: views[1]: expected 3 tokens as views[0], got 4."),
        ],
    )
    def test_refused(self, memory, stream, views, message):
        refused(KVLayerInfos, memory, stream, views, message)

    def test_places(self, memory, stream):
        host = HostMemory()
        mine, other = tensor(memory, stream, (2, 2, 1, 3, 8)), tensor(host, host.create_stream(), (2, 2, 1, 3, 8))
        before = memory.live_nbytes
        for views, on, message in (
            ([mine, other], stream, f"views[1]: expected a tensor of {memory.device}, got one of cpu."),
            ([mine], None, "stream: expected "),
        ):
            with pytest.raises(PlaceError) as caught:
                KVLayerInfos(views, stream=on)
            assert str(caught.value).startswith(message)
        with raises(ShapeError, "views", expected="sequence of layers, at least one"):
            KVLayerInfos(mine, stream=stream)
        assert memory.live_nbytes == before

    def test_what_a_view_of_one_slot_may_have(self, memory, stream):
        """Strides of dimensions of size 1 mean nothing."""
        view = tensor(memory, stream, (1, 2, 1, 3, 8), strides=(7, 24, 5, 8, 1))
        assert KVLayerInfos([view], stream=stream).host[0].kv_stride == 48


class TestStateInfos:
    def test_of_states(self, memory, stream):
        views = [tensor(memory, stream, (3, 2, 5), "float32"), tensor(memory, stream, (3, 7), "int8", strides=(9, 1))]
        infos = StateInfos(views, stream=stream)
        rows = [[views[0].ptr, 40, 40], [views[1].ptr, 9, 7]]
        assert [list(info) for info in infos.host] == rows
        assert infos.device_state_infos.numpy().tolist() == rows
        assert (infos.num_layers, infos.max_batch_size, infos.max_row_nbytes, infos.memory) == (2, 3, 40, memory)
        infos.close()
        infos.close()
        with pytest.raises(ClosedError, match=r"^these StateInfos, or their memory, are closed\.$"):
            infos.check_open()
        with pytest.raises(ClosedError, match=r"^these StateInfos are closed\.$"):
            _ = infos.device_state_infos

    @pytest.mark.parametrize(
        ("views", "message"),
        [
            ([], "ShapeError: views: expected a sequence of states, at least one."),
            ([None], "PlaceError: views[0]: expected a DeviceTensor, got NoneType."),
            ([half(3)], "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
            ([half(3, 0)], "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
            ([half(0, 3)], "ShapeError: views[0]: expected a tensor [B, ...] with elements, got "),
            ([half(3, 2, 4, strides=(16, 1, 2))], "LayoutError: views[0]: expected dense states, got "),
            ([half(3, 8, strides=(7, 1))], "LayoutError: views[0]: slots overlap: "),
            ([half(3, 8), half(2, 8)], "ShapeError: views[1]: expected 3 slots as views[0], got 2."),
        ],
    )
    def test_refused(self, memory, stream, views, message):
        refused(StateInfos, memory, stream, views, message)

    def test_places(self, memory, stream):
        host = HostMemory()
        mine, other = tensor(memory, stream, (3, 8)), tensor(host, host.create_stream(), (3, 8))
        for views, on in (([mine, other], stream), ([mine], None)):
            with pytest.raises(PlaceError):
                StateInfos(views, stream=on)
        with pytest.raises(ShapeError):
            StateInfos(mine, stream=stream)
        infos = StateInfos([mine], stream=stream)
        mine.allocation.close()
        for use in (infos.check_open, lambda: StateInfos([mine], stream=stream)):
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(TypeError):
            copy(infos)


def test_elements_of_a_strided_row(memory, stream):
    """A row is bytes, whatever the last dimension is."""
    view = tensor(memory, stream, (2, 3, 1), "float32", strides=(5, 1, 9))
    assert StateInfos([view], stream=stream).host[0].row_nbytes == 12
    assert np.array_equal(view.numpy(), np.zeros((2, 3, 1), np.float32))
