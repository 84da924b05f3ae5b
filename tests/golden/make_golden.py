"""Make the golden files: the logits that transformers computes for tiny random models.

Run with an environment that has this package, torch (CPU) and transformers::

    python tests/golden/make_golden.py

Each folder has a ``config.json``, from which ``weights.py`` makes the weights, and gets ``golden.safetensors``: ``input_ids``
uint8 ``[tokens]``, and ``logits`` float32 ``[len(lengths), vocab]`` after the first ``lengths`` (uint8) of them, of one full pass in
float32 over the weights as stored. ``versions.json`` says what made them.

The sizes are all different, so that a swapped axis shows; norm weights are not 1 and biases not 0, so that leaving one out shows.
"""

import json

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tests.golden.weights import HERE, SEEDS, write
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

LENGTHS = np.array([5, 6, 14, 15, 24])


def make(folder, seed):
    """Write the logits of one folder."""
    write(folder)
    config = json.loads((folder / "config.json").read_text())
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tied = {"lm_head.weight"} if ModelConfig.from_dict(config).tie_word_embeddings else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.state_dict().items() if name not in tied}
    assert tensor_shapes(ModelConfig.from_dict(config)) == shapes, f"{folder.name}: transformers has other tensors"
    input_ids = np.random.default_rng(seed).integers(0, config["vocab_size"], LENGTHS[-1])
    with torch.no_grad():
        logits = stored(input_ids=torch.from_numpy(input_ids)[None], use_cache=False).logits[0, LENGTHS - 1].numpy()
    small = {"input_ids": input_ids.astype(np.uint8), "lengths": LENGTHS.astype(np.uint8)}
    save_file({**small, "logits": logits}, folder / "golden.safetensors")
    print(f"{folder.name}: logits {logits.shape}, standard deviation {logits.std():.2f}")


if __name__ == "__main__":
    for name, seed in SEEDS.items():
        make(HERE / name, seed)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (HERE / "versions.json").write_text(json.dumps(versions) + "\n")
