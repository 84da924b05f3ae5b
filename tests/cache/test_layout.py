"""Where K and V of a layer lie in memory, against numbers written out by hand."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trt_kvcache import KVLayout
from trt_kvcache.cache.layout import kv_layer_storage
from trt_kvcache.dtypes import itemsize
from trt_kvcache.memory.shapes import (
    ALIGNMENT,
    is_dense,
)

# B=3, H=2, S=7, D=16: 224 elements of K in a slot; 1344 elements in all.
STORAGES = [
    # dtype, layout, slot stride, K to V, bytes of the layer
    ("float16", KVLayout.COMBINED, 448, 224, 2816),  # 2688 -> 2816
    ("float16", KVLayout.SEPARATE, 224, 768, 3072),  # 2 * (1344 -> 1536)
    ("float32", KVLayout.COMBINED, 448, 224, 5376),  # 21 * 256 exactly
    ("float32", KVLayout.SEPARATE, 224, 704, 5632),  # 2 * (2688 -> 2816)
    ("int8", KVLayout.COMBINED, 448, 224, 1536),  # 1344 -> 1536
    ("float8_e4m3fn", KVLayout.SEPARATE, 224, 768, 1536),  # 2 * (672 -> 768)
]


@pytest.mark.parametrize(("dtype", "layout", "slot_stride", "kv_stride", "nbytes"), STORAGES)
def test_storage_of_a_layer(dtype, layout, slot_stride, kv_stride, nbytes):
    storage = kv_layer_storage(max_batch_size=3, num_kv_heads=2, max_sequence_length=7, head_dim=16, dtype=dtype, layout=layout)
    assert (storage.slot_stride, storage.kv_stride, storage.nbytes) == (slot_stride, kv_stride, nbytes)
    assert storage.combined_shape == (3, 2, 2, 7, 16)
    assert storage.combined_strides == (slot_stride, kv_stride, 112, 16, 1)
    assert storage.separate_shape == (3, 2, 7, 16)
    assert storage.separate_strides == (slot_stride, 112, 16, 1)
    assert is_dense(storage.combined_shape, storage.combined_strides) is (layout is KVLayout.COMBINED)
    assert is_dense(storage.separate_shape, storage.separate_strides) is (layout is KVLayout.SEPARATE)


@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 5),
    length=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"]),
    layout=st.sampled_from(KVLayout),
)
def test_every_element_has_a_place_of_its_own_and_starts_are_aligned(batch, heads, length, head_dim, dtype, layout):
    storage = kv_layer_storage(
        max_batch_size=batch, num_kv_heads=heads, max_sequence_length=length, head_dim=head_dim, dtype=dtype, layout=layout
    )
    grid = np.indices(storage.combined_shape).reshape(5, -1)
    places = np.asarray(storage.combined_strides) @ grid
    assert len(np.unique(places)) == places.size
    assert (places.max() + 1) * itemsize(dtype) <= storage.nbytes
    assert storage.nbytes % ALIGNMENT == 0
    assert storage.nbytes - places.size * itemsize(dtype) < 2 * ALIGNMENT
    if layout is KVLayout.SEPARATE:
        assert storage.kv_stride * itemsize(dtype) % ALIGNMENT == 0


def test_the_two_layouts_are_the_same_bytes_only_for_one_slot():
    def places(batch, layout):
        storage = kv_layer_storage(max_batch_size=batch, num_kv_heads=2, max_sequence_length=8, head_dim=16, dtype="float16", layout=layout)
        return np.asarray(storage.combined_strides) @ np.indices(storage.combined_shape).reshape(5, -1)

    assert np.array_equal(places(1, KVLayout.COMBINED), places(1, KVLayout.SEPARATE))
    assert not np.array_equal(places(2, KVLayout.COMBINED), places(2, KVLayout.SEPARATE))
