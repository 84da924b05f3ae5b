"""What ``inspect`` reads from an engine folder, without TensorRT and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.models import write_model
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine_folder.inspection import inspect_engine
from trt_kvcache.errors import EngineError


def test_inspection(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    choices = (
        AttentionLayerConfig(layer=0, variant="native", decomposable=False),
        AttentionLayerConfig(layer=1, variant="native", decomposable=True, reason="because"),
    )
    make_engine_folder(model, tmp_path / "engine", attention=choices, compute_capabilities=("8.9",))
    found = inspect_engine(tmp_path / "engine")
    assert found.path == tmp_path / "engine"
    assert (found.tensorrt_flavour, found.tensorrt_version, found.compute_capabilities) == ("tensorrt_rtx", "1.7.1", ("8.9",))
    assert (found.dtype, found.model.family, found.cache.max_batch_size) == ("float16", "llama", 3)
    assert [spec.name for spec in found.tensors if spec.alias] == [f"present_{kind}_cache_{layer}" for layer in (0, 1) for kind in "kv"]
    assert [(profile.name, profile.max_width) for profile in found.profiles] == [("prefill", 11), ("decode", 1)]
    assert found.decomposable_layers == (choices[1],)
    assert found.plan_nbytes == len(PLAN)
    assert found.checkpoint.path == str(model)
    # K and V of one layer: 3 slots x 2 heads x 38 tokens x 24 x 2 bytes = 10 944, padded to 11 008 each.
    assert found.memory.bytes_per_layer == (22016, 22016)
    assert found.memory.nbytes == found.cache.nbytes == 44032
    assert found.memory.bytes_per_sequence == 2 * 2 * 2 * 38 * 24 * 2


def test_not_an_engine_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="expected an engine folder"):
        inspect_engine(tmp_path)


def test_needs_neither_tensorrt_nor_cuda(tmp_path: Path) -> None:
    make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine")
    code = (
        "import sys; sys.modules.update({'tensorrt': None, 'tensorrt_rtx': None, 'cuda': None});"
        f"from trt_kvcache.engine_folder.inspection import inspect_engine; print(inspect_engine({str(tmp_path / 'engine')!r}).dtype)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "float16"
