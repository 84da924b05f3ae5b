"""Engine folders with a damaged ``config.json``: refused with an error of ours, or read as what the file says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.mutations import damaged_json
from tests.faults.watch import Findings
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.inspection import inspect_engine


@pytest.fixture
def folder(tmp_path: Path) -> EngineFolder:
    return make_engine_folder(write_model(tmp_path / "model", num_hidden_layers=2), tmp_path / "engine")


def read(path: Path) -> None:
    """Open a folder as every command does. What was read is what the file says."""
    found = EngineFolder.open(path)
    found.read_plan().close()
    inspect_engine(path)
    data = json.loads((path / "config.json").read_bytes())
    _check_same(found.config.to_dict(), data)


def _check_same(ours: Any, data: Any, path: str = "") -> None:
    """What the file has is what was read. What it leaves out has a default, and the model has more than one spelling."""
    if isinstance(ours, dict) and isinstance(data, dict):
        for name, value in data.items():
            if name in ours and path + name not in ("format", "producer", "model"):
                _check_same(ours[name], value, f"{path}{name}.")
    elif isinstance(ours, list) and isinstance(data, list):
        assert len(ours) == len(data), path
        for index, pair in enumerate(zip(ours, data, strict=True)):
            _check_same(*pair, f"{path}{index}.")
    else:
        assert ours == data, path


def cases(folder: EngineFolder, seeds: range) -> None:
    path = folder.path / "config.json"
    original, findings = path.read_bytes(), Findings()
    for seed in seeds:
        path.write_bytes(damaged_json(original, random.Random(seed)))
        findings.run(seed, lambda: read(folder.path))
    findings.check()
    assert findings.refused


def test_damaged_folders(folder: EngineFolder) -> None:
    cases(folder, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_damaged_folders(folder: EngineFolder, part: int) -> None:
    cases(folder, range(1000 + 1500 * part, 2500 + 1500 * part))
