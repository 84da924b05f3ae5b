"""``Uncopyable``: owners of device memory cannot be copied or pickled."""

from typing import Any, NoReturn


class Uncopyable:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and pickling with a TypeError: two owners of one memory would disagree."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns device memory and cannot be copied or pickled.")

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()
