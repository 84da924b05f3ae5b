"""NumPy arrays as tensors of torch on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache.dtypes import dtype_name

_BITS: dict[int, tuple[torch.dtype, Any]] = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


def on_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device. torch does not know NumPy's bfloat16, so bits are copied."""
    on_host = torch.empty(values.shape, dtype=getattr(torch, dtype_name(values.dtype)))
    of_torch, of_numpy = _BITS[values.itemsize]
    on_host.view(of_torch).numpy()[...] = values.view(of_numpy)
    return on_host.to(device)
