"""``python -m trt_kvcache``: the ``trt-kvcache`` command."""

import sys

from trt_kvcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
