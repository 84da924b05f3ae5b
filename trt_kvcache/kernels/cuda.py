"""The kernels on the device: launches of ``plugins/*.cu``. Arguments were checked by the caller.

A launch neither allocates nor waits. The first one of a process loads the machine code, which may do both: run an operation
once before capturing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from trt_kvcache.cuda_driver import cuda_core_error
from trt_kvcache.cuda_memory import CudaMemory
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.compile import cubin
from trt_kvcache.kernels.lengths import MAX_STORED_VALUES
from trt_kvcache.tensor import DeviceTensor

_KERNELS_OF_LENGTHS = ("increment_scalar", "increment_tensor", "store_values")

_THREADS_PER_BLOCK = 256


@cache
def _load(source: str, names: tuple[str, ...], arch: str) -> Mapping[str, Any]:
    """Load the kernels of one source. They are kept until the process ends."""
    from cuda.core import ObjectCode

    try:
        code = ObjectCode.from_cubin(cubin(source, arch), name=source)
        return {name: code.get_kernel(name) for name in names}
    except cuda_core_error() as error:
        raise CudaError(f"the kernels of {source}.cu could not be loaded for {arch}: {error}") from None


@cache
def _launch_config(blocks: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=blocks, block=_THREADS_PER_BLOCK)


def _launch(name: str, lengths: DeviceTensor, stream: Any, threads: int, *arguments: int) -> None:
    """Launch a kernel of lengths.cu. cuda.core passes each argument, a Python int, as 64 bits."""
    from cuda.core import launch

    memory = lengths.memory
    assert isinstance(memory, CudaMemory)
    memory.make_current()
    kernel = _load("lengths", _KERNELS_OF_LENGTHS, memory.arch)[name]
    try:
        launch(stream, _launch_config(-(-threads // _THREADS_PER_BLOCK)), kernel, *arguments)
    except cuda_core_error() as error:
        raise CudaError(f"{name} could not be launched on {memory.device}: {error}") from None


def increment_scalar(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    """Add one number to all lengths."""
    count = len(lengths)
    _launch("increment_scalar", lengths, stream, count, lengths.ptr, increment, count)


def increment_tensor(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    """Add element by element."""
    count = len(lengths)
    _launch("increment_tensor", lengths, stream, count, lengths.ptr, increments.ptr, count)


def store_values(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    """Store the values, or add them."""
    place = lengths.ptr
    for start in range(0, len(values), MAX_STORED_VALUES):
        chunk = values[start : start + MAX_STORED_VALUES]
        count = len(chunk)
        padding = (0,) * (MAX_STORED_VALUES - count)
        _launch("store_values", lengths, stream, count, place, int(accumulate), count, *map(int, chunk), *padding)
        place += count * itemsize("int32")
