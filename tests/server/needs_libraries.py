"""Whether the libraries of the extra ``serve`` are there: without them tests are left out, visibly, or fail where they are required."""

import importlib.util
import os

import pytest

LIBRARIES = ("fastapi", "llguidance", "prometheus_client", "pydantic", "uvicorn")


def need_libraries(*more: str) -> None:
    """Leave out the tests of a module that serves, which may need ``more``; with ``TRT_KVCACHE_REQUIRE_SERVE=1`` that is a failure."""
    missing = [name for name in (*LIBRARIES, *more) if importlib.util.find_spec(name) is None]
    if not missing:
        return
    if os.environ.get("TRT_KVCACHE_REQUIRE_SERVE") == "1":
        pytest.fail(f"{', '.join(missing)} is not installed", pytrace=False)
    pytest.skip(f"{', '.join(missing)} is not installed: `make test-serve` installs it", allow_module_level=True)
