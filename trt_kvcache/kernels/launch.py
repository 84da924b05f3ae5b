"""``launch``: load and launch a kernel of ``plugins/*.cu``, and helpers for its arguments.

The first launch of a process imports cuda-python. The first launch of a kernel may compile it. Importing this file does neither.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.attention_tiles import MIN_PDL_ARCH, arch_number
from trt_kvcache.memory.cuda_driver import check, cuda_core_error
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block of every copy kernel, and vectors in flight in a thread: see ``plugins/vector_copy.cuh``.
THREADS_PER_BLOCK, VECTORS_IN_FLIGHT = 256, 4

#: Most blocks of a grid-stride launch: enough waves that a partial last wave costs little on a large GPU.
_MAX_BLOCKS = 1 << 20

#: Addresses of saved tensors in the arguments of one launch: layers of one save or restore. The sources have the same number.
MAX_SAVED_TENSORS = 64

Grid = tuple[int, int, int]


@cache
def _module(source: str, arch: str) -> Any:
    """Load the machine code of one variant of a source. It stays loaded until the process ends."""
    from cuda.core import ObjectCode

    from trt_kvcache.kernels.compile import cubin

    return ObjectCode.from_cubin(cubin(source, arch), name=source)


@cache
def _kernel(source: str, name: str, arch: str) -> Any:
    try:
        return _module(source, arch).get_kernel(name)
    except cuda_core_error() as error:
        raise CudaError(f"{name} of {source} could not be loaded for {arch}: {error}") from None


#: Limits of the dynamic shared memory of a block that were set, by kernel and device.
_shared_allowed: dict[tuple[Any, str], int] = {}


def _allow_shared(kernel: Any, nbytes: int, device: str) -> None:
    """Raise the limit of dynamic shared memory of a block, which is 48 KiB, to at least this."""
    if nbytes <= _shared_allowed.get((kernel, device), 0):
        return
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    index = int(device.partition(":")[2])
    check(driver.cuKernelSetAttribute(attribute, nbytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)))
    _shared_allowed[kernel, device] = nbytes


@cache
def _prefer_l1(kernel: Any, device: str) -> None:
    """Leave as much of a multiprocessor's memory to the L1 as the static shared memory of one block allows."""
    # Otherwise the launch before decides: attention of several tokens leaves little. Then a product of 8 rows, which every block reads for
    # each of its tiles, takes 1.3 times as long.
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    index = int(device.partition(":")[2])
    check(driver.cuKernelSetAttribute(attribute, 0, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)))


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
    arguments: tuple[int | float, ...],  # of Python's types: cuda.core passes each as 64 bits
    stream: Any,  # Stream or GraphBuilder
    *,
    threads: int = THREADS_PER_BLOCK,
    shared_nbytes: int = 0,
    cooperative: bool = False,  # blocks wait for each other: refused unless all are resident at once
    leaves_l1: bool = True,  # not where two blocks of a kernel without dynamic shared memory must be resident
    programmatic_dependent_launch: bool = False,  # may start before the launch before has ended; the kernel waits for it
) -> None:
    """Launch a kernel of a variant of a source, on the GPU of a memory. It allocates nothing and does not wait."""
    from cuda.core import launch as launch_kernel

    memory.make_current()
    kernel = _kernel(source, name, memory.arch)
    if shared_nbytes:
        _allow_shared(kernel, shared_nbytes, memory.device)
    elif leaves_l1:
        _prefer_l1(kernel, memory.device)
    try:
        launch_kernel(stream, _launch_config(grid, threads, shared_nbytes, cooperative, programmatic_dependent_launch), kernel, *arguments)
    except (ValueError, cuda_core_error()) as error:  # ValueError: cuda.core counts the blocks that can run together
        raise CudaError(f"{name} could not be launched on {memory.device}: {error}") from None


def starts_early(memory: Any) -> bool:
    """Return True if the GPU of a memory has programmatic dependent launch."""
    return arch_number(memory.arch) >= MIN_PDL_ARCH


def blocks_for(vectors: int, runs: int = 1, *, max_blocks: int = _MAX_BLOCKS) -> int:
    """Return the blocks along x that share ``vectors``, at least one. ``runs``: blocks in y and z; ``max_blocks``: limit of all of them."""
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
