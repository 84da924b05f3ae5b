"""README and docs: their Python blocks and commands run as they stand, in a folder that looks like a checkout."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(arguments, folder):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONWARNINGS": "error"}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_readme_has_blocks_to_run():
    assert len(PYTHON_BLOCKS) >= 7
    assert [shlex.split(command)[1] for command in COMMANDS] == ["build", "inspect", "generate", "serve-file", "compare", "memory"]


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: re.sub(r"\W+", "-", block.strip().splitlines()[-1])[:30])
def test_python_block_runs(block, checkout):
    done = run([sys.executable, "-c", block], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "a block shows something"


@pytest.mark.trt
def test_commands_run(checkout):
    for command in COMMANDS:
        done = run(shlex.split(command), checkout)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command


def test_the_two_set_up_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^    make (\S+)$", README, re.MULTILINE)
    assert commands == ["demo", "test"]
    for target in commands:
        assert re.search(rf"^{target}: \$\(READY\)", makefile, re.MULTILINE)


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:docs|plugins|engines|benchmarks|examples|tests|trt_kvcache)/[\w./-]+|[A-Z]+\.md)`", PAGES):
        assert (ROOT / name).exists(), name
