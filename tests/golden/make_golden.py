"""Make the golden files: the logits that transformers computes for tiny random models.

Run with an environment that has this package, torch (CPU) and transformers::

    python tests/golden/make_golden.py

``rope.json`` has the frequencies of each kind of RoPE, ``defaults.json`` what fields are that a ``config.json`` leaves out.

Each folder has a ``config.json``, from which ``weights.py`` makes the weights, and gets ``golden.safetensors``: ``input_ids``
uint8 ``[tokens]``, and ``logits`` float32 ``[len(lengths), vocab]`` after the first ``lengths`` (uint8) of them, of one full pass in
float32 over the weights as stored. ``versions.json`` says what made them.

The sizes are all different, so that a swapped axis shows; norm weights are not 1 and biases not 0, so that leaving one out shows.
"""

import dataclasses
import json
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.golden.weights import HERE, SEEDS, VISION, VISION_SEEDS, write, write_vision
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.tensor_shapes import tensor_shapes

LENGTHS = np.array([5, 6, 14, 15, 24])

#: RoPE as a ``config.json`` of a Llama has it, with heads of 16 and 64 positions, and for how many tokens.
ROPES = {
    "default": ({"rope_type": "default"}, 30),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 30),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 3.0}, 64),
    "dynamic, long": ({"rope_type": "dynamic", "factor": 3.0}, 150),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        30,
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.1}, 30),
    "yarn, fractions": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 3.0, "beta_slow": 0.3, "truncate": False},
        30,
    ),
    "yarn, two scales": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 2.0, "mscale_all_dim": 0.5},
        30,
    ),
    "yarn, one scale": ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 2.0}, 30),
    "yarn, factor of its own": ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 0.8}, 30),
    "longrope, short": (
        {"rope_type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8},
        32,
    ),
    "longrope, long": (
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 32,
            "factor": 5.0,
            "short_factor": [1.5] * 8,
            "long_factor": [1.0 + index for index in range(8)],
        },
        33,
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 30),
    "proportional, factor": ({"rope_type": "proportional", "partial_rotary_factor": 0.7, "factor": 3.0}, 30),
}


#: Token ids of prompts with an image of two rows, whose token is 10.
IMAGES = {"mistral3": [1, 5, 10, 10, 7, 3, 44], "mistral3-ministral": [2, 10, 10, 61, 9]}


def make(folder, seed):
    """Write the logits of one folder."""
    write(folder)
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    check_tensors(folder, stored)
    save_logits(folder, stored, seed)


def make_vision(folder, seed):
    """Write the logits of one folder of a model with a vision tower: of text alone, and with an image where that is rows alone."""
    write_vision(folder)
    torch.manual_seed(seed)  # the tower is not stored: it is random
    stored = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    check_tensors(folder, stored)
    save_logits(folder, stored, seed)
    if folder.name in IMAGES:
        save_image(folder, stored, seed)


def save_image(folder, stored, seed):
    """Write the rows that a tower makes of a random image, and the logits after each token of a prompt with them."""
    input_ids = torch.tensor(IMAGES[folder.name])
    pixels = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 3, 28, 56)).astype(np.float32))
    sizes = torch.tensor([[28, 56]])
    with torch.no_grad():
        for weight in stored.model.multi_modal_projector.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)  # transformers begins with rows near 0
        (rows,) = stored.model.get_image_features(pixels, image_sizes=sizes).pooler_output
        logits = stored(input_ids=input_ids[None], pixel_values=pixels, image_sizes=sizes, use_cache=False).logits[0]
    image = {"input_ids": input_ids.numpy().astype(np.uint8), "rows": rows.numpy(), "logits": logits.numpy()}
    save_file(image, folder / "image.safetensors")
    print(f"{folder.name}: rows {tuple(rows.shape)}, standard deviation {rows.std():.2f}")


def read(folder):
    """Return the ``config.json`` of a folder."""
    return json.loads((folder / "config.json").read_text())


def check_names(folder, tensors):
    """Compare the tensors of a model in transformers with those that the package expects."""
    config = ModelConfig.from_dict(read(folder))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in tied}
    assert tensor_shapes(config) == shapes, f"{folder.name}: transformers has other tensors"


def save_logits(folder, stored, seed):
    """Write the logits of a model for random token ids."""
    vocab_size = ModelConfig.from_dict(read(folder)).vocab_size
    input_ids = np.random.default_rng(seed).integers(0, vocab_size, LENGTHS[-1])
    with torch.no_grad():  # all hidden states, as transformers fails to leave some out of a Gemma 4 without per-layer embeddings
        out = stored(input_ids=torch.from_numpy(input_ids)[None], use_cache=False, output_hidden_states=True)
        logits = out.logits[0, LENGTHS - 1].numpy()
    small = {"input_ids": input_ids.astype(np.uint8), "lengths": LENGTHS.astype(np.uint8)}
    save_file({**small, "logits": logits}, folder / "golden.safetensors")
    print(f"{folder.name}: logits {logits.shape}, standard deviation {logits.std():.2f}")


def check_tensors(folder, stored):
    """Compare the tensors of a model in transformers with those that the package expects; of a model with experts, those that it saves."""
    with Checkpoint.open(folder) as checkpoint:
        family = FAMILIES[checkpoint.config.family]
        if not family.stacked:
            check_names(folder, {family.own_name(name): tensor for name, tensor in stored.state_dict().items() if not family.ignores(name)})
            return
        for original in (True, False):
            with tempfile.TemporaryDirectory() as saved:
                stored.save_pretrained(saved, save_original_format=original)
                with Checkpoint.open(saved) as written:
                    for name in checkpoint.tensor_names:
                        np.testing.assert_array_equal(written.tensor(name), checkpoint.tensor(name))


def rope(parameters, length):
    """Return the frequencies of RoPE and the factor of cosine and sine, for a sequence of ``length`` tokens."""
    parameters = {"rope_theta": 50.0, **parameters}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    kind = parameters["rope_type"]
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return {"rope_parameters": parameters, "length": length, "frequencies": frequencies.tolist(), "factor": float(factor)}


#: Fields that a family may read.
FIELDS = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "hidden_act"),
    *(
        "hidden_activation",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "attention_bias",
        "mlp_bias",
        "query_pre_attn_scalar",
    ),
    *("attn_logit_softcapping", "final_logit_softcapping", "no_rope_layer_interval", "embedding_multiplier", "logits_scaling"),
    *("residual_multiplier", "attention_multiplier", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    *("num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step", "moe_intermediate_size", "routed_scaling_factor", "n_group"),
    *("topk_group", "n_shared_experts", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "num_dense_layers"),
    *("use_expert_bias", "moe_latent_size", "swiglu_alpha", "swiglu_limit"),
    *("attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    "use_double_wide_mlp",
    *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier"),
    *("ssm_out_multiplier", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"),
)


def defaults(family):
    """Return the defaults of a family for the fields that it has."""
    config = transformers.AutoConfig.for_model(family).get_text_config()
    fields = {field.name: field.default for field in dataclasses.fields(type(config))}
    return {name: fields[name] for name in FIELDS if name in fields}


if __name__ == "__main__":
    (HERE / "defaults.json").write_text(json.dumps({family: defaults(family) for family in FAMILIES}, indent=1) + "\n")
    found = {name: rope(*case) for name, case in ROPES.items()}
    (HERE / "rope.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, seed in SEEDS.items():
        make(HERE / name, seed)
    for name, seed in VISION_SEEDS.items():
        make_vision(VISION / name, seed)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    (HERE / "versions.json").write_text(json.dumps(versions) + "\n")
