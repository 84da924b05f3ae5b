"""Run the tests of this folder over the real bindings of full TensorRT: those of the oldest and the newest release.

``python tests/bindings/run.py [--all-releases] [pytest arguments]``. A process for each release, since a process can import one
``tensorrt``. Needs gcc and the package index the first time; ``build/bindings`` keeps what is made. ``TRT_KVCACHE_BINDINGS=11.4.0.106``
limits the run to one release.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bindings.packages import NoWheel, Unavailable, prepare
from tests.bindings.versions import VERSIONS
from tests.paths import ROOT


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 if the tests of every release have passed."""
    failed, ran = [], 0
    every = arguments[:1] == ["--all-releases"]
    arguments = arguments[every:]
    only = os.environ.get("TRT_KVCACHE_BINDINGS")
    for version in (only,) if only else VERSIONS if every else (VERSIONS[0], VERSIONS[-1]):
        try:
            prepare(version)
        except NoWheel as error:
            print(f"tensorrt {version}: left out, {error}", file=sys.stderr)
            continue
        except Unavailable as error:
            print(f"tensorrt {version}: {error}", file=sys.stderr)
            return 1
        print(f"tensorrt {version}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-r", "fE", str(Path(__file__).parent), *arguments]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "TRT_KVCACHE_BINDINGS": version}, check=False).returncode:
            failed.append(version)
        ran += 1
    if failed:
        print(f"failed with tensorrt {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or not ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
