"""Whether torch is there: without it these tests are left out, visibly; with ``TRT_KVCACHE_REQUIRE_TORCH=1`` that is a failure."""

import importlib.util
import os

import pytest


def need_torch() -> None:
    """Leave out the tests of a module that imports torch."""
    if importlib.util.find_spec("torch") is not None:
        return
    if os.environ.get("TRT_KVCACHE_REQUIRE_TORCH") == "1":
        pytest.fail("torch is not installed", pytrace=False)
    pytest.skip("torch is not installed: `make test-torch` installs it", allow_module_level=True)
