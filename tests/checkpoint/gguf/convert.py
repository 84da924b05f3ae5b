"""Writes GGUF files of Hugging Face folders in the conventions of llama.cpp, with the ``gguf`` package.

Names of tensors are those of the package's own map; what is done to values is written here again, from what llama.cpp's converter does.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.folders import load_file
from tests.helpers.gguf_files import SUPER_BLOCKS, random_super_blocks

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
Config = dict[str, Any]
Edit = Callable[[gguf.GGUFWriter], object]


def convert(
    folder: Path,
    target: Path,
    *,
    kind: str = "F32",
    types: Mapping[str, str] = MappingProxyType({}),
    edit: Edit = lambda writer: None,
    parts: int = 1,
    architecture: Architecture | None = None,
) -> Path:
    """Write the model of a folder, its matrices in one type, or in another by a part of their names; those in super-blocks are random.

    ``edit`` adds more metadata. Returns the file, of several the first.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "golden.safetensors":
            tensors |= {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    architecture = architecture or ARCHITECTURES[config["model_type"]]
    splits = {"split_max_tensors": -(-len(tensors) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture.arch], **splits)
    architecture.sizes(writer, config)
    edit(writer)
    names = gguf.get_tensor_name_map(architecture.arch, num_layers(config))
    for name, tensor in architecture.tensors(tensors, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or (name if not name.startswith(("model.", "backbone.")) else None)
        assert stored is not None, name
        _add(writer, stored, tensor, next((other for part, other in types.items() if part in stored), kind))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return target if parts == 1 else target.with_name(f"{target.stem}-00001-of-{len(writer.tensors):05}.gguf")


def _add(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: str) -> None:
    values = np.ascontiguousarray(tensor, np.float32)
    quantized = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quantized]
    is_expert = "_exps.weight" in name
    if (
        (values.ndim == 1 or (not is_expert and kind == "MXFP4"))
        or kind == "F32"
        or any(part in name for part in ("ssm_a", "ssm_d", "conv", "norm", "gate_inp", "bias"))
        or values.shape[-1] % block
    ):
        writer.add_tensor(name, values)
    elif kind in SUPER_BLOCKS:
        stored = random_super_blocks(
            kind, (math.prod(values.shape[:-1]), values.shape[-1]), np.random.default_rng(zlib.crc32(name.encode()))
        )
        writer.add_tensor(name, stored.reshape(*values.shape[:-1], -1), raw_dtype=quantized)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)


def num_layers(config: Config) -> int:
    return int(config.get("num_hidden_layers") or len(config["layers_block_type"]))


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Config) -> Config:
    return {"rope_theta": config.get("rope_theta", 10000.0)} | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})


class Architecture:
    """How models of one architecture are written: as they are."""

    arch = gguf.MODEL_ARCH.QWEN2

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(num_layers(config))
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"] or config["num_attention_heads"])
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
        writer.add_layer_norm_rms_eps(next(config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config))
        rope = _rope(config)
        writer.add_rope_freq_base(rope["rope_theta"])
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "beta_fast" in rope:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        return tensors


class Qwen3(Architecture):
    arch = gguf.MODEL_ARCH.QWEN3


class Qwen3MoE(Architecture):
    """The experts of a layer are one tensor."""

    arch = gguf.MODEL_ARCH.QWEN3MOE
    count = "num_experts"

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        writer.add_expert_count(config[self.count])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        found: Tensors = {}
        of_experts: dict[str, list[Array]] = {}
        for name, tensor in tensors.items():
            layer, _, expert = name.partition(".mlp.experts.")
            if expert:
                part = expert.split(".")[1].removesuffix("_proj")
                of_experts.setdefault(f"blk.{layer.split('.')[-1]}.ffn_{part}_exps.weight", [None] * config[self.count])[  # type: ignore[list-item]
                    int(expert.split(".")[0])
                ] = tensor
            else:
                found[name] = tensor
        return found | {name: np.stack(experts) for name, experts in of_experts.items()}


class GptOss(Qwen3MoE):
    """Gate and up are two tensors; MXFP4 of transformers comes here as bytes in float32."""

    arch = gguf.MODEL_ARCH.GPT_OSS
    count = "num_local_experts"

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        writer.add_sliding_window(config["sliding_window"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            layer, _, expert = name.partition(".mlp.experts.")
            block = f"blk.{layer.split('.')[-1]}.ffn"
            if name.endswith("sinks"):
                found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = tensor
            elif not expert:
                found[name] = tensor
            elif not expert.endswith("_scales"):
                kind = "bias" if expert.endswith("_bias") else "weight"
                if expert.endswith("_blocks"):
                    rows = mxfp4_values(tensor, tensors[name.replace("_blocks", "_scales")])
                else:
                    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
                if expert.startswith("down"):
                    found[f"{block}_down_exps.{kind}"] = rows
                else:
                    found[f"{block}_gate_exps.{kind}"], found[f"{block}_up_exps.{kind}"] = rows[:, ::2], rows[:, 1::2]
        return found


def mxfp4_values(blocks: Array, scales: Array) -> Array:
    """Return the values of MXFP4 of transformers: two neighbours in a byte, the first one in the low nibble."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    stored = blocks.astype(np.uint8)
    nibbles = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], 32)
    real = values[nibbles] * np.exp2(scales.astype(np.float64) - 127)[..., None]
    return real.reshape(*stored.shape[:2], -1).astype(np.float32)


class Llama(Architecture):
    """Rows of q and k that RoPE pairs are beside each other; the factors of Llama 3 are a tensor."""

    arch = gguf.MODEL_ARCH.LLAMA

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        kv = config["num_key_value_heads"] or config["num_attention_heads"]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": kv}
        found = {
            name: paired(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor for name, tensor in tensors.items()
        }
        rope = _rope(config)
        return found | ({"rope_freqs.weight": llama3_factors(rope, _head_dim(config))} if rope.get("rope_type") == "llama3" else {})


class Mistral(Llama):
    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        if config["sliding_window"]:
            writer.add_sliding_window(config["sliding_window"])


class Ministral3(Mistral):
    arch = gguf.MODEL_ARCH.MISTRAL3

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        rope = _rope(config)
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope["mscale"] == 1:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        else:
            growth = {name: 0.1 * rope[name] * math.log(rope["factor"]) + 1 for name in ("mscale", "mscale_all_dim")}
            writer.add_rope_scaling_yarn_attn_factor(growth["mscale"] / growth["mscale_all_dim"])


class Phi3(Architecture):
    arch = gguf.MODEL_ARCH.PHI3

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        original, rope = config["original_max_position_embeddings"], _rope(config)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_dimension_count(int(config["partial_rotary_factor"] * _head_dim(config)))
        writer.add_sliding_window(config["sliding_window"] or 0)
        scale = rope.get("factor", config["max_position_embeddings"] / original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        factors = {f"rope_factors_{kind}.weight": np.array(_rope(config)[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
        return tensors | factors


class Gemma2(Architecture):
    """Norms are stored with 1 added, and scores are scaled by the size of a head alone, for which q is scaled here."""

    arch = gguf.MODEL_ARCH.GEMMA2
    scaled = "q_proj.weight"

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if "attn_logit_softcapping" in config:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        factor = math.sqrt(config["head_dim"] / config["query_pre_attn_scalar"])
        found = {name: tensor + np.float32(name.endswith("norm.weight")) for name, tensor in tensors.items()}
        return {name: tensor * np.float32(factor if name.endswith(self.scaled) else 1) for name, tensor in found.items()}


class Gemma3(Gemma2):
    arch = gguf.MODEL_ARCH.GEMMA3
    scaled = "q_norm.weight"

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])


class Gemma4(Architecture):
    """Sizes of layers are lists, factors of frequencies stop a part of a head, and norms are stored as they are."""

    arch = gguf.MODEL_ARCH.GEMMA4

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        layers, shared = num_layers(config), config["num_kv_shared_layers"]
        is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        full_heads, heads, width = config["num_global_key_value_heads"], config["num_key_value_heads"], config["intermediate_size"]
        kv = heads if full_heads is None else [heads if sliding else full_heads for sliding in is_sliding]
        widths = [width * (1 + (layer >= layers - shared)) for layer in range(layers)] if config["use_double_wide_mlp"] else width
        dims = {"head_dim": config["global_head_dim"], "num_key_value_heads": kv, "intermediate_size": widths}
        ropes = config["rope_parameters"]
        super().sizes(writer, {**config, **dims, "rope_parameters": {"rope_theta": ropes["full_attention"]["rope_theta"]}})
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_key_length_swa(config["head_dim"])
        writer.add_value_length_swa(config["head_dim"])
        writer.add_rope_dimension_count(config["global_head_dim"])
        writer.add_rope_dimension_count_swa(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(is_sliding)
        writer.add_shared_kv_layers(shared)
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if config["enable_moe_block"]:
            writer.add_expert_count(config["num_experts"])
            writer.add_expert_used_count(config["top_k_experts"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        head_dim, part = config["global_head_dim"], config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        turning = int(head_dim * part / 2)
        factors = np.array([1.0] * turning + [1e30] * (head_dim // 2 - turning), np.float32)
        return {"rope_freqs.weight": factors} | {self._stored(name): tensor for name, tensor in tensors.items()}

    def _stored(self, name: str) -> str:
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            return f"blk.{layer}.ffn_gate_inp.scale"
        if name.endswith("per_expert_scale"):
            return f"blk.{layer}.ffn_down_exps.scale"
        return f"{name}.weight" if name.endswith("layer_scalar") or ".experts." in name else name


class SmolLM3(Llama):
    arch = gguf.MODEL_ARCH.SMOLLM3


class Olmo2(Architecture):
    arch = gguf.MODEL_ARCH.OLMO2


class Granite(Llama):
    arch = gguf.MODEL_ARCH.GRANITE

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


class Lfm2(Architecture):
    arch = gguf.MODEL_ARCH.LFM2

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        layers = num_layers(config)
        kinds = config.get("layer_types") or ["full_attention" if layer in config["full_attn_idxs"] else "conv" for layer in range(layers)]
        width = config.get("block_ff_dim", config["intermediate_size"])
        if config["block_auto_adjust_ff_dim"]:
            multiple = config["block_multiple_of"]
            width = -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple
        kv = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
        super().sizes(writer, {**config, "intermediate_size": width, "num_key_value_heads": kv})
        writer.add_shortconv_l_cache(config["conv_L_cache"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor for name, tensor in tensors.items()}


class Mamba2(Architecture):
    arch = gguf.MODEL_ARCH.MAMBA2

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        writer.add_context_length(2**20)
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_block_count(num_layers(config))
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        self.states(writer, config)

    def states(self, writer: gguf.GGUFWriter, config: Config) -> None:
        def first(*names: str) -> int:
            return next(config[name] for name in names if name in config)

        heads, head_dim = first("num_heads", "mamba_n_heads", "mamba_num_heads"), first("mamba_head_dim", "mamba_d_head", "head_dim")
        if head_dim == "auto":
            head_dim = config["mamba_expand"] * config["hidden_size"] // heads
        writer.add_ssm_conv_kernel(first("conv_kernel", "mamba_d_conv"))
        writer.add_ssm_inner_size(heads * head_dim)
        writer.add_ssm_state_size(first("state_size", "mamba_d_state", "ssm_state_size"))
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(first("n_groups", "mamba_n_groups"))

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        groups = config.get("n_groups", config.get("mamba_n_groups"))
        return dict(_mamba(name, tensor, groups) for name, tensor in tensors.items())


def _mamba(name: str, tensor: Array, groups: int) -> tuple[str, Array]:
    if name.endswith(".A_log"):
        return name, -np.exp(tensor)[:, None]
    if name.endswith(".D"):
        return name, tensor[:, None]
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), tensor
    if name.endswith(".conv1d.weight"):
        return name, tensor.squeeze(1)
    return name, tensor.reshape(groups, -1) if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")) else tensor


class GraniteHybrid(Granite):
    arch = gguf.MODEL_ARCH.GRANITE_HYBRID
    uses_rope = False

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        kinds = config.get("layer_types") or [
            "attention" if layer in config["attn_layer_indices"] else "mamba" for layer in range(num_layers(config))
        ]
        kv = [config["num_key_value_heads"] or config["num_attention_heads"] if "attention" in kind else 0 for kind in kinds]
        self.around(writer, {**config, "num_key_value_heads": kv})
        Mamba2().states(writer, config)
        writer.add_rope_scaling_finetuned(self.uses_rope)

    def around(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        found: Tensors = {}
        for name, tensor in super().tensors(Mamba2().tensors(tensors, config), config).items():
            if "shared_mlp.input_linear" in name:
                layer = name.split(".")[2]
                found[f"blk.{layer}.ffn_gate.weight"], found[f"blk.{layer}.ffn_up.weight"] = np.split(tensor, 2)
            elif "shared_mlp.output_linear" in name:
                found[f"blk.{name.split('.')[2]}.ffn_down.weight"] = tensor
            else:
                found[name] = tensor
        return found


class Bamba(GraniteHybrid):
    uses_rope = True

    def around(self, writer: gguf.GGUFWriter, config: Config) -> None:
        Architecture.sizes(self, writer, config)
        writer.add_rope_dimension_count(_head_dim(config) // 2)


class NemotronH(GraniteHybrid):
    """Layers are of one part each, which counts of heads and widths say."""

    arch = gguf.MODEL_ARCH.NEMOTRON_H

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        kinds = config["hybrid_override_pattern"]
        kv = [config["num_key_value_heads"] if kind == "*" else 0 for kind in kinds]
        widths = [config["intermediate_size"] if kind == "-" else 0 for kind in kinds]
        Architecture.sizes(self, writer, {**config, "num_key_value_heads": kv, "intermediate_size": widths})
        Mamba2().states(writer, config)

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        found = super().tensors(tensors, config)
        return {name.replace("model.", "backbone.") if name.startswith("model.") else name: tensor for name, tensor in found.items()}


class Qwen35(Architecture):
    """Heads of values are apart that belong to one head of keys, and norms are stored with 1 added."""

    arch = gguf.MODEL_ARCH.QWEN35

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        super().sizes(writer, config)
        part = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
        writer.add_rope_dimension_count(int(part * _head_dim(config)))
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        return dict(self._stored(name, tensor, config) for name, tensor in tensors.items())

    def _stored(self, name: str, tensor: Array, config: Config) -> tuple[str, Array]:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]

        def apart(array: Array, axis: int = 0) -> Array:
            moved = np.moveaxis(array, axis, 0)
            heads = [head for first in range(values // keys) for head in range(first, values, values // keys)]
            parts = moved.reshape(values, len(moved) // values, *moved.shape[1:])[heads]
            return np.moveaxis(parts.reshape(moved.shape), 0, axis)

        def behind(array: Array) -> Array:
            before = 2 * keys * config["linear_key_head_dim"]
            return np.concatenate([array[:before], apart(array[before:])])

        if name.endswith(".A_log"):
            return name, apart(-np.exp(tensor))
        if name.endswith(".dt_bias"):
            return name.replace(".dt_bias", ".dt_proj.bias"), apart(tensor)
        if ".conv1d" in name:
            return name, behind(tensor.squeeze(1))
        if "in_proj_qkv" in name:
            return name, behind(tensor)
        if any(part in name for part in ("in_proj_z", "in_proj_a", "in_proj_b")):
            return name, apart(tensor)
        if "linear_attn.out_proj" in name:
            return name, apart(tensor, 1)
        return name, tensor + np.float32(name.endswith("norm.weight") and "linear_attn" not in name)


def paired(weight: Array, heads: int) -> Array:
    """Put the rows d and d + half of each head beside each other."""
    half = len(weight) // heads // 2
    rows = [head * 2 * half + part * half + row for head in range(heads) for row in range(half) for part in range(2)]
    return weight[rows]


def llama3_factors(rope: Config, head_dim: int) -> Array:
    """Return by what Llama 3.1 divides each frequency."""
    low, high, factor, original = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings")
    )
    turns = [original / (2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)) for index in range(head_dim // 2)]
    smooth = [min(max((turn - low) / (high - low), 0), 1) for turn in turns]
    return np.array([1 / ((1 - part) / factor + part) for part in smooth], np.float32)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Llama(),
    "mistral": Mistral(),
    "ministral3": Ministral3(),
    "qwen2": Architecture(),
    "qwen3": Qwen3(),
    "qwen3_moe": Qwen3MoE(),
    "gpt_oss": GptOss(),
    "phi3": Phi3(),
    "gemma2": Gemma2(),
    "gemma3_text": Gemma3(),
    "gemma4_text": Gemma4(),
    "smollm3": SmolLM3(),
    "olmo2": Olmo2(),
    "granite": Granite(),
    "qwen3_5_text": Qwen35(),
    "lfm2": Lfm2(),
    "mamba2": Mamba2(),
    "bamba": Bamba(),
    "granitemoehybrid": GraniteHybrid(),
    "nemotron_h": NemotronH(),
}
