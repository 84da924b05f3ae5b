"""Matrices of torch rounded to 4 or 8 bits on their device, as the PyTorch engine keeps packed weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).resolve().parent.parent))

from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, HALF_INPUTS, ONE_GROUP, count_groups
from trt_kvcache.torch_engine.packed_places import pack_rows, pack_values
from trt_kvcache.torch_engine.packed_weight import PackedWeight


class Scheme(NamedTuple):
    """A format of packed weights."""

    kind: str
    group: int | None  # inputs of a scale; None: all
    scales: str
    has_zero_points: bool = False


#: As ``--quantize`` makes them of a bfloat16 model, as llama.cpp stores blocks, and as GPTQ and AWQ store groups.
SCHEMES = {
    "int4": Scheme("int4", 32, "bfloat16"),
    "int4:128": Scheme("int4", 128, "bfloat16"),
    "int8": Scheme("int8", None, "bfloat16"),
    "q4_0": Scheme("int4", 32, "float16"),
    "q8_0": Scheme("int8", 32, "float16"),
    "gptq": Scheme("int4", 128, "float16", True),
}

_RANGES = {"int4": (-8, 7), "int8": (-127, 127)}


def quantized(weight: torch.Tensor, name: str, memory: Any) -> PackedWeight:
    """Return a matrix ``[outputs, inputs]`` of whole tiles, rounded by a scheme of :data:`SCHEMES`."""
    scheme = SCHEMES[name]
    (outputs, inputs), (low, high) = weight.shape, _RANGES[scheme.kind]
    padding = (0, -inputs % max(FRAGMENT_INPUTS, scheme.group or 0))
    whole = F.pad(weight.float(), padding)
    groups = whole.view(outputs, -1, scheme.group or whole.shape[1])
    smallest, largest = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    size = (largest - smallest) / (high - low) if scheme.has_zero_points else groups.abs().amax(dim=2, keepdim=True) / high
    scales = size.clamp(min=1e-6).to(getattr(torch, scheme.scales))
    zeros = (low - smallest / scales.float()).round().clamp(low, high) if scheme.has_zero_points else torch.zeros_like(smallest)
    values = (groups / scales.float() + zeros).round().clamp(low, high).view(outputs, -1)
    shift = ONE_GROUP if scheme.group is None else (scheme.group // HALF_INPUTS).bit_length() - 1
    middle, dtype = (8, torch.uint8) if scheme.kind == "int4" else (0, torch.int8)
    count = count_groups(inputs, shift)
    return PackedWeight(
        dtype=weight.dtype,
        memory=memory,
        kind=scheme.kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=shift,
        values=pack_values((values + middle).to(dtype)[:, :inputs], scheme.kind),
        scales=pack_rows(scales[:, :count, 0], count),
        zero_points=pack_rows((zeros + middle).to(dtype)[:, :count, 0], count) if scheme.has_zero_points else None,
    )
