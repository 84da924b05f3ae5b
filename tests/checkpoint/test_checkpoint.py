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
Q_BIAS, NORM = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.input_layernorm.weight"
SINGLE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"


def config(**changes):
    def edit(folder):
        data = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))

    return edit


def tensors(change, file=SINGLE):
    def edit(folder):
        stored = load_file(folder / file)
        change(stored)
        save_file(stored, folder / file)

    return edit


def put(name, make):
    return tensors(lambda stored: stored.update({name: np.ascontiguousarray(make(stored))}))


def content(file, data):
    def edit(folder):
        path = folder / file
        new = data(path.read_bytes()) if callable(data) else data
        path.unlink()
        if new is not None:
            path.write_bytes(new)

    return edit


def fingerprint(folder):
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.fingerprint()


@pytest.mark.parametrize(
    ("name", "dtype", "numpy_dtype"),
    [("llama", "float32", np.float32), ("llama-bfloat16-old", "bfloat16", ml_dtypes.bfloat16), ("qwen3-sharded", "float16", np.float16)],
)
def test_tensors_are_read_only_views_of_the_files_that_outlive_the_checkpoint(copy_of, name, dtype, numpy_dtype):
    folder = copy_of(name)
    stored = {key: array for file in folder.glob("model*.safetensors") for key, array in load_file(file).items()}
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


def test_fingerprint_sees_one_bit_every_tensor_and_every_config_field(copy_of):
    folder = copy_of("llama")
    seen = {fingerprint(folder)}
    flip = content(SINGLE, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    theta = config(rope_parameters={"rope_type": "default", "rope_theta": 10001.0})
    for edit in (config(rms_norm_eps=2e-5), theta, flip, put("model.norm.weight", lambda t: t[NORM])):
        edit(folder)
        seen.add(fingerprint(folder))
    assert len(seen) == 5


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
    assert fingerprint(folder) == before
    config(torch_dtype=...)(folder)  # it comes from the weights
    monkeypatch.setattr(checkpoint_module, "_HASH_CHUNK_BYTES", 100)
    assert fingerprint(folder) == before
    assert len(before) == 64


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("qwen2-tied", put(HEAD, lambda t: -t[EMBEDDING]), f"says `tie_word_embeddings`, but {HEAD} differs from {EMBEDDING}"),
        ("llama", tensors(lambda t: t.pop(Q_PROJ)), f"1 tensor(s) of a llama model are missing: {Q_PROJ}."),
        ("qwen2-tied", config(tie_word_embeddings=False), f"1 tensor(s) of a qwen2 model are missing: {HEAD}*tie_word_embeddings: true"),
        ("llama", put(Q_PROJ, lambda t: t[Q_PROJ][:-1]), f"expected {Q_PROJ} of shape (32, 32) by config.json, got (31, 32)"),
        ("llama", put(Q_BIAS, lambda t: t[NORM]), f"1 tensor(s) that a llama model by config.json does not use: {Q_BIAS}. Leaving"),
        ("llama", config(dtype="bfloat16"), "if all are float32, config.json must say so"),
        ("llama", content("config.json", b"{"), "{folder}/config.json: expected JSON, got a syntax error"),
        ("qwen3-sharded", content(SHARD, None), f"{{folder}}/{SHARD}: expected a shard that {INDEX} names, got nothing there"),
        ("llama", content(SINGLE, b""), f"{{folder}}/{SINGLE}: expected a whole safetensors file, got 0 bytes*may be truncated"),
        ("llama", content(SINGLE, None), f"{{folder}}: expected {SINGLE}, or shards with {INDEX}, got neither*converted to safetensors"),
        ("qwen3-sharded", tensors(dict.popitem, SHARD), f"{{folder}}/{SHARD}: {INDEX} places 'model.*' there, but the file has no such"),
        ("qwen3-sharded", content(INDEX, b'{"weight_map": null}'), "expected an object `weight_map`"),
        ("qwen3-sharded", content(INDEX, b'{"weight_map": {"a": "../a.safetensors"}}'), "got '../a.safetensors'"),
    ],
)
def test_what_is_refused(copy_of, name, damage, message):
    folder = copy_of(name)
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    for part in message.replace("{folder}", str(folder)).split("*"):
        assert part in str(error.value)
