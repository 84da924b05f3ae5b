"""A pytest plugin: kernels are built for the emulator when a test first launches them, with one source changed.

``SIMT_SOURCES`` is the folder of the sources, ``SIMT_CHANGED`` the file in it that is not as in plugins/, ``SIMT_SANITIZER`` a sanitizer of
:data:`tests.simt.run.SANITIZERS`. A header of packed products is in 80 kernels, and the first test that fails has launched one or two.
"""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simt.run import build_cubins, build_kernels
from trt_kvcache.kernels import compile as compiler
from trt_kvcache.kernels.source_variants import variant_macros
from trt_kvcache.kernels.sources import cubin_name, source_folder, source_path


def _build(name: str, arch: str) -> bytes:
    sources, sanitizer = Path(os.environ["SIMT_SOURCES"]), os.environ["SIMT_SANITIZER"]
    source = source_path(name).relative_to(source_folder())
    if not _includes(sources, source, os.environ["SIMT_CHANGED"]):
        return (build_cubins(sanitizer, (), [name]) / cubin_name(name, arch)).read_bytes()  # built once for all changes
    with TemporaryDirectory() as folder:
        target = Path(folder) / name
        build_kernels(sources / source, target, sanitizer, macros=variant_macros(name, arch), include=sources)
        return target.read_bytes()


def _includes(folder: Path, source: Path, header: str) -> bool:
    """Whether a source is this file, or includes it through any others."""
    found, left = set(), [source.as_posix()]
    while left:
        name = left.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            text = (folder / name).read_text()
            left += [str(Path(name).parent / other) for other in re.findall(r'#include "(.+)"', text)]
            left += re.findall(r'#include "(.+)"', text)
    return header in found


compiler.compile_cubin = _build
