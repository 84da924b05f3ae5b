import shutil
from pathlib import Path

import pytest

from tests.paths import GOLDEN


@pytest.fixture
def copy_of(tmp_path):
    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy
