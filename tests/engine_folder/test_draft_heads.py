"""Engine folders with that of a draft head in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import eagle3, mtp
from tests.helpers.engine_files import PLAN, make_engine_folder, make_folder_with_head
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import DRAFT_HEAD_FOLDER, EngineFolder


def in_shards(model: Path) -> Path:
    """Put the MTP head of a model into a shard of its own, as published."""
    weights = load_file(model / "model.safetensors")
    files = {name: f"{name.startswith('mtp.')}.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weight for name, weight in weights.items() if files[name] == file}, model / file)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return model


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("embedded", [False, True])
def test_the_folder_of_a_head(tmp_path: Path, kind: str, embedded: bool) -> None:
    """With copies of the checkpoints it has that of the head too: the copy of the model has its MTP head."""
    model = in_shards(mtp.write_mtp_model(tmp_path / "model")) if kind == "mtp" else eagle3.write_model(tmp_path / "model")
    head = "mtp" if kind == "mtp" else eagle3.write_head(tmp_path / "head", model)
    folder = EngineFolder.open(make_folder_with_head(model, head, tmp_path / "engine", embedded=embedded).path)
    of_head = EngineFolder.open(folder.path / DRAFT_HEAD_FOLDER)
    assert of_head.config.checkpoint.fingerprint == folder.config.draft_head
    assert of_head.config.hidden_tensors
    with of_head.read_plan() as plan:
        assert plan[:] == PLAN
    assert (of_head.path / "checkpoint").exists() == (embedded and kind == "eagle3")
    assert (folder.path / "checkpoint").exists() == embedded
    if embedded:
        opened = (
            Checkpoint.open_mtp_head(folder.path / "checkpoint")
            if kind == "mtp"
            else Checkpoint.open_eagle3_head(of_head.path / "checkpoint")
        )
        with opened as copy:
            assert copy.fingerprint() == folder.config.draft_head


def test_a_folder_is_replaced_with_its_head(tmp_path: Path) -> None:
    model = eagle3.write_model(tmp_path / "model")
    place = make_folder_with_head(model, eagle3.write_head(tmp_path / "head", model), tmp_path / "engine").path
    make_engine_folder(model, place)
    assert not (place / DRAFT_HEAD_FOLDER).exists()
    assert EngineFolder.open(place).config.draft_head == ""
