"""Engine folders: what is written is read back, and what is damaged is named."""

import contextlib
import json
import shutil

import pytest

from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.small_model import write_model
from trt_kvcache.engine_folder.config import EngineConfig
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CheckpointError, EngineError


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
        (lambda path: path.rename(path.with_name("away")).with_name("engine").touch(), "engine: expected an engine folder, got a file"),
        (lambda path: (path / "config.json").unlink(), r"engine: expected an engine folder, but it has no config\.json"),
        (
            lambda path: (path / "engine.plan").unlink(),
            r"engine: expected an engine folder, but it has no engine\.plan\. `trt-kvcache build` makes one\.",
        ),
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 3, r"format: this package reads up to 2, got 3\. A newer trt-kvcache built the engine: upgrade"),
        *(("format", value, f"format: expected a number of 1 or more, got {got}") for value, got in ((GONE, None), ("1", "'1'"))),
        ("model", GONE, r"a field is missing, unknown or of the wrong kind \(KeyError: 'model'\)"),
        ("kv_cache/layers/1", GONE, r"kv_cache\.layers: expected \[.*\] by the model, got \["),
        (
            "kv_cache/max_sequence_length",
            30,
            r"tensor `k_cache_0`: expected input `k_cache_0` float16 \(-1, 2, 30, 24\) by model and kv_cache, got .*\(-1, 2, 38, 24\)",
        ),
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
        ("model.safetensors", lambda content: content[:100], r"model\.safetensors"),
        ("config.json", lambda content: content.replace(b": 1e-05", b": 1e-06"), CHANGED),
    ],
)
def test_checkpoint_that_was_changed(folder, model, name, change, message):
    (model / name).write_bytes(change((model / name).read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        folder.open_checkpoint()
