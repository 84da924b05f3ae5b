"""The creator of the plugin, through the registry of TensorRT for RTX."""

import gc

import pytest

from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.trt.module import load
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class, register

pytestmark = pytest.mark.trt

ATTRIBUTES = AttentionAttributes(num_heads=14, num_kv_heads=7, head_dim=96, scale=0.1, window=2**31 - 1, softcap=30.5, rotary_dim=92)


def stored_fields(plugin):
    """What ``get_fields_to_serialize`` points into: TensorRT hands a creator a list of the same fields."""
    plugin.get_fields_to_serialize()
    return plugin._stored_fields


@pytest.fixture(scope="module")
def rtx():
    return load("tensorrt_rtx")


@pytest.fixture
def creator(rtx):
    return register(rtx)


def test_the_creator_is_found_in_the_registry(rtx, creator):
    found = rtx.module.get_plugin_registry().get_creator("KVCacheAttention", "1", "trt_kvcache")
    assert found is creator


def test_it_is_registered_once(rtx, creator):
    assert register(rtx) is creator


def test_it_declares_every_attribute_with_its_type(creator):
    assert {field.name: field.type.name for field in creator.field_names} == ATTRIBUTE_TYPES


def test_what_is_serialised_lives_as_long_as_the_plugin(rtx):
    plugin = plugin_class(rtx)(ATTRIBUTES)
    serialized = plugin.get_fields_to_serialize()
    assert type(serialized) is rtx.module.PluginFieldCollection_  # any other class is converted only in a call from Python
    assert plugin.get_fields_to_serialize() is serialized


def test_a_serialised_plugin_is_created_again(rtx, creator):
    plugin = plugin_class(rtx)(ATTRIBUTES)
    serialized = stored_fields(plugin)
    gc.collect()  # the plugin keeps alive what the fields point to
    made = creator.create_plugin("again", serialized, rtx.module.TensorRTPhase.RUNTIME)
    assert isinstance(made, plugin_class(rtx))
    assert made.attributes == ATTRIBUTES


def test_a_missing_field_is_refused(rtx, creator):
    plugin = plugin_class(rtx)(ATTRIBUTES)
    fields = [field for field in stored_fields(plugin) if field.name != "head_dim"]
    with pytest.raises(ConfigError, match=r"^fields: expected head_dim too"):
        creator.create_plugin("again", rtx.module.PluginFieldCollection(fields), rtx.module.TensorRTPhase.BUILD)


@pytest.mark.usefixtures("creator")
def test_a_name_that_is_taken_is_refused(rtx):
    message = r"^KVCacheAttention 1: tensorrt_rtx .* has a creator of this name and version that is not ours\.$"
    with pytest.raises(EngineError, match=message):
        register.__wrapped__(rtx)
