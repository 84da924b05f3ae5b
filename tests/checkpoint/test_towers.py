"""Folders of models with a vision tower: tensors of the text decoder by either prefix, without the tensors of the tower."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden.weights import STORED, VISION, VISION_SEEDS, random_weights
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.tensor_shapes import tensor_shapes

Tensors = dict[str, np.ndarray]


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a golden folder to where a test may change it."""
    return lambda name: Path(shutil.copytree(VISION / name, tmp_path / name))


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_shards(folder: Path) -> Path:
    """Store the text decoder and the tower in a shard each."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    towers = STORED[folder.name][2]
    shards = {name: "model-2.safetensors" if name.startswith(towers) else "model-1.safetensors" for name in tensors}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


@pytest.mark.parametrize("name", VISION_SEEDS)
def test_the_tensors_are_those_of_the_text_decoder(name: str) -> None:
    with Checkpoint.open(VISION / name) as checkpoint:
        expected = random_weights(checkpoint.config, VISION_SEEDS[name])
        assert set(checkpoint.tensor_names) == set(expected)
        for tensor, values in expected.items():
            np.testing.assert_array_equal(checkpoint.tensor(tensor), values)
        assert checkpoint.nbytes == sum(values.nbytes for values in expected.values())
        assert checkpoint.weights.nbytes == checkpoint.nbytes


def test_either_prefix_is_the_same_model(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gemma3-bias")

    def as_older_files(tensors: Tensors) -> None:
        for name in list(tensors):
            older = name.replace("lm_head.", "language_model.lm_head.").replace("model.language_model.", "language_model.model.")
            tensors[older.removeprefix("model.")] = tensors.pop(name)

    with Checkpoint.open(VISION / "gemma3-bias") as newer, Checkpoint.open(edit(folder, as_older_files)) as older:
        assert older.fingerprint() == newer.fingerprint()


def test_a_shard_of_the_tower_alone_need_not_be_there(copy_of: Callable[[str], Path]) -> None:
    folder = in_shards(copy_of("gemma3"))
    (folder / "model-2.safetensors").unlink()
    with Checkpoint.open(folder) as checkpoint, Checkpoint.open(VISION / "gemma3") as whole:
        assert checkpoint.fingerprint() == whole.fingerprint()
        assert folder / "model-2.safetensors" not in checkpoint.files


def test_a_copy_of_its_files_opens(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, copy = in_shards(copy_of("gemma3")), tmp_path / "copy"
    copy.mkdir()
    with Checkpoint.open(folder) as checkpoint:
        for path in checkpoint.files:
            shutil.copyfile(path, copy / path.name)
        with Checkpoint.open(copy) as copied:
            assert copied.fingerprint() == checkpoint.fingerprint()


def test_a_missing_shard_of_the_text_decoder_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = in_shards(copy_of("gemma3"))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.safetensors: expected a shard that model.safetensors.index.json names"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "stray", ["language_model.model.extra.weight", "vision_towers.weight", "model.multi_modal.weight", "language_model.weight"]
)
def test_other_tensors_than_those_of_the_tower_are_refused(copy_of: Callable[[str], Path], stray: str) -> None:
    folder = edit(copy_of("gemma3"), lambda tensors: tensors.update({stray: np.ones(3, np.float16)}))
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) that a gemma3 model by config.json does not use"):
        Checkpoint.open(folder)


def test_a_tensor_by_both_prefixes_is_refused(copy_of: Callable[[str], Path]) -> None:
    twice = {"model.language_model.norm.weight": np.ones(40, np.float16)}
    folder = edit(copy_of("gemma3"), lambda tensors: tensors.update(twice))
    message = "expected one tensor model.norm.weight of a gemma3 model, got .*language_model.* and .*language_model"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_missing_tensor_is_named(copy_of: Callable[[str], Path]) -> None:
    folder = edit(copy_of("gemma3"), lambda tensors: tensors.pop("language_model.model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) of a gemma3 model are missing: model.norm.weight"):
        Checkpoint.open(folder)


def test_a_dtype_that_is_stated_nowhere_comes_from_the_weights(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gemma3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": None}))
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config.dtype == "float16"


def test_a_dtype_in_the_text_config_is_that_of_the_model(copy_of: Callable[[str], Path]) -> None:
    """Weights in another dtype are converted to it, with a warning."""
    folder = edit(copy_of("gemma3-bias"), lambda tensors: tensors.update({n: t.astype(np.float32) for n, t in tensors.items()}))
    with pytest.warns(UserWarning, match="are converted to bfloat16"):
        checkpoint = Checkpoint.open(folder)
    with checkpoint:
        assert checkpoint.config.dtype == "bfloat16"
        assert set(checkpoint.tensor_names) == set(tensor_shapes(checkpoint.config))


def test_quantized_weights_are_found_by_their_prefix(copy_of: Callable[[str], Path]) -> None:
    """FP8 with one scale a matrix and static scales of activations, as Ministral 3 is published; the tower is not quantized."""
    folder, kept = copy_of("mistral3"), {}

    def quantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            values = tensors.pop(name).astype(ml_dtypes.float8_e4m3fn)
            kept[name.removeprefix("language_model.")] = values.astype(np.float32) * np.float32(0.5)
            scales = {f"{name}_scale_inv": np.float32(0.5), f"{name.removesuffix('weight')}activation_scale": np.float32(2)}
            tensors |= {name: values, **{part: np.array(scale) for part, scale in scales.items()}}

    edit(folder, quantize)
    config = json.loads((folder / "config.json").read_text())
    names = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    format_ = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": names}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": format_}))
    with pytest.warns(UserWarning, match="weights are FP8"):
        checkpoint = Checkpoint.open(folder)
    with checkpoint:
        assert set(checkpoint.quantized_names) == set(kept)
        for name, values in kept.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), values)
