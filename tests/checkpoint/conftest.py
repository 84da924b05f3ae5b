"""Folders to open, break and open again."""

import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def copy_of(tmp_path):
    """Copy a golden folder to where a test may change it."""

    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy
