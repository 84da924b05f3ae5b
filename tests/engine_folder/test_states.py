"""Engine folders of models with states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.paths import GOLDEN
from trt_kvcache import HybridCacheConfig
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.inspection import inspect_engine
from trt_kvcache.errors import EngineError

MODEL = GOLDEN / "lfm2"


@pytest.mark.parametrize("segmented", [False, True])
def test_a_folder_is_read_back(tmp_path: Path, segmented: bool) -> None:
    written = make_engine_folder(MODEL, tmp_path / "engine", segmented=segmented).config
    read = EngineFolder.open(tmp_path / "engine").config
    assert read == written
    assert isinstance(read.cache, HybridCacheConfig)
    assert [layer.layer for layer in read.attention] == [1]
    states = [spec for spec in read.tensors if "conv_state" in spec.name]
    assert {(spec.dtype, spec.shape, spec.alias) for spec in states} == {("float16", (-1, 64, 3), None)}
    assert len(states) == 6


def test_sizes_are_inspected(tmp_path: Path) -> None:
    make_engine_folder(MODEL, tmp_path / "engine")
    found = inspect_engine(tmp_path / "engine")
    # 3 slots x 64 channels x 3 inputs x 2 bytes = 1152, padded to 1280, of three layers in two buffers.
    assert found.memory.states_nbytes == 6 * 1280
    assert found.memory.nbytes == found.cache.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["kv_cache"]["mamba"].update(conv_dtype="float32"),
            r"kv_cache\.mamba\.conv_dtype: expected float16 .* got float32",
        ),
        (lambda data: data["kv_cache"]["mamba"].update(conv_kernel=4), r"kv_cache\.mamba\.conv_kernel: expected 3 for this model, got 4"),
        (lambda data: data["kv_cache"]["mamba"].update(ping_pong=False), r"kv_cache\.mamba\.ping_pong: expected True .* got False"),
        (lambda data: data["kv_cache"]["layer_types"].reverse(), r"kv_cache\.layer_types: expected \['mamba', 'attention', "),
        (lambda data: data["kv_cache"].update(mamba=None), r"HybridCacheConfig\.mamba: layer_types has 3 mamba layers, mamba describes 0"),
        (lambda data: data.update(kv_cache=data["kv_cache"]["kv"]), r"kv_cache: expected \{'layer_types': .* got \{'layers'"),
        (lambda data: tensor(data, "conv_state_1").update(dtype="float32"), r"tensor `conv_state_1`: expected .*float16.*, got .*float32"),
        (lambda data: tensor(data, "conv_state_1").update(shape=[-1, 64, 4]), r"tensor `conv_state_1`: expected .*3\).*, got .*4\)"),
        (lambda data: tensor(data, "present_conv_state_0").update(alias="conv_state_0"), r"tensor `present_conv_state_0`: expected "),
        (lambda data: data["attention"][0].update(layer=0), r"attention\[0\]\.layer: expected 1, got 0"),
        (lambda data: data.update(attention=[]), r"attention: expected 1 layers for this model, got 0"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    folder = make_engine_folder(MODEL, tmp_path / "engine")
    path = folder.path / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(EngineError, match=rf"config\.json: {message}"):
        EngineFolder.open(folder.path)


def tensor(data: Any, name: str) -> Any:
    return next(spec for spec in data["tensors"] if spec["name"] == name)
