"""The benchmarks that need neither TensorRT nor a GPU still run, and write what they measured, on what."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest

from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.errors import CudaError
from trt_kvcache.model import ModelConfig

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
    assert all(one["between_enqueues_us"] > 0 for one in result["loop"].values())
    assert result["loop"]["host"]["after_tokens_us"] > 0
    assert result["loop"]["device"]["after_tokens_max_us"] == result["limits"]["after_tokens_us"] == 0


def test_sampling(tmp_path):
    rows = measured("sampling.py", tmp_path / "sampling.json", "--quick", "--runs", "1")["host_us"]
    assert [row["logits"] for row in rows] == ["peaked", "normal", "flat", "restricted"]
    assert all(value > 0 for row in rows for name, value in row.items() if name != "logits")


def test_serving(tmp_path):
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(library)
    result = measured("serving.py", tmp_path / "serving.json", "--quick", "--rounds", "1")
    assert [row["at_once"] for row in result["rows"]] == [1, 32]
    assert all(row[name]["tokens_per_second"] > 0 for row in result["rows"] for name in ("session", "stream", "whole"))
    assert all(row["stream_over_session"] > 0 for row in result["rows"])


@pytest.mark.slow  # tests/faults attacks the server in each run
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_server_attacks(tmp_path):
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(library)
    result = measured("server_attacks.py", tmp_path / "server_attacks.json", "--quick", "--only", "bodies,headers")
    assert {row["status"] for row in result["bodies"]["rows"]} <= {200, 400}
    assert all(row["health_s"] > 0 for name in ("bodies", "headers") for row in result[name]["rows"])


@pytest.mark.long
def test_drafts(tmp_path, monkeypatch):
    result = measured("drafts.py", tmp_path / "drafts.json", "--quick", "--runs", "1", "--engine", "numpy")
    rows = {row["what"]: row for row in result["rows"]}
    assert [*rows] == ["edit", "free", "silent", "right 0", "right 0.6", "right 0.8", "right 0.9", "right 1"]
    assert rows["edit"]["steps"] < rows["edit"]["tokens"] / 2
    assert rows["silent"]["draft_tokens"] == rows["right 0"]["accepted_tokens"] == 0
    assert rows["right 1"]["accepted_tokens"] == rows["right 1"]["draft_tokens"] > rows["right 0.6"]["accepted_tokens"]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = [*importlib.import_module("tables")._drafts(result)]
    assert found[0][0] == "tokens per second with drafts / without: a text to be edited (tiny-llama), prompt lookup"
    assert [limit for _, _, limit in found] == ["", "at least 0.97", "at least 0.97", *[""] * 5]


@pytest.mark.slow  # tests of the PyTorch engine run all of it but the measurement
def test_draft_models(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    options = ("--quick", "--drafters", "eagle3", "--batches", "2", "--lengths", "2")
    result = measured("draft_models.py", tmp_path / "draft_models.json", *options)
    rows = result["rows"]["eagle3"]
    assert [row["rate"] for row in rows] == [0.6, 0.8, 0.9]
    assert all(row["draft_tokens"] > 0 for row in rows)
    assert 0 < rows[0]["accepted"] < rows[1]["accepted"] < rows[2]["accepted"] < 1
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = [*importlib.import_module("tables")._draft_models(result)]
    assert found[0][0].endswith("with an EAGLE-3 head, 2 sequences, drafts of up to 2, 0.6 of their tokens right")


@pytest.mark.slow  # as for draft_models.py
def test_draft_trees(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    result = measured("draft_trees.py", tmp_path / "draft_trees.json", "--quick", "--batches", "2", "--sizes", "4,9")
    assert [(row["batch"], row["tokens"]) for row in result["verify"]] == [(2, 4), (2, 9)]
    assert [row["tokens"] for row in result["propose"]] == [4, 9]
    assert all(row["propose_ms"] > 0 < row["proposals"] for row in result["propose"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = [*importlib.import_module("tables")._draft_trees(result)]
    assert found[0][0] == "`verify` of a tree of 4 tokens / of one token, Llama-3-8B, 2 sequences"


def test_segments(tmp_path):
    result = measured("segments.py", tmp_path / "segments.json", "--steps", "5")
    eager = result["eager_us"]
    assert list(eager) == ["16", "32", "64"]
    assert all(us > 0 for us in eager.values())
    assert result["eager_us_per_layer"] == (eager["64"] - eager["16"]) / 48  # of either sign, on a machine with other work
    assert (result["launches"], result["graph_us"]) == ("nothing", {})
    assert all(0 < us < 1000 for times in result["one_piece_us"].values() for us in times.values())


@pytest.mark.trt
@pytest.mark.long
def test_plugin_layers(tmp_path):
    rows = measured("plugin_layers.py", tmp_path / "plugin_layers.json", "--layers", "2", "--vocab-size", "256")["rows"]
    assert {row["build"]: row["plans"] for row in rows} == {
        **{"native": 1, "one plan": 1, "segments": 3},
        **{"one plan, int8 K and V": 1, "segments, int8 K and V": 3},
    }
    assert [row["constants_nbytes"] > 0 for row in rows] == [row["plans"] > 1 for row in rows]


def test_the_table_of_plugin_layers_and_of_one_plan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables, mib = importlib.import_module("tables"), 2**20
    row = {"build": "segments", "plans": 3, "seconds": 61.4, "peak_nbytes": 70 * mib, "plan_nbytes": 30 * mib}
    row |= {"constants_nbytes": 12 * mib, "weights_nbytes": 40 * mib}
    content = {"load_average": 7.9, "rows": [row, {**row, "plans": 1, "build": "one plan", "constants_nbytes": 0}]}
    label = "build with TensorRT for RTX, {} (two busy cores, load average 8)"
    assert [*tables._plugin_layers(content)] == [
        (label.format("segments"), "3 plans, 30 MiB in all; plans and constants minus weights: 2 MiB; peak 70 MiB, 61 s", ""),
        (label.format("one plan"), "1 plan, 30 MiB in all; plans and constants minus weights: -10 MiB; peak 70 MiB, 61 s", ""),
    ]
    measured = {"launches": "nothing", "eager_us_per_layer": 2.0, "graph_us": {}, "limits": {"one_piece_us": 20.0}}
    found = [*tables._segments({**measured, "load_average": 0.5, "one_piece_us": {"eager": {"16": 3.0, "64": 9.5}}})]
    assert found[1] == ("one plan: host time of `TensorRTEngine.enqueue`, 16, 64 layers, eager", "3.0 to 9.5 us", "20 us")


def test_import_time(tmp_path):
    results = measured("import_time.py", tmp_path / "import_time.json", "--runs", "1")["results"]
    assert set(results) == {
        "trt_kvcache",
        "trt_kvcache.cache.edge_llm",
        "from trt_kvcache import InferenceSession",
        "numpy, ml_dtypes",
    }
    assert 0 < results["trt_kvcache"]["best_s"] < 60


@pytest.mark.long
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


def test_the_table_of_states(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def row(layer, width, mb, share, us, **others):
        return {"layer": layer, "width": width, "state_mb": mb, "of_copy": share, "us": us, "others_us": others}

    rows = [row("mamba2", 1, 32.0, 0.9, 9.0), row("mamba2", 1, 64.0, 0.8, 9.0), row("mamba2", 1, 31.0, 0.1, 9.0)]
    rows += [row("mamba2", 16, 1.0, 0.1, 8.0, a=4.0, b="none"), row("mamba2", 32, 1.0, 0.1, 3.0, a=4.0), row("conv", 2, 1.0, 0.1, 3.0)]
    content = {"limits": {"of_copy": 0.85, "of_best_other": 1.0}, "rows": importlib.import_module("environment").to_table(rows)}
    tables, content = importlib.import_module("tables"), json.loads(json.dumps(content))
    assert [*tables._state_steps(content)] == [
        ("mamba2, decode from 64 MB of states: share of the copy bandwidth", "0.80 to 0.90 (2 shapes)", "at least 0.85")
    ]
    assert [*tables._state_prefill(content)] == [("mamba2, several new tokens: time / time of a", "0.750 to 2.000 (2 shapes)", "1")]


def test_the_table_of_products(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def row(rows, mb, share, ratio):
        return {"model": "a", "rows": rows, "mb": mb, "us": {"ours": ratio, "torch": 1.0}, "of_copy": {"ours": share, "torch": 0.5}}

    to_table = importlib.import_module("environment").to_table
    products = [row(1, 64.0, 0.9, 0.8), row(8, 65.0, 1.0, 0.7), row(8, 63.0, 0.1, 1.5), row(16, 64.0, 0.2, 2.0)]
    limits = {"of_copy": 0.9, "layers_of_copy": 0.8, "of_torch": 1.02}
    content = {"limits": limits, "products": to_table(products), "layers": to_table([row(1, 400.0, 0.95, 0.7), row(8, 20.0, 0.5, 0.7)])}
    rows = [*importlib.import_module("tables")._linear(json.loads(json.dumps(content)))]
    assert [value for _, value, _ in rows] == [
        "0.95 (0.50)",
        "0.50 (0.50)",
        "0.90 to 1.00",
        "0.70 to 1.50 (3 shapes)",
        "2.00 to 2.00 (1 shapes)",
    ]
    assert [limit for _, _, limit in rows] == ["at least 0.8", "", "at least 0.9", "1.02", ""]


def test_the_tables_of_packed_weights(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    to_table, tables = importlib.import_module("environment").to_table, importlib.import_module("tables")
    layers = [{"model": "a", "scheme": "int4", "rows": 1, "of_copy": 0.625, "speedup": 2.2}]
    shares = {("head", 1): 0.75, ("gate_up", 1): 0.7, ("gate_up", 16): 0.5, ("o", 1): 0.4}
    products = [{"product": name, "scheme": "int4", "rows": rows, "of_copy": share} for (name, rows), share in shares.items()]
    many = [{"product": "o", "scheme": "int4", "rows": 1024, "us": {"packed": 6.0, "16 bits": 5.0}}]
    content = {"limits": {"of_copy": 0.8}, "layers": to_table(layers), "products": to_table(products), "many": to_table(many)}
    rows = [*tables._packed_linear(json.loads(json.dumps(content)))]
    assert [(value, limit) for _, value, limit in rows] == [
        ("0.62; 2.20 times as fast as in 16 bits", ""),
        ("0.70 to 0.75", "at least 0.8"),
        ("1.20", "at most 1.5"),
    ]
    pairs = [{"model": "a", "schemes": "q4_k and q6_k", "rows": 1, "us": {"one launch": 8.0, "two and cat": 12.0}}]
    assert [*tables._packed_linear({**content, "pairs": to_table(pairs)})][1][1] == "1.50"
    cell = {"model": "a", "batch": 1, "past": 9, "side": "ours", "step_ms": {"median": 2.5}, "of_limit": 0.5}
    peer = {**cell, "side": "llama", "step_ms": {"median": 3.5}, "block_type": "Q4_0"}
    [(what, value, _), (other, their_value, _)] = tables._packed_end_to_end({"weights": "q4_0", "cells": {"a": cell, "b": peer}})
    assert ("q4_0" in what, value) == (True, "2.50 ms (0.50 of the bound)")
    assert ("llama.cpp (Q4_0)" in other, their_value) == (True, "3.50 ms")


def test_the_table_of_serving_under_load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    sides = [
        {"tokens_per_second": speed, "ttft_ms": {"median": ttft, "p99": 2 * ttft}, "itl_ms": {"median": 5.0, "p99": itl}}
        for speed, ttft, itl in ((800.0, 40.0, 9.0), (1000.0, 30.0, 8.0))
    ]
    row = {"model": "a", "clients": 8, "server": sides[0], "session": sides[1], "over_session": 0.8}
    row["transformers"] = {**sides[0], "tokens_per_second": 400.0}
    limits = {"over_session": 0.93, "itl_p99_over_median": 2.0}
    rows = [*tables._serving_load({"limits": limits, "prefill_chunk": 256, "rows": [row]})]
    assert [(value, limit) for _, value, limit in rows] == [
        ("800; 0.80 (1000)", "at least 0.93"),
        ("40 and 80 ms; 30 and 60 ms", ""),
        ("5.0 and 9.0 ms; 5.0 and 8.0 ms", "p99 at most 2 times p50"),
        ("400; 2.00; 40.0 and 80.0 ms; 5.0 and 9.0 ms", ""),
    ]


def test_the_table_of_opening(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    times = [{"opened": opened, "first_token": opened + 1.5} for opened in (7.0, 11.0)]
    rows = [{"model": "a", "format": "q4_0", "start": times[0], "first_start": times[1], "limit_seconds": 0.25}]
    [(what, value, limit)] = tables._opening({"rows": rows})
    assert what.startswith("a, q4_0: ")
    assert (value, limit) == ("7.0; 8.5; 12.5 s", "copy of the file: 0.25 s")


def test_the_table_of_whole_models_with_experts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    cell = {"ok": True, "model": "a", "format": "int4", "batch": 1, "past": 9, "step_ms": {"median": 2.0}, "of_limit": 0.5}
    cells = {"first": {**cell, "first_token_ms": 40.4}, "failed": {"ok": False}, "third": {**cell, "batch": 8, "first_token_ms": 9.0}}
    rows = [*tables._end_to_end_experts({"limits": {"of_limit_batch_1": 0.75}, "cells": cells})]
    assert [row[1:] for row in rows] == [("2.00 ms, 0.50; 40 ms", "at least 0.75 of the bound"), ("2.00 ms, 0.50; 9 ms", "")]
    assert rows[0][0].startswith("a in int4, batch 1, 9 tokens past: ")


def test_models_to_open(monkeypatch, tmp_path):
    """Folder and GGUF file have the shapes of the model, and a session opens both."""
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    opening = importlib.import_module("opening")
    config = {**opening.QWEN2_0_5B, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    for name, weights in (("folder", "bfloat16"), ("Q4_0.gguf", "GGUF Q4_0")):
        path = opening.write_model(tmp_path, config, name)
        assert opening.write_model(tmp_path, config, name) == path
        with InferenceSession.from_model(path, engine="numpy", max_batch_size=1) as session:
            assert session.weights.format == weights
            assert session.vocab_size == 96
            assert len([*session.generate([[1, 2]], max_new_tokens=2, ignore_eos=True)]) == 2


def test_the_side_of_llama_cpp(monkeypatch, tmp_path):
    gguf = pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    side, shapes = importlib.import_module("end_to_end_llama"), importlib.import_module("random_model")
    small = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ModelConfig.from_dict({**shapes.QWEN3_4B, **small, "num_key_value_heads": 2, "head_dim": 32})
    program = tmp_path / "llama-bench"
    rows = [
        {"n_prompt": prompt, "n_gen": 0 if prompt else 4, "n_depth": depth, "avg_ns": 8e6, "samples_ns": [8e6, 16e6], "avg_ts": 9.0}
        for prompt in (7, 0)
        for depth in (0, 7)
    ]
    found = json.dumps([{**row, "build_commit": "abc"} for row in rows])
    program.write_text(f"#!/bin/sh\necho '{found}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_BENCH", str(program))
    result = side.llama(config, "q4_0", 7, 4, tmp_path)
    assert (result["first_token_ms"], result["step_ms"]["median"], result["llama_cpp"]) == (8.0, 3.0, "abc")
    [path] = tmp_path.glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(tensors) == 2 + 2 * 11
    query = tensors["blk.1.attn_q.weight"]
    assert (query.shape.tolist(), query.tensor_type.name) == ([64, 128], "Q4_0")
    assert tensors["blk.0.attn_k_norm.weight"].shape.tolist() == [32]
    program.write_text("#!/bin/sh\necho no device >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="exit code 3: no device"):
        side.llama(config, "q4_0", 7, 4, tmp_path)


def test_the_tables_of_experts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    to_table, tables = importlib.import_module("environment").to_table, importlib.import_module("tables")
    experts = [
        {
            "model": "a",
            "format": stored,
            "launch": launch,
            "rows": 1,
            "mb": mb,
            "of_copy": {"ours": 0.875},
            "us": {"ours": 3.0, "engine": 4.0, **torch},
        }
        for launch, stored, mb, torch in (
            ("up", "bfloat16", 40, {"torch": 10.0}),
            ("both", "bfloat16", 40, {"torch": 10.0}),
            ("both", "bfloat16", 20, {"torch": 10.0}),
            ("both", "MXFP4", 40, {}),
        )
    ]
    rows = [*tables._experts({"limits": {"of_copy": 0.8, "mb": 32}, "rows": to_table(experts)})]
    assert [(value, limit) for _, value, limit in rows] == [("0.88; 2.5", "at least 0.8"), ("0.88; 2.5", ""), ("0.88", "at least 0.8")]
    assert [what for what, _, _ in rows][-1] == "chosen experts of a layer of a in MXFP4, 1 row(s): share of the copy bandwidth"


def compare_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script puts the root in front
    return importlib.import_module("compare_kernels")


def test_compare_kernels_without_a_gpu_stops_with_one_line(monkeypatch, capsys, tmp_path):
    script, out = compare_kernels(monkeypatch), tmp_path / "result.json"
    monkeypatch.setattr(script, "find_gpu", lambda: "there is no driver.")
    monkeypatch.setattr(sys, "argv", ["compare_kernels.py", "--old", str(ROOT), "--out", str(out)])
    assert script.main() == 2
    assert capsys.readouterr().err == "no GPU: there is no driver.\n"
    assert not out.exists()


def test_compare_kernels_without_an_old_checkout_stops_with_one_line(monkeypatch, capsys, tmp_path):
    script = compare_kernels(monkeypatch)
    monkeypatch.setattr(script, "find_gpu", lambda: None)
    monkeypatch.setattr(script, "HAS_TORCH", True)
    monkeypatch.setattr(sys, "argv", ["compare_kernels.py", "--old", str(tmp_path)])
    assert script.main() == 2
    assert capsys.readouterr().err == f"--old: expected a checkout with plugins/ and trt_kvcache/, got {tmp_path} without plugins/\n"


def test_compare_kernels_lists_the_attention_sources_of_a_checkout(monkeypatch):
    names = compare_kernels(monkeypatch).attention_sources(ROOT)
    assert "attention_decode-float16-128" in names
    assert {name.partition("-")[0] for name in names} == {"attention_decode", "attention_decode_few", "attention_prefill"}


def test_compare_kernels_finds_an_entry_point_in_a_source_of_another_name(monkeypatch):
    script = compare_kernels(monkeypatch)
    entries = {"one-float16-64": {"append"}, "two-float16-64": {"decode"}, "two-float16-128": {"decode", "other"}}

    class Module:
        def __init__(self, source):
            self.source = source

        def get_kernel(self, name):
            if name not in entries[self.source]:
                raise LookupError(name)
            return self.source, name

    monkeypatch.setattr(script, "cuda_core_error", lambda: LookupError)
    monkeypatch.setattr(script.Kernels, "_load_module", lambda self, side, source: Module(source))
    kernels = script.Kernels({"new": dict.fromkeys(entries), "old": {}})
    assert kernels.kernel("three-float16-64", "decode", "sm_90") == ("two-float16-64", "decode")
    with pytest.raises(
        CudaError, match="expected other for float16-64 in one of one-float16-64, two-float16-64, two-float16-128, got none"
    ):
        kernels.kernel("three-float16-64", "other", "sm_90")


def test_compare_kernels_takes_the_ratio_within_a_round(monkeypatch):
    found = compare_kernels(monkeypatch).summarize([1e-6, 2e-6, 4e-6], [1.1e-6, 2e-6, 4.2e-6])
    spread = {"least": 1.0, "largest": 1.1}
    assert found == {"old_us": 2.0, "new_us": 2.0, "new_over_old": 1.05, "spread": spread}


def compared(script, ratio, difference=0.0, kind="decode"):
    case = script.Case(kind, 1, 1, 1024, 4, 128)
    spread = {"least": ratio, "largest": ratio}
    return {**case._asdict(), "old_us": 1.0, "new_us": ratio, "new_over_old": ratio, "spread": spread, "output_difference": difference}


def test_compare_kernels_names_what_is_over_a_limit(monkeypatch):
    script = compare_kernels(monkeypatch)
    rows = [compared(script, 1.01), compared(script, 1.02), compared(script, 0.5, float("nan"))]
    shape = "decode, batch 1 width 1 past 1024 group 4 head_dim 128"
    assert script.exceeded(rows, ["a case"]) == [f"{shape}: new_over_old 1.02", f"{shape}: output_difference nan", "left out: a case"]
    assert script.exceeded([], []) == ["nothing was measured"]


def test_the_table_of_compare_kernels(monkeypatch):
    script = compare_kernels(monkeypatch)
    rows = [compared(script, 0.5), compared(script, 1.0), compared(script, 2.0, kind="prefill")]
    assert script.geometric_mean(rows) == 1.0
    to_table = importlib.import_module("environment").to_table
    content = {"old_commit": "0123456789", "limits": script.LIMITS, "geometric_mean": 1.0, "cases": to_table(rows)}
    label = "attention kernels, time / time of commit 01234567"
    assert [*importlib.import_module("tables")._compare_kernels(json.loads(json.dumps(content)))] == [
        (f"{label}: decode", "0.500 to 1.000 (2 shapes)", "1.01"),
        (f"{label}: prefill", "2.000 to 2.000 (1 shapes)", "1.01"),
        (f"{label}: geometric mean", "1.000", ""),
    ]


def test_the_table_is_that_of_the_files():
    assert run("tables.py", "--check").returncode == 0, "run: python benchmarks/tables.py"


@pytest.mark.long
def test_end_to_end(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("trt_kvcache.torch_engine")
    out = tmp_path / "end_to_end.json"
    command = [sys.executable, str(BENCHMARKS / "end_to_end.py"), "--device", "cpu", "--quick", "--cells", "b3,Qwen3-4B", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert all(one["tokens"] == 36 and one["distinct"] > 6 for one in result["compared"].values())
    assert [one["ties"] for name, one in result["compared"].items() if "float32" in name] == [[]] * 4
    assert list(result["cells"]) == [f"Qwen3-4B b3 p24 {side}" for side in ("ours", "eager", "compiled")]
    ours = result["cells"]["Qwen3-4B b3 p24 ours"]
    assert ours["steps"] == 6
    assert ours["of_limit"] > 0 < ours["engine_alone_ms"]


@pytest.mark.long
def test_steps(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = measured("steps.py", tmp_path / "steps.json", "--device", "cpu", "--quick", "--models", "Qwen3-4B")
    assert result["compared"]["Qwen3-4B"] < 1e-4
    model = result["models"]["Qwen3-4B"]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = importlib.import_module("environment").of_table(model["rows"])
    assert [(row["call"], row["batch"], row["width"]) for row in rows] == [
        ("decode", 1, 1),
        ("verify", 1, 4),
        ("append", 3, 16),
        ("prefill", 1, 16),
        ("prefill", 1, 60),
        ("prefill", 3, 20),
    ]
    assert all(0 < row["best_ms"] <= row["call_ms"] for row in rows)
    assert [row["engine_ms"] > 0 < row["first_ms"] for row in rows] == [True] * 6
    assert all(("exact_engine_ms" in row) == (row["call"] == "prefill") for row in rows)
    assert all(one["tokens_per_second"] > 0 for one in model["queue"])
    assert (model["graphs"], model["eager_us_per_layer"], model["skipped"]) == (None, None, [])
    assert len([*importlib.import_module("tables")._steps(result)]) > 5


def test_the_table_of_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def row(call, width, ms, batch=1, **more):
        times = {"call_ms": ms, "engine_ms": ms / 2, "first_ms": 9 * ms, "second_ms": 8 * ms}
        return {"call": call, "batch": batch, "width": width, **times, **more}

    rows = [row("decode", 1, 1.0), row("verify", 8, 1.2), row("verify", 17, 3.0), row("append", 16, 1.5), row("decode", 1, 2.0, batch=8)]
    rows += [row("prefill", 64, 2.3, exact_engine_ms=2.0), row("prefill", 100, 4.3, exact_engine_ms=3.2)]
    limits = {"verify_over_decode": {"A": 1.15}, "append_16_over_decode": {}, "prefill_over_exact": 1.15, "prefill_ms_apart": 0.3}
    queue = {"decode_step_ms": 1.0, "admitting_step_ms": 2.0, "longest_step_ms": 3.0}
    model = {
        "rows": importlib.import_module("environment").to_table(rows),
        "eager_us_per_layer": {"16": 99.6},
        "graphs": {"graphs": 3, "mib": 7.2, "budget_mib": 100.0},
        "queue": [queue, queue],
    }
    content = {"limits": {**limits, "eager_us_per_layer": 120.0}, "past": 1024, "compared": {"A": 0.00123}, "models": {"A": model}}
    found = {what: (value, limit) for what, value, limit in importlib.import_module("tables")._steps(json.loads(json.dumps(content)))}
    assert found["A, batch 1, 1024 past: `verify` of 8, 17 tokens"] == ("1.20, 3.00 ms", "")
    assert found["A, batch 1: `prefill` of 64, 100 tokens"] == ("2.30, 4.30 ms", "")
    assert found["A: time of the GPU to verify up to 8 tokens / for one token"] == ("1.20", "1.15")
    assert found["A: `append` of 16 / `decode`"] == ("1.50", "")
    assert found["A: `prefill`, without 0.3 ms, / time of the GPU for the exact width"] == ("1.25", "1.15")
    assert found["A: host time of a layer of 16 tokens that is not captured"] == ("100 us", "120 us")
    assert found["A: memory of 3 graphs"] == ("7 MiB", "100 MiB")


@pytest.mark.parametrize("scheme", ["int4", "int4:128", "int8", "q4_0", "q8_0", "gptq"])
def test_packed_weights_stay_near_what_they_round(monkeypatch, scheme):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script puts the root in front
    script = importlib.import_module("packed_weights")
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed = script.quantized(weight, scheme, None)
    found, bits = packed.dequantized(), 4 if packed.kind == "int4" else 8
    assert found.dtype == weight.dtype
    steps = 2 ** (bits - 1) - 1
    assert 0 < float((found - weight).abs().max()) < float(weight.abs().max()) / steps
    stored = 48 * (128 * bits // 8 + 2 * packed.scales.shape[1])
    assert stored <= packed.nbytes <= stored + 48 * packed.scales.shape[1]


def end_to_end_results():
    def cell(model, batch, past, side, ms, **more):
        one = {"ok": True, "model": model, "batch": batch, "past": past, "side": side, "step_ms": {"median": ms}, **more}
        return {f"{model} b{batch} p{past} {side}": one}

    ours = {"of_limit": 0.8123, "limit_ms": 3.5, "between_engine_us": 41.4}
    return {
        "device": "Some GPU",
        "limits": {
            "of_limit_8b_batch_1": 0.8,
            "of_limit_gemma_4_batch_1": 0.75,
            "compiled_over_ours_8b": {"1": 1.6, "8": 2.0},
            "between_engine_us_05b": 60.0,
        },
        "compared": {"a float32": {"ok": True, "tokens": 192, "ties": []}, "a bfloat16": {"ok": True, "tokens": 192, "ties": [{}]}},
        "cells": {
            **cell("Llama-3-8B", 1, 1024, "ours", 4.0, **ours),
            **cell("Llama-3-8B", 1, 1024, "compiled", 7.0),
            **cell("Llama-3-8B", 8, 1024, "eager", 9.0),
            **cell("Qwen2-0.5B", 1, 8192, "ours", 1.0, **ours),
            **cell("Gemma-4-E4B", 1, 1024, "ours", 3.0, **ours),
            "Qwen2-0.5B b8 p1024 ours": {"ok": False, "model": "Qwen2-0.5B", "batch": 8, "past": 1024, "side": "ours", "error": "x"},
        },
    }


def test_the_table_of_end_to_end(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("end_to_end_report")
    content = end_to_end_results()
    at = "Llama-3-8B, batch 1, 1024 past"
    gemma = "Gemma-4-E4B, batch 1, 1024 past"
    assert [*report.rows(content)] == [
        ("whole models: greedy tokens equal to those of transformers", "383, and 1 at ties of floats", ""),
        (f"{gemma}: time per token", "3.00 ms", ""),
        (f"{gemma}: share of the bound", "0.81", "at least 0.75"),
        (f"{gemma}: time of a step outside the engine (a difference of two measurements)", "41 us", ""),
        (f"{at}: time per token", "4.00 ms", ""),
        (f"{at}: share of the bound", "0.81", "at least 0.80"),
        (f"{at}: time of a step outside the engine (a difference of two measurements)", "41 us", ""),
        (f"{at}: time of transformers, static cache + torch.compile over ours", "1.75", "at least 1.6"),
        ("Qwen2-0.5B, batch 1, 8192 past: time per token", "1.00 ms", ""),
        ("Qwen2-0.5B, batch 1, 8192 past: share of the bound", "0.81", ""),
        ("Qwen2-0.5B, batch 1, 8192 past: time of a step outside the engine (a difference of two measurements)", "41 us", "60 us"),
    ]
    assert report.readme_block(content).splitlines()[-1] == "| Llama-3-8B | 1 | 3.50 | 4.00 | 7.00 | not measured |"
    assert ">7.00</text>" in report.picture(content)
    content["compared"]["a float32"] = {"ok": False, "error": "AssertionError: token 3"}
    assert next(report.rows(content))[1] == "no"


def test_the_line_of_the_limit_has_the_colour_of_its_legend(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("end_to_end_report")
    lines = re.findall(r'<line [^>]*stroke="([^"]+)"', report.picture(end_to_end_results()))
    assert lines == [report.LIMIT] * 3, "the legend, and the two shapes that are drawn"


def test_the_sentence_of_the_readme_is_that_of_the_result(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("end_to_end_report")
    sentence = " ".join(report.readme_sentence(end_to_end_results()).split())
    assert "Llama-3-8B in bfloat16 takes 4.00 ms a token on an Some GPU" in sentence
    assert "with a static cache and `torch.compile` takes 7.00 ms." in sentence


def test_readme_says_that_transformers_was_measured_elsewhen(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("end_to_end_report")
    content = end_to_end_results() | {"date": "2030-01-02T03:04:05+00:00"}
    said = "trt_kvcache was measured on 2030-01-02, transformers on 2029-12-31"
    assert said not in report.readme_block(content)
    assert said in report.readme_block(content | {"sides_of_transformers": {"date": "2029-12-31T00:00:00+00:00"}})


def test_readme_shows_end_to_end_where_there_is_a_result(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    readme = tables.MAIN_README.read_text(encoding="utf-8")
    assert tables.with_block(readme, "one") == tables.with_block(tables.with_block(readme, "two"), "one") != readme
    if not tables.END_TO_END.is_file():
        assert f"{tables.BEGIN}\n{tables.END}" in readme


class TestKernelResources:
    """Registers and shared memory, from the machine code; blocks of a multiprocessor."""

    @pytest.fixture
    def script(self, monkeypatch):
        pytest.importorskip("cuda.core")
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("kernel_resources")

    @pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
    def test_of_a_compiled_source(self, script, arch):
        from trt_kvcache.kernels.compile import cubin

        found = script.kernel_resources(cubin("lengths", arch), arch)
        assert {"increment_scalar", "compact_lengths_8"} <= set(found)
        for resources in found.values():
            assert 0 < resources.registers <= 255
            assert resources.code_nbytes > 0
            assert resources.local_nbytes == 0
            assert resources.static_nbytes < 48 << 10

    @pytest.mark.parametrize(
        ("registers", "threads", "shared_nbytes", "blocks"),
        [
            (32, 256, 0, 8),  # 64 warps
            (33, 256, 0, 6),  # registers: 40 for each thread
            (255, 256, 0, 1),
            (32, 256, 100 << 10, 2),  # shared memory, with the share of the system
            (16, 32, 0, 32),  # blocks
        ],
    )
    def test_resident_blocks(self, script, registers, threads, shared_nbytes, blocks):
        resources = script.KernelResources(registers, 0, 0, 0, threads)
        assert script.resident_blocks("sm_90", resources, threads, shared_nbytes) == blocks
