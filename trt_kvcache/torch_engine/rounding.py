"""Rounding rows to the nearest multiples of a scale on a device of torch, as ``trt_kvcache/checkpoint/quantized/rounding.py`` does."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.quantized.quantization import SCHEMES
from trt_kvcache.checkpoint.quantized.rounding import DIVISORS, LIMITS


def round_rows(values: torch.Tensor, scheme: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return int8 values ``[rows, inputs]``, scales ``[rows, groups]`` in ``dtype``, and True if ``rounded_to_nearest`` may differ.

    It may for groups whose scale is near to an end of the dtype, or with values that are not finite: such a group is seldom.
    """
    rows, inputs = values.shape
    bits, group = SCHEMES[scheme]
    width = group or inputs
    groups = F.pad(values.float(), (0, -inputs % width)).view(-1, width).t().contiguous()  # one after the other in memory, as there
    peaks = groups.abs().amax(dim=0)
    best = _best_scales(groups, peaks, bits, dtype)
    rounded = _nearest(groups / _divisors(best), bits).to(torch.int8).t().reshape(rows, -1)[:, :inputs].contiguous()
    return rounded, best.view(rows, -1), _has_extremes(peaks, bits, dtype)


def _has_extremes(peaks: torch.Tensor, bits: int, dtype: torch.dtype) -> bool:
    most, ends = -LIMITS[bits][0], torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32)
    is_usual = (peaks == 0) | ((peaks >= most * ends.tiny) & (peaks <= ends.max / 2))
    return not bool(is_usual.all())


def _best_scales(groups: torch.Tensor, peaks: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each group with the least squared error, the first of equal ones."""
    # A number as the divisor would be a multiplication by its inverse on a GPU, which is not the quotient.
    best, *others = [(peaks / torch.full_like(peaks, divisor)).to(dtype) for divisor in DIVISORS[bits]]
    if not others:
        return best
    least = _squared_errors(groups, peaks, best, bits)
    for scales in others:
        errors = _squared_errors(groups, peaks, scales, bits)
        best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
    return best


def _squared_errors(groups: torch.Tensor, peaks: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    divisors = _divisors(scales)
    exact = groups / divisors
    errors = _nearest(exact, bits)
    errors -= exact
    errors *= errors
    squared = errors[0].clone()
    for row in errors[1:]:  # in the order of the sums of the twin
        squared += row
    relative = divisors / torch.where(peaks > 0, peaks, torch.ones_like(peaks))
    return squared * (relative * relative)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    factors = scales.float()
    return torch.where((factors > 0) & factors.isfinite(), factors, torch.ones_like(factors))


def _nearest(exact: torch.Tensor, bits: int) -> torch.Tensor:
    return exact.round().clamp_(*LIMITS[bits])
