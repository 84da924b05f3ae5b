"""Run tests of floating-point sums as on CPUs that this one is not: ``python tests/cpus.py``. Arguments go to pytest.

OpenBLAS picks its kernels by the CPU, and each adds in an order of its own. Those that it picks here are left out: ``make test`` has
run them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

#: Kernels of a CPU without AVX-512, and of one without AVX2; and the names of the CPUs that have the same ones.
CORES = {"Haswell": ("Haswell", "Zen"), "Nehalem": ("Nehalem",)}


def own_core() -> str | None:
    """Return whose kernels the OpenBLAS in NumPy's wheel has picked here; None where there is no such library."""
    for folder in (Path(np.__file__).parent.with_name("numpy.libs"), Path(np.__file__).parent / ".dylibs"):
        for path in folder.glob("libscipy_openblas64_*"):
            name = ctypes.CDLL(str(path)).scipy_openblas_get_corename64_
            name.restype = ctypes.c_char_p
            return str(name().decode())
    return None


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 if the tests have passed with the kernels of each other CPU."""
    own, failed = own_core(), False
    for core, same in CORES.items():
        if own in same:
            print(f"as on {core}: left out, that is what this machine is ({own})", flush=True)
            continue
        print(f"as on {core}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        failed |= bool(subprocess.run(command, env={**os.environ, "OPENBLAS_CORETYPE": core}, check=False).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
