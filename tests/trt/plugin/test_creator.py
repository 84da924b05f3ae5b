"""The creators of the plugin, through the registry of TensorRT for RTX."""

import gc
from dataclasses import replace

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.trt.module import load
from trt_kvcache.trt.plugin import AttentionAttributes, creator as creator_module, plugin_class, register

pytestmark = pytest.mark.trt

ATTRIBUTES = AttentionAttributes(num_heads=14, num_kv_heads=7, head_dim=96, scale=0.1, window=2**31 - 1, softcap=30.5, rotary_dim=92)
#: By version.
ATTRIBUTES_OF = {
    "1": ATTRIBUTES,
    "2": replace(ATTRIBUTES, kv_dtype="int8", kv_scales="token"),
    "3": replace(ATTRIBUTES, takes_trees=True),
    "4": replace(ATTRIBUTES, kv_dtype="int8", kv_scales="token", takes_trees=True),
}
TYPES_OF = {"1": ATTRIBUTE_TYPES, "2": QUANTIZED_ATTRIBUTE_TYPES, "3": ATTRIBUTE_TYPES, "4": QUANTIZED_ATTRIBUTE_TYPES}


def stored_fields(plugin):
    """What ``get_fields_to_serialize`` points into: TensorRT hands a creator a list of the same fields."""
    plugin.get_fields_to_serialize()
    return plugin._stored_fields


@pytest.fixture(scope="module")
def rtx():
    return load("tensorrt_rtx")


@pytest.fixture(params=ATTRIBUTES_OF)
def version(request):
    return request.param


@pytest.fixture
def attributes(version):
    return ATTRIBUTES_OF[version]


@pytest.fixture
def creator(rtx, version):
    return register(rtx)[version]


def test_the_creator_is_found_in_the_registry(rtx, creator, version):
    found = rtx.module.get_plugin_registry().get_creator("KVCacheAttention", version, "trt_kvcache")
    assert found is creator
    assert (found.name, found.plugin_version, found.plugin_namespace) == ("KVCacheAttention", version, "trt_kvcache")


def test_it_is_registered_once(rtx, creator, version):
    assert register(rtx)[version] is creator


def test_it_declares_every_attribute_with_its_type(creator, version):
    assert {field.name: field.type.name for field in creator.field_names} == TYPES_OF[version]


def test_what_is_serialised_lives_as_long_as_the_plugin(rtx, attributes):
    plugin = plugin_class(rtx)(attributes)
    serialized = plugin.get_fields_to_serialize()
    assert type(serialized) is rtx.module.PluginFieldCollection_  # any other class is converted only in a call from Python
    assert plugin.get_fields_to_serialize() is serialized


def test_a_serialised_plugin_is_created_again(rtx, creator, attributes, version):
    plugin = plugin_class(rtx)(attributes)
    serialized = stored_fields(plugin)
    gc.collect()  # the plugin keeps alive what the fields point to
    made = creator.create_plugin("again", serialized, rtx.module.TensorRTPhase.RUNTIME)
    assert isinstance(made, plugin_class(rtx))
    assert (made.attributes, made.plugin_version) == (attributes, version)


def test_a_missing_field_is_refused(rtx, creator, attributes):
    plugin = plugin_class(rtx)(attributes)
    fields = [field for field in stored_fields(plugin) if field.name != "head_dim"]
    with raises(ConfigError, "fields", "head_dim too"):
        creator.create_plugin("again", rtx.module.PluginFieldCollection(fields), rtx.module.TensorRTPhase.BUILD)


def test_fields_of_another_version_are_refused(rtx):
    creators, kind, phase = register(rtx), plugin_class(rtx), rtx.module.TensorRTPhase.RUNTIME
    quantized, plain = (kind(ATTRIBUTES_OF[version]) for version in ("2", "1"))
    with pytest.raises(ConfigError, match=r"^field 'kv_dtype' is unknown\."):
        creators["1"].create_plugin("again", stored_fields(quantized), phase)
    with raises(ConfigError, "fields", expected="kv_dtype, kv_scales too"):
        creators["2"].create_plugin("again", stored_fields(plain), phase)


@pytest.mark.usefixtures("creator")
def test_a_name_that_is_taken_is_refused(rtx, version):
    message = rf"^KVCacheAttention {version}: tensorrt_rtx .* has a creator of this name and version that is not ours\.$"
    with pytest.raises(EngineError, match=message):
        creator_module.register_version.__wrapped__(rtx, version)
