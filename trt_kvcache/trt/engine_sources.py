"""Sources of an engine: an engine folder, or the file of a serialised engine."""

import mmap
from pathlib import Path

from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import EngineError, PlaceError
from trt_kvcache.kernels.attention_tiles import MIN_ARCH, arch_number
from trt_kvcache.memory.base import Memory
from trt_kvcache.trt.module import TensorRT, load


def require_gpu_memory(owner: str, memory: Memory) -> None:
    """Check that an engine is opened in the memory of a GPU."""
    if memory.is_host:
        raise PlaceError(f"{owner}: expected the memory of a GPU (CudaMemory), got memory on {memory.device}.")


def require_kernels(owner: str, memory: Memory) -> None:
    """Check that a GPU can run the kernels of this package."""
    arch: str = memory.arch  # type: ignore[attr-defined]  # GPU memory has one
    if arch_number(arch) < MIN_ARCH:
        raise EngineError(f"{owner}: expected a GPU of compute capability 8.0 or more, which our kernels need, got {arch}.")


def load_tensorrt_for(folder: EngineFolder, flavour: str) -> TensorRT:
    """Import the TensorRT that built an engine folder."""
    config = folder.config
    if flavour not in ("auto", config.tensorrt_flavour):
        raise EngineError(f"{folder.path}: expected flavour {config.tensorrt_flavour}, which built this engine, got {flavour}.")
    return load(config.tensorrt_flavour)


def map_plan_file(path: Path) -> mmap.mmap:
    """Map the file of a serialised engine."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: expected an engine folder or a serialised engine, cannot read it: {error}.") from error
