"""Calls of TensorRT's builder whose failure is a return value."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages


def require(make: Callable[..., Any], messages: Messages, what: str, *arguments: Any) -> Any:
    """Call something that returns None, or raises a bare TypeError, where TensorRT cannot do it."""
    try:
        made = make(*arguments)
    except (TypeError, RuntimeError):
        made = None
    if made is None:
        messages.fail(BuildError, what)
    return made
