"""Tests over the real bindings of one release of full TensorRT, in a process of their own: ``tests/bindings/run.py`` starts them.

``TRT_KVCACHE_BINDINGS`` names the release. Without it this folder has no tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_tensorrt import FakeGpuMemory
from trt_kvcache.trt import graph_engine, module as trt_module
from trt_kvcache.trt.module import TensorRT

VERSION = os.environ.get("TRT_KVCACHE_BINDINGS")

if VERSION is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def stand_in() -> Any:
    """TensorRT behind the bindings."""
    from tests.bindings.packages import load
    from tests.bindings.stand_in import StandIn

    assert VERSION is not None
    return StandIn(*load(VERSION))


@pytest.fixture(scope="session")
def full(stand_in: Any) -> Iterator[TensorRT]:
    """What the package makes of these bindings, on a machine whose driver starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trt_module, "driver_failure", lambda: None)
        patch.setattr(graph_engine, "gpu_identity", lambda device: ("GPU", "uuid", "8.7", "13000"))
        yield trt_module.load("tensorrt")


@pytest.fixture
def memory() -> FakeGpuMemory:
    return FakeGpuMemory()


@pytest.fixture(autouse=True)
def failures() -> Iterator[None]:
    """Fail a test in which TensorRT's part has failed, whatever the bindings made of that."""
    from tests.bindings.cpp import FAILURES

    FAILURES.clear()
    yield
    if FAILURES:
        raise FAILURES[0]
