"""Where the CUDA sources are, and the name of a compiled one."""

from __future__ import annotations

import re

import pytest

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels import MAX_STORED_VALUES, sources


def test_they_are_found():
    assert "lengths" in sources.source_names()
    assert (sources.source_folder() / "lengths.cu").is_file()


def test_both_sides_agree_on_the_values_of_a_launch():
    text = (sources.source_folder() / "lengths.cu").read_text()
    assert f"kMaxStoredValues = {MAX_STORED_VALUES};" in text
    assert len(set(re.findall(r"long long value(\d+)", text))) == MAX_STORED_VALUES


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
