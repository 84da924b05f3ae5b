"""Build plans with plugin layers in TensorRT for RTX, from creators of the library or of Python: a process has one or the other.

``python -m tests.plugin_library.build_in_rtx (LIBRARY | python) FOLDER [--opened]`` prints
as JSON what the registry and the log say.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from tests.plugin_library.layers import LAYERS, Layer
from trt_kvcache.trt.module import load
from trt_kvcache.trt.plugin import register
from trt_kvcache.trt.plugin.versions import (
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    QUANTIZED_VERSION,
    allow_aliasing,
    plugin_version,
)

_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
_DOMAIN = "trt.plugins"


def open_parser(folder: Path) -> None:
    """Let the ONNX parser find TensorRT: it opens a library of this name, which the wheel has under another one."""
    import tensorrt_rtx_libs

    libraries = Path(tensorrt_rtx_libs.__path__[0])
    stub = folder / "libstub.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(stub), "-Wl,-soname,libtensorrt_rtx.so"]
    command += ["-Wl,--no-as-needed", str(libraries / "libtensorrt_rtx.so.1"), f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, input=b"int stub;", check=True)
    ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


def onnx_model(layer: Layer, changed: dict[str, tuple[Any, ...]]) -> bytes:
    """Return a model of one plugin layer; ``changed``: shapes of inputs that do not fit."""

    def value(name: str, shape: Any, dtype: str) -> Any:
        return helper.make_tensor_value_info(name, _TYPES[dtype], list(changed.get(name, shape)))

    inputs = [value(name, shape, dtype) for name, (shape, dtype) in layer.inputs.items()]
    outputs = [value(name, *layer.inputs[like]) for name, like in layer.outputs.items()]
    fields = {name: array.reshape(-1)[0].item() for name, array in layer.attributes.plugin_field_arrays().items()}
    node = helper.make_node(
        PLUGIN_NAME, list(layer.inputs), list(layer.outputs), name="layer", domain=_DOMAIN,
        plugin_version=plugin_version(layer.attributes), plugin_namespace=PLUGIN_NAMESPACE, **fields,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(_DOMAIN, 1)]
    return bytes(helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=8).SerializeToString())


def build(rtx: Any, layer: Layer, embedded: list[str], changed: dict[str, tuple[Any, ...]]) -> tuple[bytes | None, list[str]]:
    """Return a plan of one layer, for a GPU that is not here, and the errors that were logged."""
    trt = rtx.module
    builder = trt.Builder(rtx.log.logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        parsed = trt.OnnxParser(network, rtx.log.logger).parse(onnx_model(layer, changed))
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        allow_aliasing(rtx, config)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.plugins_to_serialize = embedded
        for width in (16, 1):
            profile = builder.create_optimization_profile()
            for name, (shape, _) in layer.inputs.items():
                low, high = ([{"B": batch, "s": tokens}.get(size, size) for size in shape] for batch, tokens in ((1, 1), (2, width)))
                profile.set_shape(name, low, high, high)
            config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config) if parsed else None
    return None if plan is None else bytes(plan), messages.errors


def main(creators: str, folder: Path, opened: bool) -> None:
    """Build a plan of each layer into a folder."""
    rtx = load("tensorrt_rtx")
    open_parser(folder)
    registry = rtx.module.get_plugin_registry()
    if creators == "python":
        register(rtx)
    elif opened:
        ctypes.CDLL(creators)  # as Polygraphy does
    else:
        registry.load_library(creators)
    said: dict[str, Any] = {}
    for version in (PLUGIN_VERSION, QUANTIZED_VERSION):
        creator = registry.get_creator(PLUGIN_NAME, version, PLUGIN_NAMESPACE)
        said[f"fields {version}"] = [[field.name, field.type.name] for field in creator.field_names]
    for name, layer in LAYERS.items():
        plan, said[name] = build(rtx, layer, [], {})
        if plan is not None:
            (folder / f"{name}.plan").write_bytes(plan)
    if creators != "python" and not opened:
        plan, said["embedded"] = build(rtx, LAYERS["by token"], [creators], {})
        if plan is not None:
            (folder / "embedded.plan").write_bytes(plan)
    said["wrong shape"] = build(rtx, LAYERS["plain"], [], {"k": ("B", "s", 3, 64)})[1]
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--opened" in sys.argv)
