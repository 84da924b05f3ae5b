"""``Kernel``: the NumPy twin and the CUDA launch of one kernel. The public functions check the arguments, then call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from trt_kvcache.memory.base import Memory


class InMemory(Protocol):
    """An argument in one memory: a tensor, the layers of a cache, the parameters of a call."""

    @property
    def memory(self) -> Memory:
        """Memory of the tensors."""


First = TypeVar("First", bound=InMemory)
Others = ParamSpec("Others")


@dataclass(frozen=True)
class Kernel(Generic[First, Others]):
    """A kernel for trusted arguments: engines call it, and the checked functions of its file. It neither waits nor allocates.

    A call runs in the memory of its first argument. Its last argument is the stream, which NumPy ignores.
    """

    host: Callable[Concatenate[First, Others], None]  # NumPy
    device: Callable[Concatenate[First, Others], None]  # a launch of plugins/*.cu

    def __call__(self, first: First, /, *others: Others.args, **named: Others.kwargs) -> None:
        """Run the kernel."""
        run = self.host if first.memory.is_host else self.device
        run(first, *others, **named)
