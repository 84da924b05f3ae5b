"""Arrays of NumPy on a device of torch: the same bytes, of any dtype, shape and strides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache.torch_engine.upload import Upload  # noqa: E402

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
ARRAYS = {
    "bfloat16": np.arange(3000, dtype=np.float32).reshape(30, 100).astype(ml_dtypes.bfloat16),
    "float32": np.arange(1000, dtype=np.float32),
    "bytes": np.arange(2049, dtype=np.uint8).reshape(1, 2049),
    "strided": np.arange(1200, dtype=np.float16).reshape(30, 40)[::3, ::-2],
    "transposed": np.arange(1200, dtype=np.int32).reshape(30, 40).T,
    "scalar": np.array(3, np.int8),
    "empty": np.zeros((4, 0), np.float16),
}


def written(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@DEVICES
@pytest.mark.parametrize("name", ARRAYS)
def test_the_same_bytes(device, name):
    tensor = Upload(torch.device(device))(ARRAYS[name])
    assert tuple(tensor.shape) == ARRAYS[name].shape
    assert written(tensor) == ARRAYS[name].tobytes()


@DEVICES
def test_an_array_of_its_own(device):
    values = np.ones(10, np.float32)
    tensor = Upload(torch.device(device))(values)
    values[:] = 2
    assert (tensor == 1).all()


@pytest.mark.gpu
def test_more_bytes_than_the_buffers():
    """Buffers are used again only after their copy: many copies of many parts, the last of each array smaller."""
    upload = Upload(torch.device("cuda:0"), stage_nbytes=1 << 20)
    arrays = [np.random.default_rng(seed).integers(0, 256, 5_000_003 + seed, np.uint8) for seed in range(8)]
    for array, tensor in [(array, upload(array)) for array in arrays]:
        assert written(tensor) == array.tobytes()
