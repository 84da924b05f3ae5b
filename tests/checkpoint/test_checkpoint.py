"""Model folders: what is read from them, and what is refused before anything is used."""

from __future__ import annotations

import gc
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint import checkpoint as checkpoint_module
from trt_kvcache.errors import CheckpointError, ClosedError

Q_PROJ, HEAD, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
DOWN_PROJ, Q_BIAS = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"
NORM = "model.layers.{}.input_layernorm.weight"
SINGLE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"


def config(**changes):
    """Return a function that changes fields of config.json; ``...`` takes one away."""

    def edit(folder):
        data = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))

    return edit


def tensors(change, file=SINGLE):
    """Return a function that changes the dict of tensors of a file."""

    def edit(folder):
        stored = load_file(folder / file)
        change(stored)
        save_file(stored, folder / file)

    return edit


def put(name, make, file=SINGLE):
    """Return a function that stores what ``make`` makes of the tensors as one of them."""
    return tensors(lambda stored: stored.update({name: np.ascontiguousarray(make(stored))}), file)


def content(file, data):
    """Return a function that replaces a file: by bytes, by what a function makes of them, or by nothing."""

    def edit(folder):
        path = folder / file
        new = data(path.read_bytes()) if callable(data) else data
        path.unlink()
        if new is not None:
            path.write_bytes(new)

    return edit


def index(weight_map):
    return content(INDEX, json.dumps({"weight_map": weight_map}).encode())


def ones(stored):
    return np.ones(32, np.float32)


def fingerprint(folder):
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.fingerprint()


@pytest.mark.parametrize(
    ("name", "dtype", "numpy_dtype"),
    [
        ("llama", "float32", np.float32),
        ("llama-linear", "float16", np.float16),
        ("llama-bfloat16-old", "bfloat16", ml_dtypes.bfloat16),
        ("qwen3-sharded", "float16", np.float16),
    ],
)
def test_tensors_are_read_only_views_of_the_files_that_outlive_the_checkpoint(copy_of, name, dtype, numpy_dtype):
    folder = copy_of(name)
    stored = {key: array for file in folder.glob("*.safetensors") for key, array in load_file(file).items()}
    with Checkpoint.open(folder) as checkpoint:
        assert (checkpoint.path, checkpoint.config.dtype) == (folder, dtype)
        assert set(checkpoint.tensor_names) == set(stored)
        assert checkpoint.nbytes == sum(array.nbytes for array in stored.values())
        arrays = {key: checkpoint.tensor(key) for key in stored}
        with pytest.raises(CheckpointError, match=r"tensor of the model, got 'lm_head\.bias'"):
            checkpoint.tensor("lm_head.bias")
    checkpoint.close()
    with pytest.raises(ClosedError, match=rf"checkpoint .*{name} is closed"):
        checkpoint.tensor(Q_PROJ)
    del checkpoint
    gc.collect()
    for key, array in arrays.items():
        assert (array.dtype, array.flags.owndata, array.flags.writeable) == (np.dtype(numpy_dtype), False, False)
        np.testing.assert_array_equal(array, stored[key])


def test_a_file_whose_tensors_are_not_aligned(copy_of):
    """Old writers did not pad the header; the arrays are usable all the same."""
    folder = copy_of("llama")
    expected = load_file(folder / SINGLE)[Q_PROJ]

    def odd(data):
        end = 8 + int.from_bytes(data[:8], "little")
        header = data[8:end].rstrip(b" ")
        header += b" " * (1 - len(header) % 2)
        return len(header).to_bytes(8, "little") + header + data[end:]

    content(SINGLE, odd)(folder)
    with Checkpoint.open(folder) as checkpoint:
        array = checkpoint.tensor(Q_PROJ)
    assert (array.flags.aligned, array.flags.writeable) == (True, False)
    np.testing.assert_array_equal(array, expected)


def test_files_are_what_a_copy_needs(copy_of):
    folder = copy_of("qwen3-sharded")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not needed")
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    with Checkpoint.open(folder) as checkpoint:
        names = [str(file.relative_to(folder)) for file in checkpoint.files]
    assert names == ["config.json", INDEX, *shards, "generation_config.json", "tokenizer.json"]


def test_fingerprint_does_not_see_shards_spelling_or_how_much_is_read_at_once(copy_of, monkeypatch):
    folder = copy_of("qwen3-sharded")
    before = fingerprint(folder)
    stored = {}
    for shard in folder.glob("model-*.safetensors"):
        stored |= load_file(shard)
        shard.unlink()
    (folder / INDEX).unlink()
    save_file(stored, folder / SINGLE)
    config(rope_parameters=..., rope_theta=10000.0, dtype=..., torch_dtype="float16", transformers_version="4.40.0")(folder)
    monkeypatch.setattr(checkpoint_module, "_HASH_CHUNK_BYTES", 100)
    assert fingerprint(folder) == before
    assert len(before) == 64


def test_fingerprint_sees_one_bit_and_every_config_field(copy_of):
    folder = copy_of("llama")
    seen = {fingerprint(folder)}
    edits = [config(rms_norm_eps=2e-5), config(rope_parameters={"rope_type": "default", "rope_theta": 10001.0})]
    for first in (True, False):  # a bit of the first byte of a tensor, and of the last

        def flip(data, first=first):
            place = 8 + int.from_bytes(data[:8], "little") if first else len(data) - 1
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        edits.append(content(SINGLE, flip))
    for edit in [*edits, put("model.norm.weight", lambda t: t[NORM.format(0)])]:
        edit(folder)
        seen.add(fingerprint(folder))
    assert len(seen) == 6


def test_fingerprint_reports_progress(copy_of):
    reports = []
    with Checkpoint.open(copy_of("llama")) as checkpoint:
        checkpoint.fingerprint(lambda done, total: reports.append((done, total)))
        assert reports == sorted(reports)
        assert reports[-1] == (checkpoint.nbytes, checkpoint.nbytes)
        assert len(reports) >= len(checkpoint.tensor_names)


def test_dtype_that_the_config_does_not_name_comes_from_the_weights(copy_of):
    folder = copy_of("llama-linear")
    config(dtype=...)(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config.dtype == "float16"


def test_old_buffers_and_an_equal_tied_head_are_ignored(copy_of):
    folder = copy_of("qwen2-tied")
    before = fingerprint(folder)
    put(HEAD, lambda t: t[EMBEDDING])(folder)
    put("model.layers.0.self_attn.rotary_emb.inv_freq", ones)(folder)
    assert fingerprint(folder) == before
    with Checkpoint.open(folder) as checkpoint:
        assert HEAD not in checkpoint.tensor_names


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("qwen2-tied", put(HEAD, lambda t: -t[EMBEDDING]), f"says `tie_word_embeddings`, but {HEAD} differs from {EMBEDDING}"),
        ("qwen2-tied", config(tie_word_embeddings=False), f"1 tensor(s) of a qwen2 model are missing: {HEAD}*tie_word_embeddings: true"),
        ("llama", tensors(lambda t: t.pop(Q_PROJ)), f"1 tensor(s) of a llama model are missing: {Q_PROJ}."),
        ("llama", put(Q_PROJ, lambda t: t[Q_PROJ][:-1]), f"expected {Q_PROJ} of shape (32, 32) by config.json, got (31, 32)"),
        ("llama", put(DOWN_PROJ, lambda t: t[DOWN_PROJ].T), f"expected {DOWN_PROJ} of shape (32, 40) by config.json, got (40, 32)"),
        ("llama", put(Q_PROJ, lambda t: np.float16(t[Q_PROJ])), f"expected every tensor in float32, got {Q_PROJ} in float16"),
        ("llama", put(Q_PROJ, lambda t: np.int8(t[Q_PROJ])), f"expected every tensor in float32, got {Q_PROJ} in I8"),
        ("llama", put(Q_BIAS, ones), f"1 tensor(s) that a llama model by config.json does not use: {Q_BIAS}. Leaving them out"),
        ("llama", put(NORM.format(2), ones), f"does not use: {NORM.format(2)}."),
        ("llama", config(dtype="bfloat16"), "if all are float32, config.json must say so"),
        (
            "llama",
            config(num_hidden_layers=3),
            f"9 tensor(s) of a llama model are missing: {NORM.format(2)}, *model.layers.2.self_attn.k_proj.weight, ....",
        ),
        ("llama", config(model_type="mixtral"), "{folder}/config.json: model_type: 'mixtral' is not supported. Supported:"),
        ("llama", content("config.json", b"{"), "{folder}/config.json: expected JSON, got a syntax error"),
        ("llama", content("config.json", b"[1]"), "{folder}/config.json: expected a JSON object, got list"),
        ("llama", content("config.json", None), "{folder}/config.json: expected a file, got nothing there"),
        ("llama", content(SINGLE, b""), f"{{folder}}/{SINGLE}: expected a whole safetensors file, got 0 bytes*may be truncated"),
        ("llama", content(SINGLE, lambda data: data[:-1]), f"{{folder}}/{SINGLE}: expected a whole safetensors file, got "),
        ("llama", content(SINGLE, None), f"{{folder}}: expected {SINGLE}, or shards with {INDEX}, got neither*converted to safetensors"),
        ("qwen3-sharded", content(SHARD, None), f"{{folder}}/{SHARD}: expected a shard that {INDEX} names, got nothing there"),
        ("qwen3-sharded", put("stray", ones, SHARD), f"{{folder}}/{SHARD}: holds 'stray', which {INDEX} does not place there"),
        ("qwen3-sharded", tensors(dict.popitem, SHARD), f"{{folder}}/{SHARD}: {INDEX} places 'model.*' there, but the file has no such"),
        ("qwen3-sharded", index(None), "expected an object `weight_map`"),
        ("qwen3-sharded", index({"a": 3}), "expected an object `weight_map`"),
        ("qwen3-sharded", index({"a": "../a.safetensors"}), "got '../a.safetensors'"),
        ("qwen3-sharded", content(INDEX, b"\xff\xfe"), f"{{folder}}/{INDEX}: cannot be read"),
        ("nowhere", lambda folder: None, "expected a model folder, got nothing there"),
        ("nowhere", lambda folder: folder.touch(), "expected a model folder, got a file"),
    ],
)
def test_what_is_refused(copy_of, tmp_path, name, damage, message):
    folder = tmp_path / name if name == "nowhere" else copy_of(name)
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    for part in message.replace("{folder}", str(folder)).split("*"):
        assert part in str(error.value)
