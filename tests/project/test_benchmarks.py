"""The benchmarks that need neither TensorRT nor a GPU still run, and write what they measured, on what."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

from tests.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def run(script, *options):
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def measured(script, out, *options):
    """Run a benchmark. Its limits are for a quiet machine, so 1 (a limit is exceeded) is accepted here."""
    done = run(script, "--out", str(out), *options)
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr
    result = json.loads(out.read_text())
    assert {"cpu", "python", "versions", "commit", "command", "date"} <= set(result)
    return result


def test_host_step(tmp_path):
    result = measured("host_step.py", tmp_path / "results" / "host_step.json", "--steps", "20")
    layers = result["layers"]
    assert list(layers) == ["16", "32", "64"]
    assert all(0 < one["median_us"] <= one["p90_us"] for one in layers.values())
    assert result["ratio_64_to_16"] == layers["64"]["median_us"] / layers["16"]["median_us"]
    assert (result["batch_size"], result["steps"]) == (8, 20)


def test_segments(tmp_path):
    result = measured("segments.py", tmp_path / "segments.json", "--steps", "5")
    assert 0 < result["eager_us_per_layer"] < 1000
    assert list(result["eager_us"]) == ["16", "32", "64"]
    assert (result["launches"], result["graph_us"]) == ("nothing", {})


def test_import_time(tmp_path):
    results = measured("import_time.py", tmp_path / "import_time.json", "--runs", "1")["results"]
    assert set(results) == {
        "trt_kvcache",
        "trt_kvcache.cache.kv_cache_manager",
        "from trt_kvcache import InferenceSession",
        "numpy, ml_dtypes",
    }
    assert 0 < results["trt_kvcache"]["best_s"] < 60


def test_moves(tmp_path, monkeypatch):
    result = measured("moves.py", tmp_path / "moves.json", "--quick")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = importlib.import_module("environment").of_table(result["cases"])
    assert {row["case"] for row in rows} == {"1B, B = 1, 1024 tokens"}
    assert all(row["us"] > 0 < row["of_copy"] for row in rows)
    assert len(result["left_out"]) == 29
    assert (result["host_time"]["calls"], set(result["snapshots"]["seconds"]) >= {"hash", "save", "load"}) == (200, True)


def test_the_table_of_attention(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    limits = {"of_copy": 0.85, "of_best_peer": 1.02, "group_8_of_1": 1.02, "small_us": 8.0, "of_flash": 0.9}

    def row(mb, share, us, group=4, **others):
        times = {"attention": us - 1, "rope_append_attention": us}
        shape = {"batch": 1, "past": mb, "group": group, "head_dim": 128}
        return {**shape, "kv_mb": mb, "of_copy": {"attention": 2, "rope_append_attention": share}, "us": times, "peers_us": others}

    decode = [row(64.0, 0.9, 41.0, a=50.0, b="none"), row(128.0, 1.1, 81.0, a=40.0), row(32.0, 0.1, 9.0, 8), row(8.0, 0.1, 7.0)]
    decode += [row(32.0, 0.1, 11.0, 1), row(16.0, 0.1, 9.0, 8)]
    to_table, of_table = (getattr(importlib.import_module("environment"), name) for name in ("to_table", "of_table"))
    assert of_table(json.loads(json.dumps(to_table(decode)))) == decode
    assert of_table(to_table(texts := [{"a": "x", "b": 1}, {"a": "x"}, {"a": "y", "b": 1}])) == texts
    content = {"limits": limits, "decode": to_table(decode), "prefill": to_table([row(1, 0, 11.0, FLASH_ATTENTION=9.5)])}
    attention = importlib.import_module("tables")._attention
    values = [value for _, value, _ in attention(json.loads(json.dumps(content)))]
    assert values[:2] == ["0.90 to 0.90 (1 shapes)", "1.10 to 1.10 (1 shapes)"]
    assert values[2:] == ["0.800 to 2.000 (2 shapes)", "0.800 to 0.800 (1 shapes)", "7.00 to 7.00 us (1 shapes)", "0.95 to 0.95 (1 shapes)"]
    assert len([*attention({**content, "prefill": to_table([row(1, 0, 11.0)])})]) == 5  # nothing of others


def test_the_table_is_that_of_the_files():
    assert run("tables.py", "--check").returncode == 0, "run: python benchmarks/tables.py"
