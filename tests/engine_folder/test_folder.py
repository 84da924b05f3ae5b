"""Engine folders: what is written is read back, and what is damaged is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_files import PLAN, make_config, make_engine_folder
from tests.helpers.small_model import write_model
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine_folder.config import EngineConfig
from trt_kvcache.engine_folder.folder import EngineFolder, check_target, is_engine_folder
from trt_kvcache.errors import CheckpointError, ClosedError, ConfigError, EngineError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> EngineFolder:
    return make_engine_folder(model, tmp_path / "engine")


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


def test_every_kind_of_value_survives(model: Path, tmp_path: Path) -> None:
    choices = (
        AttentionLayerConfig(layer=0, variant="mask", decomposable=True, reason="no fused kernel"),
        AttentionLayerConfig(layer=1, variant="mask", decomposable=False),
    )
    written = make_engine_folder(model, tmp_path / "engine", attention=choices, compute_capabilities=("8.6", "12.0"), embedded=True).config
    read = EngineFolder.open(tmp_path / "engine").config
    assert read == written
    assert read.attention[0].reason == "no fused kernel"
    assert (read.attention_variant, read.compute_capabilities, read.checkpoint.embedded) == ("mask", ("8.6", "12.0"), True)
    assert (read.dtype, read.max_prefill_length) == ("float16", 11)


def test_config_is_plain_json(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        config = make_config(checkpoint)
    data = json.loads(json.dumps(config.to_dict()))
    assert EngineConfig.from_dict(data) == config
    assert data["format"] == 2
    assert data["producer"]["name"] == "trt-kvcache"
    assert data["tensors"][3] == {"name": "k_cache_0", "shape": [-1, 2, 38, 24], "dtype": "float16", "mode": "input", "alias": None}


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
            with_config(lambda data: data.update(format=3)),
            r"config\.json: format: this package reads up to 2, got 3\. A newer trt-kvcache built the engine: upgrade\.",
        ),
        (with_config(lambda data: data.update(format="1")), r"format: expected a number of 1 or more, got '1'"),
        (with_config(lambda data: data.update(format=True)), r"format: expected a number of 1 or more, got True"),
        (with_config(lambda data: data.pop("model")), r"a field is missing, unknown or of the wrong kind \(KeyError: 'model'\)"),
        (with_config(lambda data: data["plan"].update(md5="0")), r"a field is missing, unknown or of the wrong kind \(TypeError: .*md5"),
        (with_config(lambda data: data.update(tensors=7)), r"a field is missing, unknown or of the wrong kind \(TypeError"),
        (with_config(lambda data: data["names"].update(k_cache="k")), r"TensorNames\.k_cache: expected a name with \{i\}"),
        (with_config(lambda data: data["model"].update(model_type="gpt2")), r"model_type: 'gpt2' is not supported"),
        (
            with_config(lambda data: data["kv_cache"].update(dtype="float64")),
            r"KVCacheConfig\.dtype: expected one of float16",
        ),
        (
            with_config(lambda data: data["kv_cache"]["layers"].pop()),
            r"kv_cache\.layers: expected \[.*\] by the model, got \[",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(layout="combined")),
            r"kv_cache\.layout: expected separate by the model, got combined",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(max_sequence_length=30)),
            r"tensor `k_cache_0`: expected input `k_cache_0` float16 \(-1, 2, 30, 24\) by model and kv_cache, got .*\(-1, 2, 38, 24\)",
        ),
        (
            with_config(lambda data: data["kv_cache"].update(max_sequence_length=9)),
            r"profiles\[0\]\.max_width: expected an integer from 1 to 9, got 11",
        ),
        (with_config(lambda data: data["kv_cache"].update(max_batch_size=4)), r"profile prefill: expected max_batch 4 by kv_cache, got 3"),
        (with_config(lambda data: data.update(profiles=[])), r"profiles: expected 2, for prefill and decode, got 0"),
        (with_config(lambda data: data["attention"].pop()), r"attention: expected 2 layers by the model, got 1"),
        (with_config(lambda data: data["tensors"].pop()), r"tensors: expected 12 by model and kv_cache, got 11"),
        (
            with_config(lambda data: data["tensors"][7].update(alias="v_cache_0")),
            r"tensor `present_k_cache_0`: expected output .* with `k_cache_0` by model and kv_cache, got .* with `v_cache_0`",
        ),
        (
            lambda folder: folder.plan_path.write_bytes(PLAN[:-1]),
            r"engine\.plan: expected 31 bytes by config\.json, got 30\. Build it anew\.",
        ),
    ],
)
def test_damaged_folder_is_refused_by_name(folder: EngineFolder, damage: Callable[[EngineFolder], object], message: str) -> None:
    damage(folder)
    with pytest.raises(EngineError, match=message):
        EngineFolder.open(folder.path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("profiles/0/max_width", "8", r"profiles\[0\]\.max_width: expected an integer, got '8'"),
        ("profiles/0/name", 7, r"profiles\[0\]\.name: expected a str, got 7"),
        ("profiles/0/min_batch", 2, "profile prefill: expected min_batch 1, got 2"),
        ("profiles/0/min_batch", "1", r"profiles\[0\]\.min_batch: expected an integer, got '1'"),
        ("profiles/0/min_width", 5, "profile prefill: expected min_width 1, got 5"),
        ("profiles/1/max_width", 5, "profile decode: expected max_width 1, got 5"),
        ("profiles/1/max_width", 12, "profile decode: expected max_width 1, got 12"),
        ("profiles/1/min_width", True, r"profiles\[1\]\.min_width: expected an integer, got True"),
        ("profiles/1/name", "prefill", "profile decode: expected name decode, got prefill"),
        ("profiles", {}, r"profiles: expected a list, got \{\}"),
        ("attention/0/layer", 1, r"attention\[0\]\.layer: expected 0, got 1"),
        ("attention/1/layer", -1, r"attention\[1\]\.layer: expected at least 0, got -1"),
        ("attention/0/variant", 3, r"attention\[0\]\.variant: expected a str, got 3"),
        ("attention/1/variant", "zz", r"attention\[1\]\.variant: expected one of native, mask, plugin, got 'zz'"),
        ("attention/0/decomposable", 0, r"attention\[0\]\.decomposable: expected a bool, got 0"),
        ("checkpoint/path", 5, r"checkpoint\.path: expected a str, got 5"),
        ("checkpoint/path", None, r"checkpoint\.path: expected a str, got None"),
        ("checkpoint/fingerprint", 7, r"checkpoint\.fingerprint: expected a str, got 7"),
        ("checkpoint/nbytes", "x", r"checkpoint\.nbytes: expected an integer, got 'x'"),
        ("checkpoint/embedded", "no", r"checkpoint\.embedded: expected a bool, got 'no'"),
        ("plan/sha256", 3, r"plan\.sha256: expected a str, got 3"),
        ("plan/nbytes", -1, r"plan\.nbytes: expected at least 1, got -1"),
        ("tensorrt/flavour", "bogus", r"tensorrt\.flavour: expected one of tensorrt, tensorrt_rtx, got 'bogus'"),
        ("tensorrt/flavour", "auto", r"tensorrt\.flavour: expected one of tensorrt, tensorrt_rtx, got 'auto'"),
        ("tensorrt/flavour", 5, r"tensorrt\.flavour: expected a str, got 5"),
        ("tensorrt/version", 1.7, r"tensorrt\.version: expected a str, got 1\.7"),
        ("producer/version", None, r"producer\.version: expected a str, got None"),
        ("compute_capabilities", "8.6", r"compute_capabilities: expected a list, got '8\.6'"),
        ("compute_capabilities", [8.6], r"compute_capabilities\[0\]: expected a str, got 8\.6"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_field(folder: EngineFolder, field: str, value: Any, message: str) -> None:
    *path, last = (int(part) if part.isdigit() else part for part in field.split("/"))
    edit(folder, lambda data: at(data, path).update({last: value}))
    with pytest.raises(EngineError, match=rf"config\.json: {message}\."):
        EngineFolder.open(folder.path)


def at(data: Any, path: list[Any]) -> Any:
    return at(data[path[0]], path[1:]) if path else data


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field and item of a JSON value, however deep."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(data[key], (*path, key))


#: What nothing else in a config.json depends on: any value of the right kind may stand there.
FREE = {"tensorrt/version", "compute_capabilities", "plan/sha256", "profiles/0/max_width"}
FREE |= {f"checkpoint/{name}" for name in ("path", "fingerprint", "nbytes", "embedded")}
FREE |= {f"attention/{layer}/{name}" for layer in (0, 1) for name in ("decomposable", "reason")}
SEGMENTED = {"segments/constants/nbytes", "segments/constants/sha256"}


@pytest.mark.parametrize("segmented", [False, True])
def test_a_wrong_value_anywhere_is_refused_and_gives_no_other_error(model, tmp_path, segmented):
    good = make_engine_folder(model, tmp_path / "engine", segmented=segmented).config.to_dict()
    taken = set()
    for *path, last in places(good):
        old = at(good, path)[last]
        for value in (None, "x", -1, 2.5, True, [], [[1]], {"x": 1}, *([old + 1] if type(old) is int else [])):
            data = json.loads(json.dumps(good))
            at(data, path)[last] = value
            with contextlib.suppress(EngineError):
                EngineConfig.from_dict(data)
                if value != old and path[:1] not in (["model"], ["producer"]):
                    assert old is None or type(value) is type(old)
                    taken.add("/".join(map(str, (*path, last))))
    plans = {name for name in taken if name.endswith("plan_nbytes")}
    assert taken - plans == FREE | (SEGMENTED if segmented else {"plan/nbytes"})


def test_path_of_a_file(folder: EngineFolder) -> None:
    with pytest.raises(EngineError, match=r"engine\.plan: expected an engine folder, got a file"):
        EngineFolder.open(folder.plan_path)


def test_plan_with_a_flipped_bit(folder: EngineFolder) -> None:
    changed = bytearray(PLAN)
    changed[5] ^= 1
    folder.plan_path.write_bytes(changed)
    opened = EngineFolder.open(folder.path)  # reading the configuration does not read the plan
    with pytest.raises(EngineError, match=r"engine\.plan: it was changed since the build \(SHA-256 .*\)\. Build it anew\."):
        opened.read_plan()


def test_checkpoint_where_it_was(folder: EngineFolder, model: Path) -> None:
    progress: list[tuple[int, int]] = []
    with folder.open_checkpoint(lambda done, total: progress.append((done, total))) as checkpoint:
        assert checkpoint.path == model
        assert progress[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def test_checkpoint_embedded_survives_the_original(model: Path, tmp_path: Path) -> None:
    folder = make_engine_folder(model, tmp_path / "engine", embedded=True)
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"
    shutil.rmtree(model)
    moved = tmp_path / "elsewhere"
    folder.path.rename(moved)
    with EngineFolder.open(moved).open_checkpoint() as checkpoint:
        assert checkpoint.path == moved / "checkpoint"


def test_checkpoint_that_is_gone_names_both_places(folder: EngineFolder, model: Path) -> None:
    shutil.rmtree(model)
    with pytest.raises(CheckpointError) as raised:
        folder.open_checkpoint()
    text = str(raised.value)
    assert f"it is neither at {model}, where it was at the build" in text
    assert f"nor at {folder.path / 'checkpoint'}" in text
    assert "embedded weights" in text


def test_checkpoint_put_into_the_folder_by_hand(folder: EngineFolder, model: Path) -> None:
    model.rename(folder.path / "checkpoint")
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"


@pytest.mark.parametrize("change", ["weight", "config"])
def test_checkpoint_that_was_changed(folder: EngineFolder, model: Path, change: str) -> None:
    if change == "weight":
        path = model / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path = model / "config.json"
        path.write_text(path.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    with pytest.raises(
        CheckpointError, match=r"model: this checkpoint was changed since engine .* was built from it .* Build the engine anew"
    ):
        folder.open_checkpoint()


def test_a_checkpoint_that_is_refused_is_closed(folder: EngineFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(model)
    monkeypatch.setattr(checkpoint, "fingerprint", lambda progress: "another")
    monkeypatch.setattr(Checkpoint, "open", lambda path: checkpoint)
    with pytest.raises(CheckpointError, match="this checkpoint was changed"):
        folder.open_checkpoint()
    with pytest.raises(ClosedError):
        checkpoint.tensor(checkpoint.tensor_names[0])


def test_checkpoint_that_is_damaged(folder: EngineFolder, model: Path) -> None:
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


def test_a_folder_of_the_first_format_is_still_read(folder):
    config = folder.path / "config.json"
    data = json.loads(config.read_text())
    del data["segments"], data["names"]["kv_cache"], data["names"]["present_kv_cache"]
    config.write_text(json.dumps({**data, "format": 1}))
    assert EngineFolder.open(folder.path).config == folder.config
