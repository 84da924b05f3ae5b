"""Imports run one way: a package imports only what stands below it."""

import ast
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "trt_kvcache"

#: From the ground up.
LAYERS = (
    "errors",
    "dtypes",
    "_util",
    "plot",
    "memory",
    "model",
    "checkpoint",
    "kernels",
    "generation",
    "cache",
    "sequences",
    "handles",
    "engine",
    "ops",
    "reference",
    "torch_engine",
    "engine_folder",
    "trt",
    "builder",
    "session",
    "server",
    "benchmarking",
    "polygraphy",
    "doctor",
    "cli",
)


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere, without ``trt_kvcache.`` in front."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "trt_kvcache" else {module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("trt_kvcache.") for name in names if name.startswith("trt_kvcache.")}


def upward_imports(package: Path) -> list[str]:
    """Return what imports something above itself, as ``file -> module``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        layer = path.relative_to(package).parts[0].removesuffix(".py")
        if layer not in LAYERS:
            continue
        for module in sorted(imported_modules(path)):
            below = module.split(".")[0]
            if below in LAYERS and LAYERS.index(below) > LAYERS.index(layer):
                found.append(f"{path.relative_to(package)} -> {module}")
    return found


def test_imports_run_one_way():
    assert upward_imports(PACKAGE) == []


def test_every_package_has_a_layer():
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__", "_version"} == set(LAYERS)


@pytest.mark.parametrize(
    "statement", ["from trt_kvcache.session.chunks import Chunk", "from trt_kvcache import cli", "import trt_kvcache.cli.app"]
)
def test_an_import_that_runs_up_is_found(tmp_path, statement):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "host.py").write_text(f"def late():\n    {statement}\n")
    assert len(upward_imports(tmp_path)) == 1
