"""Base classes of objects that own memory: they cannot be copied or pickled, and they raise ``ClosedError`` once they are closed."""

from abc import ABC, abstractmethod
from typing import Any, NoReturn, TypeVar

from trt_kvcache.errors import ClosedError

_Self = TypeVar("_Self", bound="Closable")


class Uncopyable:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and pickling with a TypeError: two owners of the same memory would disagree."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{'an' if name[0] in 'AEIOU' else 'a'} {name} owns memory, or shares it, and cannot be copied or pickled.")

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()


class Closable(Uncopyable, ABC):
    """An object that can be used until it, or the ``cache`` that it works on, is closed. A context manager that closes it."""

    def __init__(self, *, cache: "Closable | None" = None) -> None:
        self._closed = False
        self._underlying_cache = cache

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def close(self) -> None:
        """Release memory and handles. Closing again does nothing."""
        self._closed = True
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Release memory and handles. May be called again."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed.")
        if self._underlying_cache is not None and self._underlying_cache.closed:
            raise ClosedError(f"this {type(self).__name__}'s cache is closed.")

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
