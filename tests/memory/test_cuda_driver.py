"""Whether there is a GPU, and why not, in one line. The driver is replaced by what each machine would answer."""

import subprocess
import sys

import pytest

from trt_kvcache.errors import CudaError, RangeError
from trt_kvcache.memory.cuda_memory import CudaMemory, find_gpu


@pytest.fixture
def driver(monkeypatch):
    from cuda.bindings import driver

    answers = {"cuInit": (driver.CUresult.CUDA_SUCCESS,), "cuDriverGetVersion": (driver.CUresult.CUDA_SUCCESS, 13000)}
    answers["cuDeviceGetCount"] = (driver.CUresult.CUDA_SUCCESS, 2)
    for name in answers:
        monkeypatch.setattr(driver, name, lambda *_, name=name: answers[name])
    return answers


def refuse(device, reason):
    assert find_gpu(device) == reason
    assert "\n" not in reason
    with pytest.raises(CudaError) as caught:
        CudaMemory(device)
    assert str(caught.value) == f"CudaMemory: {reason}"


def test_number(driver):
    assert (find_gpu(), find_gpu(1)) == (None, None)
    refuse(2, "there is no GPU 2: the driver counts 2, from 0.")
    for device in (-1, 0.5, True):
        for call in (find_gpu, CudaMemory):
            with pytest.raises(RangeError, match=r"^device: expected "):
                call(device)


def test_what_the_driver_says(driver):
    from cuda.bindings.driver import CUresult

    driver["cuDriverGetVersion"] = (driver["cuInit"][0], 12080)
    refuse(0, "the NVIDIA driver serves CUDA 12, cuda-bindings needs CUDA 13. Update the driver, or install cuda-core[cu12].")
    driver["cuInit"] = (CUresult.CUDA_ERROR_NO_DEVICE,)
    refuse(0, "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE.")


def test_no_driver(driver, monkeypatch):
    import cuda.bindings.driver
    from cuda.pathfinder import DynamicLibNotFoundError

    def not_found(_flags):
        raise DynamicLibNotFoundError("libcuda.so.1")

    monkeypatch.setattr(cuda.bindings.driver, "cuInit", not_found)
    refuse(0, "there is no NVIDIA driver on this machine (libcuda was not found).")


def test_no_cuda_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = find_gpu()
    assert reason.startswith("cuda-python is not installed (")
    assert reason.endswith("). Install trt-kvcache[cuda].")
    refuse(0, reason)


def test_nothing_is_imported_before():
    program = "import sys, trt_kvcache.memory.cuda_memory; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'cuda'))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
