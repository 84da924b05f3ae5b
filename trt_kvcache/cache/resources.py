"""``Resources``: the allocations of a cache, released together."""

from typing import Any, Protocol, TypeVar

from trt_kvcache.memory.base import Allocation, Memory


class _HasClose(Protocol):
    def close(self) -> None: ...


_Part = TypeVar("_Part", bound=_HasClose)


class Resources:
    """Allocations and other parts of a cache, closed in the reverse of the order in which they were made."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._parts: list[_HasClose] = []

    def add(self, part: _Part) -> _Part:
        """Return ``part``, which :meth:`close` closes."""
        self._parts.append(part)
        return part

    def allocate(self, nbytes: int, *, stream: Any) -> Allocation:
        """Return ``nbytes`` bytes of zeros, allocated on ``stream``, which :meth:`close` releases."""
        return self.add(self.memory.allocate(nbytes, zeroed=True, stream=stream))

    def close(self) -> None:
        """Close all parts, the last one first. Closing again does nothing."""
        while self._parts:
            self._parts.pop().close()
