"""The plugin as TensorRT drives it, through the trampolines of each release: from registration to destruction."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.bindings.conftest import VERSION
from tests.bindings.network import FLOAT, FP8, HALF, INT8, INT32
from tests.bindings.plugin_calls import Creator, Plugin, Typed, fields
from tests.kernels.attention import Case, inputs as case_inputs, make_workspace
from tests.paths import ROOT
from tests.trt.plugin.on_host import run_plugins_on_host
from trt_kvcache import HostMemory
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.kernels import attend
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import plugin as plugin_module, register

ATTRIBUTES: dict[str, Any] = {
    "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "scale": 0.5, "window": 7, "softcap": 30.5, "rotary_dim": 64
}  # fmt: skip
SHAPES = [(-1, -1, 8, 64), (-1, -1, 2, 64), (-1, -1, 2, 64), (-1, 2, 2, 30, 64), (-1,), (32, 2, 32)]
KINDS = [HALF, HALF, HALF, HALF, INT32, FLOAT]


@dataclass(frozen=True)
class Form:
    """What a version of the plugin is made of, as engines store it: written down here, so that a change of one that exists fails."""

    version: str
    attributes: dict[str, Any]
    shapes: list[tuple[int, ...]]
    kinds: list[int]
    aliases: list[int]

    @property
    def key(self) -> tuple[bytes, ...]:
        return b"KVCacheAttention", self.version.encode(), b"trt_kvcache"

    @property
    def outputs(self) -> list[Typed]:
        """``out`` is like q, others are like the input whose memory they share."""
        return [(self.shapes[max(alias, 0)], self.kinds[max(alias, 0)]) for alias in self.aliases]

    @property
    def free(self) -> list[Typed]:
        return [*zip(self.shapes, self.kinds, strict=True), *self.outputs]

    @property
    def now(self) -> list[Typed]:
        return [(tuple(3 if size < 0 else size for size in shape), kind) for shape, kind in self.free]


def quantized(kv_dtype: int, kv_scales: int, scales: tuple[int, ...], aliases: list[int]) -> Form:
    """Over codes: 64 of them are 16 words, and 30 tokens have 32 scales."""
    shapes = [*SHAPES[:3], (-1, 2, 2, 30, 16), SHAPES[4], scales, SHAPES[5]]
    kinds = [HALF, HALF, HALF, INT32, INT32, FLOAT, FLOAT]
    return Form("2", {**ATTRIBUTES, "kv_dtype": kv_dtype, "kv_scales": kv_scales}, shapes, kinds, aliases)


def with_trees(form: Form) -> Form:
    """With the ancestors of 8 slots after the lengths; scales follow."""
    shapes = [*form.shapes[:5], (8, 64, 2), *form.shapes[5:]]
    kinds = [*form.kinds[:5], INT32, *form.kinds[5:]]
    return Form({"1": "3", "2": "4"}[form.version], form.attributes, shapes, kinds, [alias + (alias == 5) for alias in form.aliases])


FORMS = {
    "16 bits": Form("1", ATTRIBUTES, SHAPES, KINDS, [-1, 3]),
    "fp8 by head": quantized(1, 1, (2, 2), [-1, 3]),
    "int8 by token": quantized(2, 2, (-1, 2, 2, 32), [-1, 3, 5]),
}
FORMS |= {f"trees, {name}": with_trees(FORMS[name]) for name in ("16 bits", "int8 by token")}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture
def creator(stand_in: Any, full: TensorRT, form: Form) -> Creator:
    register(full)
    return stand_in.creators[form.key]  # type: ignore[no-any-return]


@pytest.fixture
def plugin(creator: Creator, form: Form) -> Iterator[Plugin]:
    """A plugin that was made of stored fields, as when an engine is read."""
    made = creator.create(fields(form.attributes), 1)
    assert made is not None
    yield made
    made.destroy()


def test_the_creator_is_registered_with_its_fields(full: TensorRT, creator: Creator, form: Form) -> None:
    kinds = full.module.PluginFieldType
    types = ATTRIBUTE_TYPES if form.version in "13" else QUANTIZED_ATTRIBUTE_TYPES
    assert creator.field_names() == {name: int(getattr(kinds, kind)) for name, kind in types.items()}
    assert set(types) == set(form.attributes)
    key = [part.decode() for part in form.key]
    assert full.module.get_plugin_registry().get_creator(*key) is register(full)[form.version]


def test_a_plugin_knows_its_key(plugin: Plugin, form: Form) -> None:
    assert plugin.key() == form.key


def test_fields_that_do_not_fit_are_refused(full: TensorRT, creator: Creator, capfd: pytest.CaptureFixture[str]) -> None:
    with full.log.collect() as messages:
        assert creator.create(fields({"num_heads": 8}), 0) is None
    assert isinstance(messages.cause, ConfigError)
    assert messages.errors[0].startswith("KVCacheAttention.create_plugin: ConfigError: fields: expected num_kv_heads")
    capfd.readouterr()  # the bindings print it too


def test_what_is_serialised_makes_the_same_plugin(creator: Creator, plugin: Plugin, form: Form) -> None:
    assert plugin.serialized() == form.attributes
    again = creator.create(fields(form.attributes), 1)
    assert again is not None
    assert again.serialized() == form.attributes
    again.destroy()


def test_a_clone_outlives_the_plugin(creator: Creator, form: Form) -> None:
    first = creator.create(fields(form.attributes), 0)
    assert first is not None
    clone = first.clone()
    first.destroy()
    assert clone.key() == form.key
    assert clone.serialized() == form.attributes
    clone.destroy()


def test_types_and_shapes_of_the_outputs(plugin: Plugin, form: Form) -> None:
    shapes, kinds = (list(each) for each in zip(*form.outputs, strict=True))
    assert plugin.num_outputs() == len(form.outputs)
    assert plugin.output_types(form.kinds) == kinds
    assert plugin.output_shapes(form.shapes) == shapes
    assert plugin.aliased_inputs() == form.aliases


def test_shapes_that_do_not_fit_are_refused(full: TensorRT, plugin: Plugin, form: Form, capfd: pytest.CaptureFixture[str]) -> None:
    for position, wrong in ((1, (-1, -1, 4, 64)), (3, (-1, 2, 2, 30, 32))):
        with full.log.collect() as messages:
            assert plugin.output_shapes([*form.shapes[:position], wrong, *form.shapes[position + 1 :]]) is None
        assert isinstance(messages.cause, ShapeError)
    capfd.readouterr()


def test_formats(plugin: Plugin, form: Form) -> None:
    count = len(form.shapes)
    for position, (shape, kind) in enumerate(form.free):
        assert plugin.supports(position, form.free, count)
        for other in {INT8, FP8, INT32, FLOAT} - {kind}:
            assert not plugin.supports(position, [*form.free[:position], (shape, other), *form.free[position + 1 :]], count)


def test_it_is_configured_and_says_its_workspace(plugin: Plugin, form: Form) -> None:
    assert plugin.configure(form.free, len(form.shapes))
    assert plugin.workspace_nbytes(form.free, len(form.shapes)) > 0


def test_a_step(plugin: Plugin, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class Recorded:
        def __init__(self, *made: Any) -> None:
            self.made = made

        def run(self, *given: Any) -> None:
            runs.append((self.made, given))

    monkeypatch.setattr(plugin_module, "current_memory", lambda: "memory")
    monkeypatch.setattr(plugin_module, "PluginEnqueue", Recorded)
    attached, count = plugin.attach(), len(form.shapes)
    assert attached.on_shape_change(form.now, count)
    assert attached.set_tactic(0)
    inputs = [*range(0x1000, 0x1000 * (count + 1), 0x1000)]
    outputs = [0x9000, *(inputs[alias] for alias in form.aliases[1:])]
    assert attached.enqueue(form.now, inputs, outputs, 0xA000, 0xB0)
    attached.destroy()
    (attributes, dtype, shapes, memory), given = runs[0]
    assert (attributes.num_heads, dtype, memory) == (8, "float16", "memory")
    assert [*shapes.values()] == [shape for shape, _ in form.now[:count]]
    assert [list(one) if isinstance(one, list | tuple) else one for one in given] == [inputs, outputs, 0xA000, 0xB0]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_computes_what_the_twin_does(plugin: Plugin, form: Form, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """Quantized values, scales and addresses that came through the bindings; where outputs are not aliased, the inputs stay as they are."""
    run_plugins_on_host(monkeypatch)
    given, random = form.attributes, np.random.default_rng(4)
    kv_dtype = {None: None, 1: "float8_e4m3fn", 2: "int8"}[given.get("kv_dtype")]
    case = Case(
        lengths=(3, 0, 29), width=3, tokens=30, group=4, scale=given["scale"], window=given["window"], softcap=given["softcap"],
        kv_dtype=kv_dtype, scales={None: "token", 1: "head", 2: "token"}[given.get("kv_scales")],
        tree="star" if form.version in "34" else None,
    )  # fmt: skip
    arrays = {name: np.ascontiguousarray(array) for name, array in case_inputs(case, 3).items()}
    arrays["cos_sin"] = random.standard_normal((32, 2, 32)).astype(np.float32)
    trees = ["ancestors"] if case.tree else []
    order = ["q", "k", "v", "cache", "lengths", *trees, *(["kv_scales"] if kv_dtype else []), "cos_sin"]
    before = {name: arrays[name].tobytes() for name in order}
    names = [order[max(alias, 0)] for alias in form.aliases]
    results = [arrays[name] if in_place and name != "q" else np.full_like(arrays[name], 77) for name in names]
    memory = HostMemory()
    stream = memory.create_stream()
    expected = {name: memory.to_device(arrays[name], stream=stream) for name in order}
    expected["out"] = memory.to_device(arrays["q"], stream=stream)
    options = {name: given[name] for name in ("scale", "window", "softcap")}
    attend(**expected, workspace=make_workspace(case, memory, stream), **options, stream=stream)

    if case.tree:  # the tokens of the enqueue come first in a table of all slots
        table = np.full((8, 64), -1, np.int64)
        table.reshape(-1)[:9] = arrays["ancestors"].ravel()
        arrays["ancestors"] = table
        before["ancestors"] = table.tobytes()
    attached = plugin.attach()
    assert attached.on_shape_change(form.now, len(order))
    assert attached.enqueue(form.now, [arrays[name].ctypes.data for name in order], [one.ctypes.data for one in results], 0xA000, 0xB0)
    attached.destroy()
    for name, result in zip(["out", *names[1:]], results, strict=True):
        assert result.tobytes() == expected[name].numpy().tobytes()
    changed = {name for name in order if arrays[name].tobytes() != before[name]}
    assert changed == ({*names[1:]} if in_place else set())


def test_plugins_are_destroyed_once(full: TensorRT) -> None:
    """In a process of its own, which must reach its end; plugins that only Python has are freed where that is safe."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.bindings.plugin_lives", VERSION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (200 if full.release < (10, 4) else 0)
