"""Folders to open, break and open again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import GOLDEN


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a golden folder to where a test may change it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy
