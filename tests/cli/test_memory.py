from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.weights import VISION
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model, write_text_decoder
from trt_kvcache import what_fits

from .conftest import CONFIG, GOLDEN, SHIPPED, TOKEN_NBYTES, Run

LLAMA_7B = ("--layers", 32, "--kv-heads", 32, "--head-dim", 128, "--max-sequence-length", 2048)


def test_llama_7b_takes_a_gibibyte_per_sequence(run: Run):
    done = run("memory", *LLAMA_7B, "--gib", 4)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "│ 0-31   │ 32       │ 128      │        33554432 │ 32.0 MiB │" in lines
    assert lines[-7:] == [
        "1 slot of 2048 tokens, float16, separate",
        "per token:    524288 B (512.0 KiB)",
        "per sequence: 1073741824 B (1.0 GiB)",
        "in all:       1073741824 B (1.0 GiB)",
        "in 4 GiB (4294967296 B):",
        "  longest sequence with 1 slot: 8192 tokens",
        "  largest batch of 2048 tokens: 4 slots",
    ]


def test_slots_and_dtype_change_the_size(run: Run):
    done = run("memory", *LLAMA_7B, "--max-batch-size", 3, "--dtype", "float32")
    assert "per sequence: 2147483648 B (2.0 GiB)" in done.out
    assert "in all:       6442450944 B (6.0 GiB)" in done.out


def test_scales_add_to_the_size(run: Run):
    done = run("memory", *LLAMA_7B, "--dtype", "float8_e4m3fn")
    assert "per sequence: 553648128 B (528.0 MiB)" in done.out  # 1 GiB in float16; four bytes beside each row of 128
    assert "scales:       16777216 B" in done.out
    assert "in all:       553648128 B" in done.out


def test_static_scales_add_little(run: Run):
    done = run("memory", *LLAMA_7B, "--dtype", "float8_e4m3fn", "--kv-scales", "head")
    assert "per sequence: 536870912 B (512.0 MiB)" in done.out
    assert "scales:       8192 B" in done.out  # 256 bytes a layer
    assert "in all:       536879104 B" in done.out


@pytest.mark.parametrize("dtype", [[], ["--dtype", "float16"]])
def test_scales_of_k_and_v_in_16_bits(run: Run, dtype: list[str]):
    done = run("memory", *LLAMA_7B, *dtype, "--kv-scales", "token")
    assert done.code == 2
    assert "expected --kv-dtype fp8 or int8 with it, got none." in done.err


def test_a_model_folder(run: Run):
    done = run("memory", SHIPPED, "--gib", 0.5)
    assert f"1 slot of {CONFIG.max_position_embeddings} tokens, float16, separate" in done.out
    assert f"per token:    {TOKEN_NBYTES} B" in done.out
    assert f"longest sequence with 1 slot: {CONFIG.max_position_embeddings} tokens, all positions of the model" in done.out


def test_a_budget_for_less_than_the_positions_of_the_model(run: Run):
    done = run("memory", SHIPPED, "--gib", 300 * TOKEN_NBYTES / 2**30)
    assert "longest sequence with 1 slot: 300 tokens\n" in done.out


def test_an_engine_folder_has_the_positions_of_its_model(run: Run, engine: Path):
    assert "tokens, all positions of the model" in run("memory", engine, "--gib", 1).out


def test_windows_are_listed_and_save_nothing(run: Run):
    lines = run("memory", GOLDEN / "gemma3", "--max-sequence-length", 64).out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[:4] for row in rows] == [["0-1", "2", "24", "6"], ["2", "2", "24", ""], ["3", "2", "24", "6"]]
    assert len({row[4] for row in rows}) == 1
    short = run("memory", GOLDEN / "gemma3", "--max-sequence-length", 6).out  # no longer than the window
    assert "window" not in short


def test_a_vision_model_is_its_text_decoder(run: Run, tmp_path: Path):
    text = write_text_decoder(tmp_path / "text", "gemma3")
    found, expected = (run("memory", folder, "--gib", 0.5, "--json") for folder in (VISION / "gemma3", text))
    assert found.code == 0
    assert json.loads(found.out) == json.loads(expected.out)


def test_states_are_listed_with_their_shapes(run: Run):
    done = run("memory", GOLDEN / "bamba", "--max-sequence-length", 64)
    assert "states:       11264 B (11.0 KiB) in 2 layers of (4, 16, 8) and (80, 4), two buffers" in done.out


def test_attention_layers_are_counted_among_all_layers(run: Run):
    lines = run("memory", GOLDEN / "lfm2-bias").out.splitlines()
    assert [line.strip("│").split("│")[0].strip() for line in lines if line.startswith("│")] == ["0", "3"]  # 1 and 2 have states


def test_a_layer_with_both_is_counted_in_both(run: Run):
    out = run("memory", GOLDEN / "falcon_h1", "--max-sequence-length", 64).out
    assert [line.strip("│").split("│")[0].strip() for line in out.splitlines() if line.startswith("│")] == ["0-1"]
    assert "states:       15360 B (15.0 KiB) in 2 layers of (6, 8, 16) and (80, 4), two buffers" in out


def test_k_and_v_of_layers_that_share_them_are_counted_once(run: Run):
    out = run("memory", GOLDEN / "gemma4-shared", "--max-sequence-length", 32).out
    assert [line.strip("│").split("│")[0].strip() for line in out.splitlines() if line.startswith("│")] == ["0-1", "2"]
    assert "shared K/V:   3 more layers read K and V of these" in out
    assert "per token:    384 B" in out  # float16: K and V of 2 heads of 16 in two layers, and of 1 head of 32


def test_states_alone_have_the_limit_that_is_given(run: Run):
    lines = run("memory", GOLDEN / "mamba2", "--gib", 1).out.splitlines()
    assert lines[0] == "1 slot of any number of tokens, float16"
    assert lines[-2] == "  longest sequence with 1 slot: any number of tokens"
    assert run("memory", GOLDEN / "mamba2", "--max-sequence-length", 4096).out.startswith("1 slot of 4096 tokens, float16\n")


def test_a_model_folder_with_other_sizes(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model", head_dim=32)  # 1 layer, 2 KV heads
    done = run("memory", model, "--max-batch-size", 3, "--max-sequence-length", 40, "--dtype", "int8")
    assert "3 slots of 40 tokens, int8, separate" in done.out
    assert "per sequence: 5760 B (5.6 KiB)" in done.out


def test_more_tokens_than_positions(run: Run):
    done = run("memory", SHIPPED, "--max-sequence-length", 513)
    assert done.err == "the model was made for 512 positions: no engine holds slots of 513 tokens\n"
    assert run("memory", SHIPPED, "--max-sequence-length", 512).err == ""


def test_an_engine_folder(run: Run, engine: Path):
    assert "3 slots of 38 tokens, float16, separate" in run("memory", engine).out
    assert "5 slots of 38 tokens, float16, separate" in run("memory", engine, "--max-batch-size", 5).out


def test_only_the_configuration_is_read(run: Run, model: Path):
    (model / "model.safetensors").unlink()
    assert run("memory", model).code == 0


def test_a_budget_too_small_for_one_token(run: Run):
    done = run("memory", SHIPPED, "--max-batch-size", 3, "--gib", 1e-7)
    assert done.code == 0
    assert done.out.splitlines()[-3:] == [
        "in 1e-07 GiB (107 B):",
        "  longest sequence with 3 slots: not even 1 token fits",
        "  largest batch of 512 tokens: not even 1 slot fits",
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length."),
        (LLAMA_7B[:-2], "expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length."),
        ([SHIPPED, "--layers", 3], "expected a folder, or --layers, --kv-heads and --head-dim, got both."),
        ([SHIPPED, "--gib", "nan"], "Invalid value for --gib: expected 0 to 1e+09, got nan."),
        ([SHIPPED, "--gib", "inf"], "Invalid value for --gib: expected 0 to 1e+09, got inf."),
        ([SHIPPED, "--gib", -1], "Invalid value for --gib: expected 0 to 1e+09, got -1.0."),
        ([SHIPPED, "--dtype", "int4"], "'--dtype': expected one of float16, bfloat16, float32, fp8, float8_e4m3fn, int8, got 'int4'."),
        ([SHIPPED, "--fit", "8 gallons"], "--fit: expected a size such as 8GB (10^9 bytes) or 7.5GiB (2^30), got '8 gallons'."),
        ([SHIPPED, "--fit", "8"], "--fit: expected a unit with it, such as 8GB or 8GiB, got '8'."),
        ([SHIPPED, "--fit", "9" * 400 + "GB"], "--fit: expected at most 1e+09 GiB, got '9999"),
        ([*LLAMA_7B, "--fit", "8GB"], "--fit: expected a model folder with it"),
        (["--layers", 10**9], "Invalid value for '--layers'"),
        ([SHIPPED, "--compute-capability", "12.0"], "--compute-capability: expected --engine or --fit with it, got neither."),
        ([SHIPPED, "--adapters-rank", 8], "--adapters-rank: expected --engine or --fit with it, got neither."),
        ([SHIPPED, "--max-logits-per-slot", 3], "--max-logits-per-slot: expected --engine with it, got none."),
        ([SHIPPED, "--fit", "8GB", "--max-logits-per-slot", 3], "--max-logits-per-slot: expected --engine with it, got none."),
        ([SHIPPED, "--quantize", "int4"], "--quantize: expected --engine with it, got none"),
        ([SHIPPED, "--fit", "8GB", "--quantize", "int4"], "--quantize: expected without --fit, which lists all formats"),
        ([SHIPPED, "--fit", "8GB", "--engine", "--quantize", "int4"], "--quantize: expected without --fit"),
        ([SHIPPED, "--fit", "8GB", "--kv-dtype", "int8"], "--kv-dtype: expected without --fit"),
        ([SHIPPED, "--fit", "8GB", "--dtype", "int8"], "--dtype: expected without --fit"),
        ([SHIPPED, "--fit", "8GB", "--kv-scales", "head"], "--kv-scales: expected --kv-dtype fp8 or int8 with it"),
    ],
    ids=str,
)
def test_wrong_usage(run: Run, arguments: list[object], complaint: str):
    done = run("memory", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--layers", 2, "--kv-heads", 2, "--head-dim", 5, "--max-sequence-length", 9], "expected a multiple of 16 bytes."),
        ([SHIPPED, "--max-sequence-length", 10**30], "max_sequence_length: expected an integer from 1 to 2147483647"),
        ([GOLDEN / "nothing"], f"{GOLDEN / 'nothing'}: expected a model folder, an engine folder, or an id of the Hugging Face Hub"),
        ([SHIPPED / "config.json"], "config.json: expected a model folder, got a file that is no GGUF file."),
        ([GOLDEN], f"{GOLDEN / 'config.json'}: expected a file, got nothing there. A Hugging Face model folder has one."),
    ],
    ids=str,
)
def test_sizes_and_folders_that_are_refused(run: Run, arguments: list[object], complaint: str):
    done = run("memory", *arguments)
    assert (done.code, done.out) == (1, "")
    assert complaint in done.err


@pytest.mark.parametrize("capability", ["abc", "8", "8.6.1", "-8.6"])
@pytest.mark.parametrize("more", [("--engine",), ("--fit", "8GB")], ids=str)
def test_a_compute_capability_that_is_none(run: Run, more: tuple[str, ...], capability: str):
    done = run("memory", SHIPPED, *more, f"--compute-capability={capability}")
    assert (done.code, done.out) == (1, "")
    assert "--compute-capability: expected some " in done.err  # TensorRT knows which, where it is installed
    assert f"got '{capability}'." in done.err


@pytest.mark.parametrize("more", [(), ("--engine",), ("--fit", "8GB")])
def test_a_rounding_that_is_not_known(run: Run, more: tuple[str, ...]):
    done = run("memory", SHIPPED, "--quantize", "int7", *more)
    assert (done.code, done.out) == (1, "")
    assert "quantize: weights: expected one of int8, int4, int4:32, int4:128, got 'int7'" in done.err


def test_what_fits_into_a_gpu(run: Run, tmp_path: Path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 4096}
    model = write_model(tmp_path / "model", **sizes)
    done = run("memory", model, "--fit", "6MB", "--max-batch-size", 2, "--max-sequence-length", 300)
    found = json.loads(run("memory", model, "--fit", "6000000", "--max-batch-size", 2, "--max-sequence-length", 300, "--json").out)["fits"]
    fits = what_fits(model, 6_000_000, max_batch_size=2, max_sequence_length=300)
    assert [(one["weights"], one["kv_scales"], one["longest_sequence"]) for one in found] == [
        (fit.weights, fit.kv_scales, fit.longest_sequence) for fit in fits
    ]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.out.splitlines() if line.startswith("│")][-len(fits) :]
    assert [row[3:] for row in rows] == [[str(fit.longest_sequence), str(fit.largest_batch)] for fit in fits]
    assert rows[1][:2] == ["float16", "8 bits, scale a token"]
    asked = ("--engine", "--max-sequence-length", 300, "--adapters-rank", 500, "--json")
    adapted = json.loads(run("memory", model, "--fit", "6MB", *asked).out)
    assert adapted["build"]["adapters_nbytes"] > 0
    assert [one["largest_batch"] for one in adapted["fits"]] == [
        fit.largest_batch for fit in what_fits(model, 6_000_000, max_sequence_length=300, adapters_rank=500)
    ]
    assert adapted["fits"][0]["largest_batch"] < fits[0].largest_batch
    assert "tokens of 2 slots" in done.out
    assert "slots of 300 tokens" in done.out


def test_what_fits_of_a_model_that_tensorrt_does_not_build(run: Run):
    done = run("memory", GOLDEN / "qwen3_moe", "--fit", "1GB")
    assert done.code == 0
    assert "with PyTorch, since TensorRT does not build this model" in " ".join(done.out.split())
    found = json.loads(run("memory", GOLDEN / "qwen3_moe", "--fit", "1GB", "--json").out)["fits"]
    assert {one["engine"] for one in found} == {"torch"}


def test_json_is_one_document(run: Run):
    done = run("memory", SHIPPED, "--max-batch-size", 2, "--gib", 1, "--json")
    found = json.loads(done.out)
    assert sorted(found) == ["config", "estimate", "largest_batch", "longest_sequence"]
    assert (found["config"]["max_batch_size"], found["config"]["dtype"]) == (2, "float16")
    assert found["estimate"]["nbytes"] > 0
    assert found["largest_batch"] > 2


def test_json_says_0_where_nothing_fits(run: Run):
    found = json.loads(run("memory", SHIPPED, "--gib", 0, "--json").out)
    assert (found["longest_sequence"], found["largest_batch"]) == (0, 0)


def test_engine_adds_what_a_build_takes(run: Run):
    done = run("memory", SHIPPED, "--engine", "--max-batch-size", 4)
    assert done.code == 0
    assert "plan: weights and kernels" in done.out
    assert "host, at the peak of the build" in done.out


def test_engine_is_in_the_json_too(run: Run):
    found = json.loads(run("memory", SHIPPED, "--engine", "--json").out)
    assert found["build"]["cache_nbytes"] == found["estimate"]["nbytes"]


def test_engine_counts_the_logits_of_more_tokens(run: Run):
    one, more = (
        json.loads(run("memory", SHIPPED, "--engine", "--json", *given).out)["build"]["activations_nbytes"]
        for given in ((), ("--max-logits-per-slot", 9))
    )
    assert more - one == 8 * CONFIG.vocab_size * (2 + 4)


def test_scales_that_the_checkpoint_lacks(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model", head_dim=64)
    done = run("memory", model, "--engine", "--kv-dtype", "int8", "--kv-scales", "head")
    assert (done.code, done.out) == (1, "")
    assert "--kv-scales: expected token, as the checkpoint has no static scales of K and V in int8, got head." in done.err


@pytest.mark.parametrize("option", ["--dtype", "--kv-dtype"])
def test_both_names_of_fp8(run: Run, tmp_path: Path, option: str):
    model = write_model(tmp_path / "model", head_dim=64)
    short, full = (json.loads(run("memory", model, "--engine", "--json", option, name).out) for name in ("fp8", "float8_e4m3fn"))
    assert short == full
    assert short["config"]["dtype"] == "float8_e4m3fn"


@pytest.mark.parametrize("said", [["--dtype", "int8"], ["--kv-dtype", "int8"], ["--kv-dtype", "fp8", "--dtype", "bfloat16"]])
def test_an_engine_with_k_and_v_in_8_bits(run: Run, tmp_path: Path, said: list[str]):
    model = write_model(tmp_path / "model", head_dim=64)
    found = json.loads(run("memory", model, "--engine", "--json", "--max-batch-size", 2, *said).out)
    assert found["config"]["dtype"] == ("float8_e4m3fn" if "fp8" in said else "int8")
    assert found["config"]["scales"] == "token"
    assert found["build"]["cache_nbytes"] == found["estimate"]["nbytes"]


def test_states_beside_k_and_v_in_8_bits(run: Run):
    """``--dtype`` is that of what is computed, and of convolution states."""
    found = json.loads(run("memory", GOLDEN / "granitemoehybrid-bias", "--json", "--kv-dtype", "int8", "--dtype", "bfloat16").out)["config"]
    assert (found["kv"]["dtype"], found["mamba"]["conv_dtype"]) == ("int8", "bfloat16")


def test_two_dtypes_of_k_and_v(run: Run):
    done = run("memory", *LLAMA_7B, "--dtype", "int8", "--kv-dtype", "fp8")
    assert done.code == 2
    assert "expected --dtype float16 or bfloat16 or float32 with it, got int8." in done.err


def test_engine_needs_a_model(run: Run):
    done = run("memory", "--layers", 2, "--kv-heads", 1, "--head-dim", 64, "--max-sequence-length", 8, "--engine")
    assert (done.code, done.out) == (2, "")
    assert "expected a model folder" in done.err


def test_the_default_length_is_that_of_build(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model", max_position_embeddings=4096)
    assert "1 slot of 2048 tokens" in run("memory", model).out
    assert "1 slot of 4096 tokens" in run("memory", model, "--max-sequence-length", 4096).out


def test_what_fits_of_an_engine_folder_names_its_model(run: Run, tmp_path: Path):
    engine = make_engine_folder(SHIPPED, tmp_path / "engine").path
    done = run("memory", engine, "--fit", "8GB")
    assert done.code == 2
    assert f"got an engine folder, whose formats are fixed. It was built from {SHIPPED}." in done.complaint
    assert " of 38 tokens, float16" in run("memory", engine).out


def test_rows_that_are_not_what_their_names_let_expect_have_a_footnote(run: Run, tmp_path: Path):
    done = run("memory", SHIPPED, "--fit", "10MB")
    assert "\n(1) fewer slots: kernels for rounded weights take more than rounding saves of a model this small\n" in done.out
    assert "│ int8 (1) " in done.out
    assert "│ float16 │" in done.out.replace("  ", "")
    assert "\n(1) not even one token, or one slot, fits\n" in run("memory", SHIPPED, "--fit", "1000B").out


def test_parameters_of_a_model_with_experts(run: Run):
    done = run("memory", GOLDEN / "mixtral")
    assert done.code == 0, done.err
    document = json.loads(run("memory", GOLDEN / "mixtral", "--json").out)
    total, active = (document["parameters"][name] for name in ("total", "active"))
    assert done.out.splitlines()[-1] == f"parameters:   {total} (0.0 billion), {active} (0.0 billion) of them for each token"
    assert total - active == 2 * 3 * (3 * 36 * 48)
    assert "parameters" not in json.loads(run("memory", GOLDEN / "llama", "--json").out)


def test_engines_of_models_with_experts_that_no_plugin_layer_computes_are_refused_by_name(run: Run, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((GOLDEN / "mixtral" / "config.json").read_bytes())
    for folder in (GOLDEN / "mixtral", tmp_path):
        done = run("memory", folder, "--engine")
        assert (done.code, "plugin: head_dim: expected one of 64" in done.err) == (1, True)
        assert 'engine="torch" and engine="numpy" run it.' in done.err
