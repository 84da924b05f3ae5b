"""The plugin as TensorRT drives it, through the trampolines of each release: from registration to destruction."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bindings.conftest import VERSION
from tests.bindings.network import FLOAT, HALF, INT32
from tests.bindings.plugin_calls import Creator, Plugin, fields
from tests.paths import ROOT
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import plugin as plugin_module, register
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION

KEY = tuple(name.encode() for name in (PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE))
ATTRIBUTES: dict[str, Any] = {
    "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "scale": 0.5, "window": 7, "softcap": 30.5, "rotary_dim": 64
}  # fmt: skip
SHAPES = [(-1, -1, 8, 64), (-1, -1, 2, 64), (-1, -1, 2, 64), (-1, 2, 2, 32, 64), (-1,), (32, 2, 32)]
KINDS = [HALF, HALF, HALF, HALF, INT32, FLOAT]
FREE = [*zip(SHAPES, KINDS, strict=True), (SHAPES[0], HALF), (SHAPES[3], HALF)]
NOW = [(tuple(3 if size < 0 else size for size in shape), kind) for shape, kind in FREE]


@pytest.fixture
def creator(stand_in: Any, full: TensorRT) -> Creator:
    register(full)
    return stand_in.creators[KEY]  # type: ignore[no-any-return]


@pytest.fixture
def plugin(creator: Creator) -> Iterator[Plugin]:
    """A plugin that was made of stored fields, as when an engine is read."""
    made = creator.create(fields(ATTRIBUTES), 1)
    assert made is not None
    yield made
    made.destroy()


def test_the_creator_is_registered_with_its_fields(full: TensorRT, creator: Creator) -> None:
    kinds = full.module.PluginFieldType
    assert creator.field_names() == {name: int(getattr(kinds, kind)) for name, kind in ATTRIBUTE_TYPES.items()}
    assert full.module.get_plugin_registry().get_creator(PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE) is register(full)


def test_a_plugin_knows_its_key(plugin: Plugin) -> None:
    assert plugin.key() == KEY


def test_fields_that_do_not_fit_are_refused(full: TensorRT, creator: Creator, capfd: pytest.CaptureFixture[str]) -> None:
    with full.log.collect() as messages:
        assert creator.create(fields({"num_heads": 8}), 0) is None
    assert isinstance(messages.cause, ConfigError)
    assert messages.errors[0].startswith("KVCacheAttention.create_plugin: ConfigError: fields: expected num_kv_heads")
    capfd.readouterr()  # the bindings print it too


def test_what_is_serialised_makes_the_same_plugin(creator: Creator, plugin: Plugin) -> None:
    assert plugin.serialized() == ATTRIBUTES
    again = creator.create(fields(ATTRIBUTES), 1)
    assert again is not None
    assert again.serialized() == ATTRIBUTES
    again.destroy()


def test_a_clone_outlives_the_plugin(creator: Creator) -> None:
    first = creator.create(fields(ATTRIBUTES), 0)
    assert first is not None
    clone = first.clone()
    first.destroy()
    assert clone.key() == KEY
    assert clone.serialized() == ATTRIBUTES
    clone.destroy()


def test_types_and_shapes_of_the_outputs(plugin: Plugin) -> None:
    assert plugin.num_outputs() == 2
    assert plugin.output_types(KINDS) == [HALF, HALF]
    assert plugin.output_shapes(SHAPES) == [SHAPES[0], SHAPES[3]]
    assert plugin.aliased_inputs() == [-1, 3]


def test_shapes_that_do_not_fit_are_refused(full: TensorRT, plugin: Plugin, capfd: pytest.CaptureFixture[str]) -> None:
    with full.log.collect() as messages:
        assert plugin.output_shapes([SHAPES[0], (-1, -1, 4, 64), *SHAPES[2:]]) is None
    assert isinstance(messages.cause, ShapeError)
    capfd.readouterr()


@pytest.mark.parametrize("position", range(len(FREE)))
def test_formats(plugin: Plugin, position: int) -> None:
    assert plugin.supports(position, FREE, len(SHAPES))
    other = [(shape, INT32 if kind != INT32 else FLOAT) if index == position else (shape, kind) for index, (shape, kind) in enumerate(FREE)]
    assert not plugin.supports(position, other, len(SHAPES))


def test_it_is_configured_and_says_its_workspace(plugin: Plugin) -> None:
    assert plugin.configure(FREE, len(SHAPES))
    assert plugin.workspace_nbytes(FREE, len(SHAPES)) > 0


def test_a_step(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class Recorded:
        def __init__(self, *made: Any) -> None:
            self.made = made

        def run(self, *given: Any) -> None:
            runs.append((self.made, given))

    monkeypatch.setattr(plugin_module, "current_memory", lambda: "memory")
    monkeypatch.setattr(plugin_module, "PluginEnqueue", Recorded)
    attached = plugin.attach()
    assert attached.on_shape_change(NOW, len(SHAPES))
    assert attached.set_tactic(0)
    inputs, outputs = [*range(0x1000, 0x7000, 0x1000)], [0x9000, 0x4000]
    assert attached.enqueue(NOW, inputs, outputs, 0xA000, 0xB0)
    attached.destroy()
    (attributes, dtype, shapes, memory), given = runs[0]
    assert (attributes.num_heads, dtype, memory) == (8, "float16", "memory")
    assert [*shapes.values()] == [shape for shape, _ in NOW[: len(SHAPES)]]
    assert [list(one) if isinstance(one, list | tuple) else one for one in given] == [inputs, outputs, 0xA000, 0xB0]


def test_plugins_are_destroyed_once(full: TensorRT) -> None:
    """In a process of its own, which must reach its end; plugins that only Python has are freed where that is safe."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.bindings.plugin_lives", VERSION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (200 if full.release < (10, 4) else 0)
