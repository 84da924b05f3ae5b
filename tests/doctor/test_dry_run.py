"""All checks of doctor, in their child processes, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.trt
@pytest.mark.slow
def test_all_checks_pass_in_a_dry_run(tmp_path):
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "trt_kvcache.doctor", "--dry-run", "--full", "-o", str(out)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["dry_run"] is True
    assert {written["statuses"][name] for name in ("A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K")} == {"passed"}
    assert {written["statuses"][name] for name in ("native", "mask", "plugin", "segments")} == {"passed"}
    assert str(ROOT) not in out.read_text(encoding="utf-8")
    assert not list((tmp_path / "cache").rglob("*.json")), "a dry run keeps no verdict"
