"""Matrices of torch rounded to 4 or 8 bits on their device, as the PyTorch engine keeps packed weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from weight_schemes import SCHEMES, SUPER_BLOCKS

sys.path.append(str(Path(__file__).resolve().parent.parent))

from trt_kvcache.checkpoint.quantized.quantized_values import E2M1_VALUES
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, HALF_INPUTS, MIDDLES, NVFP4_GROUPS, ONE_GROUP, count_groups
from trt_kvcache.kernels.super_block_layout import FACTORS, HIGH_BITS, SCALE_INPUTS, SUPER_BLOCK
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_places import by_tile, pack_rows, pack_values
from trt_kvcache.torch_engine.packed_weight import PackedWeight, times_factor
from trt_kvcache.torch_engine.packing import NVFP4_GROUP
from trt_kvcache.torch_engine.super_block_places import pack_factors, pack_scales, pack_super_blocks
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight

_RANGES = {"int4": (-8, 7), "int8": (-127, 127), "e4m3": (-448, 448)}
_DTYPES = {"int4": torch.uint8, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def quantized(weight: torch.Tensor, name: str, memory: Any) -> PackedMatrix:
    """Return a matrix ``[outputs, inputs]`` of whole tiles, rounded by a scheme of :data:`SCHEMES`, or in :data:`SUPER_BLOCKS`."""
    if name in SUPER_BLOCKS:
        return _super_blocks(weight, name, memory)
    scheme = SCHEMES[name]
    if scheme.kind == "e2m1":
        return _nvfp4(weight, memory)
    (outputs, inputs), (low, high) = weight.shape, _RANGES[scheme.kind]
    padding = (0, -inputs % max(FRAGMENT_INPUTS, scheme.group or 0))
    whole = F.pad(weight.float(), padding)
    groups = whole.view(outputs, -1, scheme.group or whole.shape[1])
    smallest, largest = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    size = (largest - smallest) / (high - low) if scheme.has_zero_points else groups.abs().amax(dim=2, keepdim=True) / high
    if scheme.rows > 1:
        size = torch.cat([rows.amax(dim=0, keepdim=True).expand_as(rows) for rows in size.split(scheme.rows)])
    scales = size.clamp(min=1e-6).to(getattr(torch, scheme.scales))
    zeros = (low - smallest / scales.float()).round().clamp(low, high) if scheme.has_zero_points else torch.zeros_like(smallest)
    exact = groups / scales.float() + zeros
    values = (exact if scheme.kind == "e4m3" else exact.round()).clamp(low, high).view(outputs, -1)
    shift = ONE_GROUP if scheme.group is None else (scheme.group // HALF_INPUTS).bit_length() - 1
    middle, dtype = MIDDLES[scheme.kind], _DTYPES[scheme.kind]
    count = count_groups(inputs, shift)
    of_rows = pack_rows(scales[:, :count, 0], count)
    return PackedWeight(
        dtype=weight.dtype,
        memory=memory,
        kind=scheme.kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=shift,
        values=pack_values((values + middle).to(dtype)[:, :inputs], scheme.kind),
        scales=by_tile(of_rows, outputs) if scheme.kind == "e4m3" else of_rows,
        zero_points=pack_rows((zeros + middle).to(dtype)[:, :count, 0], count) if scheme.has_zero_points else None,
        order=_order(inputs).to(weight.device) if scheme.has_order else None,
    )


def _order(inputs: int) -> torch.Tensor:
    """Return a random order of inputs, the same for all matrices with so many."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs), dtype=torch.int32)


def _nvfp4(weight: torch.Tensor, memory: Any) -> PackedWeight:
    """Return a matrix in NVFP4, each value rounded to nearest. All matrices have one factor, for magnitudes of up to 1."""
    (outputs, inputs), factor = weight.shape, float(np.float32(1 / (6 * 448)))
    groups = weight.float().view(outputs, -1, NVFP4_GROUP)
    scales = (groups.abs().amax(dim=2) / (6 * factor)).clamp(min=2**-9).to(torch.float8_e4m3fn)
    sizes = groups / times_factor(scales, (factor, 0.0))[..., None]
    ends = (torch.tensor(E2M1_VALUES[1:8].tolist()) + torch.tensor(E2M1_VALUES[:7].tolist())).to(weight.device) / 2
    values = torch.bucketize(sizes.abs(), ends) | (sizes < 0).long() << 3
    return PackedWeight(
        dtype=weight.dtype,
        memory=memory,
        kind="e2m1",
        outputs=outputs,
        inputs=inputs,
        group_shift=NVFP4_GROUPS,
        values=pack_values(values.byte().view(outputs, inputs), "e2m1"),
        scales=pack_rows(scales.view(torch.uint8), count_groups(inputs, NVFP4_GROUPS)).view(torch.float8_e4m3fn),
        zero_points=None,
        factor=(factor, 0.0),
    )


def _super_blocks(weight: torch.Tensor, kind: str, memory: Any) -> SuperBlockWeight:
    """Return a matrix in super-blocks, each scale and minimum of a group rounded to nearest."""
    outputs, inputs = weight.shape
    largest = (16 << HIGH_BITS[kind]) - 1
    groups = weight.float().view(outputs, inputs // SUPER_BLOCK, -1, SCALE_INPUTS[kind])
    if FACTORS[kind] == 1:
        sizes = groups.abs().amax(dim=3, keepdim=True) / 31
        factors = (sizes.amax(dim=2, keepdim=True) / 127).clamp(min=2**-20).half()
        scales = (sizes / factors.float()).round()
        values = (groups / (factors.float() * scales).clamp(min=1e-9)).round().clamp(-32, 31) + 32
        of_halves, of_blocks = scales.to(torch.int8).view(torch.uint8).reshape(outputs, -1, 2), factors[..., 0]
    else:
        minimums = -groups.amin(dim=3, keepdim=True).clamp(max=0)
        sizes = (groups.amax(dim=3, keepdim=True) + minimums) / largest
        both = torch.cat((sizes, minimums), dim=3)
        factors = (both.amax(dim=2, keepdim=True) / 63).clamp(min=2**-20).half()
        rounded = (both / factors.float()).round()
        exact = factors.float() * rounded
        values = ((groups + exact[..., 1:]) / exact[..., :1].clamp(min=1e-9)).round().clamp(0, largest)
        of_halves, of_blocks = rounded.byte().reshape(outputs, -1, 2), factors[:, :, 0]
    return SuperBlockWeight(
        dtype=weight.dtype,
        memory=memory,
        kind=kind,
        outputs=outputs,
        inputs=inputs,
        values=pack_super_blocks(values.byte().view(outputs, inputs), kind),
        scales=pack_scales(of_halves),
        factors=pack_factors(of_blocks),
    )
