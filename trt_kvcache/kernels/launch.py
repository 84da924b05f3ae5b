"""Load and launch a kernel of ``plugins/*.cu``, and its arguments.

Importing this file imports nothing of cuda-python, and no compiler: the first launch does.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.attention_tiles import MIN_PDL_ARCH, arch_number
from trt_kvcache.memory.cuda_driver import check, cuda_core_error
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block, in every bookkeeping kernel, and vectors that a thread has in flight: see ``plugins/vector_copy.cuh``.
THREADS_PER_BLOCK, VECTORS_IN_FLIGHT = 256, 4

#: Blocks of a launch at most, if fewer can do the work: enough waves of them that the last one hardly counts on a large GPU.
_MAX_BLOCKS = 1 << 20

#: Addresses of saved tensors that one launch carries: layers of one capture or restore. The sources have the same number.
MAX_SAVED_TENSORS = 64

Grid = tuple[int, int, int]


@cache
def _module(source: str, arch: str) -> Any:
    """Load the machine code of one source. It stays loaded until the process ends."""
    from cuda.core import ObjectCode

    from trt_kvcache.kernels.compile import cubin

    return ObjectCode.from_cubin(cubin(source, arch), name=source)


@cache
def _kernel(source: str, name: str, arch: str) -> Any:
    try:
        return _module(source, arch).get_kernel(name)
    except cuda_core_error() as error:
        raise CudaError(f"{name} of {source} could not be loaded for {arch}: {error}") from None


#: Bytes of dynamic shared memory that blocks of a kernel may have, by kernel and device.
_shared_allowed: dict[tuple[Any, str], int] = {}


def _allow_shared(kernel: Any, nbytes: int, device: str) -> None:
    """Let blocks of a kernel have this much dynamic shared memory, or what they may have already: otherwise 48 KiB is the most."""
    if nbytes <= _shared_allowed.get((kernel, device), 0):
        return
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    index = int(device.partition(":")[2])
    check(driver.cuKernelSetAttribute(attribute, nbytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)))
    _shared_allowed[kernel, device] = nbytes


@lru_cache(maxsize=256)
def _launch_config(grid: Grid, threads: int, shared_nbytes: int, cooperative: bool, programmatic_dependent_launch: bool) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(
        grid=grid,
        block=threads,
        shmem_size=shared_nbytes,
        is_cooperative=cooperative,
        programmatic_stream_serialization=programmatic_dependent_launch,
    )


def launch(
    memory: Any,
    source: str,
    name: str,
    grid: Grid,
    arguments: tuple[int | float, ...],
    stream: Any,
    *,
    threads: int = THREADS_PER_BLOCK,
    shared_nbytes: int = 0,
    cooperative: bool = False,
    programmatic_dependent_launch: bool = False,
) -> None:
    """Launch a kernel in the memory of a GPU. Each argument is a Python int or float, which cuda.core passes as 64 bits."""
    from cuda.core import launch as launch_kernel

    memory.make_current()
    kernel = _kernel(source, name, memory.arch)
    if shared_nbytes:
        _allow_shared(kernel, shared_nbytes, memory.device)
    try:
        launch_kernel(stream, _launch_config(grid, threads, shared_nbytes, cooperative, programmatic_dependent_launch), kernel, *arguments)
    except (ValueError, cuda_core_error()) as error:  # ValueError: cuda.core counts the blocks that can run together
        raise CudaError(f"{name} could not be launched on {memory.device}: {error}") from None


def starts_early(memory: Any) -> bool:
    """Tell whether a launch on the GPU of a memory can start before the previous one has ended: programmatic dependent launch."""
    return arch_number(memory.arch) >= MIN_PDL_ARCH


def blocks_for(vectors: int, runs: int = 1, *, max_blocks: int = _MAX_BLOCKS) -> int:
    """Return the blocks along x that share a run of vectors. Each thread handles its vectors in flight once, or several times."""
    return max(1, min(-(-vectors // (THREADS_PER_BLOCK * VECTORS_IN_FLIGHT)), max_blocks // runs))


def address(tensor: DeviceTensor | None) -> int:
    """Return the address of a tensor; 0, a null pointer, for none."""
    return 0 if tensor is None else int(tensor.ptr)


def byte_stride(tensor: DeviceTensor, axis: int) -> int:
    """Return the bytes from one index to the next."""
    return tensor.strides[axis] * itemsize(tensor.dtype)


def token_rows(tensor: DeviceTensor | None) -> tuple[int, int, int]:
    """Return address, slot stride and token stride of an activation ``[B, s, ...]``; zeros for none."""
    return (0, 0, 0) if tensor is None else (tensor.ptr, byte_stride(tensor, 0), byte_stride(tensor, 1))
