from .conftest import CACHE_NBYTES, CONFIG


def rows(out, title):
    lines = out.split(f"\n{title} ")[1].split("\n└")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_what_is_shown(run, engine):
    done = run("inspect", engine)
    assert (done.code, done.err) == (0, "")
    shown = done.out
    path, model, cache, built_by = shown.splitlines()[:4]
    assert (path, model) == (str(engine), f"model: llama, {CONFIG.num_layers} layers, computed in float16")
    assert cache == "cache: 3 slots of 38 tokens, float16, separate"
    assert built_by == "built by: tensorrt_rtx 1.7.1; compute capabilities: not restricted"
    tensors = rows(shown, "Tensors")
    assert tensors[0] == ["input_ids", "input", "int32", "[?, ?]", ""]
    assert tensors[8] == ["present_v_cache_0", "output", "float16", f"[?, {CONFIG.num_kv_heads}, 38, {CONFIG.head_dim}]", "v_cache_0"]
    assert rows(shown, "Optimisation profiles") == [["0", "prefill", "1-3", "1-11"], ["1", "decode", "1-3", "1"]]
    assert rows(shown, "Attention") == [["0-1", "native", "no"]]
    assert ["cache of 3 slots", str(CACHE_NBYTES)] in [row[:2] for row in rows(shown, "Sizes")]
