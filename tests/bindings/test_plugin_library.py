"""The plugin library through the bindings of each release: their registry finds its creators, and networks take its plugins."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.bindings.plugin_calls import fields
from tests.helpers.assertions import raises
from tests.helpers.models import write_model
from tests.plugin_library.build import build_library, need_cmake, run
from tests.plugin_library.creators import creators_of
from tests.plugin_library.layers import LAYERS, Layer
from trt_kvcache import build_engine
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.errors import ConfigError
from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.trt import tensorrt_engine
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import creator as creator_module, plugin_library
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, allow_aliasing, plugin_version
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

need_cmake()


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


@pytest.fixture
def creator(stand_in: Any, full: TensorRT, layer: Layer) -> Iterator[Any]:
    """The creator of the library as the bindings give it to Python, in place of one that a test before registered."""
    before = dict(stand_in.creators)
    stand_in.creators |= {one.key: one for one in creators_of(build_library()).values()}
    yield full.module.get_plugin_registry().get_creator(PLUGIN_NAME, plugin_version(layer.attributes), PLUGIN_NAMESPACE)
    stand_in.creators.clear()
    stand_in.creators |= before


@pytest.fixture
def plugin(full: TensorRT, creator: Any, layer: Layer) -> Any:
    trt, arrays = full.module, layer.attributes.plugin_field_arrays()
    types = {name: getattr(trt.PluginFieldType, QUANTIZED_ATTRIBUTE_TYPES[name]) for name in arrays}
    given = trt.PluginFieldCollection([trt.PluginField(name, array, types[name]) for name, array in arrays.items()])
    return creator.create_plugin("layer", given, trt.TensorRTPhase.BUILD)


def test_the_bindings_know_the_creator_by_its_interface(full: TensorRT, creator: Any, layer: Layer) -> None:
    assert isinstance(creator, full.module.IPluginCreatorV3One)
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == (
        PLUGIN_NAME, plugin_version(layer.attributes), PLUGIN_NAMESPACE
    )  # fmt: skip
    types = {field.name: field.type.name for field in creator.field_names}
    assert types == {name: kind for name, kind in QUANTIZED_ATTRIBUTE_TYPES.items() if name in layer.attributes.plugin_field_arrays()}


def test_an_engine_is_built_and_opened_with_the_library(stand_in: Any, full: TensorRT, plugin: Any, layer: Layer) -> None:
    trt = full.module
    builder = trt.Builder(full.log.logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    allow_aliasing(full, config)
    inputs = [
        network.add_input(name, full.data_type(dtype), tuple(-1 if isinstance(size, str) else size for size in shape))
        for name, (shape, dtype) in layer.inputs.items()
    ]
    added = network.add_plugin_v3(inputs, [], plugin)
    for index, name in enumerate(layer.outputs):
        added.get_output(index).name = name
        network.mark_output(added.get_output(index))
    blob = builder.build_serialized_network(network, config)
    assert blob is not None
    stored = [*stand_in.plans.values()][-1].plugins[0].fields
    assert stored == {name: array[0] for name, array in layer.attributes.plugin_field_arrays().items()}
    assert fields(stored).count == len(stored)
    assert trt.Runtime(full.log.logger).deserialize_cuda_engine(blob) is not None


SIZES = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11, "flavour": "tensorrt"}


@pytest.fixture
def of_its_own(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: no library is loaded, and no creator of attention is registered."""
    monkeypatch.setattr(plugin_library, "_LIBRARIES", {})
    monkeypatch.setattr(creator_module, "register_version", cache(creator_module.register_version.__wrapped__))
    others = {key: creator for key, creator in stand_in.creators.items() if key[0].decode() != PLUGIN_NAME}
    monkeypatch.setattr(stand_in, "creators", others)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", head_dim=64, num_hidden_layers=2)


@pytest.fixture
def empty_library(tmp_path: Path) -> Path:
    """A plugin library without plugins."""
    source, library = tmp_path / "empty.c", tmp_path / "empty.so"
    source.write_text("void* getCreators(int* count) { *count = 0; return 0; }\nvoid setLoggerFinder(void* finder) { (void)finder; }\n")
    run("gcc", "-shared", "-fPIC", source, "-o", library)
    return library


@pytest.mark.usefixtures("of_its_own")
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_build_embeds_the_library_and_a_session_opens_it_without_python_s_plugin(
    stand_in: Any, full: TensorRT, model: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, kv_dtype: str | None
) -> None:
    library, options = build_library(), {**SIZES, "kv_dtype": kv_dtype}
    plain = build_engine(model, tmp_path / "plain", **options, attention="plugin").path  # type: ignore[arg-type]
    path = build_engine(model, tmp_path / "engine", **options, plugin_library=library).path  # type: ignore[arg-type]
    *_, before, built = stand_in.plans.values()
    assert (before.libraries, built.libraries) == ((), (library.resolve(),))
    assert [(layer.key, layer.fields, layer.tensors) for layer in built.plugins] == [
        (layer.key, layer.fields, layer.tensors) for layer in before.plugins
    ]
    config = EngineFolder.open(path).config
    assert config.plugin_library == FileRecord.of([library.read_bytes()])
    assert EngineFolder.open(plain).config.plugin_library is None
    stand_in.creators.clear()
    monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: pytest.fail("a creator in Python was registered"))
    with TensorRTEngine.open(path, memory=memory) as engine:
        assert dict(engine.tensors) == {spec.name: spec for spec in config.tensors}


@pytest.mark.usefixtures("of_its_own")
def test_a_library_without_the_plugin_is_refused_and_python_s_stays(
    stand_in: Any, full: TensorRT, model: Path, tmp_path: Path, empty_library: Path
) -> None:
    build_engine(model, tmp_path / "plain", **SIZES, attention="plugin")  # type: ignore[arg-type]
    before = {key: creator.address for key, creator in stand_in.creators.items()}
    for _ in range(2):
        with raises(ConfigError, "plugin_library", expected="KVCacheAttention version 1 (namespace trt_kvcache)", got="no version of it"):
            build_engine(model, tmp_path / "engine", **SIZES, plugin_library=empty_library)  # type: ignore[arg-type]
        assert not (tmp_path / "engine").exists()
        assert {key: creator.address for key, creator in stand_in.creators.items()} == before
    assert build_engine(model, tmp_path / "engine", **SIZES, plugin_library=build_library()).path.exists()  # type: ignore[arg-type]


@pytest.mark.usefixtures("of_its_own")
def test_a_creator_that_is_not_ours_keeps_a_library_out(stand_in: Any, full: TensorRT, model: Path, tmp_path: Path) -> None:
    """TensorRT refuses to load a library whose creators are registered, and to give up those of other libraries."""
    registry = full.module.get_plugin_registry()
    registry.load_library(str(build_library()))
    before = dict(stand_in.creators)
    stand_in.keeps_creators = True
    try:
        with raises(ConfigError, "plugin_library", expected="plugins that are not registered yet", says="refused to load"):
            build_engine(model, tmp_path / "engine", **SIZES, plugin_library=build_library())  # type: ignore[arg-type]
    finally:
        stand_in.keeps_creators = False
    assert stand_in.creators == before
    assert not (tmp_path / "engine").exists()
