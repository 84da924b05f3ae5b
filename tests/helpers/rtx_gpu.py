"""GPUs that TensorRT for RTX takes."""

from typing import Any

import pytest

from trt_kvcache.builder.resolved_options import known_compute_capabilities
from trt_kvcache.kernels.attention_tiles import arch_number
from trt_kvcache.trt.module import load


def need_rtx_gpu(memory: Any) -> None:
    """Skip the test if TensorRT for RTX is not installed, or does not take the GPU of a memory."""
    pytest.importorskip("tensorrt_rtx")
    capability = f"{arch_number(memory.arch) // 10}.{arch_number(memory.arch) % 10}"
    if capability not in known_compute_capabilities(load("tensorrt_rtx")):
        pytest.skip(f"TensorRT for RTX does not take GPUs of compute capability {capability}")
