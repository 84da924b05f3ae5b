"""Where the tests run, and how they look at a cache.

``TRT_KVCACHE_TEST_DEVICE`` says what the ``memory`` fixture is: ``host`` (the default), ``emulated`` (CUDA memory over the
stand-in driver of tests/simt) or ``gpu``. Tests that take the fixture get the marker ``device``; ``pytest -m device`` runs
them alone. Tests marked ``gpu`` are skipped without a GPU, and fail without one under ``TRT_KVCACHE_REQUIRE_GPU=1``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import numpy as np
import pytest
from golden.weights import write_all

from trt_kvcache import DeviceTensor, HostMemory, Lengths
from trt_kvcache.errors import LengthsUnknown

DEVICE = os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host")
REQUIRE_GPU = os.environ.get("TRT_KVCACHE_REQUIRE_GPU") == "1"

# The same examples on every run, and no database folder. A launch in the emulator takes a hundred times longer than NumPy.
hypothesis.settings.register_profile(
    "trt_kvcache", deadline=None, derandomize=True, database=None, max_examples=10 if DEVICE == "emulated" else 60
)
hypothesis.settings.load_profile("trt_kvcache")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, not in every worker of pytest-xdist
        write_all()


def _missing_gpu() -> str | None:
    """Say why there is no GPU to test on; None where there is one."""
    if DEVICE == "emulated":
        return "the device is emulated"
    try:
        from cuda.bindings import driver

        status, count = driver.cuInit(0)[0], driver.cuDeviceGetCount()
    except (ImportError, RuntimeError) as error:
        return f"no CUDA driver: {error}"
    return None if status == 0 and count[0] == 0 and count[1] > 0 else f"the CUDA driver found no device (cuInit: {status!r})"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "memory" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.device)
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_gpu() if needing_gpu and not REQUIRE_GPU else None
    if missing:
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if REQUIRE_GPU and item.get_closest_marker("gpu"):
        missing = _missing_gpu()
        if missing:
            pytest.fail(f"TRT_KVCACHE_REQUIRE_GPU=1: {missing}", pytrace=False)


@pytest.fixture
def memory() -> Any:
    """The memory that the run is for: see the top of this file."""
    if DEVICE == "host":
        return HostMemory()
    if DEVICE in ("emulated", "gpu"):
        from trt_kvcache import CudaMemory

        if DEVICE == "gpu":
            gc.collect()  # what earlier tests left waits for the device when it goes, which would break off a capture
        return CudaMemory()
    pytest.fail(f"TRT_KVCACHE_TEST_DEVICE: expected host, emulated or gpu, got {DEVICE!r}", pytrace=False)


@pytest.fixture
def stream(memory: Any) -> Any:
    return memory.create_stream()


def _whole_allocation(tensor: DeviceTensor) -> DeviceTensor:
    return DeviceTensor(tensor.allocation, shape=(tensor.allocation.nbytes,), dtype="uint8")


def _observe(subject: Any) -> dict[str, Any]:
    """Everything that an operation could change: bytes with their padding, addresses, lengths, the mirror, live memory."""
    lengths = subject if isinstance(subject, Lengths) else subject.lengths
    tensors = [lengths.tensor]
    if lengths is not subject:
        tensors += [subject.get_combined_kv_cache(index) for index in range(subject.num_layers)]
        tensors += [] if subject.kv_scales is None else [subject.kv_scales]
    try:
        host: Any = lengths.host
    except LengthsUnknown as error:
        host = str(error)
    return {
        "bytes": [_whole_allocation(tensor).numpy().tobytes() for tensor in tensors],
        "addresses": [tensor.ptr for tensor in tensors],
        "active": (lengths.active_batch_size, lengths.active_tensor.shape, lengths.active_tensor.ptr),
        "mirror": (host, lengths.upper_bounds, lengths.all_empty),
        "live_nbytes": lengths.tensor.memory.live_nbytes,
    }


@pytest.fixture(scope="session")
def unchanged() -> Callable[[Any], AbstractContextManager[None]]:
    """Return a context manager: bytes and state of a manager or a Lengths are afterwards as they were before."""

    @contextmanager
    def check(subject: Any) -> Iterator[None]:
        before = _observe(subject)
        yield
        assert _observe(subject) == before

    return check


@pytest.fixture(scope="session")
def fill() -> Callable[..., np.ndarray[Any, Any]]:
    """Return a function that overwrites all K/V bytes of a manager, padding included, and returns what it wrote."""

    def overwrite(cache: Any, *, stream: Any, value: int | None = None) -> list[np.ndarray[Any, Any]]:
        written: dict[int, np.ndarray[Any, Any]] = {}
        for index in range(cache.num_layers):
            tensor = _whole_allocation(cache.get_combined_kv_cache(index))
            if tensor.ptr not in written:
                random = np.random.default_rng(index).integers(0, 256, tensor.shape, np.uint8)
                written[tensor.ptr] = random if value is None else np.full(tensor.shape, value, np.uint8)
                cache.memory.upload(tensor, written[tensor.ptr], stream=stream)
        cache.memory.synchronize(stream)
        return list(written.values())

    return overwrite
