import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def copy_of(tmp_path):
    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy
