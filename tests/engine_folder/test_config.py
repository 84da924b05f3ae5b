"""``EngineFolderConfig``: written as JSON, read back, and refused by field."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_config, make_engine_folder
from tests.helpers.models import write_model
from tests.paths import GOLDEN
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine.step_rows import ReducedLayers
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.config_reader import read_config
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.errors import EngineError

#: What nothing else in a config.json depends on: any value of the right kind may stand there.
FREE = {"attention_reason", "tensorrt/version", "compute_capabilities", "plan/sha256", "profiles/0/max_width"}
FREE |= {f"checkpoint/{name}" for name in ("path", "fingerprint", "nbytes", "embedded", "weights")}
FREE |= {"names/new_lengths"}  # of engines with states
FREE |= {f"attention/{layer}/{name}" for layer in (0, 1) for name in ("decomposable", "reason")}
SEGMENTED = {"segments", "segments/constants/nbytes", "segments/constants/sha256"}


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
    assert read_config(data) == config
    assert data["format"] == 8
    assert data["producer"]["name"] == "trt-kvcache"
    assert data["tensors"][3] == {"name": "k_cache_0", "shape": [-1, 2, 38, 24], "dtype": "float16", "mode": "input", "alias": None}


def test_a_plugin_library_is_recorded(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        config = make_config(checkpoint, attention_variant="plugin", plugin_library=FileRecord.of([b"library"]))
        without = make_config(checkpoint, attention_variant="plugin")
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert data["plugin_library"]["nbytes"] == 7
    assert config.network_facts() == without.network_facts()
    del data["plugin_library"]  # folders of before
    assert read_config(data).plugin_library is None


@pytest.mark.parametrize("changes", [{"attention_variant": "mask"}, {"segmented": True}])
def test_a_plugin_library_without_plugin_layers_is_refused(model: Path, changes: dict[str, Any]) -> None:
    with Checkpoint.open(model) as checkpoint:
        data = make_config(checkpoint, plugin_library=FileRecord.of([b"library"]), **changes).to_dict()
    with raises(EngineError, "plugin_library", expected="none without plugin layers"):
        read_config(data)


#: Changes of an engine folder that make it one with V outputs.
WITH_V_OUTPUTS: dict[str, Any] = {"attention_variant": "plugin", "tensorrt_flavour": "tensorrt"}


def config_with_v_outputs(model: Path, **changes: Any) -> EngineFolderConfig:
    with Checkpoint.open(model) as checkpoint:
        return make_config(checkpoint, **WITH_V_OUTPUTS | {"v_outputs": v_outputs(checkpoint.config, "float16")} | changes)


def test_v_outputs_are_recorded(model: Path) -> None:
    config = config_with_v_outputs(model)
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert data["v_outputs"] == [
        {"name": f"v_{layer}", "shape": [-1, -1, 2, 24], "dtype": "float16", "mode": "output", "alias": None} for layer in (0, 1)
    ]
    del data["v_outputs"]  # folders of before
    assert read_config(data) == config_with_v_outputs(model, v_outputs=())


def test_v_outputs_are_in_the_dtype_of_computation(tmp_path: Path) -> None:
    config = config_with_v_outputs(write_model(tmp_path / "wide", head_dim=64), quantized=QuantizedKV("int8"))
    assert read_config(config.to_dict()) == config


@pytest.mark.parametrize(
    "changes",
    [{"attention_variant": "mask"}, {"tensorrt_flavour": "tensorrt_rtx"}, {"segmented": True, "tensorrt_flavour": "tensorrt_rtx"}],
)
def test_v_outputs_without_plugin_layers_of_full_tensorrt_are_refused(model: Path, changes: dict[str, Any]) -> None:
    data = config_with_v_outputs(model, **changes).to_dict()
    with raises(EngineError, "v_outputs", expected="none of", got="some"):
        read_config(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda specs: specs.pop(), r"v_outputs: expected output `v_0` float16 \(-1, -1, 2, 24\), output `v_1` .* for this model, got"),
        (lambda specs: specs.reverse(), r"v_outputs: expected .* for this model, got output `v_1`"),
        (lambda specs: specs[0].update(shape=[-1, -1, 2, 32]), r"v_outputs: expected .*24\).*, got .*32\)"),
        (lambda specs: specs[1].update(dtype="bfloat16"), r"v_outputs: expected .*, got .*`v_1` bfloat16"),
        (
            lambda specs: specs[1].update(alias="past_key_values_1"),
            r"v_outputs: expected .*, got .*sharing memory with `past_key_values_1`",
        ),
        (lambda specs: specs[0].update(mode="input"), r"v_outputs: expected .*, got input `v_0`"),
        (lambda specs: specs[0].update(size=3), "unknown or of the wrong kind"),
        (lambda specs: specs.insert(0, None), "unknown or of the wrong kind"),
    ],
)
def test_v_outputs_of_another_model_are_refused(model: Path, change: Callable[[Any], object], message: str) -> None:
    data = json.loads(json.dumps(config_with_v_outputs(model).to_dict()))
    change(data["v_outputs"])
    with pytest.raises(EngineError, match=message):
        read_config(data)


def config_with_adapters(model: Path, **changes: Any) -> EngineFolderConfig:
    with Checkpoint.open(model) as checkpoint:
        inputs = AdapterInputs.of(checkpoint.config, rank=8, modules=("q_proj", "down_proj"))
        return make_config(checkpoint, **{"adapters": inputs, **changes})


def test_inputs_for_adapters_are_recorded(model: Path) -> None:
    config = config_with_adapters(model)
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert data["adapters"] == {"rank": 8, "modules": ["q_proj", "down_proj"]}
    assert {spec.name for spec in config.adapter_tensors} >= {"slot_adapters", "rank_adapters", "lora_a_q_0", "lora_b_down_1"}
    assert config.network_facts() != config_with_adapters(model, adapters=None).network_facts(), "compiled kernels are others"
    del data["adapters"]  # folders of before
    assert read_config(data) == config_with_adapters(model, adapters=None)
    assert read_config(data).adapter_tensors == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "adapters_rank: expected an integer from 1 to 2147483647, got 0"),
        ({"rank": True}, "adapters_rank: expected an integer, got True"),
        ({"modules": []}, "adapters: expected modules .* for this model, got "),
        ({"modules": ["down_proj", "q_proj"]}, "adapters: expected modules q_proj, down_proj for this model, got down_proj, q_proj"),
        ({"modules": ["q_proj", "q_proj"]}, "adapters: expected modules q_proj for this model, got q_proj, q_proj"),
        ({"modules": ["qkv_proj"]}, "adapters_modules: expected some of q_proj, .*, got 'qkv_proj'"),
        ({"modules": "q_proj"}, "adapters.modules: expected a list, got 'q_proj'"),
        ({"modules": [3]}, r"adapters.modules\[0\]: expected a str, got 3"),
        ({"size": 3}, "unknown or of the wrong kind"),
    ],
)
def test_inputs_for_adapters_of_another_model_are_refused(model: Path, change: dict[str, Any], message: str) -> None:
    data = config_with_adapters(model).to_dict()
    data["adapters"].update(change)
    with pytest.raises(EngineError, match=message):
        read_config(data)


@pytest.mark.parametrize("segmented", [False, True])
def test_the_input_for_rows_is_recorded(tmp_path: Path, segmented: bool) -> None:
    model = write_model(tmp_path / "model", head_dim=64)
    with Checkpoint.open(model) as checkpoint:
        config, without = (make_config(checkpoint, segmented=segmented, max_embeddings=count) for count in (6, 0))
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert data["max_embeddings"] == 6
    [spec] = config.embedding_tensors
    assert (spec.name, spec.shape, spec.dtype) == ("embedding_rows", (6, config.model.hidden_size), "float16")
    assert config.network_facts() != without.network_facts(), "compiled kernels are others"
    for given in (-1, True, 2.0, "6"):
        with raises(EngineError, "max_embeddings", got=repr(given)):
            read_config({**data, "max_embeddings": given})
    del data["max_embeddings"]  # folders of before
    if segmented:
        with pytest.raises(EngineError, match=r"segments\.steps\[0\]"):
            read_config(data)
    else:
        assert read_config(data) == without
        assert without.embedding_tensors == ()


def test_an_input_for_rows_beside_per_layer_embeddings_is_refused() -> None:
    with Checkpoint.open(GOLDEN / "gemma4-ple") as checkpoint:
        data = make_config(checkpoint, attention_variant="mask", max_embeddings=2).to_dict()
    with pytest.raises(EngineError, match="max_embeddings: expected 0 for a model with per-layer embeddings, got 2"):
        read_config(data)


def test_inputs_for_adapters_in_segments_or_with_a_merged_adapter_are_refused(model: Path) -> None:
    with raises(EngineError, "adapters", expected="none with segments", got="rank 8"):
        read_config(config_with_adapters(model, segmented=True).to_dict())
    data = config_with_adapters(model).to_dict()
    data["checkpoint"].update(adapter="/lora", adapter_fingerprint="0" * 64)
    with raises(EngineError, "adapters", expected="none with a merged adapter", got="rank 8"):
        read_config(data)


REDUCED = ReducedLayers((0, 1, 2), 24)


def config_with_hidden_states(model: Path, layers: Any = REDUCED, **changes: Any) -> EngineFolderConfig:
    with Checkpoint.open(model) as checkpoint:
        return make_config(checkpoint, **{"hidden_layers": layers, "draft_head": "0" * 64, **changes})


@pytest.mark.parametrize("layers", [ReducedLayers((0, 1, 2), 24), "final_norm", (2,)], ids=str)
def test_hidden_states_are_recorded(model: Path, layers: Any) -> None:
    config = config_with_hidden_states(model, layers)
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    [spec] = config.hidden_tensors
    width = 24 if isinstance(layers, ReducedLayers) else config.model.hidden_size
    assert (spec.name, spec.shape, spec.dtype) == ("hidden_states", (-1, -1, width), "float16")
    plain = config_with_hidden_states(model, None, draft_head="")
    assert config.network_facts() != plain.network_facts(), "compiled kernels are others"
    assert config.network_facts() == config_with_hidden_states(model, layers, draft_head="1" * 64).network_facts()
    del data["hidden_layers"], data["draft_head"]  # folders of before
    assert read_config(data) == plain
    assert read_config(data).hidden_tensors == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_layers": "embedding"}, "hidden_layers: expected null, final_norm, or an object with layers and width, got 'embedding'"),
        ({"hidden_layers": {"layers": []}}, "hidden_layers: expected null, final_norm, or an object"),
        ({"hidden_layers": {"layers": [1], "dtype": 1}}, "hidden_layers: expected null, final_norm, or an object"),
        ({"hidden_layers": {"layers": [0, 3]}}, "hidden_layers.layers: expected an integer from 0 to 2, got 3"),
        ({"hidden_layers": {"layers": ["1"]}}, "hidden_layers.layers: expected an integer, got '1'"),
        ({"hidden_layers": {"layers": [1], "width": 0}}, "hidden_layers.width: expected an integer from 1 to 2147483647, got 0"),
        ({"hidden_layers": None}, "hidden_layers: expected some for one, got None"),
        ({"draft_head": ""}, "hidden_layers: expected none without one, got ReducedLayers"),
        ({"draft_head": 5}, "draft_head: expected a str, got 5"),
    ],
    ids=str,
)
def test_hidden_states_that_no_head_reads_are_refused(model: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_config(config_with_hidden_states(model).to_dict() | change)


def test_hidden_states_in_segments_are_refused(model: Path) -> None:
    with raises(EngineError, "hidden_layers", expected="none with segments", got="ReducedLayers"):
        read_config(config_with_hidden_states(model, segmented=True).to_dict())


def with_more_logits(model: Path, *, segmented: bool = False) -> EngineFolderConfig:
    with Checkpoint.open(model) as checkpoint:
        return make_config(checkpoint, segmented=segmented, max_logits_per_slot=5)


@pytest.mark.parametrize("segmented", [False, True])
def test_more_logits_are_read_back(model: Path, segmented: bool) -> None:
    config = with_more_logits(model, segmented=segmented)
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert (config.max_logits_per_slot, [profile.name for profile in config.profiles]) == (5, ["prefill", "decode", "verify"])


@pytest.mark.parametrize(
    ("profile", "name", "value", "message"),
    [
        (0, "max_logits", 12, r"profiles\[0\]\.max_logits: expected an integer from 1 to 11, got 12"),
        (0, "max_logits", 4, "profile verify: expected max_width 4, got 5"),
        (0, "max_logits", 1, "profiles: expected 2, for prefill and decode, got 3"),
        (1, "max_logits", 2, "profile decode: expected max_logits 1, got 2"),
        (2, "max_logits", 4, "profile verify: expected max_logits 5, got 4"),
        (2, "max_width", 6, "profile verify: expected max_width 5, got 6"),
        (0, "max_width", 5, "profiles: expected 2, for prefill and decode, got 3"),
    ],
)
def test_a_profile_that_does_not_fit_the_others_is_refused(model: Path, profile: int, name: str, value: int, message: str) -> None:
    data = with_more_logits(model).to_dict()
    data["profiles"][profile][name] = value
    with pytest.raises(EngineError, match=message):
        read_config(data)


def test_tensors_without_more_logits_are_refused_where_the_profiles_have_them(model: Path) -> None:
    data = with_more_logits(model).to_dict()
    data["tensors"][-1]["shape"] = [-1, 37]
    with raises(EngineError, "tensor `logits`", expected="output `logits` float32 (-1, -1, 37) for this model"):
        read_config(data)


@pytest.mark.parametrize("older", range(1, 8))
def test_an_older_format_is_refused(model: Path, older: int) -> None:
    with Checkpoint.open(model) as checkpoint:
        data = make_config(checkpoint).to_dict()
    message = rf"^format: this package reads 8, got {older}\. An older trt-kvcache built the engine: build it again\.$"
    with pytest.raises(EngineError, match=message):
        read_config({**data, "format": older})


def edit(folder: EngineFolder, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder.path / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


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
        ("checkpoint/weights", None, r"checkpoint\.weights: expected a str, got None"),
        ("checkpoint/quantize", "int3", r"quantize: weights: expected one of int8, int4, int4:32, int4:128, got 'int3'"),
        ("checkpoint/embedded", "no", r"checkpoint\.embedded: expected a bool, got 'no'"),
        ("plan/sha256", 3, r"plan\.sha256: expected a str, got 3"),
        ("plan/nbytes", -1, r"plan\.nbytes: expected at least 1, got -1"),
        ("tensorrt/flavour", "bogus", r"tensorrt\.flavour: expected one of tensorrt, tensorrt_rtx, got 'bogus'"),
        ("tensorrt/flavour", "auto", r"tensorrt\.flavour: expected one of tensorrt, tensorrt_rtx, got 'auto'"),
        ("tensorrt/flavour", 5, r"tensorrt\.flavour: expected a str, got 5"),
        ("tensorrt/version", 1.7, r"tensorrt\.version: expected a str, got 1\.7"),
        ("producer/version", None, r"producer\.version: expected a str, got None"),
        ("v_outputs", None, r"v_outputs: expected a list, got None"),
        ("v_outputs", {"v_0": 1}, r"v_outputs: expected a list, got \{'v_0': 1\}"),
        ("adapters", 8, r"adapters: expected a dict, got 8"),
        ("compute_capabilities", "8.6", r"compute_capabilities: expected a list, got '8\.6'"),
        ("compute_capabilities", [8.6], r"compute_capabilities\[0\]: expected a str, got 8\.6"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(folder: EngineFolder, field: str, value: Any, message: str) -> None:
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


@pytest.mark.parametrize("segmented", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_wrong_value_anywhere_is_refused_and_gives_no_other_error(model, tmp_path, segmented):
    good = make_engine_folder(model, tmp_path / "engine", segmented=segmented).config.to_dict()
    taken = set()
    for *path, last in places(good):
        old = at(good, path)[last]
        for value in (None, "x", -1, 2.5, True, [], [[1]], {"x": 1}, *([old + 1] if type(old) is int else [])):
            data = json.loads(json.dumps(good))
            at(data, path)[last] = value
            with contextlib.suppress(EngineError):
                read_config(data)
                if value != old and path[:1] not in (["model"], ["producer"]):
                    is_one_plan = (last, value) == ("segments", None)  # with plugin attention too
                    assert old is None or is_one_plan or type(value) is type(old)
                    taken.add("/".join(map(str, (*path, last))))
    plans = {name for name in taken if name.endswith("plan_nbytes")}
    assert taken - plans == FREE | (SEGMENTED if segmented else {"plan/nbytes"})


def config_with_trees(model: Path, **changes: Any) -> EngineFolderConfig:
    with Checkpoint.open(model) as checkpoint:
        return make_config(checkpoint, **{"attention_variant": "plugin", "max_logits_per_slot": 9, "draft_tree": 9, **changes})


def test_the_input_for_trees_is_recorded(model: Path) -> None:
    config, without = config_with_trees(model), config_with_trees(model, draft_tree=None)
    data = json.loads(json.dumps(config.to_dict()))
    assert read_config(data) == config
    assert [(spec.name, spec.shape) for spec in config.tree_tensors] == [("ancestors", (3, 64, 2))]
    assert config.network_facts() != without.network_facts()
    del data["draft_tree"]  # folders of before
    assert read_config(data) == without
    assert read_config(data).tree_tensors == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_tree": 1}, "draft_tree: expected an integer from 2 to 64, got 1"),
        ({"draft_tree": True}, "draft_tree: expected an integer, got True"),
        ({"draft_tree": "9"}, "draft_tree: expected an integer, got '9'"),
        ({"draft_tree": 10}, "draft_tree: expected at most 9, the logits of a slot in profiles, got 10"),
        ({"attention_variant": "native"}, "draft_tree: expected none with native attention, got 9"),
        ({"segmented": True}, "draft_tree: expected none with segments, got 9"),
        ({"plugin_library": FileRecord(nbytes=3, sha256="0")}, "draft_tree: expected none with a plugin library, got 9"),
    ],
    ids=str,
)
def test_an_input_for_trees_that_cannot_be(model: Path, changes: dict[str, Any], message: str) -> None:
    draft_tree = changes.pop("draft_tree", 9)
    data = {**config_with_trees(model, **changes).to_dict(), "draft_tree": draft_tree}
    with pytest.raises(EngineError, match=message):
        read_config(data)
