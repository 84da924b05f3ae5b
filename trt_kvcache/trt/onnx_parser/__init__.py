"""Plugin layers in networks of TensorRT for RTX: its network API cannot add them, but its ONNX parser can."""

from trt_kvcache.trt.onnx_parser.plugin_layers import ParsedPluginLayers, parse_plugin_layers

__all__ = ["ParsedPluginLayers", "parse_plugin_layers"]
