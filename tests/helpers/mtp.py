"""Models with a multi-token prediction (MTP) head: folders, and the head in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.paths import GOLDEN
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

Array = npt.NDArray[Any]

PREFIX = "mtp.layers.0."


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a head, by the names of published files."""
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        **_mlp_shapes(config),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    outer = {"fc.weight": (hidden, 2 * hidden), **{f"{name}.weight": (hidden,) for name in NORMS}}
    return {f"{PREFIX}{name}": shape for name, shape in layer.items()} | {f"mtp.{name}": shape for name, shape in outer.items()}


def _mlp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a dense MLP, or of experts: of each alone in Qwen3-Next, stacked in Qwen3.5-MoE."""
    hidden, count = config["hidden_size"], config.get("num_experts", 0)

    def dense(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"{prefix}.{name}_proj.weight": (hidden, inner) if name == "down" else (inner, hidden) for name in ("gate", "up", "down")}

    if not count:
        return dense("mlp", config["intermediate_size"])
    inner = config["moe_intermediate_size"]
    routed = {"mlp.experts.gate_up_proj": (count, 2 * inner, hidden), "mlp.experts.down_proj": (count, hidden, inner)}
    if config["model_type"] == "qwen3_next":
        routed = {name: shape for expert in range(count) for name, shape in dense(f"mlp.experts.{expert}", inner).items()}
    shared = {**dense("mlp.shared_expert", config["shared_expert_intermediate_size"]), "mlp.shared_expert_gate.weight": (1, hidden)}
    return {**routed, **shared, "mlp.gate.weight": (count, hidden)}


NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def write_mtp_model(
    folder: Path, *, family: str = "qwen3_5", seed: int = 0, scale: float = 0.3, head: Mapping[str, Array] | None = None, **changes: Any
) -> Path:
    """Write a small model of a golden folder with an MTP head, of which ``head`` has some tensors; return its folder."""
    config = json.loads((GOLDEN / family / "config.json").read_text()) | {"dtype": "float32", **changes}
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(config["dtype"])
    shapes = tensor_shapes(ModelConfig.from_dict(config)) | head_shapes(config)
    weights = {name: (random.standard_normal(shape) * scale).astype(dtype) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights | dict(head or {}), folder / "model.safetensors")
    return folder


def head_in_float64(
    config: Mapping[str, Any], weights: Mapping[str, Array], embedding: Array, lm_head: Array, tokens: list[int], hidden: Array
) -> tuple[Array, Array]:
    """Return hidden states and logits of a head over a whole sequence: written from vLLM's ``qwen3_5_mtp.py`` and ``qwen3_next.py``.

    ``tokens[i]`` follows the token of which ``hidden[i]`` is the hidden state.
    """
    stored = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * (1 + stored[name])

    def linear(x: Array, name: str) -> Array:
        return x @ stored[f"{PREFIX}{name}.weight"].T

    rope, width, count = config.get("rope_parameters", config), config["head_dim"], len(tokens)
    rotary = int(width * rope.get("partial_rotary_factor", 0.25))
    angles = np.arange(count)[:, None] * rope["rope_theta"] ** -(np.arange(0, rotary, 2) / rotary)

    def rotated(x: Array) -> Array:  # [heads, tokens, width]
        first, second, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    halves = (
        norm(np.asarray(embedding, np.float64)[tokens], "mtp.pre_fc_norm_embedding.weight"),
        norm(np.asarray(hidden, np.float64), "mtp.pre_fc_norm_hidden.weight"),
    )
    x = np.concatenate(halves, -1) @ stored["mtp.fc.weight"].T
    normed = norm(x, f"{PREFIX}input_layernorm.weight")
    q, gate = np.split(linear(normed, "self_attn.q_proj").reshape(count, -1, 2 * width), 2, -1)
    k, v = (linear(normed, f"self_attn.{name}_proj").reshape(count, -1, width) for name in "kv")
    q, k = norm(q, f"{PREFIX}self_attn.q_norm.weight"), norm(k, f"{PREFIX}self_attn.k_norm.weight")
    groups = q.shape[1] // k.shape[1]
    q, k, v = rotated(q.swapaxes(0, 1)), *(part.swapaxes(0, 1).repeat(groups, 0) for part in (k, v))
    scores = q @ rotated(k).swapaxes(1, 2) / np.sqrt(width) + np.triu(np.full((count, count), -np.inf), 1)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (chances / chances.sum(-1, keepdims=True) @ v).swapaxes(0, 1)
    x = x + linear((attended / (1 + np.exp(-gate))).reshape(count, -1), "self_attn.o_proj")
    normed = norm(x, f"{PREFIX}post_attention_layernorm.weight")
    x = x + _mlp_in_float64(config, {name.removeprefix(PREFIX): one for name, one in stored.items()}, normed)
    x = norm(x, "mtp.norm.weight")
    return x, x @ np.asarray(lm_head, np.float64).T


def _mlp_in_float64(config: Mapping[str, Any], stored: Mapping[str, Array], x: Array) -> Array:
    def dense(x: Array, gate: Array, up: Array, down: Array) -> Array:
        inner = x @ gate.T
        return inner / (1 + np.exp(-inner)) * (x @ up.T) @ down.T

    def matrices(prefix: str) -> list[Array]:
        return [stored[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down")]

    if not config.get("num_experts"):
        return dense(x, *matrices("mlp"))
    if "mlp.experts.down_proj" in stored:
        halves = (np.split(both, 2) for both in stored["mlp.experts.gate_up_proj"])
        experts = [[*pair, down] for pair, down in zip(halves, stored["mlp.experts.down_proj"], strict=True)]
    else:
        experts = [matrices(f"mlp.experts.{index}") for index in range(config["num_experts"])]
    logits = x @ stored["mlp.gate.weight"].T
    out = dense(x, *matrices("mlp.shared_expert")) / (1 + np.exp(-x @ stored["mlp.shared_expert_gate.weight"].T))
    for row, of_experts in enumerate(logits):
        chosen = np.argsort(-of_experts)[: config["num_experts_per_tok"]]
        shares = np.exp(of_experts[chosen] - of_experts[chosen].max())  # over the chosen ones alone, which renormalises
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            out[row] += share * dense(x[row], *experts[expert])
    return out


#: Tokens of a ring, twice: a token is followed by the next one of its half. The last two tokens begin a sequence, and choose the half.
RING = 16
TOPICS = (2 * RING, 2 * RING + 1)


def ring_prompts(count: int) -> list[list[int]]:
    """Return prompts of the ring, in both halves."""
    return [[TOPICS[index % 2], (3 * index) % RING + RING * (index % 2)] for index in range(count)]


def write_ring_model(folder: Path, *, permuted: bool = False, **changes: Any) -> Path:
    """Write a model that counts on a ring, and a head that is right by construction, or one of the same weights in another order.

    Both halves have the same embeddings, so a head knows the half from the hidden state alone, and the place from the token alone.
    """
    config = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    config |= {"dtype": "float32", "vocab_size": 2 * RING + 2, "tie_word_embeddings": False, **kinds, **changes}
    shapes = tensor_shapes(ModelConfig.from_dict(config)) | head_shapes(config)
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    hidden, half = config["hidden_size"], RING  # the dimension after those of the places says the half
    identity = np.eye(hidden, dtype=np.float32)
    weights["model.embed_tokens.weight"][: 2 * RING] = np.tile(identity[:RING], (2, 1))
    weights["model.embed_tokens.weight"][2 * RING :, half] = 1, -1
    # Queries of zeros attend to all tokens alike, of which the first one says the half.
    weights["model.layers.1.self_attn.v_proj.weight"][0, half] = 1
    weights["model.layers.1.self_attn.o_proj.weight"][half, 0] = 1
    weights["lm_head.weight"][: 2 * RING] = np.tile(4 * np.roll(identity[:RING], 1, axis=0), (2, 1))
    weights["lm_head.weight"][: 2 * RING, half] = np.repeat([20, -20], RING)
    weights["mtp.fc.weight"][:, :hidden] = identity
    weights["mtp.fc.weight"][half, hidden + half] = 1
    if permuted:
        order = np.random.default_rng(1)
        for name in head_shapes(config):
            weights[name] = order.permutation(weights[name].ravel()).reshape(weights[name].shape)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
