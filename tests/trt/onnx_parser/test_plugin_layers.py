"""Plugin layers by the ONNX parser of TensorRT for RTX: what it makes, what it refuses, and what is missing for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trt_kvcache.errors import BuildError
from trt_kvcache.kernels.attention_tiles import MAX_SCORE_FACTOR, MIN_SCORE_FACTOR
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.onnx_parser import parse_plugin_layers
from trt_kvcache.trt.plugin import register

from .test_model_proto import ATTRIBUTES, attention_node

pytestmark = pytest.mark.trt

HEADS = [TensorType((-1, -1, count, 64), "float16") for count in (4, 2, 2)]
REST = [TensorType((-1, 2, 2, 300, 64), "float16"), TensorType((-1,), "int32"), TensorType((300, 2, 30), "float32")]


def node(name: str, inputs: list[TensorType]) -> object:
    return replace(attention_node(name), inputs=tuple(inputs))


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    found = load("tensorrt_rtx")
    register(found)
    return found


def parse(rtx: TensorRT, *nodes: object, fill: bool = False) -> list[tuple[str, str]]:
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        builder = rtx.create("Builder")
        network = builder.create_network(0)
        if fill:
            network.add_identity(network.add_input("x", rtx.data_type("float16"), (1,)))
        parsed = parse_plugin_layers(rtx, network, nodes, messages)
        assert (messages.errors, messages.warnings) == ([], [])
        return [(name, layer.type.name) for name, layer in parsed.layers.items() if layer.type.name == "PLUGIN_V3"]


def test_the_layers_have_the_names_of_their_nodes(rtx: TensorRT) -> None:
    assert parse(rtx, node("a/b", [*HEADS, *REST]), node("c", [*HEADS, *REST])) == [("a/b", "PLUGIN_V3"), ("c", "PLUGIN_V3")]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([*HEADS[:2], *REST], "expected q, k, v, cache, lengths, cos_sin and, if wanted, new_lengths, got 5"),
        ([*HEADS, TensorType((-1, 2, 3, 300, 64), "float16"), *REST[1:]], "cache: expected [1, 2, 2, S, 64], got [1, 2, 3, 300, 64]"),
        ([HEADS[0], TensorType((-1, -1, 2, 64), "bfloat16"), HEADS[2], *REST], "k: expected float16, got bfloat16"),
    ],
)
def test_what_a_plugin_refuses_is_an_error_of_ours(rtx: TensorRT, inputs: list[TensorType], text: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse(rtx, node("one", inputs))
    assert str(caught.value).startswith("plugin layers: the ONNX parser of tensorrt_rtx ")
    assert text in str(caught.value)
    assert "plugin_layers='segments'" in str(caught.value)


@pytest.mark.parametrize(("scale", "softcap"), [(0.1, 0.0), (0.1, 30.1), (MIN_SCORE_FACTOR, MAX_SCORE_FACTOR), (0.0, 0.0)])
def test_scale_and_softcap_arrive_as_float32(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch, scale: float, softcap: float) -> None:
    """The network API passes doubles; an attribute of ONNX is a float32, also for a value at the end of the range that rounds down."""
    given = replace(ATTRIBUTES, scale=scale, softcap=softcap)
    kinds: list[set[str]] = []
    made: list[AttentionAttributes] = []
    read = AttentionAttributes.from_plugin_fields

    def note(fields: Any, **kind: bool) -> AttentionAttributes:
        kinds.append({field.type.name for field in fields if field.name in ("scale", "softcap")})
        made.append(read(fields, **kind))
        return made[-1]

    monkeypatch.setattr(AttentionAttributes, "from_plugin_fields", note)
    parse(rtx, replace(node("one", [*HEADS, *REST]), fields=given.plugin_field_arrays()))  # type: ignore[type-var]
    assert kinds == [{"FLOAT32"}]
    assert made == [replace(given, scale=float(np.float32(scale)), softcap=float(np.float32(softcap)))]


def test_an_unknown_plugin_is_an_error_of_ours(rtx: TensorRT) -> None:
    with pytest.raises(BuildError, match=r"^plugin layers: .*"):
        parse(rtx, replace(attention_node("one"), version="99"))


def test_a_network_that_is_not_empty_is_refused(rtx: TensorRT) -> None:
    with pytest.raises(BuildError, match=r"^plugin layers: .*"):
        parse(rtx, node("one", [*HEADS, *REST]), fill=True)


_PREPARE = """
import ctypes, os, platform, tempfile
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import load
from trt_kvcache.trt.onnx_parser import plugin_layers
rtx = load("tensorrt_rtx")
try:
    ctypes.CDLL("libtensorrt_rtx.so")
    raise SystemExit(77)  # this machine has one
except OSError:
    pass
"""

#: What is broken, and a part of the error.
_BROKEN = {
    "no folder for temporary files": ('tempfile.tempdir = "/nowhere"', "/nowhere"),
    "another machine": ('platform.machine = lambda: "riscv64"', "expected a machine of x86_64 or aarch64, got riscv64"),
    "another name of the library": ('plugin_layers._LIBRARY = "libmissing.so"', "libmissing.so.1 is not loaded"),
    "a library without the function": ('plugin_layers._FUNCTION = "missing"', "missing"),
}


_PARSE = """
from trt_kvcache.trt.plugin import register
from tests.trt.onnx_parser.test_plugin_layers import HEADS, REST, node
register(rtx)
builder = rtx.create("Builder")
with rtx.log.collect() as messages:
    plugin_layers.parse_plugin_layers(rtx, builder.create_network(0), [node("one", [*HEADS, *REST])], messages)
print("parsed")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", _PREPARE + program], check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this machine has libtensorrt_rtx.so")
    return done


@pytest.mark.skipif(sys.platform != "linux", reason="the loader of Linux")
class TestLibrary:
    @pytest.mark.parametrize("broken", _BROKEN)
    def test_one_that_cannot_be_loaded_is_an_error_of_ours(self, broken: str) -> None:
        change, text = _BROKEN[broken]
        program = f"{change}\ntry:\n    plugin_layers.preload_library(rtx)\nexcept BuildError as error:\n    print(error)"
        done = run(program)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("plugin layers: tensorrt_rtx ")
        assert text in done.stdout
        assert "plugin_layers='segments'" in done.stdout

    def test_without_it_the_parser_ends_the_process(self) -> None:
        """The reason for all this. Where this fails, a newer parser has no need of it."""
        done = run("plugin_layers.preload_library = lambda tensorrt: None" + _PARSE)
        assert done.returncode < 0
        assert "terminate" in done.stderr
        done = run(_PARSE)
        assert (done.returncode, done.stdout) == (0, "parsed\n")
