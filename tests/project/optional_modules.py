"""Importing modules of the package that need a library of an extra: without it, what asks for them is left out."""

from importlib import import_module
from types import ModuleType

from tests.server.needs_libraries import need_libraries
from tests.server.needs_ray import need_ray
from tests.torch_engine.needs_torch import need_torch


def imported(name: str) -> ModuleType:
    """Import a module of the package; one that needs torch or the libraries of a server as their tests say."""
    if name.startswith("trt_kvcache.torch_engine"):
        need_torch()
    if name.startswith("trt_kvcache.server"):
        need_libraries()
    if name.startswith("trt_kvcache.server.ray_serve"):
        need_ray()
    return import_module(name)
