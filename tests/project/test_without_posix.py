"""Commands run with what Python has on Windows: see ``without_posix/sitecustomize.py``. Windows itself is untried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.paths import ROOT, SHIPPED

HERE = Path(__file__).parent / "without_posix"
NUMPY = ("--engine", "numpy", "--max-sequence-length", "64")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "caches"), "PYTHONWARNINGS": "ignore"}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "trt_kvcache", *map(str, words)]


def run(environment: dict[str, str], *words: object, text: str = "") -> str:
    done = subprocess.run(command(*words), env=environment, input=text, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


HIDDEN = [
    "import fcntl",
    "import resource",
    "import pwd",
    "import os; os.fork()",
    "import os; os.symlink('a', 'b')",
    "import signal; signal.SIGKILL",
    "import signal; signal.SIGHUP",
    "import signal; signal.pthread_sigmask",
]
RUN_EACH = f"""
for statement in {HIDDEN}:
    try:
        exec(statement)
    except (ImportError, AttributeError):
        print(statement)
"""


def test_posix_is_hidden(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", RUN_EACH], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == HIDDEN


def test_generate(environment: dict[str, str]) -> None:
    assert run(environment, "generate", SHIPPED, *NUMPY, "--prompt", "Alice was", "--max-new-tokens", 3)


def test_chat(environment: dict[str, str]) -> None:
    assert run(environment, "chat", ROOT / "examples" / "tiny-chat", "--engine", "numpy", "--max-new-tokens", 3, text="Hello\n")


def test_bench(environment: dict[str, str]) -> None:
    found = run(environment, "bench", SHIPPED, *NUMPY, "--json", "-p", 8, "-n", 2, "-r", 1, "--warmup", 0)
    assert json.loads(found)


@pytest.mark.trt
def test_build_and_generate_from_the_engine_folder(environment: dict[str, str], tmp_path: Path) -> None:
    for _ in range(2):  # the second build replaces the folder of the first
        assert "tensorrt_rtx" in run(environment, "build", SHIPPED, "-o", tmp_path / "engine", "--flavour", "tensorrt_rtx")
    assert run(environment, "generate", tmp_path / "engine", "--engine", "numpy", "--prompt", "Alice was", "--max-new-tokens", 3)


def test_serve(environment: dict[str, str]) -> None:
    pytest.importorskip("fastapi")
    words = command("serve", ROOT / "examples" / "tiny-chat", "--engine", "numpy", "--port", 0)
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            address = next(word.rstrip("/.,;:") for line in lines for word in line.split() if word.startswith("http://"))
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
            request = urllib.request.Request(
                f"{address.removesuffix('/v1')}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"] is not None
        finally:
            server.terminate()
            _, rest = server.communicate(timeout=60)
    assert server.returncode == 0, rest
