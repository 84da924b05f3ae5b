"""The child process of a check: ``python -m trt_kvcache.doctor.child MODULE LOG``, with a JSON object on stdin."""

import faulthandler
import importlib
import json
import sys
import warnings
from pathlib import Path

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.settings import Settings


def main() -> int:
    """Run one check."""
    faulthandler.enable()
    module, path = sys.argv[1:]
    given = json.load(sys.stdin)
    settings, log = Settings(**given["settings"]), CaseLog(Path(path), skip=given["skip"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module(module).check(settings, log)
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is not DeprecationWarning):
        log.note("warning", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
