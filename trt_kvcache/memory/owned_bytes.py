"""``OwnedBytes``: an allocation that counts its bytes, and gives up its reference to them when it is closed."""

from typing import Generic, Protocol, TypeVar

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import ClosedError


class _Counting(Protocol):
    def count_live(self, nbytes: int) -> None: ...


_Counter = TypeVar("_Counter", bound=_Counting)
_Owner = TypeVar("_Owner")


class OwnedBytes(Uncopyable, Generic[_Counter, _Owner]):
    """Bytes that an owner holds, counted in its memory until they are closed: an ``Allocation`` without the address."""

    def __init__(self, memory: _Counter, owner: _Owner, nbytes: int) -> None:
        #: The memory that made it.
        self.memory = memory
        #: Size in bytes, as requested.
        self.nbytes = nbytes
        self._storage: _Owner | None = owner

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._storage is None

    @property
    def storage(self) -> _Owner:
        """The owner of the bytes: a uint8 array, or a CudaBuffer."""
        if self._storage is None:
            raise ClosedError("the memory of this tensor is closed. Keep its cache open, or copy with .numpy() before.")
        return self._storage

    def close(self) -> None:
        """Release the bytes. Closing again does nothing.

        Without a DLPack consumer they are freed now, on a device after a wait for it; else the last consumer frees them.
        """
        if self._storage is not None:
            self._storage = None
            self.memory.count_live(-self.nbytes)

    def __del__(self) -> None:
        self.close()
