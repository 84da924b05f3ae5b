"""Choosing and importing TensorRT. Stand-in modules; the real one in the tests marked ``trt``."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import fake_module
from trt_kvcache.engine.attention_variants import attention_variant
from trt_kvcache.errors import BuildError, DTypeError, EngineError
from trt_kvcache.trt import module as trt_module, wheels
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT, load

NATIVE = attention_variant("native")


@pytest.fixture(autouse=True)
def forget_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import again in each test, and leave alone what others have imported: TensorRT keeps its first logger."""
    monkeypatch.setattr(trt_module, "_import", cache(trt_module._import.__wrapped__))
    monkeypatch.setattr(trt_module, "driver_failure", lambda: None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says what ``import tensorrt`` and ``import tensorrt_rtx`` give; None: not installed."""

    def install(**modules: ModuleType | None) -> None:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    install(tensorrt=None, tensorrt_rtx=None)
    return install


def test_neither_flavour_is_installed(installed: Any) -> None:
    with pytest.raises(EngineError) as raised:
        load()
    text = str(raised.value)
    assert text.startswith("TensorRT cannot be used. tensorrt: not installed; pip install 'trt-kvcache[tensorrt]'")
    assert "tensorrt_rtx: not installed; pip install 'trt-kvcache[rtx]', or 'trt-kvcache[rtx-cu12]' for NVIDIA driver 570 to 575." in text


@pytest.mark.parametrize(
    ("wheel", "driver", "fits"),
    [("cu13", 12, False), ("cu13", 13, True), ("cu13", None, True), ("cu12", 12, True), ("cu12", 13, True), ("cu12", 11, False)],
)
def test_a_wheel_of_rtx_for_a_newer_driver_is_named(
    installed: Any, monkeypatch: pytest.MonkeyPatch, wheel: str, driver: int | None, fits: bool
) -> None:
    installed(tensorrt_rtx=fake_module("1.7.1"))
    monkeypatch.setattr(trt_module, "driver_version", lambda: None if driver is None else (driver, 9))
    monkeypatch.setattr(wheels, "_is_installed", lambda name: name == f"tensorrt-rtx-{wheel}")
    tensorrt = load("tensorrt_rtx")
    if fits:
        tensorrt.create("Runtime")
        return
    with tensorrt.log.collect() as messages, pytest.raises(RuntimeError):
        tensorrt.create("Runtime")
    [text] = messages.errors
    parts = (f"supports CUDA {driver}", f"tensorrt-rtx-{wheel}", f"trt-kvcache[rtx-cu{driver}]", {"cu13": "580", "cu12": "570"}[wheel])
    assert [part for part in parts if part not in text] == []


@pytest.mark.trt
def test_the_wheel_that_is_installed_has_a_name() -> None:
    assert set(wheels.rtx_wheels()) & set(wheels.wheels_of_cuda())


def test_the_caller_chooses_the_error_type(installed: Any) -> None:
    with pytest.raises(BuildError):
        load("tensorrt_rtx", error=BuildError)


def test_an_unknown_flavour_is_refused(installed: Any) -> None:
    with raises(EngineError, "TensorRT flavour", expected="auto, tensorrt, tensorrt_rtx", got="'trt'"):
        load("trt")


def test_full_tensorrt_comes_first(installed: Any) -> None:
    full, rtx = fake_module("11.0.0"), fake_module("1.7.1")
    installed(tensorrt=full, tensorrt_rtx=rtx)
    found = load()
    assert (found.module, found.flavour, found.version, found.is_rtx) == (full, "tensorrt", "11.0.0", False)
    found = load("tensorrt_rtx")
    assert (found.module, found.flavour, found.is_rtx) == (rtx, "tensorrt_rtx", True)
    assert load("tensorrt_rtx") is found  # one logger per module


def test_auto_skips_a_full_tensorrt_that_cannot_start(installed: Any) -> None:
    installed(tensorrt=fake_module("11.4.0", start=False), tensorrt_rtx=fake_module("1.7.1"))
    assert load().flavour == "tensorrt_rtx"
    with pytest.raises(EngineError, match=r"tensorrt: cannot start here: CUDA initialization failure with error: 35\."):
        load("tensorrt")


@pytest.mark.parametrize("kind", ["Runtime", "Builder"])
def test_full_tensorrt_is_not_called_where_the_driver_does_not_start(installed: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Without a GPU, the libraries from 10.15 to 11.4 return an invalid pointer, which ends the process."""

    def end_the_process(logger: Any) -> Any:
        raise AssertionError("TensorRT was called")

    full, rtx = fake_module("11.4.0"), fake_module("1.7.1")
    full.Runtime = full.Builder = end_the_process  # type: ignore[attr-defined]
    rtx.Builder = rtx.Runtime  # type: ignore[attr-defined]
    installed(tensorrt=full, tensorrt_rtx=rtx)
    reason = "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"
    monkeypatch.setattr(trt_module, "driver_failure", lambda: reason)
    assert load().flavour == "tensorrt_rtx"
    with pytest.raises(EngineError, match=rf"tensorrt: cannot start here: {reason}\.$"):
        load("tensorrt")
    tensorrt = TensorRT(module=full, flavour="tensorrt", version="11.4.0", log=TensorRTLog(full))
    with tensorrt.log.collect() as messages, pytest.raises(RuntimeError, match=reason):
        tensorrt.create(kind)
    assert messages.errors == [reason]
    assert load("tensorrt_rtx").create(kind) is not None  # it needs no GPU


def test_auto_skips_a_full_tensorrt_that_is_too_old(installed: Any) -> None:
    installed(tensorrt=fake_module("10.2.0.34"), tensorrt_rtx=fake_module("1.7.1"))
    assert load().flavour == "tensorrt_rtx"
    with raises(EngineError, "tensorrt: version 10.2.0.34 is too old", expected="11.0 or newer, or 10.3 for plugin"):
        load("tensorrt")


@pytest.mark.parametrize(("version", "native"), [("10.15.1.29", False), ("10.16.1.11", False), ("11.0.0", True), ("11.4.0", True)])
def test_native_attention_by_version(installed: Any, version: str, native: bool) -> None:
    installed(tensorrt=fake_module(version))
    assert load("tensorrt").supports(NATIVE) is native


@pytest.mark.parametrize(("version", "has"), [("10.16.0", True), ("10.15.1.29", True), ("10.14.1", False), ("10.3.0", False)])
def test_masked_attention_by_version(installed: Any, version: str, has: bool) -> None:
    installed(tensorrt=fake_module(version))
    assert load("tensorrt").supports(attention_variant("mask")) is has


@pytest.mark.parametrize("version", ["10.3.0", "10.16.1"])
def test_auto_takes_an_older_full_tensorrt_where_there_is_nothing_else(installed: Any, version: str) -> None:
    installed(tensorrt=fake_module(version))
    assert str(load()) == f"tensorrt {version}"


@pytest.mark.parametrize("version", ["10.3.0", "10.16.1"])
def test_auto_prefers_rtx_to_a_full_tensorrt_without_native_attention(installed: Any, version: str) -> None:
    installed(tensorrt=fake_module(version), tensorrt_rtx=fake_module("1.7.1"))
    assert load().flavour == "tensorrt_rtx"
    assert load("tensorrt").flavour == "tensorrt"


@pytest.mark.parametrize(("version", "native"), [("1.4.0.76", False), ("1.5.0.114", True), ("1.7.1", True)])
def test_native_attention_in_rtx(installed: Any, version: str, native: bool) -> None:
    installed(tensorrt_rtx=fake_module(version))
    rtx = load()
    assert rtx.supports(NATIVE) is native
    assert rtx.supports(attention_variant("mask"))
    assert rtx.supports(attention_variant("plugin"))


def test_module_that_is_not_tensorrt(installed: Any) -> None:
    installed(tensorrt_rtx=ModuleType("tensorrt_rtx"))
    with pytest.raises(EngineError, match="tensorrt_rtx: the module of that name is not TensorRT"):
        load("tensorrt_rtx")


def test_module_whose_libraries_are_missing(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(trt_module.importlib, "import_module", broken)
    with pytest.raises(EngineError, match=r"cannot be imported \(libnvinfer\.so\.11: cannot open shared object file\)"):
        load("tensorrt")


@pytest.mark.trt
def test_dtypes_there_and_back() -> None:
    rtx = load("tensorrt_rtx")
    for name in ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "int64"):
        assert rtx.dtype_name(rtx.data_type(name)) == name
    assert rtx.data_type("bfloat16") == rtx.module.bfloat16
    assert rtx.dtype_name(rtx.module.DataType.BOOL) == "bool"
    with pytest.raises(DTypeError, match=r"expected one of float16, .*got 'float64'"):
        rtx.data_type("float64")


def test_nothing_imports_tensorrt_or_cuda_before_it_is_asked_for() -> None:
    code = (
        "import sys, trt_kvcache.builder.build_engine, trt_kvcache.trt.tensorrt_engine, trt_kvcache.engine_folder.inspection;"
        "print([name for name in sys.modules if name.split('.')[0] in ('tensorrt', 'tensorrt_rtx', 'cuda')])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_a_module_that_cannot_import_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'tensorrt_libs'", name="tensorrt_libs")

    monkeypatch.setattr(trt_module.importlib, "import_module", broken)
    with pytest.raises(EngineError, match=r"tensorrt: cannot be imported \(No module named 'tensorrt_libs'\)\."):
        load("tensorrt")
