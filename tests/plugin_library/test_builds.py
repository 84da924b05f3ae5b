"""``build_engine(plugin_library=...)`` with TensorRT for RTX: the engine carries the library, and has the plugin layers of Python's."""

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.plugin_library.build import build_library, need_cmake
from trt_kvcache.engine_folder.folder import EngineFolder

need_cmake()
pytestmark = pytest.mark.trt


@pytest.fixture(scope="module")
def library():
    return build_library()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def said(library, folder):
    """The error of each build of ``build_folders.py``, or a list of its warnings."""
    command = [sys.executable, "-m", "tests.plugin_library.build_folders", str(library), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["auto", "quantized"])
def test_an_engine_carries_the_library(said, folder, library, name):
    kernels = {"auto": "float16-64", "quantized": "float16-64-int8"}[name]
    assert [line.split(". ")[0] for line in said[name]] == [f"kernels: expected {kernels} in this library, got none"]
    engine = EngineFolder.open(folder / name)
    config, content = engine.config, library.read_bytes()
    assert (config.attention_variant, config.segments) == ("plugin", None)
    assert config.plugin_library.nbytes == len(content)
    with engine.read_plan() as plan:
        assert plan.find(content) > 0


def test_the_plugin_layers_are_those_of_python(said, folder, library):
    """The plan with the library is larger by the library; the record of a layer is the same from Python and from the library."""
    assert said["before"] == said["after"] == []  # a process warns of missing kernels once
    sizes = {name: EngineFolder.open(folder / name).config.plan.nbytes for name in ("before", "auto", "after")}
    assert sizes["before"] == sizes["after"]
    assert 0 <= sizes["auto"] - sizes["before"] - library.stat().st_size < 4096
    records = []
    for name in ("before", "after"):
        with EngineFolder.open(folder / name).read_plan() as plan:
            start = plan.find(b"KVCacheAttention")
            records.append(plan[start : plan.find(b"rotary_dim", start) + 80])
    assert records[0] == records[1]


def test_without_a_library_the_engine_carries_none(said, folder, library):
    for name in ("before", "after"):
        assert said[name] == []
        engine = EngineFolder.open(folder / name)
        assert engine.config.plugin_library is None
        with engine.read_plan() as plan:
            assert plan.find(library.read_bytes()) < 0


@pytest.mark.parametrize(
    ("name", "expected", "got"),
    [
        ("no library", "a shared library for this machine", "text.so"),
        ("foreign", "a library with getCreators and setLoggerFinder", "libm.so.6 has no getCreators"),
        ("registers itself", "a library whose plugins TensorRT registers", "libtrt_kvcache_plugins_registered.so, which registers them"),
        ("registers itself, after Python", "a library whose plugins TensorRT registers", "libtrt_kvcache_plugins_registered.so"),
        ("other", "libtrt_kvcache_plugins.so as it was when this process loaded it", "other.so"),
    ],
)
def test_a_library_that_does_not_fit_is_refused_before_anything_is_written(said, folder, name, expected, got):
    start, end = said[name].split(expected)
    assert start.endswith("ConfigError: plugin_library: expected ") or "/" in start
    assert got in end
    assert not (folder / name).exists()
