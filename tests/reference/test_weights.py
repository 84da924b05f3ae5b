import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import CheckpointError
from trt_kvcache.reference.weights import load_weights

from .rig import GOLDEN


def test_a_value_that_the_dtype_cannot_hold(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        load_weights(checkpoint, "bfloat16")
        with pytest.raises(CheckpointError, match=r"llama: model\.norm\.weight has values that float16 cannot hold"):
            load_weights(checkpoint, "float16")


def test_a_tied_head_is_the_embedding_and_float32_is_not_copied():
    with Checkpoint.open(GOLDEN / "qwen2-tied") as tied, Checkpoint.open(GOLDEN / "llama") as checkpoint:
        weights = load_weights(tied, "float32")
        assert weights.head is weights.embedding
        assert np.shares_memory(load_weights(checkpoint, "float32").head, checkpoint.tensor("lm_head.weight"))
