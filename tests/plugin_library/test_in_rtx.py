"""The plugin library in TensorRT for RTX: its registry loads it, its ONNX parser creates the plugins, its builder makes engines of them.

So the declarations that the library was compiled with have the layout of NVIDIA's binaries. Engines are not opened: that needs a GPU.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.paths import ROOT
from tests.plugin_library.build import build_library, need_cmake
from tests.plugin_library.layers import LAYERS
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, QUANTIZED_ATTRIBUTE_TYPES

need_cmake()
pytestmark = pytest.mark.trt


def _build(creators, folder, *options):
    """Return what a build in a process of its own has said."""
    command = [sys.executable, "-m", "tests.plugin_library.build_in_rtx", str(creators), str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def library():
    return build_library()


@pytest.fixture(scope="module")
def built(library, tmp_path_factory):
    """The folder of plans, and what was said, by who created the plugins."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("library", "python", "opened")}
    return {
        "library": (folders["library"], _build(library, folders["library"])),
        "python": (folders["python"], _build("python", folders["python"])),
        "opened": (folders["opened"], _build(library.with_stem(f"{library.stem}_registered"), folders["opened"], "--opened")),
    }


def test_the_creators_have_the_fields_of_those_in_python(built):
    for version, types in (("1", ATTRIBUTE_TYPES), ("2", QUANTIZED_ATTRIBUTE_TYPES)):
        found = [built[creators][1][f"fields {version}"] for creators in ("library", "python")]
        assert found[0] == found[1] == [[name, kind] for name, kind in types.items()]


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_plan_is_that_of_the_python_plugin(built, name):
    """TensorRT numbers some tensors in another order; the plugin's record, all fields with it, is the same."""
    plans = [np.frombuffer((folder / f"{name}.plan").read_bytes(), np.uint8) for folder, _ in (built["library"], built["python"])]
    assert [said[name] for _, said in built.values()] == [[], [], []]
    assert plans[0].size == plans[1].size
    differ = np.flatnonzero(plans[0] != plans[1])
    assert differ.size <= 64
    start, end = _record(plans[0].tobytes(), LAYERS[name])
    assert not ((start <= differ) & (differ < end)).any()


def _record(plan, layer):
    """Return the place of the plugin in a plan: from its name to the value of its last field."""
    start = plan.index(b"KVCacheAttention")
    last = list(layer.attributes.plugin_field_arrays())[-1].encode()
    return start, plan.index(last, start) + len(last) + 80


def test_a_plan_may_carry_the_library(built, library):
    """``plugins_to_serialize``."""
    folder, said = built["library"]
    plain, embedded = ((folder / f"{name}.plan").read_bytes() for name in ("by token", "embedded"))
    assert said["embedded"] == []
    assert library.read_bytes() in embedded
    assert len(embedded) - len(plain) < library.stat().st_size + 4096


def test_a_library_that_registers_itself_is_opened_without_the_registry(built):
    for name in LAYERS:
        plans = [(built[kind][0] / f"{name}.plan").read_bytes() for kind in ("library", "opened")]
        assert len(plans[0]) == len(plans[1])


def test_shapes_that_do_not_fit_are_errors_in_the_log_of_tensorrt(built):
    expected = "KVCacheAttention.getOutputShapes: k: expected [B, s, 2, 64], got [-1, -1, 3, 64]."
    said = built["library"][1]["wrong shape"]
    assert any(expected in line for line in said), said
