"""``import trt_kvcache`` needs NumPy and ml_dtypes, and nothing else. Each test asks a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import trt_kvcache

USE_A_CACHE = """
memory = trt_kvcache.HostMemory()
stream = memory.create_stream()
layers = [trt_kvcache.KVLayerConfig(num_kv_heads=2, head_dim=16)]
kv = trt_kvcache.KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, dtype="bfloat16")
with trt_kvcache.KVCacheManager(kv, memory=memory) as cache:
    cache.reset_for_new_sequences([0, 5], stream=stream)
    cache.commit_sequence_length(2, stream=stream)
    cache.commit_sequence_length([0, 0], stream=stream)
    cache.commit_sequence_length(memory.to_device(numpy.zeros(2, numpy.int32), stream=stream), max_increment=0, stream=stream)
    cache.sync_lengths(stream=stream)
    assert cache.host_kv_cache_lengths == (2, 7)
    cache.get_combined_kv_cache(0).numpy()
trt_kvcache.longest_sequence(kv, 1 << 20)
"""


def _run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("then", ["", USE_A_CACHE], ids=["import", "import and use"])
def test_only_numpy_and_ml_dtypes_are_imported(then):
    program = (
        "import json, sys, numpy, ml_dtypes\n"
        "before = set(sys.modules)\n"
        "import trt_kvcache\n"
        f"{then}\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))))"
    )
    assert json.loads(_run(program)) == ["trt_kvcache"]


def test_nothing_else_is_needed():
    program = f"""
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {{"numpy", "ml_dtypes", "trt_kvcache", *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
import numpy
import trt_kvcache
{USE_A_CACHE}
try:
    import hypothesis
except ModuleNotFoundError:
    print("refused")
"""
    assert _run(program) == "refused\n"


def test_the_names_of_the_package():
    assert set(trt_kvcache.__all__) >= {
        "CacheConfig",
        "CudaMemory",
        "DeviceTensor",
        "HostMemory",
        "InferenceSession",
        "KVCacheConfig",
        "KVCacheManager",
        "KVLayerConfig",
        "KVLayout",
        "Lengths",
        "LinearKVCache",
        "estimate_memory",
        "largest_batch",
        "longest_sequence",
    }
    assert dir(trt_kvcache) == trt_kvcache.__all__
    assert sorted(set(trt_kvcache.__all__)) == sorted(trt_kvcache.__all__)


@pytest.mark.parametrize("name", trt_kvcache.__all__)
def test_each_name_of_the_package_is_there(name):
    assert getattr(trt_kvcache, name) is not None


def test_another_name_is_not():
    with pytest.raises(AttributeError, match=r"^module 'trt_kvcache' has no attribute 'KVCache'$"):
        trt_kvcache.KVCache  # noqa: B018
