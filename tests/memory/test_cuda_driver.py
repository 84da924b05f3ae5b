"""Whether there is a GPU, and why not, in one line. The driver is replaced by what each machine would answer."""

import subprocess
import sys
from typing import Any

import pytest

from trt_kvcache.errors import CudaError, RangeError
from trt_kvcache.memory import cuda_driver
from trt_kvcache.memory.cuda_memory import CudaMemory, find_gpu


class TestFindGpu:
    """The reason in one line. The driver is replaced by what each machine would answer."""

    @pytest.fixture
    def driver(self, monkeypatch):
        from cuda.bindings import driver

        answers = {"cuInit": (driver.CUresult.CUDA_SUCCESS,), "cuDriverGetVersion": (driver.CUresult.CUDA_SUCCESS, 13000)}
        answers["cuDeviceGetCount"] = (driver.CUresult.CUDA_SUCCESS, 2)
        for name in answers:
            monkeypatch.setattr(driver, name, lambda *_, name=name: answers[name])
        return answers

    def refuse(self, device, reason):
        assert find_gpu(device) == reason
        assert "\n" not in reason
        with pytest.raises(CudaError) as caught:
            CudaMemory(device)
        assert str(caught.value) == f"CudaMemory: {reason}"

    def test_there_is_one(self, driver):
        assert (find_gpu(), find_gpu(1)) == (None, None)

    def test_no_such_gpu(self, driver):
        self.refuse(2, "there is no GPU 2: the driver counts 2, from 0.")

    def test_no_gpu(self, driver):
        from cuda.bindings.driver import CUresult

        driver["cuInit"] = (CUresult.CUDA_ERROR_NO_DEVICE,)
        self.refuse(0, "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE.")

    def test_old_driver(self, driver):
        driver["cuDriverGetVersion"] = (driver["cuInit"][0], 12080)
        self.refuse(
            0,
            "the NVIDIA driver supports CUDA 12, the package cuda-bindings is for CUDA 13. Update the driver to 580 or newer, or install "
            "trt-kvcache[rtx-cu12] (TensorRT for RTX), [tensorrt-cu12] or [cuda12] in a new environment.",
        )

    def test_no_driver(self, driver, monkeypatch):
        import cuda.bindings.driver
        from cuda.pathfinder import DynamicLibNotFoundError

        def not_found(_flags):
            raise DynamicLibNotFoundError("libcuda.so.1")

        monkeypatch.setattr(cuda.bindings.driver, "cuInit", not_found)
        self.refuse(0, "there is no NVIDIA driver on this machine (libcuda was not found).")

    def test_no_cuda_python(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        reason = find_gpu()
        assert reason.startswith("cuda-python is not installed (")
        assert reason.endswith("). Install trt-kvcache[cuda].")
        self.refuse(0, reason)

    @pytest.mark.parametrize("device", [-1, 0.5, True])
    def test_not_a_number_of_a_gpu(self, device):
        for call in (find_gpu, CudaMemory):
            with pytest.raises(RangeError, match=r"^device: expected "):
                call(device)

    def test_nothing_is_imported_before(self):
        loaded = "name for name in sys.modules if name.partition('.')[0] == 'cuda'"
        program = f"import sys, trt_kvcache.memory.cuda_memory; print(sorted({loaded}))"
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


class TestWhetherTheDriverStarts:
    class Driver:
        """A libcuda whose cuInit returns ``status``."""

        def __init__(self, status: int, name: bytes | None = None) -> None:
            self.status, self.name = status, name

        def cuInit(self, flags: int) -> int:
            return self.status

        def cuGetErrorName(self, status: int, text: Any) -> int:
            assert status == self.status
            text._obj.value = self.name
            return 0 if self.name else 1

    @pytest.mark.parametrize(
        ("driver", "reason"),
        [
            (Driver(0), None),
            (Driver(100, b"CUDA_ERROR_NO_DEVICE"), "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"),
            (Driver(4711), "the CUDA driver does not start: error 4711"),
            (object(), "there is no NVIDIA driver on this machine (libcuda.so.1 was not found)"),  # not a libcuda
        ],
    )
    def test_what_cu_init_returns(self, monkeypatch: pytest.MonkeyPatch, driver: object, reason: str | None) -> None:
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)
        assert cuda_driver.driver_failure() == reason

    def test_a_machine_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr("sys.platform", "win32")
        monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
        assert cuda_driver.driver_failure() == "there is no NVIDIA driver on this machine (nvcuda.dll was not found)"
