"""Devices of torch: torch tensors over bound memory, and the execution of a step on a stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from trt_kvcache.errors import EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.step_graphs import StepGraphs

#: Divisor of the GPU's memory: the budget of an engine's CUDA graphs.
GRAPH_MEMORY_DIVISOR = 32


class TorchDevice(Protocol):
    """A device of torch over one of this package's memories."""

    @property
    def torch_device(self) -> torch.device:
        """The device in torch's terms."""

    @property
    def graphs(self) -> StepGraphs | None:
        """CUDA graphs; None on a device without."""

    def view(self, tensor: DeviceTensor) -> torch.Tensor:
        """Return a torch tensor over the same bytes, through DLPack, without waiting."""

    def run(self, key: Hashable | None, stream: Any, work: Callable[[], None]) -> None:
        """Run ``work()`` stream-ordered on ``stream``. Work of an equal key, unless None, may be replayed from a CUDA graph."""

    def synchronize(self) -> None:
        """Wait for all work of torch."""

    def close(self) -> None:
        """Release graphs. Idempotent."""


class HostDevice:
    """The CPU, over host memory."""

    torch_device = torch.device("cpu")
    graphs = None

    def view(self, tensor: DeviceTensor) -> torch.Tensor:
        """See :meth:`TorchDevice.view`."""
        return torch.from_dlpack(tensor.__dlpack__())

    def run(self, key: Hashable | None, stream: Any, work: Callable[[], None]) -> None:
        """Run the work at once."""
        work()

    def synchronize(self) -> None:
        """Do nothing: nothing runs later."""

    def close(self) -> None:
        """Do nothing."""


class CudaDevice:
    """A GPU, over its :class:`~trt_kvcache.memory.cuda_memory.CudaMemory`. Raises EngineError if torch cannot use it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.torch_device = torch.device(memory.device)
        reason = gpu_failure(self.torch_device.index)
        if reason is not None:
            raise EngineError(f"torch: expected one that can use {memory.device}, got {reason}.")
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        self.graphs = StepGraphs(self.torch_device, total // GRAPH_MEMORY_DIVISOR)
        self._stream: torch.cuda.ExternalStream | None = None

    def view(self, tensor: DeviceTensor) -> torch.Tensor:
        """See :meth:`TorchDevice.view`."""
        return torch.from_dlpack(tensor.__dlpack__(stream=-1))

    def run(self, key: Hashable | None, stream: Any, work: Callable[[], None]) -> None:
        """Run the work on the stream, or replay its graph."""
        refuse_capture(self._memory, "a step in PyTorch", stream, because="memory of PyTorch's allocator would not belong to the graph")
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._torch_stream(stream)):
            self.graphs.run(key, work)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """Wait for the graphs, and release them. Idempotent."""
        self.graphs.close()

    def _torch_stream(self, stream: Any) -> torch.cuda.ExternalStream:
        """Return torch's view of a stream."""
        handle = int(stream.__cuda_stream__()[1])
        if self._stream is None or self._stream.cuda_stream != handle:
            self.graphs.synchronize()  # those on the other stream, which share memory with these
            self._stream = torch.cuda.ExternalStream(handle, device=self.torch_device)
        return self._stream


def gpu_failure(device: int) -> str | None:
    """Return the reason why this torch cannot use a GPU, or None if it can."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return f"torch {torch.__version__} " + (f"of CUDA {built}, which finds no GPU" if built else "without CUDA")
    if device >= torch.cuda.device_count():
        return f"torch {torch.__version__}, which finds {torch.cuda.device_count()} GPUs"
    return None
