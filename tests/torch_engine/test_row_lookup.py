"""Rows of tables by token ids, on a device and in host memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.paths import GOLDEN
from tests.simt.standin import needs_standin
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

import trt_kvcache  # noqa: E402
from trt_kvcache import HostMemory  # noqa: E402
from trt_kvcache.dtypes import numpy_dtype  # noqa: E402
from trt_kvcache.errors import ConfigError  # noqa: E402
from trt_kvcache.memory.base import Memory  # noqa: E402
from trt_kvcache.torch_engine import row_lookup  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402
from trt_kvcache.torch_engine.row_lookup import HostRows, KernelLookUp, look_up  # noqa: E402

IDS = torch.tensor([[10, 0, 3], [3, 7, 1]], dtype=torch.int32)

#: Dtypes of a table in a checkpoint and in memory.
DTYPES = [("float16", "float32"), *((one, one) for one in ("float16", "bfloat16", "uint8"))]


def table_of(memory: Memory, stored: str, dtype: str, shape: tuple[int, ...]) -> tuple[HostRows, np.ndarray]:
    """Return a table in host memory, and the rows of ``IDS`` in float32."""
    values = np.random.default_rng(0).integers(0, 99, shape).astype(numpy_dtype(stored))
    return HostRows.of(values, dtype, memory), values[IDS.numpy()].astype(np.float32)


@pytest.mark.parametrize(("stored", "dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(11, 5), (11, 2, 3)])
def test_a_table_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], stored: str, dtype: str) -> None:
    monkeypatch.setattr(row_lookup, "_PART", 12)
    table, expected = table_of(HostMemory(), stored, dtype, shape)
    assert (table.values.dtype, table.values.shape) == (getattr(torch, dtype), shape)
    np.testing.assert_array_equal(look_up(table.values, IDS).float().numpy(), expected)


@needs_standin
@pytest.mark.device
@pytest.mark.parametrize(("stored", "dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(11, 5), (11, 16), (11, 2, 3)])
def test_rows_in_host_memory_are_those_on_the_device(memory: Memory, shape: tuple[int, ...], stored: str, dtype: str) -> None:
    stream = memory.create_stream()
    kernel = KernelLookUp(DeviceViews(memory), stream)
    table, expected = table_of(memory, stored, dtype, shape)
    for rows in (table, table.values):  # the emulated device has the addresses of the host
        found = kernel(rows, IDS)
        memory.synchronize(stream)
        assert found.shape == (*IDS.shape, *shape[1:])
        np.testing.assert_array_equal(found.float().numpy(), expected)
    ids = torch.tensor([[11, -1, 2]], dtype=torch.int32)
    no_row = kernel(table, ids)
    memory.synchronize(stream)
    assert not no_row[0, :2].any()


def test_the_table_is_a_copy_in_the_memory_of_the_device() -> None:
    """Pinned memory of the device's driver, not of the file."""
    asked = []

    class Counted(HostMemory):
        def staging(self, shape, dtype):  # type: ignore[no-untyped-def]
            asked.append((tuple(shape), dtype))
            return super().staging(shape, dtype)

    values = np.ones((3, 4), ml_dtypes.bfloat16)
    table = HostRows.of(values, "bfloat16", Counted())
    values[:] = 0
    assert asked == [((3, 4), "bfloat16")]
    assert table.values.float().min() == 1


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_on_a_cpu_both_places_are_host_memory(engine: str) -> None:
    found = []
    for place in ("device", "host"):
        options = {"engine": engine, "per_layer_table": place, "max_sequence_length": 16, "dtype": "float32"}
        with trt_kvcache.load(GOLDEN / "gemma4-ple", **options) as session:  # type: ignore[arg-type]
            found.append(session.prefill([[3, 1, 4]]).copy())
    np.testing.assert_array_equal(*found)


def test_a_model_without_the_table_is_refused() -> None:
    with raises(ConfigError, "per_layer_table", expected="device for a model without per-layer embeddings", got="host for llama"):
        trt_kvcache.load(GOLDEN / "llama", engine="torch", per_layer_table="host")
