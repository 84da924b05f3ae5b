"""Engine folders: what is written is read back, and what is damaged is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.engine_files import PLAN, make_engine_folder
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import EngineFolder, check_target, is_engine_folder
from trt_kvcache.errors import CheckpointError, ClosedError, ConfigError, EngineError


def edit(folder: EngineFolder, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder.path / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_written_and_read_back(folder: EngineFolder) -> None:
    found = EngineFolder.open(folder.path)
    assert found.config == folder.config
    assert EngineFolder.open(str(folder.path)).config == folder.config
    with found.read_plan() as plan:
        assert plan[:] == PLAN
    assert is_engine_folder(folder.path)
    assert not is_engine_folder(folder.path.parent)
    assert not is_engine_folder(folder.path / "nowhere")


def remove(name: str) -> Callable[[EngineFolder], object]:
    return lambda folder: os.remove(folder.path / name)


def write_config(text: str) -> Callable[[EngineFolder], object]:
    return lambda folder: (folder.path / "config.json").write_text(text)


def with_config(change: Callable[[dict[str, Any]], object]) -> Callable[[EngineFolder], object]:
    return lambda folder: edit(folder, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder.path), r"engine: expected an engine folder, got nothing there\."),
        (remove("engine.plan"), r"engine: expected an engine folder, but it has no engine\.plan\. `trt-kvcache build` makes one\."),
        (remove("config.json"), r"engine: expected an engine folder, but it has no config\.json"),
        (write_config('{"format": 1,'), r"config\.json: cannot be read as JSON: "),
        (write_config("[1]"), r"config\.json: expected a JSON object, got list"),
        (write_config("{}"), r"config\.json: format: expected a number of 1 or more, got None"),
        (
            with_config(lambda data: data.update(format=9)),
            r"config\.json: format: this package reads 8, got 9\. A newer trt-kvcache built the engine: upgrade\.",
        ),
        (with_config(lambda data: data.update(format="1")), r"format: expected a number of 1 or more, got '1'"),
        (with_config(lambda data: data.update(format=True)), r"format: expected a number of 1 or more, got True"),
        (with_config(lambda data: data.pop("model")), r"a field is missing, unknown or of the wrong kind \(KeyError: 'model'\)"),
        (with_config(lambda data: data["plan"].update(md5="0")), r"a field is missing, unknown or of the wrong kind \(TypeError: .*md5"),
        (with_config(lambda data: data.update(tensors=7)), r"a field is missing, unknown or of the wrong kind \(TypeError"),
        (with_config(lambda data: data["names"].update(k_cache="k")), r"TensorNames\.k_cache: expected a name with \{i\}"),
        (with_config(lambda data: data["model"].update(family="gpt2")), r"model\.family: expected one of llama, .*, got 'gpt2'"),
        (
            with_config(lambda data: data["kv_cache"].update(dtype="float64")),
            r"KVCacheConfig\.dtype: expected one of float16",
        ),
        (
            with_config(lambda data: data["kv_cache"]["layers"].pop()),
            r"kv_cache\.layers: expected \[.*\] for this model, got \[",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(layout="combined")),
            r"kv_cache\.layout: expected separate for this model, got combined",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(max_sequence_length=30)),
            r"tensor `k_cache_0`: expected input `k_cache_0` float16 \(-1, 2, 30, 24\) for this model and .*, got .*\(-1, 2, 38, 24\)",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(max_sequence_length=9)),
            r"profiles\[0\]\.max_width: expected an integer from 1 to 9, got 11",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(max_batch_size=4)),
            r"profile prefill: expected max_batch 4 as in kv_cache, got 3",
        ),
        (with_config(lambda data: data.update(profiles=[])), r"profiles: expected 2, for prefill and decode, got 0"),
        (with_config(lambda data: data["attention"].pop()), r"attention: expected 2 layers for this model, got 1"),
        (with_config(lambda data: data["tensors"].pop()), r"tensors: expected 12 for this model and kv_cache, got 11"),
        (
            with_config(lambda data: data["tensors"][7].update(alias="v_cache_0")),
            r"tensor `present_k_cache_0`: expected output .* with `k_cache_0` for this model and kv_cache, got .* with `v_cache_0`",
        ),
        (
            lambda folder: folder.plan_path.write_bytes(PLAN[:-1]),
            r"engine\.plan: expected 31 bytes as config\.json records, got 30\. Build it again\.",
        ),
    ],
)
def test_damaged_folder_is_refused_by_name(folder: EngineFolder, damage: Callable[[EngineFolder], object], message: str) -> None:
    damage(folder)
    with pytest.raises(EngineError, match=message):
        EngineFolder.open(folder.path)


def test_a_file_is_refused_as_an_engine_folder(folder: EngineFolder) -> None:
    with raises(EngineError, "engine.plan", expected="engine folder", got="file"):
        EngineFolder.open(folder.plan_path)


def test_a_plan_with_a_flipped_bit_is_refused(folder: EngineFolder) -> None:
    changed = bytearray(PLAN)
    changed[5] ^= 1
    folder.plan_path.write_bytes(changed)
    opened = EngineFolder.open(folder.path)  # reading the configuration does not read the plan
    with pytest.raises(EngineError, match=r"engine\.plan: it was changed since the build \(SHA-256 .*\)\. Build it again\."):
        opened.read_plan()


def test_the_checkpoint_is_opened_where_it_was_at_the_build(folder: EngineFolder, model: Path) -> None:
    progress: list[tuple[int, int]] = []
    with folder.open_checkpoint(lambda done, total: progress.append((done, total))) as checkpoint:
        assert checkpoint.path == model
        assert progress[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def test_an_embedded_checkpoint_survives_the_original(model: Path, tmp_path: Path) -> None:
    folder = make_engine_folder(model, tmp_path / "engine", embedded=True)
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"
    shutil.rmtree(model)
    moved = tmp_path / "elsewhere"
    folder.path.rename(moved)
    with EngineFolder.open(moved).open_checkpoint() as checkpoint:
        assert checkpoint.path == moved / "checkpoint"


def test_a_missing_checkpoint_is_refused_with_both_places(folder: EngineFolder, model: Path) -> None:
    shutil.rmtree(model)
    with pytest.raises(CheckpointError) as raised:
        folder.open_checkpoint()
    text = str(raised.value)
    assert f"it is neither at {model}, where it was at the build" in text
    assert f"nor at {folder.path / 'checkpoint'}" in text
    assert "embed_weights=True" in text


def test_a_checkpoint_moved_into_the_folder_is_found(folder: EngineFolder, model: Path) -> None:
    model.rename(folder.path / "checkpoint")
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"


@pytest.mark.parametrize("change", ["weight", "config"])
def test_a_changed_checkpoint_is_refused(folder: EngineFolder, model: Path, change: str) -> None:
    if change == "weight":
        path = model / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path = model / "config.json"
        path.write_text(path.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    with pytest.raises(
        CheckpointError, match=r"model: this checkpoint was changed since engine .* was built from it .* Build the engine again"
    ):
        folder.open_checkpoint()


def test_a_checkpoint_that_is_refused_is_closed(folder: EngineFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(model)
    monkeypatch.setattr(checkpoint, "fingerprint", lambda progress: "another")
    monkeypatch.setattr(Checkpoint, "open", lambda path, quantize, adapter: checkpoint)
    with pytest.raises(CheckpointError, match="this checkpoint was changed"):
        folder.open_checkpoint()
    with pytest.raises(ClosedError):
        checkpoint.tensor(checkpoint.tensor_names[0])


def test_a_damaged_checkpoint_is_refused(folder: EngineFolder, model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        folder.open_checkpoint()


@pytest.mark.parametrize("inside", [".", "checkpoint", "checkpoint/deep"])
def test_a_folder_that_holds_the_model_is_not_replaced(folder: EngineFolder, model: Path, inside: str) -> None:
    place = folder.path / inside
    if inside != ".":
        place.parent.mkdir(exist_ok=True)
        model.rename(place)
    with pytest.raises(ConfigError, match=r"engine path .*: the model .* is in it and would be replaced"):
        check_target(folder.path, place)


@pytest.mark.parametrize(("leads_to", "what"), [("link", "got a link to itself"), ("file", "got a file"), ("folder", "but it holds a.txt")])
def test_a_link_to_what_is_no_engine_folder_is_refused(tmp_path: Path, leads_to: str, what: str) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder/a.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(leads_to)
    with pytest.raises(ConfigError, match=rf"engine path .*link: expected a folder to make or an engine folder to replace, {what}"):
        check_target(tmp_path / "link", tmp_path / "model")


def test_a_link_to_where_nothing_is_yet_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "engine")
    check_target(tmp_path / "link", tmp_path / "model")


def test_a_link_to_the_model_does_not_replace_it(folder: EngineFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(ConfigError, match="is in it and would be replaced"):
        check_target(tmp_path / "link", folder.path)


@pytest.mark.parametrize("path", ["\u00e9" * 5000, "no\0path"], ids=["too long", "with a zero"])
def test_a_checkpoint_at_a_path_that_no_system_takes_is_gone(folder: EngineFolder, path: str) -> None:
    edit(folder, lambda data: data["checkpoint"].update(path=path))
    assert EngineFolder.open(folder.path).find_checkpoint() is None
