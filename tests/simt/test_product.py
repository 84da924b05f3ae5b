"""The package's kernels, launched by the package, under the sanitizers; and mistakes planted into them, which must be caught."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from simt import run
from simt.standin import need_compiler
from trt_kvcache.kernels.sources import cubin_name, source_folder, source_names

need_compiler()


def run_tests(cubins: Path, sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests of tests/kernels on the emulated device with these kernels."""
    command = [*run.pytest_command(sanitizer), "-q", "-x", "-p", "no:cacheprovider", "-m", "device and not slow", *arguments]
    return subprocess.run(command, env=run.environment(cubins, sanitizer), cwd=run.REPOSITORY, capture_output=True, text=True)


# Many layers take ThreadSanitizer many seconds and show it nothing new.
@pytest.mark.parametrize(
    ("sanitizer", "left_out"), [("address", ""), ("thread", "more_layers"), pytest.param("thread", "", marks=pytest.mark.slow)]
)
def test_nothing_is_found(sanitizer, left_out):
    result = run_tests(run.build_cubins(sanitizer), sanitizer, "tests/kernels", *(["-k", f"not {left_out}"] if left_out else []))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    passed = re.search(r"^(\d+) passed", result.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 400


RACE, OVERRUN, BYTES, MISALIGNED = "WARNING: ThreadSanitizer: data race", "heap-buffer-overflow", "bytes differ", "misaligned address"
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
    "the first layer's heads": ("kv.cu", "head(layers)", "head(layers - blockIdx.z)", "none", "test_kv_moves.py", BYTES),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistake(tmp_path, mistake):
    file, right, wrong, sanitizer, tests, said = MISTAKES[mistake]
    for source in source_folder().glob("*.cu*"):
        text = source.read_text()
        assert (right in text) or source.name != file
        (tmp_path / source.name).write_text(text.replace(right, wrong) if source.name == file else text)
    cubins = tmp_path / "cubins"
    cubins.mkdir()
    for name in (cubin_name(source, run.ARCH) for source in source_names()):
        if name.partition("-")[0] == Path(file).stem or file.endswith(".cuh"):
            run.build_kernels(tmp_path / f"{name.partition('-')[0]}.cu", cubins / name, sanitizer)
        else:
            (cubins / name).symlink_to(run.build_cubins(sanitizer) / name)
    result = run_tests(cubins, sanitizer, f"tests/kernels/{tests}")
    assert said in result.stdout + result.stderr
    assert result.returncode != 0
