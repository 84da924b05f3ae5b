"""Build engine folders with TensorRT for RTX and a plugin library, in one process: a library stays loaded until the process ends.

``python -m tests.plugin_library.build_folders LIBRARY FOLDER`` prints as JSON, for each build, its error, or a list of its warnings.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.helpers.models import write_model
from trt_kvcache import build_engine
from trt_kvcache.errors import KVCacheError

_OPTIONS: dict[str, Any] = {
    "max_batch_size": 3,
    "max_sequence_length": 38,
    "max_prefill_length": 11,
    "flavour": "tensorrt_rtx",
    "compute_capabilities": ["8.9"],
}


def main(library: Path, folder: Path) -> None:
    """Build, in this order: libraries that are refused, without one, with one, with that of other bytes, and without one again."""
    model = write_model(folder / "model", head_dim=64, num_hidden_layers=2)
    other = folder / "other.so"
    shutil.copy(library, other)
    with other.open("ab") as file:
        file.write(b"other")
    (folder / "text.so").write_text("no library")
    foreign = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so" in line)
    registered = library.with_stem(f"{library.stem}_registered")
    builds: dict[str, dict[str, Any]] = {
        "no library": {"plugin_library": folder / "text.so"},
        "foreign": {"plugin_library": foreign},
        "registers itself": {"plugin_library": registered},
        "before": {"attention": "plugin"},
        "registers itself, after Python": {"plugin_library": registered},
        "auto": {"plugin_library": library},
        "quantized": {"plugin_library": library, "kv_dtype": "int8"},
        "other": {"plugin_library": other},
        "after": {"attention": "plugin"},
    }
    said = {name: _build(model, folder / name, options) for name, options in builds.items()}
    print(json.dumps(said))


def _build(model: Path, target: Path, options: dict[str, Any]) -> str | list[str]:
    try:
        return [*build_engine(model, target, **{**_OPTIONS, **options}).warnings]
    except KVCacheError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
