"""The package's kernels, launched by the package, under the sanitizers; and mistakes planted into them, which must be caught."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.attention import DECODE_CASES, GRID, PREFILL_CASES
from tests.simt import run
from tests.simt.standin import need_compiler
from trt_kvcache.kernels.attention_tiles import attention_names, macros_of
from trt_kvcache.kernels.sources import cubin_name, source_folder, source_names, source_path

need_compiler()
run.use_tiles()

ATTENTION = "test_attention"


def run_tests(cubins: Path, sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests of tests/kernels on the emulated device with these kernels."""
    command = [*run.pytest_command(sanitizer), "-q", "-x", "-p", "no:cacheprovider", "-m", "device and not slow", *arguments]
    return subprocess.run(command, env=run.environment(cubins, sanitizer), cwd=run.REPOSITORY, capture_output=True, text=True)


def count_passed(result: subprocess.CompletedProcess[str]) -> int:
    """Return how many tests passed; all must."""
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    passed = re.search(r"^(\d+) passed", result.stdout, re.MULTILINE)
    assert passed is not None
    return int(passed[1])


# Many layers take ThreadSanitizer many seconds and show it nothing new.
@pytest.mark.parametrize(
    ("sanitizer", "left_out"),
    [("address", ATTENTION), ("thread", f"{ATTENTION} or more_layers"), pytest.param("thread", ATTENTION, marks=pytest.mark.slow)],
)
def test_nothing_is_found(sanitizer, left_out):
    assert count_passed(run_tests(run.build_cubins(sanitizer, ()), sanitizer, "tests/kernels", "-k", f"not ({left_out})")) > 400


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "cases"), [("test_decode", DECODE_CASES), ("test_prefill", PREFILL_CASES)])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_found_in_attention(sanitizer, tests, cases):
    passed = count_passed(run_tests(run.build_cubins(sanitizer), sanitizer, f"tests/kernels/{ATTENTION}.py", "-k", tests))
    assert passed == len(cases) * (1 + (cases is PREFILL_CASES))  # in both forms


@pytest.mark.slow
def test_grid_of_attention():
    forms = [name.partition("-")[2] for name in attention_names("attention_decode")]
    result = run_tests(run.build_cubins("none", forms), "none", f"tests/kernels/{ATTENTION}.py", "-m", "device", "-k", "test_grid")
    assert count_passed(result) == len(GRID)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_tiles_of_smaller_gpus(arch):
    command = [sys.executable, str(run.HERE / "run.py"), "-q", "-p", "no:cacheprovider", "-m", "device and not slow"]
    command += [f"tests/kernels/{ATTENTION}.py", "-k", "test_decode or test_prefill"]
    result = subprocess.run(command, env={**os.environ, "SIMT_TILES": arch}, cwd=run.REPOSITORY, capture_output=True, text=True)
    assert count_passed(result) == len(DECODE_CASES) + 2 * len(PREFILL_CASES)  # in both forms


RACE, OVERRUN, BYTES, MISALIGNED = "WARNING: ThreadSanitizer: data race", "heap-buffer-overflow", "bytes differ", "misaligned address"
DECODE, PREFILL = (f"{ATTENTION}.py::{test}" for test in ("test_decode", "test_prefill"))
DECODING, PREFILLING, TOGETHER = (f"attention/{name}" for name in ("decode.cu", "prefill.cu", "split_kv_reduce.cuh"))
ADDING = "\n#pragma unroll 1\n            for (int x = threadIdx.x; x < (to"
COMPACT, UNIT, ONE_MORE = "test_compaction.py", "(sizeof(Unit)), apart", "(sizeof(Unit)) + 1, apart"

#: File, what is replaced by what (each time that it is there), sanitizer, tests, and what is said.
MISTAKES = {
    "steps are read before they are there": ("compaction.cuh", "__syncthreads();", "", "thread", f"{COMPACT}::test_every_byte", RACE),
    "blocks share columns": (
        "units.cuh",
        "static_cast<long long>(blockIdx.x) * kInFlight * blockDim.x + threadIdx.x",
        "threadIdx.x",
        "thread",
        f"{COMPACT}::test_long_slots_in_several_blocks",
        RACE,
    ),
    "lengths are written while others read": ("lengths.cu", "    __syncthreads();\n    if", "    if", "thread", COMPACT, RACE),
    "lengths by a mapping are too": ("lengths.cu", "        __syncthreads();\n", "", "thread", f"{COMPACT}::test_every_byte", RACE),
    "one unit too many": ("units.cuh", UNIT, ONE_MORE, "address", "test_cuda.py", OVERRUN),
    "one unit too many, inside": ("units.cuh", UNIT, ONE_MORE, "none", "test_kv_moves.py", BYTES),
    "an address that is not looked at": ("rows.cu", "address(data) | ", "", "address", "test_rows.py", MISALIGNED),
    "only one side is looked at": ("rows.cu", "| of.grain()", "", "address", "test_rows.py", MISALIGNED),
    "nor where it is saved": ("rows.cu", "| saved,", ",", "address", "test_rows.py", MISALIGNED),
    "columns of short slots only": ("compaction.cuh", "extent(steps.longest)", "extent(1)", "none", COMPACT, BYTES),
    "a register for all columns": ("compaction.cuh", "held[i] = units[i]", "held[0] = units[i]", "none", COMPACT, BYTES),
    "stale tokens move too": ("compaction.cuh", "extent(step.tokens), units", "end, units", "none", COMPACT, BYTES),
    "one layout's stride": ("kv.cu", "slot * layer.slot_stride", "slot * 2 * layer.kv_stride", "none", "test_kv_moves.py", BYTES),
    "fresh rows that the others are not waited for": (
        DECODING,
        "            __syncthreads();\n            const SharedAddress rows",
        "            const SharedAddress rows",
        "thread",
        DECODE,
        RACE,
    ),
    "rows that do not live": (DECODING, "place.position - place.token(warp)", "kTokens", "none", DECODE, "isnan"),
    "one window too wide": (PREFILLING, "behind >= span", "behind > span", "none", PREFILL, "error <="),
    "keys of nobody": (
        PREFILLING,
        "const bool lives = tile * kKeys + row < keys_end;",
        "const bool lives = true;",
        "none",
        PREFILL,
        "isnan",
    ),
    "a part that is forgotten": (TOGETHER, "pieces, others, factor", "pieces, others - 1, factor", "none", DECODE, "assert"),
    "units that there is no room for": (TOGETHER, "from = to)", "from = end)", "none", DECODE, "assert"),
    "a block that waits for itself": (TOGETHER, "(other >= number)", "0", "none", DECODE, "waits for"),
    "all put the same together": (TOGETHER, "? number * share : 0", "? 0 : 0", "none", DECODE, "waits for"),
    "a workspace that is not left as it was": (TOGETHER, "take_back(places[i]);", "", "none", DECODE, "assert"),
    "parts that are yet to come": (TOGETHER, f"__syncthreads();{ADDING}", ADDING, "thread", DECODE, RACE),
    "copies that are not waited for": (
        DECODING,
        "wait_for_copies<3 * kStages - 5>",
        "wait_for_copies<3 * kStages>",
        "none",
        DECODE,
        "isnan",
    ),
    "a new token that is forgotten": (DECODING, "if (warp == kWarps - 1 &&", "if (false &&", "none", DECODE, "assert"),
    "keys that were guessed wrong": (DECODING, "== 0 && part.even;", "== 0;", "none", DECODE, "assert"),
    "keys behind the cache": (DECODING, "lives ? call.max_tokens - (tile + warp) * kTokens", "lives ? kTokens", "address", DECODE, OVERRUN),
    "tiles of nobody": (DECODING, "max(number - (parts - more), 0)", "0", "none", DECODE, "assert"),
    "a slot that is full": (DECODING, "length < call.max_tokens", "length <= call.max_tokens", "none", DECODE, "assert"),
    "a tile that is still read": (
        PREFILLING,
        "__syncthreads();\n        if (tile + kStages - 1",
        "if (tile + kStages - 1",
        "thread",
        PREFILL,
        RACE,
    ),
    "sums of an older maximum": (PREFILLING, "sums[m][i] *= less;", "", "none", PREFILL, "error <="),
    "the first layer's heads": ("kv.cu", "head(layers)", "head(layers - blockIdx.z)", "address", "test_kv_moves.py", OVERRUN),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistake(tmp_path, mistake):
    file, right, wrong, sanitizer, tests, said = MISTAKES[mistake]
    sources = tmp_path / "plugins"
    shutil.copytree(source_folder(), sources)
    text = (sources / file).read_text()
    assert right in text
    (sources / file).write_text(text.replace(right, wrong))
    cubins = tmp_path / "cubins"
    cubins.mkdir()
    forms = run.FORMS if file.startswith("attention") else ()
    for name in (name for name in source_names() if run.is_chosen(name, forms)):
        source, cubin = source_path(name).relative_to(source_folder()), cubin_name(name, run.ARCH)
        if source == Path(file) or file.endswith(".cuh"):
            run.build_kernels(sources / source, cubins / cubin, sanitizer, macros=macros_of(name, run.ARCH), include=sources)
        else:
            (cubins / cubin).symlink_to(run.build_cubins(sanitizer, forms) / cubin)
    result = run_tests(cubins, sanitizer, f"tests/kernels/{tests}")
    assert said in result.stdout + result.stderr
    assert result.returncode != 0
