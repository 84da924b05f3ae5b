import numpy as np
import pytest

from tests.helpers.cache_cases import Image, fill_all, make_cache, on_device
from trt_kvcache import KVLayout
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ClosedError, LengthsUnknown
from trt_kvcache.polygraphy.live_rows import live_rows


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_they_are_what_the_cache_holds_up_to_each_length(memory, stream, layout, dtype):
    with make_cache("manager", memory, layout=layout, dtype=dtype) as cache:
        cache.reset_for_new_sequences([5, 0, 2], stream=stream)
        fill_all(cache, stream)
        rows = live_rows(cache)
        assert (rows["kvcache_lengths"].dtype, rows["kvcache_lengths"].tolist()) == (np.int32, [5, 0, 2])
        expected = {}
        for layer, held in enumerate(Image(cache).rows):
            values = held[:3, :, :, :5].view(numpy_dtype(dtype)).astype(np.float32)
            values[1] = values[2, :, :, 2:] = 0
            expected |= {f"k_cache_{layer}": values[:, 0], f"v_cache_{layer}": values[:, 1]}
        assert list(rows) == [*expected, "kvcache_lengths"]
        for name, values in expected.items():
            assert rows[name].dtype == np.float32
            np.testing.assert_array_equal(rows[name], values, err_msg=name)


def test_lengths_must_be_known_and_the_cache_open(memory, stream):
    cache = make_cache("manager", memory)
    cache.reset_for_new_sequences([1], stream=stream)
    cache.commit_sequence_length(on_device(memory, [1], stream), max_increment=1, stream=stream)
    with pytest.raises(LengthsUnknown):
        live_rows(cache)
    cache.sync_lengths(stream=stream)
    assert live_rows(cache)["kvcache_lengths"].tolist() == [2]
    cache.close()
    with pytest.raises(ClosedError):
        live_rows(cache)
