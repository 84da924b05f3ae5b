"""Named ranges in the timelines of NVIDIA's profilers (NVTX), if the package ``nvtx`` is installed and a profiler is attached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _domain() -> Any:
    """Return the NVTX domain of this package; None without a profiler."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain("trt_kvcache")
    return None if type(domain).__name__ == "DummyDomain" else domain  # no profiler is attached


_DOMAIN = _domain()


def nvtx_range(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that wraps each call in a range; without a profiler at import it returns the function itself, at no cost."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if _DOMAIN is None:
            return function
        domain, attributes = _DOMAIN, _DOMAIN.get_event_attributes(message=name)

        @functools.wraps(function)
        def in_range(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            domain.push_range(attributes)
            try:
                return function(*args, **kwargs)
            finally:
                domain.pop_range()

        return in_range

    return decorate
