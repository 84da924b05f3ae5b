"""Whether Ray is there: without it these tests are left out, visibly; with ``TRT_KVCACHE_REQUIRE_RAY=1`` that is a failure."""

import importlib.util
import os
import warnings

import pytest

from tests.server.needs_libraries import need_libraries


def need_ray() -> None:
    """Leave out the tests of a module that imports Ray."""
    need_libraries("httpx")
    if importlib.util.find_spec("ray") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray uses what pydantic is about to remove
            importlib.import_module("ray.serve")
        return
    if os.environ.get("TRT_KVCACHE_REQUIRE_RAY") == "1":
        pytest.fail("ray is not installed", pytrace=False)
    pytest.skip("ray is not installed: `make test-ray` installs it", allow_module_level=True)
