"""What the package uses of TensorRT, read from its source: classes and members, layers, and how many arguments calls have.

Found are

- names of the module: ``trt.DataType.HALF``, ``tensorrt.module.BuilderFlag.TF32``;
- layers: ``graph.op(name, "cast", tensor, dtype)`` is ``INetworkDefinition.add_cast`` with two arguments;
- members of TensorRT's objects, where ``OBJECTS`` says which expression is which class.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "trt_kvcache"

#: Expressions that are the module of TensorRT.
_MODULE = {"trt", "graph.trt", "self.trt", "module", "tensorrt.module", "self._tensorrt.module"}

#: Classes of the objects of TensorRT that the package holds, by file and expression.
OBJECTS = {
    "builder/definition.py": {"builder": "Builder", "network": "INetworkDefinition"},
    "builder/serialization.py": {
        "definition.builder": "Builder",
        "config": "IBuilderConfig",
        "trt_profile": "IOptimizationProfile",
    },
    "builder/network/attention_lowering.py": {"plugin_layer": "IPluginV3Layer"},
    "builder/network/plugin_layers.py": {"trt.get_plugin_registry()": "IPluginRegistry"},
    "builder/network/causal_convolution.py": {"inputs": "IConcatenationLayer", "kept": "IGatherLayer"},
    "builder/network/causal_mask.py": {"layer": "IShuffleLayer"},
    "builder/network/graph.py": {"layer": "IShuffleLayer", "self.network": "INetworkDefinition", "tensor": "ITensor"},
    "builder/network/head.py": {"layer": "IGatherLayer"},
    "builder/network/hidden_states.py": {"layer": "IConcatenationLayer"},
    "builder/network/projection.py": {"layer": "IDequantizeLayer"},
    "builder/network/rope.py": {"layer": "IRotaryEmbeddingLayer"},
    "builder/network/self_attention.py": {"layer": "IAttention"},
    "builder/network/sizes.py": {"fill": "IFillLayer", "section": "ISliceLayer", "shuffle": "IShuffleLayer"},
    "builder/network/softcapped_attention.py": {"softmax": "ISoftMaxLayer"},
    "builder/network/step_lengths.py": {"layer": "IFillLayer"},
    "trt/loaded_plan.py": {
        "config": "IRuntimeConfig",
        "context": "IExecutionContext",
        "self._contexts[context]": "IExecutionContext",
        "source": "IExecutionContext",
        "self._engine": "ICudaEngine",
        "self._runtime": "Runtime",
    },
    "trt/onnx_parser/plugin_layers.py": {"layer": "IPluginV3Layer", "network": "INetworkDefinition", "parser": "OnnxParser"},
    "trt/plan_inspection.py": {"engine": "ICudaEngine"},
    "trt/plugin/creator.py": {"trt.get_plugin_registry()": "IPluginRegistry"},
    "trt/plugin/operation_plugin.py": {
        "builder": "IExprBuilder",
        "desc": "PluginTensorDesc",
        "trt.get_plugin_registry()": "IPluginRegistry",
    },
    "trt/plugin/plugin_library.py": {
        "registry": "IPluginRegistry",
        "tensorrt.module.get_plugin_registry()": "IPluginRegistry",
    },
    "trt/plugin/plugin.py": {"desc": "PluginTensorDesc", "size": "IDimensionExpr"},
    "trt/plugin/versions.py": {"config": "IBuilderConfig"},
    "trt/tensors.py": {"engine": "ICudaEngine"},
}


@dataclass(frozen=True)
class Use:
    """One use of TensorRT.

    Parameters
    ----------
    name : str
        Such as ``"INetworkDefinition.add_cast"`` or ``"DataType.HALF"``.
    where : str
        File and line.
    arguments : int or None
        How many positional arguments a call has; None where it is not called, or has a varying number.
    keywords : tuple of str
        Names of its keyword arguments.
    """

    name: str
    where: str
    arguments: int | None = None
    keywords: tuple[str, ...] = ()


def find_uses(package: Path = PACKAGE) -> list[Use]:
    """Return every use of TensorRT in the sources of a package."""
    return [use for path in sorted(package.rglob("*.py")) for use in _uses_in(path, path.relative_to(package).as_posix())]


def _uses_in(path: Path, name: str) -> Iterator[Use]:
    if not name.startswith(("trt/", "builder/")):  # nothing else touches TensorRT: test_layers.py and docs/architecture.md
        return
    tree, objects = ast.parse(path.read_text()), OBJECTS.get(name, {})
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            kind = _layer_kind(node)
            if kind is not None:
                yield Use(f"INetworkDefinition.add_{kind}", where, _count(node.args[2:]))
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        used = _member(owner, node.attr, objects)
        if used is not None:
            call = called.get(id(node))
            keywords = tuple(one.arg or "**" for one in call.keywords) if call else ()
            yield Use(used, where, _count(call.args) if call else None, keywords)


def _member(owner: str, attribute: str, objects: dict[str, str]) -> str | None:
    """Return the name of what ``owner.attribute`` is in TensorRT, or None."""
    if owner in objects:
        return f"{objects[owner]}.{attribute}"
    if owner in _MODULE:
        return attribute if attribute[0].isupper() or attribute == "get_plugin_registry" else None
    module, _, class_name = owner.rpartition(".")
    if module in _MODULE and class_name[0].isupper():
        return f"{class_name}.{attribute}"
    return None


def _layer_kind(call: ast.Call) -> str | None:
    """Return the kind of a call like ``graph.layer(name, "cast", ...)``."""
    is_layer = isinstance(call.func, ast.Attribute) and call.func.attr in ("layer", "op") and len(call.args) >= 2
    if is_layer and isinstance(call.args[1], ast.Constant):
        return str(call.args[1].value)
    return None


def _count(arguments: list[ast.expr]) -> int | None:
    return None if any(isinstance(one, ast.Starred) for one in arguments) else len(arguments)
