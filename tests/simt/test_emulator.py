"""The emulator: kernels that are right give the right values under every sanitizer, and each planted mistake is caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.simt import run
from tests.simt.standin import need_compiler

need_compiler()

PLANTED = Path(__file__).with_name("planted")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The planted kernels as a program for each sanitizer."""
    programs = {sanitizer: tmp_path_factory.mktemp("planted") / sanitizer for sanitizer in run.SANITIZERS}
    for sanitizer, program in programs.items():
        run.build_kernels(PLANTED / "kernels.cu", program, sanitizer, main=PLANTED / "main.h")
    return programs


def call(program: Path, kernel: str, blocks: int, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in run.SANITIZERS[program.name][2].items() if name.endswith("SAN_OPTIONS")}
    return subprocess.run([program, kernel, str(blocks), *more], capture_output=True, text=True, env=environment)


def warp_values() -> list[float]:
    values = []
    for thread in range(64):
        lane = thread % 32
        left, right = lane - (lane % 8 > 0), lane + 2 * (lane < 30)
        third = 2 * (3 + lane // 4 * 4) if lane < 8 else 0
        values.append(496 + 1000 * (left + right) + 1e6 * third + 1 + 1 + 7)
    return values


#: Kernel, what it writes, and in how many blocks. %g prints six digits.
RIGHT: dict[str, tuple[list[float], int]] = {
    "barrier": ([float((96 - thread) % 64) for thread in range(64)] * 5, 5),
    "barriers_of_warps": ([float(thread ^ 31) for thread in range(64)], 1),
    "warp": (warp_values(), 1),
    "warp_memory": ([float(thread ^ 1) for thread in range(64)], 1),
    "copies": ([float(thread + 1) for thread in range(64)], 1),
    "next_block": ([1, 1, 2], 3),
    "counter": ([9 * 64 * 2.0**-149], 9),  # an atomic int, read as a float
}


@pytest.mark.parametrize("sanitizer", list(run.SANITIZERS))
@pytest.mark.parametrize("kernel", list(RIGHT))
def test_right(programs, kernel, sanitizer):
    expected, blocks = RIGHT[kernel]
    result = call(programs[sanitizer], kernel, blocks, *["together"] * (kernel == "next_block"))
    assert result.returncode == 0, result.stderr
    assert [float(word) for word in result.stdout.split()][: len(expected)] == pytest.approx(expected, rel=1e-6)


RACE, OVERRUN = "WARNING: ThreadSanitizer: data race", "ERROR: AddressSanitizer: heap-buffer-overflow"

#: Mistake, blocks, what the program says, and which one it is that says it.
MISTAKES = [
    ("missing_barrier", 1, "nan", "none"),
    ("missing_barrier", 1, RACE, "thread"),
    ("missing_second_barrier", 1, RACE, "thread"),
    ("missing_syncwarp", 1, RACE, "thread"),
    ("missing_barrier_after_copy", 1, RACE, "thread"),
    ("unordered_counter", 2, RACE, "thread"),
    ("racing_compaction", 3, RACE, "thread"),
    ("unwritten_shared", 1, "nan", "none"),
    ("unwaited_copy", 1, "a thread ended without waiting for its asynchronous copies (block 0,0,0, thread 63)", "none"),
    ("copy_waited_too_late", 1, "nan", "none"),
    ("mixed_operations", 1, "lanes of one warp meet in different operations: __shfl_xor_sync and __ballot_sync (", "none"),
    ("lane_outside_its_mask", 1, "__shfl_sync: the calling lane is not in its mask (block 0,0,0, thread 63)", "none"),
    ("next_block", 3, "a block waits for what no block that runs will write", "none"),  # the launch is not cooperative
    ("lane_that_never_comes", 1, "deadlock: of 64 threads, 32 wait at __syncthreads, 31 for lanes of their warp, and the oth", "none"),
    ("barrier_of_the_other_warp", 1, RACE, "thread"),
    ("barrier_of_two_counts", 1, "threads meet at one barrier with different counts (block 0,0,0, thread ", "none"),
    ("barrier_that_is_never_full", 1, "0 wait at __syncthreads, 32 at a barrier of some threads, 0 for lanes", "none"),
    ("overrun", 1, OVERRUN, "address"),
    ("overrun", 3, OVERRUN, "address"),
    ("overrun_of_shared", 1, OVERRUN, "address"),
    ("overrun_of_an_array", 1, OVERRUN, "address"),
    ("misaligned", 1, "store to misaligned address", "address"),
]


@pytest.mark.parametrize(("kernel", "blocks", "said", "sanitizer"), MISTAKES, ids=[f"{name}-{by}-{n}" for name, n, _, by in MISTAKES])
def test_mistake(programs, kernel, blocks, said, sanitizer):
    result = call(programs[sanitizer], kernel, blocks)
    assert said in result.stdout + result.stderr
    assert (result.returncode != 0) == (said != "nan")
