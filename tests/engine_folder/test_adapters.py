"""Engine folders with a merged adapter: its record, its copy, and adapters that are gone or changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.adapters import write_adapter
from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from trt_kvcache import InferenceSession, inspect_engine, load
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter
from trt_kvcache.engine_folder.folder import CONFIG_FILE, EngineFolder, check_target
from trt_kvcache.errors import CheckpointError, ConfigError, EngineError


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
def adapted(tmp_path: Path, model: Path, adapter: Path) -> EngineFolder:
    return make_engine_folder(model, tmp_path / "adapted", adapter=adapter)


def test_the_configuration_records_the_adapter(adapted: EngineFolder, folder: EngineFolder, adapter: Path) -> None:
    found = inspect_engine(adapted.path)
    assert (found.checkpoint.adapter, found.checkpoint.adapter_fingerprint) == (str(adapter), LoraAdapter.open(adapter).fingerprint())
    assert found.engines == ("tensorrt", "torch", "numpy")
    plain = EngineFolder.open(folder.path).config.checkpoint
    assert (plain.adapter, plain.adapter_fingerprint) == ("", "")
    assert plain.fingerprint != found.checkpoint.fingerprint


def test_a_session_of_the_folder_has_the_adapter(adapted: EngineFolder, model: Path, adapter: Path) -> None:
    with InferenceSession.open(adapted.path, engine="numpy") as session, load(model, adapter=adapter, engine="numpy") as other:
        np.testing.assert_array_equal(session.prefill([[5, 6, 7]]), other.prefill([[5, 6, 7]]))


def test_an_embedded_adapter_survives_the_original(tmp_path: Path, model: Path, adapter: Path) -> None:
    folder = make_engine_folder(model, tmp_path / "embedded", adapter=adapter, embedded=True)
    shutil.rmtree(adapter)
    shutil.rmtree(model)
    with EngineFolder.open(folder.path).open_checkpoint() as checkpoint:
        assert checkpoint.adapter is not None
        assert checkpoint.adapter.path == folder.path / "adapter"
    check_target(folder.path, tmp_path / "another")  # such a folder may be replaced


def test_an_adapter_that_is_gone_or_changed_is_refused(adapted: EngineFolder, adapter: Path) -> None:
    write_adapter(adapter, lora_alpha=8)
    with pytest.raises(CheckpointError, match=r"adapter: this adapter was changed since engine .*adapted was built with it"):
        adapted.open_checkpoint()
    shutil.rmtree(adapter)
    with pytest.raises(CheckpointError, match=f"the adapter of this engine is gone: it is not at {adapter}"):
        adapted.open_checkpoint()
    assert inspect_engine(adapted.path).engines == ("tensorrt",)


def test_a_record_of_half_an_adapter_is_refused(adapted: EngineFolder) -> None:
    path = adapted.path / CONFIG_FILE
    data = json.loads(path.read_text())
    data["checkpoint"]["adapter_fingerprint"] = ""
    path.write_text(json.dumps(data))
    with raises(EngineError, "checkpoint", "adapter_fingerprint", "''"):
        EngineFolder.open(adapted.path)


def test_a_folder_is_not_replaced_with_its_adapter_in_it(tmp_path: Path, model: Path, adapter: Path) -> None:
    folder = make_engine_folder(model, tmp_path / "embedded", adapter=adapter, embedded=True)
    with pytest.raises(ConfigError, match=r"the adapter .* is in it and would be replaced"):
        check_target(folder.path, model, folder.path / "adapter")
