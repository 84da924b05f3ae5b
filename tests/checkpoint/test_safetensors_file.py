"""One safetensors file, mapped into memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file

from tests.checkpoint.folders import Q_PROJ, CopyOf, refused
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.safetensors_file import safetensors_buffers


def test_a_file_whose_tensors_are_not_aligned(copy_of: CopyOf) -> None:
    """Old writers did not pad the header; the arrays are usable all the same."""
    folder = copy_of("llama")
    file = folder / "model.safetensors"
    expected = load_file(file)[Q_PROJ]
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + header_bytes].rstrip(b" ")
    header += b" " * (1 + len(header) % 2 - 2 * (len(header) % 2))  # an odd length
    assert len(header) % 2 == 1
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + header_bytes :])
    with Checkpoint.open(folder) as checkpoint:
        array = checkpoint.tensor(Q_PROJ)
        assert array.flags.aligned
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, expected)


def test_buffers_of_a_file() -> None:
    """The library reads them, and what is contiguous was not copied."""
    random = np.random.default_rng(0)
    table = random.standard_normal((5, 3)).astype(ml_dtypes.bfloat16)
    angles = random.standard_normal((4, 7)).astype(np.float32)
    tensors = {"table": table, "angles": angles, "columns": angles.T}
    header, *parts = safetensors_buffers(tensors)
    assert len(header) % 8 == 0
    found = dict(deserialize(b"".join([header, *(part.tobytes() for part in parts)])))
    codes = {"table": "BF16", "angles": "F32", "columns": "F32"}
    assert {name: (one["dtype"], tuple(one["shape"])) for name, one in found.items()} == {
        name: (codes[name], array.shape) for name, array in tensors.items()
    }
    assert all(bytes(found[name]["data"]) == array.tobytes() for name, array in tensors.items())
    assert any(np.shares_memory(part, table) for part in parts)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(copy_of: CopyOf, keep: int) -> None:
    folder = copy_of("llama")
    file = folder / "model.safetensors"
    content = file.read_bytes()[:keep]
    file.write_bytes(content)
    message = refused(folder)
    assert f"{file}: expected a whole safetensors file, got {len(content)} bytes" in message
    assert "It may be truncated" in message


def test_weights_that_are_a_folder_are_refused(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors" in refused(folder)
