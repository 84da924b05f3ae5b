"""Choosing and importing TensorRT. Stand-in modules; the real one in the tests marked ``trt``."""

import enum
import sys
from functools import cache
from types import ModuleType

import pytest

from trt_kvcache.engine.attention_variants import attention_variant
from trt_kvcache.errors import BuildError, EngineError
from trt_kvcache.trt import module as trt_module
from trt_kvcache.trt.module import load

NATIVE = attention_variant("native")


class FakeLogger:
    Severity = enum.IntEnum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"], start=0)

    def __init__(self):
        pass


def fake_module(version, *, start=True):
    class Runtime:
        def __init__(self, logger):
            if not start:
                logger.log(FakeLogger.Severity.ERROR, "CUDA initialization failure with error: 35")
                raise TypeError("pybind11::init(): factory function returned nullptr")

    module = ModuleType("tensorrt")
    module.__version__, module.ILogger, module.Runtime = version, FakeLogger, Runtime
    return module


@pytest.fixture(autouse=True)
def forget_imports(monkeypatch):
    """Import anew in each test, and leave alone what others have imported: TensorRT keeps its first logger."""
    monkeypatch.setattr(trt_module, "_import", cache(trt_module._import.__wrapped__))


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says what ``import tensorrt`` and ``import tensorrt_rtx`` give; None: not installed."""

    def install(**modules):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    install(tensorrt=None, tensorrt_rtx=None)
    return install


def test_neither_is_there(installed):
    with pytest.raises(EngineError) as raised:
        load()
    text = str(raised.value)
    assert text.startswith("TensorRT cannot be used. tensorrt: not installed; pip install 'trt-kvcache[tensorrt]'")
    assert "tensorrt_rtx: not installed; pip install 'trt-kvcache[rtx]'." in text
    with pytest.raises(BuildError):
        load("tensorrt_rtx", error=BuildError)
    with pytest.raises(EngineError, match="TensorRT flavour: expected one of auto, tensorrt, tensorrt_rtx, got 'trt'"):
        load("trt")


def test_full_tensorrt_comes_first(installed):
    full, rtx = fake_module("11.0.0"), fake_module("1.7.1")
    installed(tensorrt=full, tensorrt_rtx=rtx)
    found = load()
    assert (found.module, found.flavour, found.version, found.is_rtx) == (full, "tensorrt", "11.0.0", False)
    found = load("tensorrt_rtx")
    assert (found.module, found.flavour, found.is_rtx, found.supports(NATIVE)) == (rtx, "tensorrt_rtx", True, True)
    assert load("tensorrt_rtx") is found  # one logger per module


@pytest.mark.parametrize(
    ("full", "message"),
    [
        (fake_module("11.4.0", start=False), r"tensorrt: cannot start here: CUDA initialization failure with error: 35\."),
        (fake_module("10.2.0.34"), r"tensorrt: version 10\.2\.0\.34 is too old\. Expected 11\.0 or newer, or 10\.3 for plugin"),
    ],
)
def test_full_tensorrt_that_cannot_be_used_gives_way(installed, full, message):
    installed(tensorrt=full, tensorrt_rtx=fake_module("1.7.1"))
    assert load().flavour == "tensorrt_rtx"
    with pytest.raises(EngineError, match=message):
        load("tensorrt")


@pytest.mark.parametrize(
    ("version", "has"), [("11.0.0", "11"), ("10.16.1.11", "10"), ("10.15.1.29", "10"), ("10.14.1", "00"), ("10.3.0", "00")]
)
def test_what_versions_have(installed, version, has):
    installed(tensorrt=fake_module(version))
    found = load("tensorrt")
    assert f"{found.supports(attention_variant('mask')):d}{found.supports(NATIVE):d}" == has


@pytest.mark.parametrize("version", ["10.3.0", "10.16.1"])
def test_auto_prefers_what_serves_all_attentions(installed, version):
    installed(tensorrt=fake_module(version))
    assert str(load()) == f"tensorrt {version}"
    trt_module._import.cache_clear()
    installed(tensorrt_rtx=fake_module("1.7.1"))
    assert [load(flavour).flavour for flavour in ("auto", "tensorrt")] == ["tensorrt_rtx", "tensorrt"]
    trt_module._import.cache_clear()
    installed(tensorrt=fake_module("11.0.0"))
    assert load().flavour == "tensorrt"
