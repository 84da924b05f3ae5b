"""GGUF files as models: types of blocks, files in parts, folders, and what commands make of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

import trt_kvcache
from tests.checkpoint.folders import refused
from tests.paths import GOLDEN
from tests.reference.rig import golden
from trt_kvcache import Checkpoint, Tokenizer, build_engine, estimate_build, what_fits
from trt_kvcache.checkpoint.gguf.header import GGUFHeader
from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.gguf.weights import GGUFWeights
from trt_kvcache.errors import CheckpointError

from .convert import convert
from .test_models import logits
from .test_tokenizers import PUBLISHED, byte_level
from .tokenizers_in_metadata import write_tokenizer

#: All types with blocks that the library reads, but those whose size is not in a file of the model's.
KINDS = sorted(kind.name for kind in gguf.quants._type_traits)


def with_tokenizer(writer: gguf.GGUFWriter) -> None:
    write_tokenizer(writer, byte_level(PUBLISHED["gpt-2"]), kind="gpt2", pre="gpt-2", bos=0, eos=1)
    writer.add_chat_template("{% for one in messages %}{{ one.content }}{% endfor %}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_blocks(tmp_path: Path, kind: str) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[quantized]
    stored = np.random.default_rng(3).integers(0, 60, (8, 2 * nbytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=quantized)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    weights = GGUFWeights(GGUFModel(tmp_path / "model.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights.tensors[name].shape == (8, 2 * block)
    is_packed = kind in ("Q4_0", "Q8_0", "MXFP4")
    assert weights.dequantized == ({} if is_packed or kind == "BF16" else {name: kind})
    expected = stored if is_packed else gguf.quants.dequantize(stored, quantized)
    np.testing.assert_array_equal(weights.array(name).astype(expected.dtype), expected)
    assert not weights.array(name).flags.writeable


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_dtypes(tmp_path: Path, kind: str) -> None:
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", kind=kind)
    assert Checkpoint.read_config(path).dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_values_that_are_dequantized_are_rounded_once(tmp_path: Path) -> None:
    """To what is computed in, not to the dtype of the model before."""
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", kind="Q5_0")
    with Checkpoint.open(path) as checkpoint:
        values = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
        assert (checkpoint.config.dtype, values.dtype) == ("bfloat16", np.float32)
        assert checkpoint.tensor("model.norm.weight").dtype == np.float32
        assert checkpoint.weights.format == "bfloat16"


def test_a_model_in_three_files(tmp_path: Path) -> None:
    ids, expected = golden("llama")
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", parts=3)
    assert path.name == "model-00001-of-00003.gguf"
    whole = logits(convert(GOLDEN / "llama", tmp_path / "one.gguf"), ids, expected)
    np.testing.assert_array_equal(logits(path, ids, expected), whole)
    (tmp_path / "one.gguf").unlink()
    np.testing.assert_array_equal(logits(tmp_path, ids, expected), whole)  # the folder that has them
    with Checkpoint.open(path) as checkpoint:
        assert [file.name for file in checkpoint.files] == [f"model-{part:05}-of-00003.gguf" for part in (1, 2, 3)]


def test_a_missing_part(tmp_path: Path) -> None:
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", parts=3)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    assert "expected all 3 files of the model in one folder, got none of the name model-00002-of-00003.gguf." in refused(path)


def test_another_part_is_not_opened(tmp_path: Path) -> None:
    convert(GOLDEN / "llama", tmp_path / "model.gguf", parts=3)
    text = refused(tmp_path / "model-00002-of-00003.gguf")
    assert "expected the first file of a model in 3 files, model-00001-of-00003.gguf, got number 2 of them." in text


def test_a_folder_whose_only_weights_are_one(tmp_path: Path) -> None:
    ids, expected = golden("llama")
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", edit=with_tokenizer)
    np.testing.assert_array_equal(logits(tmp_path, ids, expected), logits(path, ids, expected))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer is not None
    assert tokenizer.has_chat_template


def test_the_files_of_a_folder_come_first(tmp_path: Path) -> None:
    convert(GOLDEN / "llama", tmp_path / "model.gguf", edit=with_tokenizer)
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    shutil.copy(Path(__file__).parents[3] / "examples" / "tiny-llama" / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.vocab_size, tokenizer.has_chat_template) == (320, False)


def test_sizes_come_from_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is dequantized for them."""
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", kind="Q4_1", edit=with_tokenizer)
    monkeypatch.setattr(gguf.quants, "dequantize", None)
    with pytest.warns(UserWarning, match=r"in Q4_1 are dequantized"):
        estimate = estimate_build(path, max_sequence_length=16)
    with pytest.warns(UserWarning, match=r"in Q4_1 are dequantized"):
        fits = what_fits(path, 1 << 28)
    assert estimate.weights_nbytes > GGUFHeader(path).tensors["output.weight"].nbytes
    assert fits[0].weights == "bfloat16"
    assert fits[0].longest_sequence == 64


def test_a_session_over_text(tmp_path: Path) -> None:
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", edit=with_tokenizer)
    with trt_kvcache.load(path, engine="reference") as session:
        assert session.eos_token_ids == (1,)
        assert session.tokenizer is not None


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trt-kvcache\[gguf\]'"):
        trt_kvcache.load(path, engine="reference")


def test_a_that_is_not_negative(tmp_path: Path) -> None:
    path = convert(GOLDEN / "mamba2", tmp_path / "model.gguf")
    tensor = GGUFHeader(path).tensors["blk.1.ssm_a"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 4] = np.float32(1).tobytes()
    path.write_bytes(content)
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match="expected negative numbers in ssm_a"):
        checkpoint.tensor("backbone.layers.1.mixer.A_log")


@pytest.mark.trt
def test_an_engine_folder_has_the_tokenizer(tmp_path: Path) -> None:
    path = convert(GOLDEN / "llama", tmp_path / "model.gguf", edit=with_tokenizer)
    folder = build_engine(path, tmp_path / "engine", max_sequence_length=16).path
    tokenizers = [Tokenizer.open(place) for place in (path, folder)]
    texts = [
        None if one is None else (one.encode("Hello"), one.apply_chat_template([{"role": "user", "content": "x"}])) for one in tokenizers
    ]
    assert texts[0] == texts[1] is not None
    ids, expected = golden("llama")
    with trt_kvcache.load(folder, engine="reference") as session:
        found = session.prefill([ids[:5].tolist()])[0]
    np.testing.assert_allclose(found, expected[5], atol=1e-4 * np.abs(expected[5]).max(), rtol=0)
