"""Calls of TensorRT's builder that report a failure by returning None."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages


def require(function: Callable[..., Any], messages: Messages, what: str, *arguments: Any) -> Any:
    """Call TensorRT for an object.

    Parameters
    ----------
    function : callable
        Returns None, or raises a TypeError without a reason, where TensorRT cannot do it.
    messages : Messages
        An open collection of TensorRT's log.
    what : str
        What failed, for the message of the exception.
    *arguments
        Arguments of ``function``.

    Returns
    -------
    object
        What ``function`` returned.

    Raises
    ------
    BuildError
        It returned None or raised; the text is what TensorRT logged.
    """
    try:
        created = function(*arguments)
    except (TypeError, RuntimeError):
        created = None
    if created is None:
        messages.fail(BuildError, what)
    return created
