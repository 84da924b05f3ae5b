"""Folders of engines in segments: what is read back, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder, segment_plans
from tests.helpers.models import write_model
from tests.paths import GOLDEN
from trt_kvcache.engine_folder.decoder_segments import COS_SIN, EMBEDDING
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.errors import EngineError

LAYERS = 2


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> EngineFolder:
    base = tmp_path_factory.mktemp("segments")
    model = write_model(base / "model", num_hidden_layers=LAYERS, head_dim=64)
    return make_engine_folder(model, base / "engine", segmented=True)


@pytest.fixture
def path(original: EngineFolder, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(original.path, tmp_path / "engine"))


def test_the_configuration_is_read_back(original: EngineFolder) -> None:
    assert EngineFolder.open(original.path).config == original.config


def test_constants_are_read_back(original: EngineFolder) -> None:
    assert set(original.read_constants()) == {EMBEDDING, COS_SIN}


def test_each_plan_is_found_by_its_span(original: EngineFolder) -> None:
    assert original.config.segments is not None
    with original.read_plan() as plan:
        assert [plan[start:end] for start, end in original.config.segments.spans] == segment_plans(LAYERS)


def test_constants_of_another_size_are_refused(path: Path) -> None:
    (path / "constants.safetensors").write_bytes(b"12345")
    with raises(EngineError, "constants.safetensors", expected="bytes as config.json records", got=5):
        EngineFolder.open(path)


def test_constants_with_a_flipped_bit_are_refused_when_they_are_read(path: Path) -> None:
    file = path / "constants.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    folder = EngineFolder.open(path)
    with pytest.raises(EngineError, match=r"constants\.safetensors: it was changed since"):
        folder.read_constants()


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        ("tensorrt", {"flavour": "tensorrt"}, "segments: expected none of tensorrt and plugin attention, got some"),
        ("segments/steps/2", {"inputs": []}, r"segments\.steps\[2\]: expected CustomOpNode"),
        ("segments/steps/2/attributes", {"num_heads": 8}, r"segments\.steps\[2\]: expected"),
        ("segments/steps/1", {"plan_nbytes": 0}, "segment 0: plan_nbytes: expected at least 1, got 0"),
        ("segments/steps/5", {"plan_nbytes": 7}, "plan.nbytes: expected 8199, the end of the last segment, got "),
        ("segments/constants", {"nbytes": "1"}, r"segments\.constants\.nbytes: expected an integer"),
        ("attention/1", {"variant": "mask"}, r"attention\[1\]\.variant: expected plugin as in the first layer, got mask"),
        ("kv_cache", {"layout": "separate"}, r"kv_cache\.layout: expected combined for this model, got separate"),
    ],
)
def test_values_that_contradict_each_other_are_refused(path: Path, place: str, values: dict[str, Any], message: str) -> None:
    data = inner = json.loads((path / "config.json").read_text())
    for key in place.split("/") if place else []:
        inner = inner[int(key) if key.isdigit() else key]
    inner.update(values)
    (path / "config.json").write_text(json.dumps(data))
    with pytest.raises(EngineError, match=message):
        EngineFolder.open(path)


def test_a_missing_stage_is_refused(path: Path) -> None:
    data = json.loads((path / "config.json").read_text())
    data["segments"]["steps"].pop()
    (path / "config.json").write_text(json.dumps(data))
    with raises(EngineError, "segments.steps", expected="6 for this model and kv_cache", got=5):
        EngineFolder.open(path)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_constants_that_do_not_fit_the_model_are_refused(path: Path, change: str) -> None:
    file = path / "constants.safetensors"
    constants = dict(EngineFolder.open(path).read_constants())
    if change == "missing":
        del constants[COS_SIN]
    else:
        constants[COS_SIN] = constants[COS_SIN][:-1] if change == "shape" else constants[COS_SIN].astype(np.float16)
    content = save({name: np.ascontiguousarray(array) for name, array in constants.items()})
    file.write_bytes(content)
    data = json.loads((path / "config.json").read_text())
    data["segments"]["constants"] = asdict(FileRecord.of([content]))
    (path / "config.json").write_text(json.dumps(data))
    with raises(EngineError, "constants.safetensors", expected=f"`{COS_SIN}` float32 (38, 2, 32)"):
        EngineFolder.open(path).read_constants()


@pytest.mark.parametrize("change", [{"window": 8}, {"softcap": 3.0}, {"scale": 0.5}, {"rotary_dim": 12}])
def test_attention_that_is_not_that_of_its_layer_is_refused(tmp_path: Path, change: dict[str, float]) -> None:
    path = make_engine_folder(GOLDEN / "gemma2", tmp_path / "engine", segmented=True).path
    assert len(EngineFolder.open(path).read_constants()) == 2
    data = json.loads((path / "config.json").read_text())
    data["segments"]["steps"][2]["attributes"].update(change)
    (path / "config.json").write_text(json.dumps(data))
    with raises(EngineError, "segments.steps[2]", expected="CustomOpNode"):
        EngineFolder.open(path)


def test_native_attention_of_a_model_with_windows_is_refused(tmp_path: Path) -> None:
    path = make_engine_folder(GOLDEN / "mistral-window", tmp_path / "engine").path
    message = (
        r"attention: expected mask or plugin, got native: layers\[0\]\.mixer\.window = 7, and TensorRT's attention layer has no window"
    )
    with pytest.raises(EngineError, match=message):
        EngineFolder.open(path)
