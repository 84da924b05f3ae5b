"""A pytest plugin: a kernel that is not in the folder of compiled ones is built for the emulator when a test first launches it.

``SIMT_SANITIZER`` is a sanitizer of :data:`tests.simt.run.SANITIZERS`. If ``SIMT_CHANGED`` names a file, that is not as in plugins/:
it is in the folder ``SIMT_SOURCES``, which has copies of all others.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simt.run import ARCH, build_cubins, build_kernels
from trt_kvcache.kernels import compile as compiler
from trt_kvcache.kernels.source_variants import variant_macros
from trt_kvcache.kernels.sources import cubin_name, source_folder, source_path

_compile_for_gpu, _cached_code = compiler.compile_cubin, compiler.cached_code


def _compile(name: str, arch: str) -> bytes:
    if arch != ARCH:
        return _compile_for_gpu(name, arch)
    source, sanitizer = source_path(name).relative_to(source_folder()), os.environ["SIMT_SANITIZER"]
    changed, sources = os.environ.get("SIMT_CHANGED"), Path(os.environ.get("SIMT_SOURCES", source_folder()))
    if changed is None or not _includes(sources, source, changed):
        return (build_cubins(sanitizer, (), [name]) / cubin_name(name, arch)).read_bytes()
    with TemporaryDirectory() as folder:
        target = Path(folder) / name
        build_kernels(sources / source, target, sanitizer, macros=variant_macros(name, arch), include=sources)
        return target.read_bytes()


def _cached(kind: str, file_name: str, compile_code: Callable[[], bytes]) -> bytes:
    """Keep nothing for the emulator in the user's cache folder: names there do not tell one sanitizer from another."""
    return compile_code() if file_name.endswith(f".{ARCH}.cubin") else _cached_code(kind, file_name, compile_code)


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


compiler.compile_cubin, compiler.cached_code = _compile, _cached
