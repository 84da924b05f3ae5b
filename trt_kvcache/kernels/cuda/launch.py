"""Load and launch a kernel of ``plugins/*.cu``."""

from functools import cache, lru_cache
from typing import Any

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.compile import cubin
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import check, cuda_core_error
from trt_kvcache.memory.cuda_memory import CudaMemory

#: Threads of a block, in every kernel, and units that a thread has in flight: see ``plugins/units.cuh``.
THREADS_PER_BLOCK, UNITS_IN_FLIGHT = 256, 4

#: Blocks of a launch at most, where one can do: enough waves of them that the last one hardly counts on a large GPU.
_MAX_BLOCKS = 1 << 20

Grid = tuple[int, int, int]


@cache
def _module(source: str, arch: str) -> Any:
    """Load the machine code of one source. It is kept until the process ends."""
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin(source, arch), name=source)


@cache
def _kernel(source: str, name: str, arch: str) -> Any:
    try:
        return _module(source, arch).get_kernel(name)
    except cuda_core_error() as error:
        raise CudaError(f"{name} of {source}.cu could not be loaded for {arch}: {error}") from None


@cache
def _allow_shared(kernel: Any, nbytes: int, device: str) -> None:
    """Let blocks of a kernel have so much dynamic shared memory: without this, 48 KiB is the most."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    index = int(device.partition(":")[2])
    check(driver.cuKernelSetAttribute(attribute, nbytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)))


@lru_cache(maxsize=256)
def _launch_config(grid: Grid, threads: int, shared_nbytes: int, together: bool, early: bool) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(
        grid=grid, block=threads, shmem_size=shared_nbytes, is_cooperative=together, programmatic_stream_serialization=early
    )


def launch(
    memory: Memory,
    source: str,
    name: str,
    grid: Grid,
    arguments: tuple[int | float, ...],
    stream: Any,
    *,
    threads: int = THREADS_PER_BLOCK,
    shared_nbytes: int = 0,
    together: bool = False,
    early: bool = False,
) -> None:
    """Launch a kernel.

    ``memory``: CudaMemory. Of the device that it runs on.
    ``source``, ``name``: The file of ``plugins/`` without ``.cu``, and the kernel in it.
    ``grid``: Blocks in x, y and z.
    ``arguments``: Addresses and numbers; cuda.core passes each as 64 bits.
    ``stream``: cuda.core.Stream or GraphBuilder.
    ``threads``: Of a block.
    ``shared_nbytes``: Dynamic shared memory of a block.
    ``together``: Blocks wait for each other: they run all at once (a cooperative launch), or the launch is refused.
    ``early``: It may begin before the launch before has ended, and waits by itself (programmatic dependent launch).

    Raises CudaError: the kernel could not be loaded or launched.
    """
    from cuda.core import launch as launch_kernel

    assert isinstance(memory, CudaMemory)
    memory.make_current()
    kernel = _kernel(source, name, memory.arch)
    if shared_nbytes:
        _allow_shared(kernel, shared_nbytes, memory.device)
    try:
        launch_kernel(stream, _launch_config(grid, threads, shared_nbytes, together, early), kernel, *arguments)
    except (ValueError, cuda_core_error()) as error:  # ValueError: cuda.core counts the blocks that can run together
        raise CudaError(f"{name} could not be launched on {memory.device}: {error}") from None


def blocks_for(units: int, runs: int = 1, *, most: int = _MAX_BLOCKS) -> int:
    """Return the blocks along x that share a run of units: each thread takes its units in flight once, or more often.

    ``units``: Of the longest run.
    ``runs``: Blocks in y and z.
    ``most``: Blocks in x, y and z together, but one in x there always is.
    """
    return max(1, min(-(-units // (THREADS_PER_BLOCK * UNITS_IN_FLIGHT)), most // runs))
