"""Where the CUDA sources are, and the name of a compiled one."""

from __future__ import annotations

import re

import pytest

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels import MAX_SAVED, MAX_STORED_VALUES, KVLayerInfo, StateInfo, sources
from trt_kvcache.kernels.arguments import STEP_COUNTS
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, UNITS_IN_FLIGHT
from trt_kvcache.kernels.steps import REGISTER


def test_they_are_found():
    assert "lengths" in sources.source_names()
    assert (sources.source_folder() / "lengths.cu").is_file()


class TestBothSides:
    """What is written in Python and in CUDA C++ is the same."""

    TEXT = "".join(path.read_text() for path in sorted(sources.source_folder().glob("*.cu*")))

    @pytest.mark.parametrize(("name", "value"), [("kThreads", THREADS_PER_BLOCK), ("kInFlight", UNITS_IN_FLIGHT), ("kRegister", REGISTER)])
    def test_numbers(self, name, value):
        (number,) = re.findall(rf"constexpr int {name} = (\w+);", self.TEXT)
        assert int(number, 0) == value

    def test_arguments_of_kernels(self):
        """How many values each kernel takes beside others; the last of several forms is that of the most steps."""
        kernels = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(kThreads\) )?(\w+)\(([^{]*)\)', self.TEXT)
        lists = {name: int(re.findall(r"LIST_(\d+)", rest)[0]) for name, rest in kernels if "LIST_" in rest}
        steps = {f"compact_{what}_{form}": form for what in ("layers", "rows", "lengths") for form in STEP_COUNTS}
        saved = dict.fromkeys(("save_layers", "instantiate_layers", "save_rows", "instantiate_rows"), MAX_SAVED)
        assert lists == {**steps, **saved, "store_values": MAX_STORED_VALUES}

    @pytest.mark.parametrize(("struct", "info"), [("KVLayer", KVLayerInfo), ("State", StateInfo)])
    def test_infos(self, struct, info):
        (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n\n|struct {struct} {{\n(.*?)}};", self.TEXT, re.DOTALL)
        fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body[0] or body[1]))
        assert tuple(fields) == info._fields


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of sources in the place of plugins/."""
    (tmp_path / "one.cu").write_text('#include "common.cuh"\nextern "C" __global__ void one(int* p) { *p = VALUE; }\n')
    (tmp_path / "common.cuh").write_text("#define VALUE 1\n")
    monkeypatch.setattr(sources, "source_folder", lambda: tmp_path)
    sources._digest.cache_clear()
    yield tmp_path
    sources._digest.cache_clear()


@pytest.mark.parametrize("changed", ["one.cu", "common.cuh"])
def test_the_name_changes_with_every_source(folder, changed):
    before = sources.cubin_name("one", "sm_90")
    assert re.fullmatch(r"one-[0-9a-f]{16}\.sm_90\.cubin", before)
    sources._digest.cache_clear()
    assert sources.cubin_name("one", "sm_90") == before
    (folder / changed).write_text((folder / changed).read_text() + "\n")
    sources._digest.cache_clear()
    assert sources.cubin_name("one", "sm_90") != before


def test_nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "trt_kvcache")
    with pytest.raises(
        CudaError, match=r"^the CUDA sources of trt_kvcache are missing: expected .*_plugins\. Install the package again\.$"
    ):
        sources.source_folder.__wrapped__()


def test_an_installed_package_has_its_own(tmp_path, monkeypatch):
    for folder in ("trt_kvcache/_plugins", "plugins"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lengths.cu").touch()
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "trt_kvcache")
    assert sources.source_folder.__wrapped__() == tmp_path / "trt_kvcache" / "_plugins"
