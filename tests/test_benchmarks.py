"""The benchmarks that need neither TensorRT nor a GPU still run, and write what they measured, on what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, out: Path, *options: str) -> dict:
    """Run a benchmark. Its limits are for a quiet machine, so 1 (a limit is exceeded) is accepted here."""
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr
    result = json.loads(out.read_text())
    assert {"cpu", "python", "versions", "commit", "command", "date"} <= set(result)
    return result


def test_host_step(tmp_path):
    result = run("host_step.py", tmp_path / "results" / "host_step.json", "--steps", "20")
    assert set(result["layers"]) == {"16", "32", "64"}
    assert all(0 < layers["median_us"] <= layers["p90_us"] for layers in result["layers"].values())
    assert result["ratio_64_to_16"] == result["layers"]["64"]["median_us"] / result["layers"]["16"]["median_us"]
    assert (result["batch_size"], result["steps"]) == (8, 20)


def test_import_time(tmp_path):
    result = run("import_time.py", tmp_path / "import_time.json", "--runs", "1")
    assert set(result["results"]) == {
        "trt_kvcache",
        "trt_kvcache.manager",
        "from trt_kvcache import InferenceSession",
        "numpy, ml_dtypes",
    }
    assert 0 < result["results"]["trt_kvcache"]["best_s"] < 60


def test_the_table_is_that_of_the_files() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / "tables.py"), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, "run: python benchmarks/tables.py"
