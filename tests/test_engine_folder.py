"""Engine folders: what is written is read back, and what is damaged is named."""

import contextlib
import json
import shutil

import pytest
from engine_files import PLAN, make_engine_folder
from small_model import write_model

from trt_kvcache.engine_config import EngineConfig
from trt_kvcache.engine_folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CheckpointError, EngineError
from trt_kvcache.network.decomposable import AttentionChoice


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path, model):
    return make_engine_folder(model, tmp_path / "engine")


def test_written_and_read_back(folder):
    found = EngineFolder.open(str(folder.path))
    assert found.config == folder.config
    with found.read_plan() as plan:
        assert plan[:] == PLAN
    assert [is_engine_folder(path) for path in (folder.path, folder.path.parent, folder.path / "nowhere")] == [True, False, False]


def test_every_kind_of_value_survives_in_plain_json(model, tmp_path):
    choices = (
        AttentionChoice(layer=0, variant="mask", decomposable=True, reason="no fused kernel"),
        AttentionChoice(layer=1, variant="mask", decomposable=False),
    )
    written = make_engine_folder(model, tmp_path / "engine", attention=choices, compute_capabilities=("8.6", "12.0"), embedded=True).config
    read = EngineFolder.open(tmp_path / "engine").config
    assert read == written
    assert read.attention == choices
    assert (read.attention_variant, read.compute_capabilities, read.checkpoint.embedded) == ("mask", ("8.6", "12.0"), True)
    assert (read.dtype, read.max_prefill_length) == ("float16", 11)
    data = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert (data["format"], data["producer"]["name"]) == (2, "trt-kvcache")
    assert data["tensors"][3] == {"name": "k_cache_0", "shape": [-1, 2, 38, 24], "dtype": "float16", "mode": "input", "alias": None}


def test_a_folder_of_the_first_format_is_still_read(folder):
    config = folder.path / "config.json"
    data = json.loads(config.read_text())
    del data["segments"], data["names"]["kv_cache"], data["names"]["present_kv_cache"]
    config.write_text(json.dumps({**data, "format": 1}))
    assert EngineFolder.open(folder.path).config == folder.config


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"engine: expected an engine folder, got nothing there\."),
        (
            lambda path: (path / "engine.plan").unlink(),
            r"engine: expected an engine folder, but it has no engine\.plan\. `trt-kvcache build` makes one\.",
        ),
        (lambda path: path.rename(path.with_name("away")).with_name("engine").touch(), "engine: expected an engine folder, got a file"),
        (lambda path: (path / "config.json").unlink(), r"engine: expected an engine folder, but it has no config\.json"),
        (lambda path: (path / "config.json").write_text('{"format": 1,'), r"config\.json: cannot be read as JSON: "),
        (
            lambda path: (path / "engine.plan").write_bytes(PLAN[:-1]),
            r"engine\.plan: expected 31 bytes by config\.json, got 30\. Build it anew\.",
        ),
    ],
)
def test_damaged_folder_is_refused_by_name(folder, damage, message):
    damage(folder.path)
    with pytest.raises(EngineError, match=message):
        EngineFolder.open(folder.path)


GONE = object()
WRONG_KIND = "a field is missing, unknown or of the wrong kind"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", GONE, "format: expected a number of 1 or more, got None"),
        ("format", 3, r"format: this package reads up to 2, got 3\. A newer trt-kvcache built the engine: upgrade"),
        ("format", "1", "format: expected a number of 1 or more, got '1'"),
        ("model", GONE, rf"{WRONG_KIND} \(KeyError: 'model'\)"),
        ("names/k_cache", "k", r"TensorNames\.k_cache: expected a name with \{i\}"),
        ("model/model_type", "gpt2", "model_type: 'gpt2' is not supported"),
        ("kv_cache/dtype", "float64", r"KVCacheConfig\.dtype: expected one of float16"),
        ("kv_cache/layers/1", GONE, r"kv_cache\.layers: expected \[.*\] by the model, got \["),
        (
            "kv_cache/max_sequence_length",
            30,
            r"tensor `k_cache_0`: expected input `k_cache_0` float16 \(-1, 2, 30, 24\) by model and kv_cache, got .*\(-1, 2, 38, 24\)",
        ),
        ("kv_cache/max_sequence_length", 9, r"profiles\[0\]\.max_width: expected an integer from 1 to 9, got 11"),
        ("kv_cache/max_batch_size", 4, "profile prefill: expected max_batch 4 by kv_cache, got 3"),
        ("tensors/11", GONE, "tensors: expected 12 by model and kv_cache, got 11"),
        (
            "tensors/7/alias",
            "v_cache_0",
            "tensor `present_k_cache_0`: expected output .* in place of `k_cache_0` by model and kv_cache, got .* in place of `v_cache_0`",
        ),
        ("profiles", [], "profiles: expected 2, for prefill and decode, got 0"),
        ("profiles/0/min_batch", 2, "profile prefill: expected min_batch 1, got 2"),
        ("profiles/1/max_width", 12, "profile decode: expected max_width 1, got 12"),
        ("attention/0/layer", 1, r"attention\[0\]\.layer: expected 0, got 1"),
        ("attention/1/variant", "zz", r"attention\[1\]\.variant: expected one of native, mask, plugin, got 'zz'"),
        ("plan/nbytes", -1, r"plan\.nbytes: expected at least 1, got -1"),
        ("tensorrt/flavour", "auto", r"tensorrt\.flavour: expected one of tensorrt, tensorrt_rtx, got 'auto'"),
        ("compute_capabilities", "8.6", r"compute_capabilities: expected a list, got '8\.6'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_field(folder, field, value, message):
    *path, last = (int(part) if part.isdigit() else part for part in field.split("/"))
    config = folder.path / "config.json"
    data = json.loads(config.read_text())
    place = at(data, path)
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    config.write_text(json.dumps(data))
    with pytest.raises(EngineError, match=rf"config\.json: {message}.*\."):
        EngineFolder.open(folder.path)


def at(data, path):
    return at(data[path[0]], path[1:]) if path else data


def places(data, path=()):
    """Every field and item of a JSON value, however deep."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(data[key], (*path, key))


@pytest.mark.parametrize("segmented", [False, True])
def test_no_damaged_value_gives_another_error(model, tmp_path, segmented):
    good = make_engine_folder(model, tmp_path / "engine", segmented=segmented).config.to_dict()
    for *path, last in places(good):
        for value in (None, "x", -1, 2.5, True, [], [[1]], {"x": 1}):
            data = json.loads(json.dumps(good))
            at(data, path)[last] = value
            with contextlib.suppress(EngineError):
                EngineConfig.from_dict(data)


def test_plan_with_a_flipped_bit(folder):
    folder.plan_path.write_bytes(bytes([PLAN[0] ^ 1]) + PLAN[1:])
    opened = EngineFolder.open(folder.path)  # reading the configuration does not read the plan
    with pytest.raises(EngineError, match=r"engine\.plan: it was changed since the build \(SHA-256 .*\)\. Build it anew\."):
        opened.read_plan()


def test_checkpoint_embedded_survives_the_original(model, tmp_path):
    folder = make_engine_folder(model, tmp_path / "engine", embedded=True)
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"
    shutil.rmtree(model)
    moved = folder.path.rename(tmp_path / "elsewhere")
    with EngineFolder.open(moved).open_checkpoint() as checkpoint:
        assert checkpoint.path == moved / "checkpoint"


def test_checkpoint_that_is_gone_names_both_places_and_can_be_put_into_the_folder(folder, model, tmp_path):
    model.rename(tmp_path / "away")
    with pytest.raises(CheckpointError) as raised:
        folder.open_checkpoint()
    for part in (f"it is neither at {model}, where it was at the build", f"nor at {folder.path / 'checkpoint'}", "embedded weights"):
        assert part in str(raised.value)
    (tmp_path / "away").rename(folder.path / "checkpoint")
    with folder.open_checkpoint() as checkpoint:
        assert checkpoint.path == folder.path / "checkpoint"


CHANGED = "model: this checkpoint was changed since engine .* was built from it .* Build the engine anew"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]), CHANGED),
        ("config.json", lambda content: content.replace(b": 1e-05", b": 1e-06"), CHANGED),
        ("model.safetensors", lambda content: content[:100], r"model\.safetensors"),
    ],
)
def test_checkpoint_that_was_changed(folder, model, name, change, message):
    (model / name).write_bytes(change((model / name).read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        folder.open_checkpoint()
