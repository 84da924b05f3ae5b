"""Where the tests run, and how they look at a cache.

``TRT_KVCACHE_TEST_DEVICE`` says what the ``memory`` fixture is: ``host`` (the default), ``emulated`` (CUDA memory over the
stand-in driver of tests/simt) or ``gpu``. Tests that take the fixture get the marker ``device``; ``pytest -m device`` runs
them alone. Tests marked ``gpu`` are skipped without a GPU, and fail without one under ``TRT_KVCACHE_REQUIRE_GPU=1``.
"""

import gc
import os

import hypothesis
import pytest

from tests.golden.weights import write_all
from tests.selection import Selection, add_options
from trt_kvcache import HostMemory

DEVICE = os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host")
REQUIRE_GPU = os.environ.get("TRT_KVCACHE_REQUIRE_GPU") == "1"

# The same examples on every run, and no database folder. A launch in the emulator takes a hundred times longer than NumPy.
hypothesis.settings.register_profile(
    "trt_kvcache",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=10 if DEVICE == "emulated" else 60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],  # the memory is one for all examples of a test
)
hypothesis.settings.load_profile("trt_kvcache")


def pytest_addoption(parser):
    add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(Selection())
    if not hasattr(config, "workerinput"):  # once, not in every worker of pytest-xdist
        write_all()


def _missing_gpu():
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
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "memory" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.device)
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_gpu() if needing_gpu and not REQUIRE_GPU else None
    if missing:
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_collection_finish():
    """Leave the tests themselves out of collections of garbage: many tests collect, and would look at all of them each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if REQUIRE_GPU and item.get_closest_marker("gpu"):
        missing = _missing_gpu()
        if missing:
            pytest.fail(f"TRT_KVCACHE_REQUIRE_GPU=1: {missing}", pytrace=False)


@pytest.fixture
def memory():
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
def stream(memory):
    return memory.create_stream()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One that has every byte."""
    from tests.checkpoint.tokenizer_folders import byte_level_folder, opened

    return opened(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))
