"""Calls of TensorRT's builder that report a failure by returning None."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages


def require(function: Callable[..., Any], messages: Messages, what: str, *arguments: Any) -> Any:
    """Call TensorRT for an object; raise BuildError with TensorRT's log if it returns None, or raises a TypeError without a reason."""
    try:
        created = function(*arguments)
    except (TypeError, RuntimeError):
        created = None
    if created is None:
        messages.fail(BuildError, what)
    return created
