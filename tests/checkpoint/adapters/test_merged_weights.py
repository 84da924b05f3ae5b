"""``Checkpoint.open(adapter=)``: merged tensors, their one rounding, and adapters of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.folders import edit_config, edit_tensors
from tests.golden.weights import SEEDS, VISION
from tests.helpers.adapters import DOWN_PROJ, Q_PROJ, SHAPES, edit_adapter, merged, tensors_of, write_adapter
from tests.helpers.assertions import raises
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import write_model
from tests.helpers.quantized_models import CASES, write_quantized
from tests.paths import GOLDEN
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.adapters import merged_weights
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, tensor_shapes

Q, K = f"{Q_PROJ}.weight", "model.layers.0.self_attn.k_proj.weight"

#: Sums of at most 3 products in float32.
EXACT = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def base_tensor(folder: Path, name: str) -> np.ndarray[Any, Any]:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.tensor(name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_merged_tensors_are_float32_and_the_others_as_stored(tmp_path: Path, dtype: str) -> None:
    base = write_model(tmp_path / "model", num_hidden_layers=2, torch_dtype=dtype)
    adapter = write_adapter(tmp_path / "adapter", dtype=ml_dtypes.bfloat16)
    with Checkpoint.open(base, adapter=adapter) as checkpoint, Checkpoint.open(base) as plain:
        for name in checkpoint.tensor_names:
            module, tensor = name.removesuffix(".weight"), checkpoint.tensor(name)
            assert not tensor.flags.writeable
            if module in SHAPES:
                assert tensor.dtype == np.float32
                np.testing.assert_allclose(tensor, merged(adapter, plain.tensor(name), module, 7 / 3), **EXACT)
            else:
                np.testing.assert_array_equal(tensor, plain.tensor(name))
        assert checkpoint.nbytes == plain.nbytes
        assert checkpoint.weights == plain.weights
        assert checkpoint.config == plain.config
        assert [checkpoint.nbytes_of(name) for name in checkpoint.tensor_names] == [plain.nbytes_of(name) for name in plain.tensor_names]


def test_a_merged_weight_is_rounded_once(tmp_path: Path) -> None:
    """1 + 2**-8 + 2**-13 is more than half of the way to the next bfloat16; in float16, the dtype of the model, it is half of it."""
    base, name = write_model(tmp_path / "model", num_hidden_layers=2), f"{DOWN_PROJ}.weight"
    edit_tensors(base, lambda tensors: tensors[name].fill(1))
    adapter = write_adapter(tmp_path / "adapter", {DOWN_PROJ: (40, 28)}, rank=1, lora_alpha=1)
    a, b = (f"base_model.model.{DOWN_PROJ}.lora_{side}.weight" for side in "AB")
    edit_adapter(adapter, {a: np.full((1, 28), 2**-8 + 2**-13, np.float32), b: np.ones((40, 1), np.float32)})
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        found = RoundedTensors(checkpoint, "bfloat16")(name)
    assert (found == ml_dtypes.bfloat16(1 + 2**-7)).all()


@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_dora_scales_rows_to_their_magnitudes(base: Path, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, magnitudes = write_adapter(tmp_path / "dora", {Q_PROJ: (96, 40)}, use_dora=True), np.linspace(0.5, 2, 96, dtype=np.float32)
    edit_adapter(adapter, {**tensors_of(adapter), f"base_model.model.{Q_PROJ}.lora_magnitude_vector": magnitudes})
    monkeypatch.setattr(merged_weights, "_CHUNK", chunk)
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        found, first = checkpoint.tensor(Q), checkpoint.fingerprint()
    rows = merged(adapter, base_tensor(base, Q), Q_PROJ, 7 / 3)
    np.testing.assert_allclose(found, rows / np.linalg.norm(rows, axis=1, keepdims=True) * magnitudes[:, None], **EXACT)
    edit_adapter(adapter, {**tensors_of(adapter), f"base_model.model.{Q_PROJ}.lora_magnitude_vector": magnitudes[::-1]})
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        assert checkpoint.fingerprint() != first


def with_norm(adapter: Path, norm: np.ndarray[Any, Any]) -> Path:
    write_adapter(adapter, modules_to_save=["norm"])
    edit_adapter(adapter, {**tensors_of(adapter), "base_model.model.model.norm.weight": norm})
    return adapter


def test_whole_tensors_keep_their_dtype_until_they_are_rounded_once(base: Path, adapter: Path) -> None:
    norm = np.full(40, 1 + 2**-8 + 2**-13, np.float32)
    with Checkpoint.open(base, adapter=with_norm(adapter, norm)) as checkpoint, Checkpoint.open(base) as plain:
        np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), norm)
        assert (RoundedTensors(checkpoint, "bfloat16")("model.norm.weight") == ml_dtypes.bfloat16(1 + 2**-7)).all()
        np.testing.assert_array_equal(checkpoint.tensor(K), plain.tensor(K))
        first = checkpoint.fingerprint()
    with Checkpoint.open(base, adapter=with_norm(adapter, norm + 1)) as checkpoint:
        assert checkpoint.fingerprint() != first


def test_whole_tensors_are_rounded_to_other_formats_too(base: Path, adapter: Path) -> None:
    weight, name = np.random.default_rng(5).standard_normal((48, 40)).astype(np.float32), K.removesuffix(".weight")
    write_adapter(adapter, modules_to_save=["k_proj"])
    edit_adapter(adapter, {**tensors_of(adapter), f"base_model.model.{name}.weight": weight})
    with Checkpoint.open(base, adapter=adapter, quantize="int8") as checkpoint:
        np.testing.assert_allclose(checkpoint.tensor(K), weight, atol=np.abs(weight).max() / 250)


def test_a_resized_vocabulary_is_refused(base: Path, adapter: Path) -> None:
    with raises(CheckpointError, str(adapter), ("model.norm.weight", "(40,)"), "(41,)"):
        Checkpoint.open(base, adapter=with_norm(adapter, np.ones(41, np.float32)))


def test_a_merge_in_chunks_is_the_same(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        whole = checkpoint.tensor(Q)
        monkeypatch.setattr(merged_weights, "_CHUNK", 7 * 40)
        np.testing.assert_allclose(checkpoint.tensor(Q), whole, **EXACT)


def test_roundings_are_of_the_merged_weight(base: Path, adapter: Path) -> None:
    with Checkpoint.open(base, quantize="int8", adapter=adapter) as checkpoint:
        packed = checkpoint.quantized_weight(Q)
        assert packed is not None
        expected = merged(adapter, base_tensor(base, Q), Q_PROJ, 7 / 3)
        step = np.abs(expected).max(axis=1, keepdims=True) / 127
        assert (np.abs(checkpoint.tensor(Q) - expected) < 0.6 * step).all()


def test_a_model_with_an_adapter_has_a_fingerprint_of_its_own(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", seed=1)
    found = set()
    for options in ({}, {"adapter": adapter}, {"adapter": str(other)}, {"adapter": adapter, "quantize": "int8"}):
        with Checkpoint.open(base, **options) as checkpoint:
            progress: list[tuple[int, int]] = []
            found.add(checkpoint.fingerprint(lambda done, total: progress.append((done, total))))  # noqa: B023
            assert progress[-1][0] == progress[-1][1]
    assert len(found) == 4
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        assert checkpoint.fingerprint() in found


def test_modules_of_a_tower_are_left_out_with_it(tmp_path: Path) -> None:
    base, name = VISION / "qwen3_vl", "model.layers.1.self_attn.q_proj"
    with Checkpoint.open(base) as checkpoint:
        weight = checkpoint.tensor(f"{name}.weight")
        others = {one: checkpoint.tensor(one) for one in checkpoint.tensor_names if one != f"{name}.weight"}
    stored, tower = "model.language_model.layers.1.self_attn.q_proj", {"model.visual.blocks.0.attn.qkv": (5, 4)}
    adapter = write_adapter(tmp_path / "both", {stored: weight.shape, **tower})
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        np.testing.assert_allclose(checkpoint.tensor(f"{name}.weight"), merged(adapter, weight, stored, 7 / 3), **EXACT)
        for one, tensor in others.items():
            np.testing.assert_array_equal(checkpoint.tensor(one), tensor)
    with raises(CheckpointError, "alone", "decoder", "tower"):
        Checkpoint.open(base, adapter=write_adapter(tmp_path / "alone", tower))


def test_a_module_under_two_names_is_refused(tmp_path: Path) -> None:
    name = "layers.1.self_attn.q_proj"
    with Checkpoint.open(VISION / "qwen3_vl") as checkpoint:
        shape = checkpoint.tensor(f"model.{name}.weight").shape
    twice = write_adapter(tmp_path / "twice", dict.fromkeys((f"model.language_model.{name}", f"model.{name}"), shape))
    with raises(CheckpointError, "twice", "once", "second time"):
        Checkpoint.open(VISION / "qwen3_vl", adapter=twice)


@pytest.mark.parametrize(
    ("shapes", "expected", "got"),
    [
        ({**SHAPES, "model.layers.2.self_attn.q_proj": (96, 40)}, "a llama model", "model.layers.2.self_attn.q_proj"),
        ({**SHAPES, "model.layers.0.self_attn.w_proj": (96, 40)}, "a llama model", "model.layers.0.self_attn.w_proj"),
        ({Q_PROJ: (96, 41)}, (Q, "(96, 40)"), "(96, 41)"),
        ({Q_PROJ: (40, 96)}, (Q, "(96, 40)"), "(40, 96)"),
        ({"model.layers.0.input_layernorm": (40, 40)}, "model.layers.0.input_layernorm.weight", "(40, 40)"),
        ({"model.embed_tokens": (37, 40)}, "model.embed_tokens.weight", "a linear layer"),
    ],
)
def test_adapters_of_other_models_are_refused(base: Path, tmp_path: Path, shapes: Any, expected: Any, got: str) -> None:
    adapter = write_adapter(tmp_path / "other", shapes)
    with raises(CheckpointError, str(adapter), expected, got):
        Checkpoint.open(base, adapter=adapter)


def test_the_hint_names_the_base_model_of_the_adapter(base: Path, tmp_path: Path) -> None:
    with raises(CheckpointError, "wide", says="somebody/base"):
        Checkpoint.open(base, adapter=write_adapter(tmp_path / "wide", {Q_PROJ: (96, 41)}))


def test_modules_that_are_listed_and_absent_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "half", {Q_PROJ: (96, 40)}, target_modules=["q_proj", "w_proj"])
    with raises(CheckpointError, "half", "all modules", "model.layers.1.self_attn.q_proj"):
        Checkpoint.open(base, adapter=adapter)


def test_layers_that_are_left_out_by_number_may_be_absent(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "first", {Q_PROJ: (96, 40)}, target_modules=["q_proj"], layers_to_transform=[0])
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        np.testing.assert_allclose(checkpoint.tensor(Q), merged(adapter, base_tensor(base, Q), Q_PROJ, 7 / 3), **EXACT)


def test_values_beyond_float32_are_refused(base: Path, adapter: Path) -> None:
    edit_adapter(adapter, {name: np.full_like(tensor, 1e30) for name, tensor in tensors_of(adapter).items()})
    with Checkpoint.open(base, adapter=adapter) as checkpoint, raises(CheckpointError, "adapter", ("finite", Q), "others"):
        checkpoint.tensor(Q)


def test_quantized_bases_are_refused(tmp_path: Path, adapter: Path) -> None:
    quantize, config = CASES["awq"]
    write_quantized(tmp_path / "awq", "llama", quantize, config)
    with raises(CheckpointError, "adapter", "16 or 32 bits", "AWQ int4"):
        Checkpoint.open(tmp_path / "awq", adapter=adapter)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_gguf_file_is_refused_as_a_base(tmp_path: Path, adapter: Path, kind: str) -> None:
    write_gguf(tmp_path / "gguf", kind)
    with raises(CheckpointError, "adapter", ("safetensors", "16 or 32 bits"), "a GGUF file"):
        Checkpoint.open(tmp_path / "gguf", adapter=adapter)


def test_a_tied_head_is_read_apart_from_the_embedding() -> None:
    """PEFT adapts the two modules, not the weight that they share."""
    base, adapter = GOLDEN / "qwen2-tied", GOLDEN / "adapters" / "qwen2-tied"
    embedding, head = "model.embed_tokens", "lm_head"
    tensors = tensors_of(adapter)
    with Checkpoint.open(base, adapter=adapter) as checkpoint, Checkpoint.open(base) as plain:
        assert plain.config.tie_word_embeddings
        assert not checkpoint.config.tie_word_embeddings
        shared = plain.tensor(f"{embedding}.weight")
        a, b = (tensors[f"base_model.model.{embedding}.lora_embedding_{side}"].astype(np.float64) for side in "AB")
        np.testing.assert_allclose(checkpoint.tensor(f"{embedding}.weight"), shared + 1.5 * (b @ a).T, **EXACT)
        np.testing.assert_allclose(checkpoint.tensor(f"{head}.weight"), merged(adapter, shared, head, 1.5), **EXACT)
        assert checkpoint.nbytes == plain.nbytes + shared.nbytes
        checkpoint.fingerprint()


def test_a_base_weight_in_the_file_must_be_that_of_the_model(tmp_path: Path) -> None:
    base, adapter = GOLDEN / "qwen2-tied", tmp_path / "adapter"
    write_adapter(adapter, {"lm_head": (73, 48)})
    with Checkpoint.open(base) as checkpoint:
        shared = checkpoint.tensor("model.embed_tokens.weight").astype(np.float32)
    for copy, is_refused in ((shared, False), (shared + 1, True), (np.vstack([shared, shared[:1]]), True)):
        edit_adapter(adapter, {**tensors_of(adapter), "base_model.model.lm_head.base_layer.weight": copy})
        if is_refused:
            with raises(CheckpointError, str(adapter), ("lm_head", "(73, 48)"), str(copy.shape)):
                Checkpoint.open(base, adapter=adapter)
        else:
            Checkpoint.open(base, adapter=adapter).close()


def test_a_model_that_says_no_dtype_has_the_stored_one(base: Path, adapter: Path) -> None:
    edit_config(base, torch_dtype=...)
    with Checkpoint.open(base, adapter=adapter) as checkpoint:
        assert checkpoint.config.dtype == "float16"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEEDS))
def test_matrices_of_every_family_can_be_merged(tmp_path: Path, name: str) -> None:
    with Checkpoint.open(GOLDEN / name) as plain:
        if plain.weights.is_quantized:
            pytest.skip("no adapter is merged into quantized weights")
        embedding = embedding_name(plain.config)
        names = [one for one, shape in tensor_shapes(plain.config).items() if len(shape) == 2 and one not in (embedding, HEAD)]
        chosen = {one: plain.tensor(one) for one in names[:: max(1, len(names) // 5)]}
    modules = {one.removesuffix(".weight"): tensor.shape for one, tensor in chosen.items()}
    adapter = write_adapter(tmp_path / "adapter", modules)
    with Checkpoint.open(GOLDEN / name, adapter=adapter) as checkpoint:
        for one, tensor in chosen.items():
            np.testing.assert_allclose(checkpoint.tensor(one), merged(adapter, tensor, one.removesuffix(".weight"), 7 / 3), **EXACT)
