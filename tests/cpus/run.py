"""Run tests of floating-point sums as on CPUs that this one is not: ``python tests/cpus/run.py``. Arguments go to pytest.

OpenBLAS picks its kernels by the CPU, and each adds in an order of its own. Here every product of float32 adds in a shuffled order, which
stands for all of them. ``SUM_ORDER`` in the environment is the number of the order, 1 if left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]

#: Prints the bits of products of float32, a line for each kind: matrices, a matrix and a vector, vectors; operands plain and transposed.
PRODUCTS = """
import numpy as np
a, b, x = (np.random.default_rng(7).normal(size=size).astype(np.float32) for size in ((20, 300), (300, 20), 300))
kinds = {
    "matrices": [(left, right) for left in (a, b.T) for right in (b, a.T)],
    "a matrix and a vector": [(a, x), (b.T, x), (x, b), (x, a.T)],
    "vectors": [(row, column) for row in a for column in (x, b[:, 0])],
}
for kind, pairs in kinds.items():
    found = [np.asarray(left @ right) for left, right in pairs]
    for result, (left, right) in zip(found, pairs, strict=True):
        left, right = left.astype(np.float64), right.astype(np.float64)
        assert result.dtype == np.float32 and (np.abs(result - left @ right) < 1e-5 * (np.abs(left) @ np.abs(right))).all(), kind
    print(kind, *(result.tobytes().hex() for result in found), sep=": ")
"""


def openblas() -> Path:
    """Return the OpenBLAS in NumPy's wheel."""
    libraries = sorted(Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas64_*"))
    if not libraries:
        sys.exit(f"OpenBLAS: expected libscipy_openblas64_* beside NumPy, got none; hint: install NumPy {np.__version__} from its wheel")
    return libraries[0]


def shuffled_sums() -> dict[str, str]:
    """Compile the library that shuffles sums, and return the environment in which it is loaded."""
    library = REPOSITORY / "build" / "cpus" / "shuffled_sums.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("shuffled_sums.c")
    subprocess.run(["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SUM_ORDER_BLAS": str(openblas()), "SUM_ORDER": os.environ.get("SUM_ORDER", "1")}


def products(environment: dict[str, str]) -> list[str]:
    """Return a line for each kind of product, with its bits in that environment; each has been held against float64."""
    command = [sys.executable, "-c", PRODUCTS]
    return subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    """Return the exit status of pytest, once the sums have been seen to differ from those of this CPU."""
    shuffled = shuffled_sums()
    for one, other in zip(products({}), products(shuffled), strict=True):
        if one == other:
            sys.exit(f"products of {one.split(':')[0]}: expected other bits with {shuffled['LD_PRELOAD']}, got the same")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], env={**os.environ, **shuffled}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
