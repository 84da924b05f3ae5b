"""Where the CUDA sources are, that they say what Python says, and the name of a compiled one."""

import re

import pytest

from trt_kvcache.kernels import MAX_SAVED_TENSORS, MAX_STORED_VALUES, sources
from trt_kvcache.kernels.compaction_moves import REGISTER
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, VECTORS_IN_FLIGHT
from trt_kvcache.kernels.launch_limits import MOVE_CAPACITIES

TEXT = "".join(path.read_text() for path in sorted(sources.source_folder().rglob("*.cu*")))


def test_numbers_of_both_sides():
    for name, value in (("kThreads", THREADS_PER_BLOCK), ("kInFlight", VECTORS_IN_FLIGHT), ("kRegister", REGISTER)):
        (number,) = re.findall(rf"constexpr int {name} = (\w+);", TEXT)
        assert int(number, 0) == value


def test_arguments_of_kernels_of_both_sides():
    """How many values each kernel takes beside others; the kernels of a compaction exist in several sizes."""
    kernels = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(kThreads\) )?(\w+)\(([^{]*)\)', TEXT)
    lists = {name: int(re.findall(r"LIST_(\d+)", rest)[0]) for name, rest in kernels if "LIST_" in rest}
    moves = {f"compact_{what}_{capacity}": capacity for what in ("layers", "rows", "lengths") for capacity in MOVE_CAPACITIES}
    saved = dict.fromkeys(("save_layers", "instantiate_layers", "save_rows", "instantiate_rows"), MAX_SAVED_TENSORS)
    assert lists == {**moves, **saved, "store_values": MAX_STORED_VALUES}


@pytest.mark.parametrize("changed", ["one.cu", "common.cuh"])
def test_the_name_changes_with_every_source(tmp_path, monkeypatch, changed):
    monkeypatch.setattr(sources, "source_folder", lambda: tmp_path)
    names = []
    for name in ("one.cu", "common.cuh", changed):
        (tmp_path / name).write_text(f"#define VALUE {len(names)}\n")
        sources._digest.cache_clear()
        names.append(sources.cubin_name("one", "sm_90"))
    assert re.fullmatch(r"one-[0-9a-f]{16}\.sm_90\.cubin", names[0])
    assert len(set(names)) == 3
    sources._digest.cache_clear()
