"""``Checkpoint``: tensors, fingerprints, and folders that do not fit their configuration."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.folders import Q_PROJ, CopyOf, Tensors, edit_config, edit_tensors, refused, unshard
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint, checkpoint as checkpoint_module
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError, ClosedError


@pytest.mark.parametrize(
    ("name", "dtype", "numpy_dtype"),
    [
        ("llama", "float32", np.float32),
        ("llama-linear", "float16", np.float16),
        ("llama-bfloat16-old", "bfloat16", ml_dtypes.bfloat16),
        ("qwen3-sharded", "float16", np.float16),
    ],
)
def test_tensors_are_those_of_the_files(copy_of: CopyOf, name: str, dtype: str, numpy_dtype: Any) -> None:
    folder = copy_of(name)
    stored: Tensors = {}
    for file in folder.glob("model*.safetensors"):
        stored |= load_file(file)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.path == folder
        assert checkpoint.config.dtype == dtype
        assert set(checkpoint.tensor_names) == set(stored)
        assert checkpoint.nbytes == sum(array.nbytes for array in stored.values())
        for tensor_name, expected in stored.items():
            array = checkpoint.tensor(tensor_name)
            assert array.dtype == np.dtype(numpy_dtype)
            np.testing.assert_array_equal(array, expected)


def test_tensors_are_read_only_views_that_outlive_the_checkpoint(copy_of: CopyOf) -> None:
    checkpoint = Checkpoint.open(copy_of("llama"))
    array = checkpoint.tensor(Q_PROJ)
    expected = array.copy()
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 0
    checkpoint.close()
    checkpoint.close()
    del checkpoint
    gc.collect()
    np.testing.assert_array_equal(array, expected)


def test_reading_from_a_closed_checkpoint_is_refused(copy_of: CopyOf) -> None:
    checkpoint = Checkpoint.open(copy_of("llama"))
    checkpoint.close()
    with pytest.raises(ClosedError, match=r"checkpoint .*llama is closed"):
        checkpoint.tensor(Q_PROJ)


def test_an_unknown_tensor_is_refused(copy_of: CopyOf) -> None:
    with Checkpoint.open(copy_of("llama")) as checkpoint, pytest.raises(CheckpointError, match=r"tensor of the model, got 'lm_head\.bias'"):
        checkpoint.tensor("lm_head.bias")


def test_files_are_those_that_a_copy_needs(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    for name in ("generation_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("not needed")
    with Checkpoint.open(folder) as checkpoint:
        assert [file.relative_to(folder).as_posix() for file in checkpoint.files] == [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "generation_config.json",
            "tokenizer.json",
        ]


def fingerprint(folder: Path) -> str:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.fingerprint()


def test_fingerprint_does_not_see_shards_or_spelling(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    before = fingerprint(folder)
    unshard(folder)
    edit_config(folder, rope_parameters=..., rope_theta=10000.0, dtype=..., torch_dtype="float16", transformers_version="4.40.0")
    assert fingerprint(folder) == before
    assert len(before) == 64


def test_fingerprint_sees_one_bit_and_every_config_field(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    seen = {fingerprint(folder)}
    edit_config(folder, rms_norm_eps=2e-5)
    seen.add(fingerprint(folder))
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 10001.0})
    seen.add(fingerprint(folder))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    for position in (-1, 8 + int.from_bytes(content[:8], "little")):  # the last byte, and the first one of a tensor
        content[position] ^= 1
        file.write_bytes(content)
        seen.add(fingerprint(folder))
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.layers.0.input_layernorm.weight"]}))
    seen.add(fingerprint(folder))
    assert len(seen) == 6


def test_fingerprint_does_not_depend_on_how_much_is_read_at_once(copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of("llama")
    before = fingerprint(folder)
    monkeypatch.setattr(checkpoint_module, "_HASH_CHUNK_BYTES", 100)
    assert fingerprint(folder) == before


def test_fingerprint_reports_progress(copy_of: CopyOf) -> None:
    reports: list[tuple[int, int]] = []
    with Checkpoint.open(copy_of("llama")) as checkpoint:
        checkpoint.fingerprint(lambda done, total: reports.append((done, total)))
        assert reports == sorted(reports)
        assert reports[-1] == (checkpoint.nbytes, checkpoint.nbytes)
        assert len(reports) >= len(checkpoint.tensor_names)


def test_dtype_that_the_config_does_not_name_comes_from_the_weights(copy_of: CopyOf) -> None:
    folder = copy_of("llama-linear")
    edit_config(folder, dtype=...)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config.dtype == "float16"


def test_old_buffers_and_an_equal_tied_head_are_ignored(copy_of: CopyOf) -> None:
    folder = copy_of("qwen2-tied")

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    before = fingerprint(folder)
    edit_tensors(folder, add)
    assert fingerprint(folder) == before
    with Checkpoint.open(folder) as checkpoint:
        assert "lm_head.weight" not in checkpoint.tensor_names


def test_a_tied_head_of_its_own_is_refused(copy_of: CopyOf) -> None:
    folder = copy_of("qwen2-tied")
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": -tensors["model.embed_tokens.weight"]}))
    assert "config.json says `tie_word_embeddings`, but lm_head.weight differs from model.embed_tokens.weight" in refused(folder)


def test_untied_without_a_head_gets_a_hint(copy_of: CopyOf) -> None:
    folder = copy_of("qwen2-tied")
    edit_config(folder, tie_word_embeddings=False)
    message = refused(folder)
    assert "1 tensor(s) of a qwen2 model are missing: lm_head.weight" in message
    assert "tie_word_embeddings: true" in message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"1 tensor(s) of a llama model are missing: {Q_PROJ}."),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ][:-1]}), f"expected {Q_PROJ} of shape (32, 32) by config.json, got (31, 32)"),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": t["model.layers.0.mlp.down_proj.weight"].T.copy()}),
            "expected model.layers.0.mlp.down_proj.weight of shape (32, 40) by config.json, got (40, 32)",
        ),
        (
            lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}),
            f"expected every tensor in float16, bfloat16, float32, got {Q_PROJ} in I8. "
            "Quantized weights are read where `quantization_config` says how.",
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.float64)}), f"got {Q_PROJ} in F64"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            "1 tensor(s) that a llama model by config.json does not use: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(32, np.float32)}),
            "does not use: model.layers.2.input_layernorm.weight. Leaving them out would run another model.",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(copy_of: CopyOf, edit: Callable[[Tensors], object], message: str) -> None:
    folder = copy_of("llama")
    edit_tensors(folder, edit)
    assert message in refused(folder)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_converted_to_the_dtype_of_the_config(copy_of: CopyOf, dtype: str) -> None:
    folder = copy_of("llama")
    stored = load_file(folder / "model.safetensors")
    edit_config(folder, dtype=dtype)
    with pytest.warns(UserWarning, match="are converted") as caught:
        opened = Checkpoint.open(folder)
    with opened as checkpoint:
        assert checkpoint.config.dtype == dtype
        assert checkpoint.nbytes == sum(array.nbytes for array in stored.values()) // 2
        for name, array in stored.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), array.astype(numpy_dtype(dtype)))
            assert not checkpoint.tensor(name).flags.writeable
    assert [str(warning.message) for warning in caught] == [
        f"{folder}: {len(stored)} tensor(s) are stored in float32 and are converted to {dtype}, the dtype of the model by config.json: "
        "model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.self_attn.q_proj.weight, ...."
    ]
    assert caught[0].filename == __file__


def widen_norms(tensors: Tensors) -> None:
    tensors.update({name: array.astype(np.float32) for name, array in tensors.items() if "norm" in name})


@pytest.mark.parametrize("name", ["llama-bfloat16-old", "llama-linear"])
def test_norms_in_float32_run_as_those_of_the_dtype_of_the_model(copy_of: CopyOf, name: str) -> None:
    folder = copy_of(name)
    before, tokens = fingerprint(folder), greedy_tokens(folder)
    edit_tensors(folder, widen_norms)
    with pytest.warns(UserWarning, match=r"tensor\(s\) are stored in float32 and are converted to b?float16"):
        after = fingerprint(folder)
    with pytest.warns(UserWarning, match="are converted"):
        assert greedy_tokens(folder) == tokens
    assert after == before


def greedy_tokens(folder: Path) -> list[int]:
    with InferenceSession.from_model(folder, engine="reference", max_sequence_length=16) as session:
        return [event.token for event in session.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True)]


def test_weights_that_the_dtype_of_the_config_cannot_hold_are_refused_when_they_are_read(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    edit_tensors(folder, lambda tensors: tensors[Q_PROJ].__setitem__((0, 0), 1e5))
    edit_config(folder, dtype="float16")
    with pytest.warns(UserWarning, match="are converted"):
        opened = Checkpoint.open(folder)
    with opened as checkpoint:
        checkpoint.tensor("model.norm.weight")
        with pytest.raises(CheckpointError, match=f"{Q_PROJ} is stored in float32 and has values that float16, the dtype of"):
            checkpoint.tensor(Q_PROJ)


def test_a_tied_head_in_another_dtype_is_compared_after_the_conversion(copy_of: CopyOf) -> None:
    folder = copy_of("qwen2-tied")
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    with Checkpoint.open(folder) as checkpoint:
        assert "lm_head.weight" not in checkpoint.tensor_names
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": -head}))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(folder)


def test_many_missing_tensors_are_not_all_listed(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    edit_config(folder, num_hidden_layers=3)
    message = refused(folder)
    assert "9 tensor(s) of a llama model are missing: model.layers.2.input_layernorm.weight, " in message
    assert message.endswith("model.layers.2.self_attn.k_proj.weight, ....")


def test_an_unsupported_model_is_refused_with_its_file(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    edit_config(folder, model_type="mixtral")
    assert f"{folder / 'config.json'}: model_type: 'mixtral' is not supported. Supported" in refused(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "expected JSON, got a syntax error"), ("[1]", "expected a JSON object, got list"), (None, "expected a file, got nothing there")],
)
def test_config_file_missing_or_damaged(copy_of: CopyOf, text: str | None, message: str) -> None:
    folder = copy_of("llama")
    path = folder / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert f"{path}: {message}" in refused(folder)


def test_not_a_folder(tmp_path: Path) -> None:
    assert "expected a model folder, got nothing there" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "expected a model folder, got a file" in refused(tmp_path / "file")


def in_float64(tensors: Tensors) -> None:
    tensors.update({name: array.astype(np.float64) for name, array in tensors.items()})


def test_weights_of_an_unsupported_dtype_are_refused_with_file_and_tensor_if_the_config_names_no_dtype(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    edit_config(folder, dtype=...)
    edit_tensors(folder, in_float64)
    assert refused(folder) == (
        f"{folder / 'model.safetensors'}: expected weights in one of float16, bfloat16, float32, got model.embed_tokens.weight in F64. "
        "Convert the checkpoint, or use one that is not quantized."
    )
