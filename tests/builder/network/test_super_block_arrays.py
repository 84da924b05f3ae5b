"""Matrices of GGUF in super-blocks as bytes of an operation: exactly the values that the ``gguf`` package dequantizes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builder.network.test_packed_matrices import made, values

gguf = pytest.importorskip("gguf")

from tests.helpers.gguf_files import random_super_blocks  # noqa: E402
from trt_kvcache.builder.network import super_block_arrays  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.dtypes import numpy_dtype  # noqa: E402


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts; rows of one in another order."""
    monkeypatch.setattr(super_block_arrays, "_ELEMENTS", 16 * 512)
    stored = [random_super_blocks(kind, (48, 512), np.random.default_rng(seed)) for seed in range(3)]
    order = [*range(16, 32), *range(47, 31, -1)]
    parts = [SuperBlocks(kind=kind, stored=one).of_rows([slice(0, 32)]) for one in stored]
    parts[1] = SuperBlocks(kind=kind, stored=stored[1]).of_rows([order])
    exact = [gguf.quants.dequantize(one, getattr(gguf.GGMLQuantizationType, kind)) for one in stored]
    expected = [exact[0][:32], exact[1][order], exact[2][:32]]
    found = values(made(*parts, dtype=dtype), 3, dtype, columns=512)
    for one, weights in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, weights.astype(numpy_dtype(dtype)))


def test_super_blocks_of_no_whole_tile() -> None:
    stored = random_super_blocks("Q5_K", (41, 256), np.random.default_rng(1))
    packed = made(SuperBlocks(kind="Q5_K", stored=stored))
    [found] = values(packed, 1, columns=256, rows=41)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q5_K).astype(numpy_dtype("bfloat16"))
    np.testing.assert_array_equal(found, expected)
