"""The version of the plugin, and versions of TensorRT."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.helpers.assertions import raises
from tests.trt.plugin.stand_in import tensorrt
from tests.trt.plugin.test_plugin_tensors import FIELDS, QUANTIZED
from trt_kvcache.errors import EngineError
from trt_kvcache.trt.plugin import allow_aliasing, can_add_plugins, plugin_class
from trt_kvcache.trt.plugin.versions import (
    PLUGIN_ABIS,
    abi_digest,
    ahead_of_time_module,
    constant_of,
    needs_extra_reference,
    plugin_version,
)

#: Of every version that was given out. A change of inputs, outputs or fields takes a new version, never a new digest.
DIGESTS = {"1": "0009ac9ee71b24c7", "2": "c2178cc1225e52bf", "3": "ec1cece77a9ba418", "4": "759c28ba5cfb7a02"}


def test_the_version_changes_with_the_abi():
    assert {version: abi_digest(version) for version in PLUGIN_ABIS} == DIGESTS


def test_attention_in_16_bits_keeps_the_version_of_its_engines():
    assert plugin_version(FIELDS) == "1"
    assert {plugin_version(attributes) for attributes in QUANTIZED.values()} == {"2"}
    trees = [replace(attributes, takes_trees=True) for attributes in (FIELDS, *QUANTIZED.values())]
    assert [plugin_version(attributes) for attributes in trees] == ["3", "4", "4"]


def test_a_tensorrt_without_aliased_plugin_outputs_is_refused():
    old = tensorrt()
    del old.module.IPluginV3OneBuildV2
    with raises(EngineError, "KVCacheAttention", expected="TensorRT 10.3 or newer", got=("tensorrt 10.3.0", "IPluginV3OneBuildV2")):
        plugin_class(old)


def test_which_networks_take_plugins():
    assert can_add_plugins(tensorrt(INetworkDefinition=SimpleNamespace(add_plugin_v3=None)))
    assert not can_add_plugins(tensorrt(INetworkDefinition=SimpleNamespace()))


def test_aliasing_is_allowed_where_there_is_a_switch():
    switched = []
    config = SimpleNamespace(set_preview_feature=lambda *what: switched.append(what))
    for features in ({}, {"ALIASED_PLUGIN_IO_10_03": "it"}):
        allow_aliasing(tensorrt(PreviewFeature=SimpleNamespace(**features)), config)
        assert switched == [(one, True) for one in features.values()]


def test_a_tensorrt_without_plugins_ahead_of_time_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    with raises(EngineError, "tensorrt.plugin", expected="full TensorRT with plugins compiled ahead of time", got="tensorrt 10.3.0"):
        ahead_of_time_module(tensorrt())
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", SimpleNamespace(register=None))
    with pytest.raises(EngineError, match=r"tensorrt 10\.3\.0 has no aot_impl"):
        ahead_of_time_module(tensorrt())


@pytest.mark.parametrize(("size", "value"), [((True, 3), 3), ((True, lambda: 4), 4), ((False, 5), None)])
def test_constants_are_read_in_either_form(size, value):
    assert constant_of(SimpleNamespace(is_constant=size[0], constant_value=size[1])) == value


@pytest.mark.parametrize(("version", "needed"), [("10.3.0", True), ("10.4.0", False), ("11.4.0", False)])
def test_plugins_of_10_3_get_a_reference_more(version, needed):
    """So that Python never frees them: the bindings of 10.3 would free them twice. With real bindings: tests/bindings/plugin_lives.py."""
    full = replace(tensorrt(), version=version)
    assert needs_extra_reference(full) is needed
    plugin, plain = plugin_class(full)(FIELDS), plugin_class(replace(full, version="11.4.0"))(FIELDS)
    assert sys.getrefcount(plugin) - sys.getrefcount(plain) == int(needed)
