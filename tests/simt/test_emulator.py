"""The emulator: kernels that are right give the right values under every sanitizer, and each planted mistake is caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from simt import run
from simt.standin import need_compiler

need_compiler()

PLANTED = Path(__file__).with_name("planted")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The planted kernels as a program for each sanitizer."""
    programs = {sanitizer: tmp_path_factory.mktemp("planted") / sanitizer for sanitizer in run.SANITIZERS}
    for sanitizer, program in programs.items():
        run.build_kernels(PLANTED / "kernels.cu", program, sanitizer, main=PLANTED / "main.h")
    return programs


def call(program: Path, kernel: str, blocks: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in run.SANITIZERS[program.name][2].items() if name.endswith("SAN_OPTIONS")}
    return subprocess.run([program, kernel, str(blocks)], capture_output=True, text=True, env=environment)


def warp_values() -> list[float]:
    values = []
    for thread in range(64):
        lane = thread % 32
        left, right = lane - (lane % 8 > 0), lane + 2 * (lane < 30)
        third = 2 * (3 + lane // 4 * 4) if lane < 8 else 0
        values.append(496 + 1000 * (left + right) + 1e6 * third + 1 + 1 + 7)
    return values


RIGHT = {
    "barrier": [float((96 - thread) % 64) for thread in range(64)] * 5,
    "warp": warp_values(),
    "warp_memory": [float(thread ^ 1) for thread in range(64)],
    "copies": [float(thread + 1) for thread in range(64)],
}


@pytest.mark.parametrize("sanitizer", list(run.SANITIZERS))
@pytest.mark.parametrize("kernel", list(RIGHT))
def test_right(programs, kernel, sanitizer):
    result = call(programs[sanitizer], kernel, blocks=len(RIGHT[kernel]) // 64)
    assert result.returncode == 0, result.stderr
    assert [float(word) for word in result.stdout.split()] == pytest.approx(RIGHT[kernel], rel=1e-6)


@pytest.mark.parametrize("sanitizer", list(run.SANITIZERS))
def test_atomic_operations_of_many_blocks(programs, sanitizer):
    result = call(programs[sanitizer], "counter", blocks=9)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[0]) == pytest.approx(9 * 64 * 2.0**-149)  # as a float; %g prints six digits


#: Mistake, blocks, what the program says, and which one it is that says it.
MISTAKES = [
    ("missing_barrier", 1, "nan", "none"),
    ("missing_barrier", 1, "WARNING: ThreadSanitizer: data race", "thread"),
    ("missing_second_barrier", 1, "WARNING: ThreadSanitizer: data race", "thread"),
    ("missing_syncwarp", 1, "WARNING: ThreadSanitizer: data race", "thread"),
    ("missing_barrier_after_copy", 1, "WARNING: ThreadSanitizer: data race", "thread"),
    ("unordered_counter", 2, "WARNING: ThreadSanitizer: data race", "thread"),
    ("racing_compaction", 3, "WARNING: ThreadSanitizer: data race", "thread"),
    ("unwritten_shared", 1, "nan", "none"),
    ("unwaited_copy", 1, "a thread ended without waiting for its asynchronous copies (block 0,0,0, thread 63)", "none"),
    ("copy_waited_too_late", 1, "nan", "none"),
    ("mixed_operations", 1, "lanes of one warp meet in different operations: __shfl_xor_sync and __ballot_sync (", "none"),
    ("lane_outside_its_mask", 1, "__shfl_sync: the calling lane is not in its mask (block 0,0,0, thread 63)", "none"),
    (
        "lane_that_never_comes",
        1,
        "deadlock: of 64 threads, 32 wait at __syncthreads, 31 for lanes of their warp, and the others have ended",
        "none",
    ),
    ("overrun", 1, "ERROR: AddressSanitizer: heap-buffer-overflow", "address"),
    ("overrun", 3, "ERROR: AddressSanitizer: heap-buffer-overflow", "address"),
    ("overrun_of_shared", 1, "ERROR: AddressSanitizer: heap-buffer-overflow", "address"),
    ("overrun_of_an_array", 1, "ERROR: AddressSanitizer: heap-buffer-overflow", "address"),
    ("misaligned", 1, "store to misaligned address", "address"),
]


@pytest.mark.parametrize(("kernel", "blocks", "said", "sanitizer"), MISTAKES, ids=[f"{name}-{by}-{n}" for name, n, _, by in MISTAKES])
def test_mistake(programs, kernel, blocks, said, sanitizer):
    result = call(programs[sanitizer], kernel, blocks)
    assert said in result.stdout + result.stderr
    assert (result.returncode != 0) == (said != "nan")
