"""Plugin layers by way of the ONNX parser of TensorRT for RTX, and everything that the parser needs for them.

- Its network must be empty: it refuses one that is not. So plugin layers come first, and the decoder is defined around them.
- It opens ``libtensorrt_rtx.so`` when it adds a plugin layer, and a miss ends the process (``std::terminate``). The wheel has
  ``libtensorrt_rtx.so.1`` only. Neither a symbolic link that is opened by its path, nor a search path that is set in this process, makes
  the loader find the other name. What works is a library that we write under that name: it depends on the real one, and is loaded before
  the parser opens it. See ``stub_library``.
  On Windows it opens ``tensorrt_rtx_1_7.dll``, the name of the file in the wheel. The name was found in the parser's
  file, and was never tried on Windows.
- It finds plugins by creators of the class ``IPluginCreatorV3One`` in the registry, and warns of fields that a node does not have.
- It checks plugins as it parses, by the shapes and dtypes of their inputs. Those are placeholders until ``set_input`` gives the layer its
  real tensors. A placeholder cannot be a network input: removing one breaks shape inference.
- The network points at memory of the parser, so the parser must live as long as the network.
- The builder wants ``PreviewFeature.ALIASED_PLUGIN_IO_10_03`` for outputs that share memory with inputs: see ``allow_aliasing``.
- ``BuilderFlag.REQUIRE_USER_ALLOCATION``, which every build sets: without it TensorRT may allocate in an enqueue, which a capture refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.onnx_parser.model_proto import model_proto
from trt_kvcache.trt.onnx_parser.stub_library import MACHINES, stub_library
from trt_kvcache.trt.plugin_node import PluginNode

#: The library that the parser opens, and the function that it calls there.
_LIBRARY, _FUNCTION = "libtensorrt_rtx.so", "getPrivateApi_INTERNAL"

_HINT = "Build with plugin_layers='segments', which needs no parser."


@dataclass(frozen=True, eq=False)
class ParsedPluginLayers:
    """The plugin layers of a network, which are there already, by name."""

    layers: Mapping[str, Any]  # ILayer
    owner: Any  # of memory that the network points at

    def add(self, node: PluginNode, inputs: Sequence[Any]) -> Any:
        """Return the layer of a node, with these tensors in place of its placeholders."""
        layer = self.layers[node.name]
        for index, tensor in enumerate(inputs):
            layer.set_input(index, tensor)
        return layer


def parse_plugin_layers(tensorrt: TensorRT, network: Any, nodes: Sequence[PluginNode], messages: Messages) -> ParsedPluginLayers:
    """Fill an empty network with plugin layers whose creators are registered."""
    preload_library(tensorrt)
    parser = tensorrt.module.OnnxParser(network, tensorrt.log.logger)
    if not parser.parse(model_proto(nodes)):
        for index in range(parser.num_errors):
            messages.add(parser.get_error(index).desc(), is_error=True)
        messages.fail(BuildError, f"plugin layers: the ONNX parser of {tensorrt} refused them. {_HINT}")
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return ParsedPluginLayers({layer.name: layer for layer in layers}, parser)


@cache
def preload_library(tensorrt: TensorRT) -> None:
    """Make the library known under the name by which the parser opens it, once per process; raises BuildError where it cannot."""
    if os.name == "nt":  # the parser's name is the name of the file, which the module has loaded
        return
    try:
        library = _loaded(_LIBRARY) or _load_stub(f"{_LIBRARY}.{tensorrt.release[0]}")
        getattr(library, _FUNCTION)
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"plugin layers: {tensorrt} has no {_LIBRARY}, which its ONNX parser opens, and none can be made: {error}. {_HINT}"
        ) from error


def _loaded(name: str) -> ctypes.CDLL | None:
    """Return a library of this process by its name, None if it is not loaded."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _load_stub(needed: str) -> ctypes.CDLL:
    """Load a library named as the parser expects it that needs the one of the wheel. Its file is gone afterwards; it stays loaded."""
    if _loaded(needed) is None:
        raise OSError(f"{needed} is not loaded")
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(f"expected a machine of {' or '.join(MACHINES)}, got {machine}")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(stub_library(_LIBRARY, needed=needed, machine=machine))
        file.flush()
        return ctypes.CDLL(file.name)
