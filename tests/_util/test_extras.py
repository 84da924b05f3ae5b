"""Which extra a missing library belongs to."""

from __future__ import annotations

import numpy
import pytest

from trt_kvcache._util.extras import installed_versions, missing_library, naming_the_extra


@pytest.mark.parametrize(("module", "extra"), [("rich.text", "models"), ("polygraphy", "polygraphy"), ("cuda.core", "cuda")])
def test_the_extra_is_named(module: str, extra: str) -> None:
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert missing_library(error) == f"{module} is not installed. Run: pip install 'trt-kvcache[{extra}]'"
    with pytest.raises(ModuleNotFoundError, match=rf"trt-kvcache\[{extra}\]") as raised, naming_the_extra():
        raise error
    assert raised.value.name == module


def test_a_library_of_nobody_keeps_its_error() -> None:
    error = ModuleNotFoundError("No module named 'other'", name="other")
    assert missing_library(error) is None
    with pytest.raises(ModuleNotFoundError) as raised, naming_the_extra():
        raise error
    assert raised.value is error


def test_versions_of_installed_distributions_only() -> None:
    assert installed_versions(["numpy", "no-such-distribution"]) == {"numpy": numpy.__version__}
