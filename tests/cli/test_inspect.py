from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.eagle3 import write_head, write_model
from tests.helpers.engine_files import make_engine_folder, make_folder_with_head
from tests.helpers.fake_tensorrt import FakeTensorRT
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.cli.console import size
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.memory.shapes import align_up
from trt_kvcache.trt import plan_inspection

from .conftest import CACHE_NBYTES, CONFIG, GOLDEN, MIXER, SHIPPED, TOKEN_NBYTES, Run


def rows(out: str, title: str) -> list[list[str]]:
    """Return the cells of a table, row by row."""
    lines = out.split(f"\n{title} ")[1].splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if line.startswith("└"))
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines[:end] if line.startswith("│")]


def test_model_cache_and_origin(run: Run, engine: Path):
    done = run("inspect", engine)
    assert (done.code, done.err) == (0, "")
    path, model, cache, built_by, built_from, run_by = done.out.splitlines()[:6]
    assert path == str(engine)
    assert model == f"model: llama, {CONFIG.num_layers} layers, computed in float16"
    assert cache == "cache: 3 slots of 38 tokens, float16, separate"
    assert built_by == "built by: tensorrt_rtx 1.7.1; compute capabilities: not restricted"
    assert built_from.startswith(f"built from: {engine.parent / 'model'}, fingerprint ")
    assert run_by == "can be run by: tensorrt, torch, numpy"


def test_states_alone_have_the_limit_of_the_build(run: Run, tmp_path: Path):
    engine = make_engine_folder(GOLDEN / "mamba2", tmp_path / "engine").path
    assert run("inspect", engine).out.splitlines()[2] == "cache: 3 slots of 38 tokens, float16, states"


def test_without_the_checkpoint_only_tensorrt_can_run_it(run: Run, engine: Path):
    (engine.parent / "model").rename(engine.parent / "elsewhere")
    assert "\ncan be run by: tensorrt; torch and numpy need the checkpoint, which is gone\n" in run("inspect", engine).out
    assert json.loads(run("inspect", engine, "--json").out)["engines"] == ["tensorrt"]


def test_the_variant_of_attention_has_its_reason(run: Run, tmp_path: Path):
    engine = make_engine_folder(SHIPPED, tmp_path / "engine", attention_reason="it was named").path
    assert "\nnative attention, because it was named\n" in run("inspect", engine).out
    assert json.loads(run("inspect", engine, "--json").out)["attention_reason"] == "it was named"


def test_a_plugin_library_is_shown(run: Run, engine: Path, tmp_path: Path):
    library = FileRecord.of([b"library"])
    carrying = make_engine_folder(SHIPPED, tmp_path / "carrying", attention_variant="plugin", plugin_library=library).path
    line = f"\ncarries a plugin library, whose code runs when it is opened: 7 B, SHA-256 {library.sha256[:16]}\n"
    assert line in run("inspect", carrying).out
    assert "plugin library" not in run("inspect", engine).out
    assert json.loads(run("inspect", carrying, "--json").out)["plugin_library"] == {"nbytes": 7, "sha256": library.sha256}


def test_v_outputs_are_shown(run: Run, engine: Path, tmp_path: Path):
    changes = {"attention_variant": "plugin", "tensorrt_flavour": "tensorrt", "v_outputs": v_outputs(CONFIG, "float16")}
    marked = make_engine_folder(SHIPPED, tmp_path / "marked", **changes).path
    shape = f"[?, ?, {MIXER.num_kv_heads}, {MIXER.head_dim}]"
    assert rows(run("inspect", marked).out, "Tensors")[-1] == ["v_{0..1}", "output", "float16", shape, ""]
    nbytes = 2 * align_up(3 * 11 * MIXER.num_kv_heads * MIXER.head_dim * 2)
    assert ["V outputs of all layers", str(nbytes)] in [row[:2] for row in rows(run("inspect", marked).out, "Sizes")]
    assert "V outputs" not in run("inspect", engine).out
    assert [one["name"] for one in json.loads(run("inspect", marked, "--json").out)["v_outputs"]] == ["v_0", "v_1"]


def test_inputs_for_adapters_are_shown(run: Run, engine: Path, tmp_path: Path):
    inputs = AdapterInputs.of(CONFIG, rank=16, modules=("q_proj", "v_proj"))
    with_inputs = make_engine_folder(SHIPPED, tmp_path / "adapters", adapters=inputs).path
    shown = run("inspect", with_inputs).out
    assert "inputs for adapters: 16 ranks in all, of q_proj, v_proj\n" in shown
    width = MIXER.num_heads * MIXER.head_dim
    assert ["lora_b_q_{0..1}", "input", "float16", f"[1, {width}, 16]", ""] in rows(shown, "Tensors")
    nbytes = 2 * 2 * 16 * (2 * CONFIG.hidden_size + width + MIXER.num_kv_heads * MIXER.head_dim)
    assert ["adapters, of all ranks", str(nbytes)] in [row[:2] for row in rows(shown, "Sizes")]
    assert "inputs for adapters" not in run("inspect", engine).out
    assert json.loads(run("inspect", with_inputs, "--json").out)["adapters"] == {"rank": 16, "modules": ["q_proj", "v_proj"]}


def test_a_draft_head_is_shown(run: Run, engine: Path, tmp_path: Path):
    model = write_model(tmp_path / "llama")
    head = write_head(tmp_path / "head", model)
    folder = make_folder_with_head(model, head, tmp_path / "drafting").path
    shown = run("inspect", folder).out
    assert f"draft head: EAGLE-3, built from {head}, fingerprint " in shown
    assert ["hidden_states", "output", "float16", "[?, ?, 32]", ""] in rows(shown, "Tensors")
    sizes = dict(row[:2] for row in rows(shown, "Sizes"))
    # slots, tokens of the cache and of an enqueue of the model, those that the head reads and returns, and one of each slot; bytes
    assert sizes["hidden states of a session with drafts"] == str(3 * (38 + 11 + 2 * 11 + 1) * 32 * 2)
    assert sizes["cache of the draft head"] == str(2 * align_up(3 * 38 * 2 * 16 * 2))
    found = json.loads(run("inspect", folder, "--json").out)
    assert found["hidden_layers"] == {"layers": [2, 3, 4], "width": 32}
    assert found["draft_head"]["hidden_layers"] == [1]
    assert "draft head" not in run("inspect", engine).out


def test_the_input_for_rows_is_shown(run: Run, engine: Path, tmp_path: Path):
    with_rows = make_engine_folder(SHIPPED, tmp_path / "rows", max_embeddings=6).path
    shown = run("inspect", with_rows).out
    assert "input for rows in place of rows of the embedding: 6\n" in shown
    assert ["embedding_rows", "input", "float16", f"[6, {CONFIG.hidden_size}]", ""] in rows(shown, "Tensors")
    assert ["rows in place of rows of the embedding", str(6 * CONFIG.hidden_size * 2)] in [row[:2] for row in rows(shown, "Sizes")]
    assert "in place of rows" not in run("inspect", engine).out
    assert json.loads(run("inspect", with_rows, "--json").out)["max_embeddings"] == 6


def test_the_input_for_trees_is_shown(run: Run, engine: Path, tmp_path: Path):
    with_input = make_engine_folder(SHIPPED, tmp_path / "trees", attention_variant="plugin", max_logits_per_slot=9, draft_tree=9).path
    shown = run("inspect", with_input).out
    assert "takes trees of draft tokens: of up to 9 tokens for each slot\n" in shown
    assert ["ancestors", "input", "int32", "[3, 64, 2]", ""] in rows(shown, "Tensors")
    assert "takes trees" not in run("inspect", engine).out
    assert json.loads(run("inspect", with_input, "--json").out)["draft_tree"] == 9


def test_tensors_of_layers_that_are_alike_share_a_row(run: Run, engine: Path):
    shape = f"[?, {MIXER.num_kv_heads}, 38, {MIXER.head_dim}]"
    assert rows(run("inspect", engine).out, "Tensors") == [
        ["input_ids", "input", "int32", "[?, ?]", ""],
        ["kvcache_start_index", "input", "int32", "[?]", ""],
        ["last_token_ids", "input", "int32", "[?, 1]", ""],
        ["k_cache_{0..1}", "input", "float16", shape, ""],
        ["v_cache_{0..1}", "input", "float16", shape, ""],
        ["present_k_cache_{0..1}", "output", "float16", shape, "k_cache_{0..1}"],
        ["present_v_cache_{0..1}", "output", "float16", shape, "v_cache_{0..1}"],
        ["logits", "output", "float32", f"[?, {CONFIG.vocab_size}]", ""],
    ]


def test_profiles_with_more_logits(run: Run, tmp_path: Path):
    engine = make_engine_folder(SHIPPED, tmp_path / "engine", max_logits_per_slot=5).path
    shown = run("inspect", engine).out
    assert rows(shown, "Optimisation profiles") == [
        ["0", "prefill", "1-3", "1-11", "1-5"],
        ["1", "decode", "1-3", "1", "1"],
        ["2", "verify", "1-3", "1-5", "1-5"],
    ]
    assert ["logits", "output", "float32", f"[?, ?, {CONFIG.vocab_size}]", ""] in rows(shown, "Tensors")


def test_every_tensor_can_be_listed(run: Run, engine: Path):
    found = rows(run("inspect", engine, "--tensors").out, "Tensors")
    assert [row[0] for row in found] == [
        *("input_ids", "kvcache_start_index", "last_token_ids", "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"),
        *("present_k_cache_0", "present_v_cache_0", "present_k_cache_1", "present_v_cache_1", "logits"),
    ]
    assert found[8] == ["present_v_cache_0", "output", "float16", f"[?, {MIXER.num_kv_heads}, 38, {MIXER.head_dim}]", "v_cache_0"]


def test_json_is_one_document(run: Run, engine: Path):
    done = run("inspect", engine, "--json")
    found = json.loads(done.out)
    assert (found["path"], found["dtype"], found["cache"]["max_batch_size"]) == (str(engine), "float16", 3)
    assert [tensor["name"] for tensor in found["tensors"]][:4] == ["input_ids", "kvcache_start_index", "last_token_ids", "k_cache_0"]
    assert found["memory"]["bytes_per_token"] == TOKEN_NBYTES


class TestPlan:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Path:
        (tmp_path / "other.plan").write_bytes(b"plan")
        return tmp_path / "other.plan"

    @pytest.fixture
    def tensorrt(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
        config = EngineFolder.open(engine).config
        fake = FakeTensorRT(list(config.tensors), list(config.profiles))
        monkeypatch.setattr(plan_inspection, "load", fake.tensorrt)
        monkeypatch.setattr("trt_kvcache.trt.module.driver_failure", lambda: None)
        return fake

    def test_the_plan_of_an_engine_folder_is_that_folder(self, run: Run, engine: Path):
        assert run("inspect", engine / "engine.plan").out == run("inspect", engine).out

    @pytest.mark.usefixtures("tensorrt")
    def test_a_plan_alone_is_read_by_tensorrt(self, run: Run, plan: Path):
        done = run("inspect", plan)
        assert done.code == 0
        assert done.out.splitlines()[:2] == [str(plan), "4 B (4 B), activations 4.9 KiB, read by tensorrt 1.7.1"]
        assert rows(done.out, "Tensors")[0] == ["input_ids", "input", "int32", "[?, ?]", ""]
        assert rows(done.out, "Optimisation profiles")[0] == ["0", "input_ids", "[1, 1]", "[3, 11]"]

    @pytest.mark.usefixtures("tensorrt")
    def test_json(self, run: Run, plan: Path):
        found = json.loads(run("inspect", plan, "--json").out)
        assert (found["nbytes"], found["activations_nbytes"], len(found["profiles"])) == (4, 5000, 2)
        assert found["profiles"][1]["ranges"]["input_ids"] == [[1, 1], [3, 1]]

    def test_what_tensorrt_refuses_is_an_error_with_the_reason_of_each(self, run: Run, plan: Path, tensorrt: FakeTensorRT):
        tensorrt.errors["deserialize_cuda_engine"] = "no GPU"
        tensorrt.refuse.add("deserialize_cuda_engine")
        done = run("inspect", plan)
        assert (done.code, done.out) == (1, "")
        assert f"error: {plan}: a plan without its engine folder can be read by TensorRT on a GPU only. " in done.err
        for flavour in ("tensorrt", "tensorrt_rtx"):
            assert f"{flavour} 1.7.1 refuses it. TensorRT says: no GPU" in done.err

    def test_it_has_no_cache_to_draw(self, run: Run, plan: Path, tmp_path: Path):
        assert run("inspect", plan, "--plot", tmp_path / "cache.svg").code == 2


def test_profiles(run: Run, engine: Path):
    assert rows(run("inspect", engine).out, "Optimisation profiles") == [["0", "prefill", "1-3", "1-11"], ["1", "decode", "1-3", "1"]]


def test_windows_are_listed_by_layer(run: Run, tmp_path: Path):
    choices = tuple(AttentionLayerConfig(layer=layer, variant="mask", decomposable=False) for layer in range(4))
    engine = make_engine_folder(GOLDEN / "gemma3", tmp_path / "engine", attention=choices).path
    assert rows(run("inspect", engine).out, "Attention") == [
        ["0-1", "mask", "6", "no"],
        ["2", "mask", "", "no"],
        ["3", "mask", "6", "no"],
    ]


def test_decomposable_layers_are_listed_with_the_reason(run: Run, model: Path, tmp_path: Path):
    choices = (
        AttentionLayerConfig(layer=0, variant="native", decomposable=False),
        AttentionLayerConfig(layer=1, variant="native", decomposable=True, reason="float32 has no fused kernel"),
    )
    engine = make_engine_folder(model, tmp_path / "engine", attention=choices).path
    expected = [["0", "native", "no"], ["1", "native", "yes: float32 has no fused kernel"]]
    assert rows(run("inspect", engine).out, "Attention") == expected


def test_layers_with_the_same_attention_share_a_row(run: Run, engine: Path):
    assert rows(run("inspect", engine).out, "Attention") == [["0-1", "native", "no"]]


def test_sizes(run: Run, engine: Path):
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
    assert rows(run("inspect", engine).out, "Sizes") == [[what, str(nbytes), size(nbytes)] for what, nbytes in expected.items()]


def test_the_targets_of_a_build_and_an_embedded_checkpoint(run: Run, model: Path, tmp_path: Path):
    engine = make_engine_folder(model, tmp_path / "engine", embedded=True, compute_capabilities=("8.6", "12.0")).path
    done = run("inspect", engine)
    assert "compute capabilities: 8.6, 12.0" in done.out
    assert f"built from: {model} (embedded), fingerprint " in done.out


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [
        (SHIPPED, "expected an engine folder, but it has no engine.plan. `trt-kvcache build` makes one."),
        (SHIPPED / "config.json", "expected an engine folder, got a file."),
        (SHIPPED / "nothing", "expected an engine folder, got nothing there."),
    ],
    ids=["model folder", "file", "nothing"],
)
def test_what_is_no_engine_folder_is_refused(run: Run, folder: Path, complaint: str):
    done = run("inspect", folder)
    assert (done.code, done.out, done.err) == (1, "", f"error: {folder}: {complaint}\n")


def test_segments_and_operations(run: Run, model: Path, tmp_path: Path):
    folder = make_engine_folder(model, tmp_path / "engine", segmented=True)
    out = run("inspect", folder.path).out
    assert "3 segments, with operations between them: embedding (1), attention (2); --tensors lists them" in out
    out = run("inspect", folder.path, "--tensors").out
    steps = rows(out, "Segments and operations")
    assert [row[0] for row in steps] == ["embedding", "segment 0", "attention", "segment 1", "attention", "segment 2"]
    assert steps[2][2] == "attended_0, present_key_values_0"
    assert [row[3] for row in steps] == ["", "9", "", "10", "", "11"]
    assert rows(out, "Sizes")[1][:2] == ["constants.safetensors", str(folder.config.segments.constants.nbytes)]


def test_plot_writes_a_picture_of_the_sizes(run: Run, engine: Path, tmp_path: Path):
    assert run("inspect", engine, "--plot", tmp_path / "sizes.svg").code == 0
    picture = (tmp_path / "sizes.svg").read_text()
    assert ("plan" in picture, "K and V" in picture, "3 slots of 38 tokens" in picture) == (True, True, True)


def test_plot_refuses_a_name_that_is_no_picture(run: Run, engine: Path, tmp_path: Path):
    result = run("inspect", engine, "--plot", tmp_path / "sizes.jpg")
    assert result.code == 1
    assert "expected a file name that ends with .svg, .png, .pdf" in result.err.replace("\n", " ")
    assert not (tmp_path / "sizes.jpg").exists()
