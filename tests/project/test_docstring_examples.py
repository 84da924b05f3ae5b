"""The examples in docstrings run, and print what they say."""

import doctest

import pytest

from tests.paths import ROOT
from tests.project.optional_modules import imported

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "trt_kvcache").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = doctest.testmod(imported(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(
    "module", ["cache.config", "cache.estimate", "cache.edge_llm", "cache.lengths", "memory.host_memory", "memory.tensor"]
)
def test_what_users_start_with_has_an_example(module):
    assert f"trt_kvcache.{module}" in MODULES
