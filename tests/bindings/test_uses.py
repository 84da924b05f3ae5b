"""Every use of TensorRT in the package exists in each release, takes these arguments, or is guarded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.bindings.uses import OBJECTS, PACKAGE, Use, find_uses
from trt_kvcache.trt.module import TensorRT

#: What older releases do not have, the first release that has it, and what keeps the package from using it before. None: no release of
#: full TensorRT has it, or the package uses it with TensorRT for RTX only.
_MASK, _NATIVE = "attention mask: choose_attention", "attention native: choose_attention, TensorRT.supports"
_RTX = "TensorRT.is_rtx"
SINCE: dict[str, tuple[tuple[int, int] | None, str]] = {
    "AttentionNormalizationOp": ((10, 14), _MASK),
    "IAttention": ((10, 14), _MASK),
    "INetworkDefinition.add_attention": ((10, 14), _MASK),
    "INetworkDefinition.add_kv_cache_update": ((10, 15), _MASK),
    "INetworkDefinition.add_rotary_embedding": ((10, 15), _MASK),
    "IRotaryEmbeddingLayer": ((10, 15), _MASK),
    "KVCacheMode": ((10, 15), _MASK),
    "CausalMaskKind": ((11, 0), _NATIVE),
    "IAttention.key_value_lengths": ((11, 0), _NATIVE),
    "INetworkDefinition.add_attention_v2": ((11, 0), _NATIVE),
    "IDequantizeLayer.block_shape": ((10, 15), "projection.dequantized"),
    "ComputeCapability": (None, _RTX),
    "CudaGraphStrategy": (None, _RTX),
    "DynamicShapesKernelSpecializationStrategy": (None, _RTX),
    "IBuilderConfig.num_compute_capabilities": (None, _RTX),
    "IBuilderConfig.set_compute_capability": (None, _RTX),
    "ICudaEngine.create_runtime_config": (None, _RTX),
    "IExecutionContext.is_stream_capturable": (None, _RTX),
    "IRuntimeConfig": (None, _RTX),
}

USES = find_uses()


def first_release(name: str) -> tuple[bool, tuple[int, int] | None]:
    """Return whether a name, or its class, is in ``SINCE``, and its first release."""
    for known in (name, name.partition(".")[0]):
        if known in SINCE:
            return True, SINCE[known][0]
    return False, None


def find(module: Any, name: str) -> Any:
    """Return what a name is in the module; None if it is not there."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def test_what_is_used_exists(full: TensorRT) -> None:
    missing = []
    for use in USES:
        guarded, first = first_release(use.name)
        if guarded and (first is None or full.release < first):
            continue
        if find(full.module, use.name) is None:
            missing.append(f"{use.where}: {use.name}")
    assert missing == []


def test_the_first_releases_are_right(full: TensorRT) -> None:
    """A name that exists before its release in the table should not be kept from it; one that does not exist after it is not guarded."""
    wrong = [
        name for name, (first, _) in SINCE.items() if first is not None and (find(full.module, name) is not None) != (full.release >= first)
    ]
    assert wrong == []


def test_every_row_of_the_tables_is_used() -> None:
    used = {use.name for use in USES} | {use.name.partition(".")[0] for use in USES}
    assert set(SINCE) - used == set()
    files = {use.where.partition(":")[0] for use in USES}
    assert set(OBJECTS) - files == set()


@pytest.mark.parametrize("name", sorted({use.name for use in USES if use.arguments is not None or use.keywords}))
def test_calls_have_the_arguments_of_the_signature(full: TensorRT, name: str) -> None:
    guarded, first = first_release(name)
    if guarded and (first is None or full.release < first):
        pytest.skip(f"{full} has no {name}, which is guarded")
    signatures = read_signatures(find(full.module, name))
    if not signatures:
        pytest.skip("a class or an enumeration, whose calls have no signature")
    for use in USES:
        if use.name == name:
            assert any(fits(use, *signature) for signature in signatures), f"{use.where}: {use}, expected {signatures}"


@pytest.mark.parametrize("interface", ["IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginV3"])
def test_the_plugin_overrides_what_the_interfaces_declare(full: TensorRT, interface: str) -> None:
    """A method that no interface has is never called; one of them that must be overridden and is not fails at its first call."""
    from trt_kvcache.trt.plugin import plugin_class

    kind = plugin_class(full)
    declared = {name for base in kind.__mro__[1:] for name in vars(base)}
    own = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    assert own - declared == set()
    optional = {"get_valid_tactics", "get_metadata_string", "get_timing_cache_id", "destroy"}
    mine = {name for name, value in vars(getattr(full.module, interface)).items() if callable(value) and not name.startswith("_")}
    assert mine - own - optional == set()


#: Names and whether each has a default, without ``self``.
Parameters = list[tuple[str, bool]]


def read_signatures(function: Any) -> list[tuple[Parameters, bool]]:
    """Return the parameters of each overload from the docstring that pybind11 makes, and whether it takes any number."""
    text = getattr(function, "__doc__", None) or ""
    name = getattr(function, "__name__", "")
    lines = re.findall(rf"^(?:\d+\. )?{name}\((.*)\)(?: -> .*)?$", text, re.MULTILINE)
    return [_parameters(line) for line in lines if name and line != "*args, **kwargs"]


def _parameters(text: str) -> tuple[Parameters, bool]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    named = [part.strip() for part in parts if part.strip()]
    return [(part.partition(":")[0].strip(), "=" in part) for part in named if not part.startswith(("self", "*"))], "*" in text


def fits(use: Use, parameters: Parameters, any_number: bool) -> bool:
    """Return whether a call fits a signature."""
    if any_number or use.arguments is None or "**" in use.keywords:
        return True
    count = use.arguments - use.name.endswith(".__init__")  # called with the object itself
    positional, rest = parameters[:count], parameters[count:]
    names = {name for name, _ in rest}
    return len(positional) == count and set(use.keywords) <= names and all(optional or name in use.keywords for name, optional in rest)


def test_a_use_that_does_not_exist_would_be_found(tmp_path: Path, full: TensorRT) -> None:
    """The search itself: a member, a class and a layer that no release has, and a call with too many arguments."""
    for folder in ("trt", "builder/network"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trt/tensors.py").write_text(
        "def read(engine, tensorrt):\n    return engine.get_nothing(1), tensorrt.module.INothing.ONE\n"
    )
    (tmp_path / "builder/network/rope.py").write_text(
        "def add(graph, x):\n    graph.op('name', 'nothing', x)\n    graph.op('n', 'cast', x, 1, 2)\n"
    )
    uses = {use.name: use for use in find_uses(tmp_path)}
    assert set(uses) == {
        "ICudaEngine.get_nothing", "INothing", "INothing.ONE", "INetworkDefinition.add_nothing", "INetworkDefinition.add_cast"
    }  # fmt: skip
    assert not any(find(full.module, name) for name in uses if name != "INetworkDefinition.add_cast")
    assert uses["ICudaEngine.get_nothing"].arguments == 1
    cast = read_signatures(full.module.INetworkDefinition.add_cast)
    assert not any(fits(uses["INetworkDefinition.add_cast"], *one) for one in cast)
    assert any(fits(Use("INetworkDefinition.add_cast", "here", 2), *one) for one in cast)
    assert PACKAGE.is_dir()
