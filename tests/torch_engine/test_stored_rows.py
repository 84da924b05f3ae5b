"""Tables that stay in the blocks of a GGUF file: their rows are those of the dequantized table, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.checkpoint.gguf.convert import convert
from tests.helpers.gguf_files import SUPER_BLOCKS, random_super_blocks
from tests.paths import GOLDEN
from tests.torch_engine.gemma4_in_blocks import write_gemma4_in_blocks
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.torch_engine.test_uploaded_rows import check  # noqa: E402
from trt_kvcache import Checkpoint, HostMemory, InferenceSession  # noqa: E402
from trt_kvcache.builder.torch_memory import TorchMemory  # noqa: E402
from trt_kvcache.cache.edge_llm import make_cache  # noqa: E402
from trt_kvcache.checkpoint.quantized.gguf import TYPES, BlockValues  # noqa: E402
from trt_kvcache.checkpoint.quantized.offset_blocks import PLANES as OFFSET_PLANES, OffsetBlocks  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.checkpoint.quantized.table_blocks import TableBlocks, table_blocks  # noqa: E402
from trt_kvcache.dtypes import numpy_dtype  # noqa: E402
from trt_kvcache.engine.decoder_cache import decoder_cache_config  # noqa: E402
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402
from trt_kvcache.torch_engine.checkpoint_tensors import CheckpointTensors  # noqa: E402
from trt_kvcache.torch_engine.stored_rows import StoredRows  # noqa: E402
from trt_kvcache.torch_engine.upload import Upload  # noqa: E402

KINDS = ("Q8_0", "Q4_0", *OFFSET_PLANES, *SUPER_BLOCKS)
SHAPE = (11, 512)
IDS = torch.tensor([[10, 0, 3], [3, 7, 1]], dtype=torch.int32)


def table(kind: str, size: float = 0.05) -> tuple[TableBlocks, np.ndarray]:
    """Return a table of a type, and its values."""
    quantized, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(5)
    if kind in SUPER_BLOCKS:
        blocks = random_super_blocks(kind, SHAPE, random, size)
        return SuperBlocks(kind=kind, stored=blocks), gguf.quants.dequantize(blocks, quantized)
    blocks = gguf.quants.quantize((size * random.standard_normal(SHAPE)).astype(np.float32), quantized)
    values = gguf.quants.dequantize(blocks, quantized)
    return BlockValues(stored=blocks, kind=TYPES[kind], shape=SHAPE) if kind in TYPES else OffsetBlocks(kind=kind, stored=blocks), values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_table(kind: str, dtype: str) -> None:
    stored, values = table(kind)
    rows = StoredRows.of(stored, getattr(torch, dtype), Upload(torch.device("cpu")))
    assert rows is not None
    assert rows.blocks.nbytes == stored.stored.nbytes
    check(rows(IDS), values.astype(numpy_dtype(dtype))[IDS.numpy()])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0"])
def test_values_that_the_dtype_cannot_hold_are_refused(kind: str) -> None:
    stored, values = table(kind, size=1e5)
    assert np.abs(values).max() > np.finfo(np.float16).max
    assert StoredRows.of(stored, torch.float16, Upload(torch.device("cpu"))) is None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(write_gemma4_in_blocks(tmp_path)) as found:
        yield found


def test_an_engine_with_stored_rows_computes_the_same_logits(checkpoint: Checkpoint) -> None:
    memory = HostMemory()
    config = decoder_cache_config(checkpoint.config, max_batch_size=2, max_sequence_length=24, dtype="bfloat16", attention="native")
    tensors = CheckpointTensors(checkpoint, "bfloat16", torch.device("cpu"), memory)
    found = []
    for load_rows in (tensors.load_rows, lambda name: None):
        engine = TorchEngine(
            checkpoint.config, tensors.load, lambda name, rows: None, load_rows, kv=config, max_prefill_length=7, memory=memory
        )
        assert engine._weights is not None
        assert engine._weights.per_layer is not None
        assert isinstance(engine._weights.per_layer.embedding, StoredRows) == (load_rows == tensors.load_rows)
        with InferenceSession(engine, make_cache(config, memory=memory)) as session:
            found.append([session.prefill([[3, 1, 4, 1, 5], [9, 2]]), session.decode([6, 5])])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_the_estimate_counts_the_stored_bytes(checkpoint: Checkpoint) -> None:
    elements, nbytes = 83 * 6 * 16, checkpoint.nbytes_of(PER_LAYER_EMBEDDING)
    assert nbytes == elements * 34 // 32
    assert TorchMemory.of(checkpoint).packed[PER_LAYER_EMBEDDING] == nbytes


def test_other_tables_are_read_whole(tmp_path: Path, checkpoint: Checkpoint) -> None:
    assert isinstance(table_blocks(checkpoint, PER_LAYER_EMBEDDING), BlockValues)
    for path in (GOLDEN / "gemma4-ple", convert(GOLDEN / "gemma4-ple", tmp_path / "float.gguf")):
        with Checkpoint.open(path) as other:
            assert table_blocks(other, PER_LAYER_EMBEDDING) is None
            assert PER_LAYER_EMBEDDING not in TorchMemory.of(other).packed
