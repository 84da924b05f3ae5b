"""Exceptions of a plugin, kept for the error that follows: TensorRT prints them and passes only the failure on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME


def reporter(tensorrt: TensorRT, plugin: str = PLUGIN_NAME) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the methods that TensorRT calls, which logs their exceptions and raises them again."""

    def reported(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            try:
                return method(self, *arguments)
            except Exception as error:
                tensorrt.log.receive_exception(f"{plugin}.{method.__name__}", error)
                raise

        return call

    return reported
