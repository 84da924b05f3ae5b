"""Hugging Face folders of any size with random weights, written tensor by tensor."""

import json
import math

import numpy as np

from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, tensor_shapes

#: The shape of Qwen2-0.5B: 494 million parameters, the head tied to the embedding.
QWEN2_0_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
#: The shape of Gemma 3 1B: five layers with a window of 512 for each without, heads of 256.
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
#: The sizes of Phi-4-mini, with plain RoPE over three quarters of a head of 128.
PHI_4_MINI = {
    "model_type": "phi3",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
#: The shape of LFM2-350M: ten short convolutions and six layers of attention.
LFM2_350M = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "intermediate_size": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
#: The shape of Bamba-9B: Mamba-2, and attention in three of 32 layers.
BAMBA_9B = {
    "model_type": "bamba",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_SAFETENSORS_NAME = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_CHUNK_ELEMENTS = 1 << 22


def write_random_model(folder, config, *, seed=0, head_factor=1.0):
    """Write a model folder: norms near 1, everything else normal with a standard deviation that keeps activations of order 1.

    ``folder`` is made here, its parent must be there; ``config`` is a ``config.json``; logits are multiplied with ``head_factor``.
    """
    model = ModelConfig.from_dict(config)
    shapes = tensor_shapes(model)
    random = np.random.default_rng(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(shapes, model.dtype))
        for name, shape in shapes.items():
            mean, deviation = (1.0, 0.02) if name.endswith("norm.weight") else (0.0, 1 / math.sqrt(model.hidden_size))
            deviation *= head_factor if name == HEAD else 1
            for start in range(0, math.prod(shape), _CHUNK_ELEMENTS):
                count = min(_CHUNK_ELEMENTS, math.prod(shape) - start)
                values = random.standard_normal(count, np.float32) * np.float32(deviation) + np.float32(mean)
                file.write(values.astype(numpy_dtype(model.dtype)).tobytes())
    return folder


def _header(shapes, dtype):
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * itemsize(dtype)
        entries[name] = {"dtype": _SAFETENSORS_NAME[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
