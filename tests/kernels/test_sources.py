"""Where the CUDA sources are, that they say what Python says, and the name of a compiled one."""

from __future__ import annotations

import re

import pytest

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels import MAX_SAVED, MAX_STORED_VALUES, KVLayerInfo, StateInfo, sources
from trt_kvcache.kernels.arguments import STEP_COUNTS
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, UNITS_IN_FLIGHT, blocks_for
from trt_kvcache.kernels.steps import REGISTER

TEXT = "".join(path.read_text() for path in sorted(sources.source_folder().glob("*.cu*")))


def test_numbers_of_both_sides():
    for name, value in (("kThreads", THREADS_PER_BLOCK), ("kInFlight", UNITS_IN_FLIGHT), ("kRegister", REGISTER)):
        (number,) = re.findall(rf"constexpr int {name} = (\w+);", TEXT)
        assert int(number, 0) == value


def test_arguments_of_kernels_of_both_sides():
    """How many values each kernel takes beside others; the last of several forms is that of the most steps."""
    kernels = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(kThreads\) )?(\w+)\(([^{]*)\)', TEXT)
    lists = {name: int(re.findall(r"LIST_(\d+)", rest)[0]) for name, rest in kernels if "LIST_" in rest}
    steps = {f"compact_{what}_{form}": form for what in ("layers", "rows", "lengths") for form in STEP_COUNTS}
    saved = dict.fromkeys(("save_layers", "instantiate_layers", "save_rows", "instantiate_rows"), MAX_SAVED)
    assert lists == {**steps, **saved, "store_values": MAX_STORED_VALUES}


@pytest.mark.parametrize(("struct", "info"), [("KVLayer", KVLayerInfo), ("State", StateInfo)])
def test_infos_of_both_sides(struct, info):
    (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n\n|struct {struct} {{\n(.*?)}};", TEXT, re.DOTALL)
    fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body[0] or body[1]))
    assert tuple(fields) == info._fields


@pytest.mark.parametrize("changed", ["one.cu", "common.cuh"])
def test_the_name_changes_with_every_source(tmp_path, monkeypatch, changed):
    for name in ("one.cu", "common.cuh"):
        (tmp_path / name).write_text("#define VALUE 1\n")
    monkeypatch.setattr(sources, "source_folder", lambda: tmp_path)

    def name_of() -> str:
        sources._digest.cache_clear()
        return sources.cubin_name("one", "sm_90")

    before = name_of()
    assert re.fullmatch(r"one-[0-9a-f]{16}\.sm_90\.cubin", before)
    assert name_of() == before
    (tmp_path / changed).write_text("#define VALUE 2\n")
    assert name_of() != before
    sources._digest.cache_clear()


def test_where_they_are(tmp_path, monkeypatch):
    assert "lengths" in sources.source_names()
    assert (sources.source_folder() / "lengths.cu").is_file()
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "trt_kvcache")
    with pytest.raises(
        CudaError, match=r"^the CUDA sources of trt_kvcache are missing: expected .*_plugins\. Install the package again\.$"
    ):
        sources.source_folder.__wrapped__()
    for folder in ("trt_kvcache/_plugins", "plugins"):  # an installed package has its own
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lengths.cu").touch()
    assert sources.source_folder.__wrapped__() == tmp_path / "trt_kvcache" / "_plugins"


@pytest.mark.parametrize(
    ("units", "runs", "expected"), [(0, 1, 1), (1, 1, 1), (1024, 4, 1), (1025, 4, 2), (2**40, 3, 33), (2**40, 2**20, 1)]
)
def test_blocks_of_a_launch(units, runs, expected):
    assert blocks_for(units, runs, most=100) == expected
