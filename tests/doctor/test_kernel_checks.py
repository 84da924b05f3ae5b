"""Checks A and B: the machine, and the kernels of this package."""

import numpy as np
import pytest

from trt_kvcache.doctor.cases import MACHINE_CASE, CheckFailure
from trt_kvcache.doctor.checks import environment, graphs, kernels
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.errors import EngineError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.trt import wheels


def statuses(log):
    return {case.name: case.status for case in log.cases}


def test_dry_run_passes_and_describes_no_gpu(settings, log):
    environment.check(settings, log)
    kernels.check(settings, log)
    assert "failed" not in statuses(log).values()
    (machine,) = [case for case in log.cases if case.name == MACHINE_CASE]
    assert "gpu" not in machine.figures
    assert statuses(log)["compile and load"] == "not here"


def test_without_a_gpu_the_machine_is_not_here(tmp_path, log, monkeypatch):
    monkeypatch.setattr(environment, "find_gpu", lambda device: "there is no driver.")
    environment.check(Settings(scratch=str(tmp_path)), log)
    assert statuses(log)[MACHINE_CASE] == "not here"
    assert "NVRTC" not in statuses(log)


def test_missing_tensorrt_is_told(settings, log, monkeypatch):
    def missing(flavour):
        raise EngineError("TensorRT cannot be used. tensorrt: not installed")

    monkeypatch.setattr(environment, "load", missing)
    environment.check(settings, log)
    assert statuses(log)["TensorRT"] == "not here"
    (machine,) = [case for case in log.cases if case.name == MACHINE_CASE]
    assert machine.figures["tensorrt"] is None


@pytest.mark.parametrize("shape", kernels.SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("mistake", ["output", "cache"])
def test_wrong_attention_fails(settings, log, monkeypatch, shape, mistake):
    right, calls = kernels.attend, []

    def wrong(*arguments, out, **options):
        right(*arguments, out=out, **options)
        calls.append(out)
        if len(calls) == 1:  # in the memory that is checked, not in the reference
            changed = HostMemory().array(out if mistake == "output" else arguments[3])
            changed[1, ..., 0, :, 3] = np.array(1.5, changed.dtype) if mistake == "output" else np.array(7, changed.dtype)

    monkeypatch.setattr(kernels, "attend", wrong)
    figures = log.run("attention", lambda: kernels._attention_agrees(shape, settings.memory()))
    assert figures is None
    assert log.cases[-1].status == "failed"
    assert "expected a relative error of at most" in log.cases[-1].text


@pytest.mark.parametrize("name", ["lengths", "compaction", "sampled_tokens"])
def test_one_wrong_byte_fails(settings, name):
    compute = getattr(kernels, name)

    def wrong(memory):
        results = [array.copy() for array in compute(memory)]
        if memory is checked:
            results[-1].reshape(-1).view(np.uint8)[0] ^= 1
        return results

    checked = settings.memory()
    kernels._same(compute, checked)
    with pytest.raises(CheckFailure, match=r"expected equal bytes, got 1 of \d+ values that differ"):
        kernels._same(wrong, checked)


@pytest.mark.device
@pytest.mark.parametrize("shape", kernels.SHAPES, ids=lambda shape: shape.name)
def test_attention_agrees_in_any_memory(memory, shape):
    assert kernels._attention_agrees(shape, memory)["relative_error"] <= kernels.TOLERANCES[shape.dtype] / 4


@pytest.mark.device
@pytest.mark.parametrize("name", ["lengths", "compaction", "sampled_tokens"])
def test_results_are_equal_in_any_memory(memory, name):
    kernels._same(getattr(kernels, name), memory)


@pytest.mark.device
def test_machine_is_described(memory, tmp_path):
    if memory.is_host:
        pytest.skip("host memory is no GPU")
    machine = environment._machine(Settings(scratch=str(tmp_path)), "tensorrt_rtx 1.7.1")
    assert machine["gpu"].count("compute capability") == 1
    assert "CUDA" in machine["driver"]
    assert machine["memory_mib"] >= machine["free_mib"] > 0
    assert machine["tensorrt"] == "tensorrt_rtx 1.7.1"


@pytest.mark.device
def test_commit_is_captured(memory):
    if memory.is_host:
        pytest.skip("host memory has no graphs")
    assert graphs._commit(memory) == {}


def with_distributions(monkeypatch, *names):
    class Distribution:
        def __init__(self, name):
            self.metadata = {"Name": name}

    monkeypatch.setattr(wheels.metadata, "distributions", lambda: [Distribution(name) for name in names])


def test_wheels_for_the_driver(monkeypatch):
    names = (
        "numpy",
        "nvidia-cuda-nvrtc",
        "nvidia_cudnn_cu14",
        "nvidia_cuda_nvrtc_cu12",
        "tensorrt_rtx_cu13_libs",
        "tensorrt-cu12",
        "cuda-core",
    )
    with_distributions(monkeypatch, *names)
    assert environment.wheels_fit("13.0")["wheels"] == 3
    with pytest.raises(CheckFailure) as refused:
        environment.wheels_fit("12.8")
    parts = ("driver supports CUDA 12", "the wheel tensorrt-rtx-cu13-libs is for CUDA 13", "580", "trt-kvcache[rtx-cu12]")
    assert [part for part in parts if part not in str(refused.value)] == []
