"""ModelOpt: FP8, NVFP4 and INT4 (AWQ), as NVIDIA's Model Optimizer exports them to Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.compressed_tensors import kv_dtype_of_scheme
from trt_kvcache.checkpoint.quantized.format import FLOATS, Arrays, QuantizedFormat, StoredPart, constant, divided, groups_of
from trt_kvcache.checkpoint.quantized.fp8_blocks import WEIGHT_ONLY
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError

#: Titles of the supported algorithms.
ALGORITHMS = {
    "FP8": "FP8 (e4m3), one scale a matrix",
    "NVFP4": "NVFP4",
    "NVFP4_AWQ": "NVFP4 (AWQ)",
    "W4A16_NVFP4": "NVFP4",
    "W4A16_AWQ": "int4 (AWQ)",
}

_NVFP4_GROUP = 16


class ModelOpt(QuantizedFormat):
    """Quantized values in ``weight``, scales in ``weight_scale``; ``weight_scale_2`` of NVFP4; ``pre_quant_scale`` of AWQ."""

    name = "ModelOpt"
    kinds = ("int4", "e4m3", "e2m1")
    ignored = (".input_scale", ".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.algorithm = config.get("quant_algo")
        layers = config.get("quantized_layers") or {}
        if self.algorithm == "MIXED_PRECISION":
            if not isinstance(layers, Mapping) or not layers or not all(isinstance(layer, Mapping) for layer in layers.values()):
                raise ConfigError(f"quantization.quantized_layers: expected an object for each module, got {short_repr(layers)}.")
            self.modules = {name: (_algorithm(layer.get("quant_algo")), _group_size(layer)) for name, layer in layers.items()}
        else:
            self.modules = {}
            self.algorithm = _algorithm(self.algorithm)
            self.group_size = _group_size(config)
        names = {algorithm for algorithm, _ in self.modules.values()} or {self.algorithm}
        self.title = "ModelOpt " + " and ".join(ALGORITHMS[name] for name in sorted(names))
        self.notes = (WEIGHT_ONLY,) if names - {"W4A16_AWQ", "W4A16_NVFP4"} else ()
        algorithm = config.get("kv_cache_quant_algo")
        by_algorithm = {"FP8": "float8_e4m3fn", "INT8": "int8"}.get(algorithm) if isinstance(algorithm, str) else None
        self.kv_dtype = by_algorithm or kv_dtype_of_scheme(config.get("kv_cache_scheme"))

    def main_part(self, module: str) -> str:
        """Return ``"weight"``."""
        return "weight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        (algorithm, group_size), (outputs, inputs) = self._of(module), shape
        factor = StoredPart(((inputs,),), FLOATS, is_required=False)
        if algorithm == "FP8":
            return {"weight": StoredPart((shape,), ("F8_E4M3",)), "weight_scale": StoredPart(((), (1,)), FLOATS), "pre_quant_scale": factor}
        if "NVFP4" in algorithm:
            if group_size not in (None, 0, _NVFP4_GROUP):
                raise ConfigError(f"quantization.group_size: expected {_NVFP4_GROUP} with NVFP4, got {group_size}.")
            groups = groups_of(module, inputs, _NVFP4_GROUP)
            return {
                "weight": StoredPart(((outputs, divided(module, "inputs", inputs, 2)),), ("U8",)),
                "weight_scale": StoredPart(((outputs, groups),), ("F8_E4M3",)),
                "weight_scale_2": StoredPart(((), (1,)), ("float32",)),
                "pre_quant_scale": factor,
            }
        groups = groups_of(module, inputs, self._int4_group(module, group_size))
        packed = (divided(module, "outputs", outputs, 2), inputs)
        return {
            "weight": StoredPart((packed,), ("U8",)),
            "weight_scale": StoredPart(((outputs, groups),), FLOATS),
            "pre_quant_scale": factor,
        }

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        algorithm, group_size = self._of(module)
        factor = None if "pre_quant_scale" not in arrays else arrays["pre_quant_scale"].astype(np.float32)
        if algorithm == "FP8":
            values = QuantizedValues(stored=arrays["weight"], kind="e4m3", shape=shape)
            scales = Scales(stored=arrays["weight_scale"].reshape(1, 1), block=shape)
        elif "NVFP4" in algorithm:
            values = QuantizedValues(stored=arrays["weight"], kind="e2m1", shape=shape)
            scale = constant(arrays["weight_scale_2"])
            if not 0 <= scale < np.inf:  # 0 of a matrix of zeros
                raise ConfigError(f"{module}.weight_scale_2: expected a finite number >= 0, got {scale}.")
            scales = Scales(stored=arrays["weight_scale"], block=(1, _NVFP4_GROUP), factor=scale)
        else:
            values = QuantizedValues(stored=arrays["weight"], kind="int4", shape=shape, packed_axis="rows")
            scales = Scales(stored=arrays["weight_scale"], block=(1, self._int4_group(module, group_size)))
        return QuantizedWeight(quantized_values=values, scales=scales, input_factor=factor)

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "modelopt", "algorithm": self.algorithm, "modules": self.modules or self.group_size}

    def _of(self, module: str) -> tuple[str, int | None]:
        """Return the algorithm and the group size of a module."""
        if not self.modules:
            return str(self.algorithm), self.group_size
        if module not in self.modules:
            raise ConfigError(f"quantization.quantized_layers: expected {module} among the modules, as it is quantized, got none.")
        return self.modules[module]

    def _int4_group(self, module: str, group_size: int | None) -> int:
        if not group_size:
            raise ConfigError(f"quantization.group_size: expected a positive integer for {module}, got none.")
        return group_size


def _algorithm(name: object) -> str:
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"quantization.quant_algo: expected one of {', '.join(ALGORITHMS)}, MIXED_PRECISION, got {short_repr(name)}.")
    return name


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return the group size, which ``config.json`` has inside its groups."""
    size = config.get("group_size")
    groups = config.get("config_groups")
    if size is None and isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        size = next((found["group_size"] for found in weights if isinstance(found, Mapping) and found.get("group_size")), None)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise ConfigError(f"quantization.group_size: expected a positive integer, got {short_repr(size)}.")
    return size
