"""README, CONTRIBUTING and the pages of docs: what they show runs as it stands, in a folder that looks like a checkout."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(language, pages):
    """Return every fenced block of a language as a parameter that is named after its page."""
    found = []
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        for number, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE), 1):
            found.append(pytest.param(block, id=f"{name}-{number}"))
    return found


def commands(block):
    return [line for line in block.splitlines() if line]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(arguments, folder):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
    }
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_readme_shows_what_people_do_first():
    assert len(blocks("python", [README])) == 3
    (block,) = blocks("bash", [README])
    assert [shlex.split(command)[1] for command in commands(block.values[0])] == ["build", "generate", "serve-file"]


@pytest.mark.parametrize("block", blocks("python", PAGES))
def test_a_python_block_runs_and_prints_something(block, checkout):
    done = run([sys.executable, "-c", block], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def run_commands(block, checkout):
    for command in commands(block):
        done = run(shlex.split(command), checkout)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert (done.stdout + done.stderr).strip(), command


@pytest.mark.trt
@pytest.mark.parametrize("block", blocks("bash", [README]))
def test_the_commands_of_the_readme_run(block, checkout):
    run_commands(block, checkout)


@pytest.mark.parametrize("block", blocks("bash", [page for page in PAGES if page != README]))
def test_the_commands_of_a_page_run_without_tensorrt(block, checkout):
    run_commands(block, checkout)


def test_the_first_screen_ends_with_the_demo():
    lines = text_of(README).splitlines()
    assert lines.index("    make demo") < 60
    assert lines.index("**Status**:") < 15


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", text_of(page))) <= targets, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page):
    folders = "docs|plugins|engines|benchmarks|examples|tests|trt_kvcache"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+|[A-Z]+\.md)`", text_of(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_links_to_exists(page):
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target
