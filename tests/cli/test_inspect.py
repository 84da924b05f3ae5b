from engine_files import make_engine_folder

from .conftest import CACHE_NBYTES, CONFIG


def rows(out, title):
    """Return the cells of a table, row by row."""
    lines = out.split(f"\n{title} ")[1].split("\n└")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_what_is_shown(run, engine):
    done = run("inspect", engine)
    assert (done.code, done.err) == (0, "")
    shown = done.out
    path, model, cache, built_by, built_from = shown.splitlines()[:5]
    assert (path, model) == (str(engine), f"model: llama, {CONFIG.num_layers} layers, computed in float16")
    assert cache == "cache: 3 slots of 38 tokens, float16, separate"
    assert built_by == "built by: tensorrt_rtx 1.7.1; compute capabilities: not restricted"
    assert built_from.startswith(f"built from: {engine.parent / 'model'}, fingerprint ")
    tensors = rows(shown, "Tensors")
    assert tensors[0] == ["input_ids", "input", "int32", "[?, ?]", ""]
    assert tensors[8] == ["present_v_cache_0", "output", "float16", f"[?, {CONFIG.num_kv_heads}, 38, {CONFIG.head_dim}]", "v_cache_0"]
    assert tensors[-1] == ["logits", "output", "float32", f"[?, {CONFIG.vocab_size}]", ""]
    assert rows(shown, "Optimisation profiles") == [["0", "prefill", "1-3", "1-11"], ["1", "decode", "1-3", "1"]]
    assert rows(shown, "Attention") == [["0-1", "native", "no"]]
    assert ["cache of 3 slots", str(CACHE_NBYTES)] in [row[:2] for row in rows(shown, "Sizes")]


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
