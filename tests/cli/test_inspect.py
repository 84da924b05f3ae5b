from __future__ import annotations

import pytest
from engine_files import make_engine_folder

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.cli.console import size
from trt_kvcache.network.decomposable import AttentionChoice

from .conftest import CACHE_NBYTES, CONFIG, SHIPPED, TOKEN_NBYTES


def rows(out: str, title: str) -> list[list[str]]:
    """Return the cells of a table, row by row."""
    lines = out.split(f"\n{title} ")[1].split("\n└")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


@pytest.fixture
def shown(run, engine):
    done = run("inspect", engine)
    assert (done.code, done.err) == (0, "")
    return done.out


def test_head(shown, engine):
    path, model, cache, built_by, built_from = shown.splitlines()[:5]
    assert path == str(engine)
    assert model == f"model: llama, {CONFIG.num_layers} layers, computed in float16"
    assert cache == "cache: 3 slots of 38 tokens, float16, separate"
    assert built_by == "built by: tensorrt_rtx 1.7.1; compute capabilities: not restricted"
    assert built_from.startswith(f"built from: {engine.parent / 'model'}, fingerprint ")


def test_tensors_aliases_profiles_and_attention(shown):
    tensors = rows(shown, "Tensors")
    assert [row[0] for row in tensors] == [
        *("input_ids", "kvcache_start_index", "last_token_ids", "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"),
        *("present_k_cache_0", "present_v_cache_0", "present_k_cache_1", "present_v_cache_1", "logits"),
    ]
    assert tensors[0] == ["input_ids", "input", "int32", "[?, ?]", ""]
    assert tensors[8] == ["present_v_cache_0", "output", "float16", f"[?, {CONFIG.num_kv_heads}, 38, {CONFIG.head_dim}]", "v_cache_0"]
    assert tensors[-1] == ["logits", "output", "float32", f"[?, {CONFIG.vocab_size}]", ""]
    assert rows(shown, "Optimisation profiles") == [["0", "prefill", "1-3", "1-11"], ["1", "decode", "1-3", "1"]]
    assert rows(shown, "Attention") == [["0-1", "native", "no"]]


def test_sizes(shown):
    with Checkpoint.open(SHIPPED) as checkpoint:
        weights = checkpoint.nbytes
    expected = {
        "engine.plan": 31,
        "weights of the checkpoint": weights,
        "K and V of one token": TOKEN_NBYTES,
        "K and V of one sequence of 38": 38 * TOKEN_NBYTES,
        "K and V of one layer": CACHE_NBYTES // CONFIG.num_layers,
        "cache of 3 slots": CACHE_NBYTES,
    }
    assert rows(shown, "Sizes") == [[what, str(nbytes), size(nbytes)] for what, nbytes in expected.items()]


def test_decomposable_layers_targets_and_an_embedded_checkpoint(run, model, tmp_path):
    reasons = (None, "float32 has no fused kernel")
    choices = [AttentionChoice(layer=i, variant="native", decomposable=bool(why), reason=why or "") for i, why in enumerate(reasons)]
    changes = {"attention": tuple(choices), "compute_capabilities": ("8.6", "12.0")}
    out = run("inspect", make_engine_folder(model, tmp_path / "engine", embedded=True, **changes).path).out
    assert rows(out, "Attention") == [["0", "native", "no"], ["1", "native", "yes: float32 has no fused kernel"]]
    assert "compute capabilities: 8.6, 12.0" in out
    assert f"built from: {model} (embedded), fingerprint " in out


def test_segments_and_operations(run, model, tmp_path):
    folder = make_engine_folder(model, tmp_path / "engine", segmented=True)
    out = run("inspect", folder.path).out
    steps = rows(out, "Segments and operations")
    assert [row[0] for row in steps] == ["embedding", "segment 0", "attention", "segment 1", "attention", "segment 2"]
    assert steps[2][2] == "attended_0, present_key_values_0"
    assert [row[3] for row in steps] == ["", "9", "", "10", "", "11"]
    assert rows(out, "Sizes")[1][:2] == ["constants.safetensors", str(folder.config.segments.constants.nbytes)]


def test_a_picture_of_its_cache(run, engine, tmp_path):
    assert run("inspect", engine, "--plot", tmp_path / "cache.svg").code == 0
    assert "slot 2 (not active)" in (tmp_path / "cache.svg").read_text()
