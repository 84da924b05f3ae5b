"""An engine folder of a small model, and a way to change its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from trt_kvcache.engine_folder.folder import EngineFolder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> EngineFolder:
    return make_engine_folder(model, tmp_path / "engine")
