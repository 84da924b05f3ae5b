"""NVIDIA's AIPerf measures the server, where it is installed: it is large, and has an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.http.running import NAME, chat_model, serving


@pytest.mark.slow
def test_aiperf_measures_streams_of_chats(tmp_path: Path):
    command = shutil.which("aiperf")
    if command is None:
        pytest.skip("aiperf is not installed")
    folder = chat_model(tmp_path / "model")
    with serving(4, folder=folder, max_sequence_length=512) as server:
        options = {
            "--model": NAME,
            "--url": server.url,
            "--endpoint-type": "chat",
            "--tokenizer": str(folder),
            "--concurrency": "4",
            "--request-count": "12",
            "--synthetic-input-tokens-mean": "40",
            "--output-tokens-mean": "8",
            "--output-artifact-dir": str(tmp_path / "out"),
            "--ui": "none",
        }
        asked = [command, "profile", "--streaming", *(part for option in options.items() for part in option)]
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert server.stats().session.decode_tokens > 0
    [exported] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(exported.read_text())
    assert found["request_count"]["avg"] == 12
    assert found["time_to_first_token"]["avg"] > 0
