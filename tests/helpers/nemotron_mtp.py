"""Nemotron-H models with a multi-token prediction (MTP) head: folders, and the head in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.helpers.mtp import RING
from tests.paths import GOLDEN
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

Array = npt.NDArray[Any]

ATTENTION, EXPERTS = "mtp.layers.0.", "mtp.layers.1."


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a head of a layer of attention and one of experts, by the names of published files."""
    hidden, width, count = config["hidden_size"], config["head_dim"], config["n_routed_experts"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    inner, latent = config["moe_intermediate_size"], config.get("moe_latent_size")
    attention = {
        **{f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")},
        "eh_proj.weight": (hidden, 2 * hidden),
        "mixer.q_proj.weight": (queries, hidden),
        "mixer.k_proj.weight": (keys, hidden),
        "mixer.v_proj.weight": (keys, hidden),
        "mixer.o_proj.weight": (hidden, queries),
    }
    taken = latent or hidden
    experts: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        "mixer.gate.weight": (count, hidden),
        "mixer.gate.e_score_correction_bias": (count,),
        **{f"mixer.experts.{expert}.up_proj.weight": (inner, taken) for expert in range(count)},
        **{f"mixer.experts.{expert}.down_proj.weight": (taken, inner) for expert in range(count)},
        "mixer.shared_experts.up_proj.weight": (config["moe_shared_expert_intermediate_size"], hidden),
        "mixer.shared_experts.down_proj.weight": (hidden, config["moe_shared_expert_intermediate_size"]),
        "final_layernorm.weight": (hidden,),
    }
    if latent:
        experts |= {"mixer.fc1_latent_proj.weight": (latent, hidden), "mixer.fc2_latent_proj.weight": (hidden, latent)}
    return {f"{ATTENTION}{name}": shape for name, shape in attention.items()} | {
        f"{EXPERTS}{name}": shape for name, shape in experts.items()
    }


def _config(**changes: Any) -> dict[str, Any]:
    config = json.loads((GOLDEN / "nemotron_h-experts" / "config.json").read_text())
    return {**config, "dtype": "float32", "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", **changes}


def _save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name.replace("model.", "backbone."): weight for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def write_nemotron_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a small Nemotron-H with an MTP head, of random weights; return its folder."""
    config, random = _config(**changes), np.random.default_rng(seed)
    shapes = tensor_shapes(ModelConfig.from_dict(config)) | head_shapes(config)
    weights = {name: (random.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}
    return _save(folder, config, weights)


def write_nemotron_ring(folder: Path, *, permuted: bool = False) -> Path:
    """Write a Nemotron-H that counts on the ring of :mod:`tests.helpers.mtp`, and a head that is right, or the same in another order."""
    config = _config(vocab_size=2 * RING + 2, hybrid_override_pattern="M*", num_hidden_layers=2)
    shapes = tensor_shapes(ModelConfig.from_dict(config)) | head_shapes(config)
    weights = {name: np.full(shape, "norm" in name, np.float32) for name, shape in shapes.items()}
    hidden, half = config["hidden_size"], RING  # the dimension after those of the places says the half
    identity = np.eye(hidden, dtype=np.float32)
    weights["model.embeddings.weight"][: 2 * RING] = np.tile(identity[:RING], (2, 1))
    weights["model.embeddings.weight"][2 * RING :, half] = 1, -1
    # Queries of zeros attend to all tokens alike, of which the first one says the half.
    weights["model.layers.1.mixer.v_proj.weight"][0, half] = 1
    weights["model.layers.1.mixer.o_proj.weight"][half, 0] = 1
    weights["lm_head.weight"][: 2 * RING] = np.tile(4 * np.roll(identity[:RING], 1, axis=0), (2, 1))
    weights["lm_head.weight"][: 2 * RING, half] = np.repeat([20, -20], RING)
    weights[f"{ATTENTION}eh_proj.weight"][:, :hidden] = identity
    weights[f"{ATTENTION}eh_proj.weight"][half, hidden + half] = 1
    if permuted:
        order = np.random.default_rng(1)
        for name in head_shapes(config):
            weights[name] = order.permutation(weights[name].ravel()).reshape(weights[name].shape)
    return _save(folder, config, weights)


def head_in_float64(
    config: Mapping[str, Any], weights: Mapping[str, Array], embedding: Array, lm_head: Array, tokens: list[int], hidden: Array
) -> tuple[Array, Array]:
    """Return hidden states and logits of a head over a whole sequence: written from vLLM's ``nemotron_h_mtp.py`` and ``nemotron_h.py``.

    ``tokens[i]`` follows the token of which ``hidden[i]`` is the hidden state.
    """
    stored = {name: np.asarray(weight, np.float64) for name, weight in weights.items() if name.startswith("mtp.")}

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["layer_norm_epsilon"]) * stored[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return x @ stored[f"{name}.weight"].T

    def mlp(x: Array, name: str) -> Array:
        return linear(np.maximum(linear(x, f"{name}.up_proj"), 0) ** 2, f"{name}.down_proj")

    width, count = config["head_dim"], len(tokens)
    halves = norm(np.asarray(embedding, np.float64)[tokens], f"{ATTENTION}enorm"), norm(np.asarray(hidden, np.float64), f"{ATTENTION}hnorm")
    x = linear(np.concatenate(halves, -1), f"{ATTENTION}eh_proj")
    normed = norm(x, f"{ATTENTION}norm")
    q, k, v = (linear(normed, f"{ATTENTION}mixer.{name}_proj").reshape(count, -1, width).swapaxes(0, 1) for name in "qkv")
    k, v = (part.repeat(len(q) // len(k), 0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(width) + np.triu(np.full((count, count), -np.inf), 1)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (chances / chances.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(count, -1)
    x = x + linear(attended, f"{ATTENTION}mixer.o_proj")
    normed = norm(x, f"{EXPERTS}norm")
    out = mlp(normed, f"{EXPERTS}mixer.shared_experts")
    chosen_scores = 1 / (1 + np.exp(-linear(normed, f"{EXPERTS}mixer.gate")))
    has_latent = bool(config.get("moe_latent_size"))
    taken = linear(normed, f"{EXPERTS}mixer.fc1_latent_proj") if has_latent else normed
    for row, of_experts in enumerate(chosen_scores):
        order = np.argsort(-(of_experts + stored[f"{EXPERTS}mixer.gate.e_score_correction_bias"]))
        chosen = order[: config["num_experts_per_tok"]]
        shares = of_experts[chosen] / of_experts[chosen].sum() * config["routed_scaling_factor"]
        routed = sum(share * mlp(taken[row], f"{EXPERTS}mixer.experts.{expert}") for expert, share in zip(chosen, shares, strict=True))
        out[row] += linear(np.asarray(routed), f"{EXPERTS}mixer.fc2_latent_proj") if has_latent else routed
    x = norm(x + out, f"{EXPERTS}final_layernorm")
    return x, x @ np.asarray(lm_head, np.float64).T
