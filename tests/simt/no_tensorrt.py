"""A pytest plugin: TensorRT cannot be imported. It must never meet the stand-in driver."""

import sys

for name in ("tensorrt", "tensorrt_rtx"):
    sys.modules[name] = None  # type: ignore[assignment]
