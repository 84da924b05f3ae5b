"""Models with an EAGLE-3 head in a folder of its own: folders, and the head in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.helpers.mtp import RING
from tests.paths import GOLDEN
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

Array = npt.NDArray[Any]

#: Layers of the models: the head reads the hidden states before layers 2, 3 and 4.
NUM_LAYERS = 7


def write_model(folder: Path, *, seed: int = 0, scale: float = 0.3, **changes: Any) -> Path:
    """Write a small Llama with random weights and as many layers as a head needs; return its folder."""
    config = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {"num_hidden_layers": NUM_LAYERS, **changes}
    random = np.random.default_rng(seed)
    shapes = tensor_shapes(ModelConfig.from_dict(config))
    weights = {name: (random.standard_normal(shape) * scale + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}
    return _save(folder, config, weights)


def head_config(model: Path, num_logits: int, **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a head, as SpecForge and SGLang write it; a change to ... removes a field."""
    config = json.loads((model / "config.json").read_text())
    sizes = {"intermediate_size": 28, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5}
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": num_logits,
        **{name: config[name] for name in ("hidden_size", "vocab_size", "max_position_embeddings")},
        **sizes,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def head_shapes(config: Mapping[str, Any], *, num_states: int = 3) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a head without an embedding, by the names of published files."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "fc.weight": (hidden, num_states * config.get("target_hidden_size", hidden)),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }


def token_maps(tokens: Sequence[int], vocab_size: int) -> dict[str, Array]:
    """Return the tensors that say which token ids the logits are of."""
    ids = np.asarray(tokens, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab_size), ids)}


def write_head(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    scale: float = 0.3,
    tokens: Sequence[int] = range(3, 40),
    embedding: bool = False,
    num_states: int = 3,
    **changes: Any,
) -> Path:
    """Write a head of random weights for a model, which proposes these token ids, with or without an embedding; return its folder."""
    config = head_config(model, len(tokens), **changes)
    random = np.random.default_rng(seed)
    shapes = head_shapes(config, num_states=num_states) | (
        {"embed_tokens.weight": (config["vocab_size"], config["hidden_size"])} if embedding else {}
    )
    weights = {name: (random.standard_normal(shape) * scale + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}
    return _save(folder, config, weights | token_maps(tokens, config["vocab_size"]))


def _save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


class HeadInFloat64:
    """A head, written from ``cnets.py`` of SafeAILab/EAGLE and from vLLM's ``llama_eagle3.py``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        of_model = load_file(model / "model.safetensors")
        self._stored = {name: np.asarray(weight, np.float64) for name, weight in stored.items() if name != "t2d"}
        self._embedding = np.asarray(stored.get("embed_tokens.weight", of_model["model.embed_tokens.weight"]), np.float64)
        self._lm_head = np.asarray(stored.get("lm_head.weight", of_model.get("lm_head.weight")), np.float64)
        self.tokens = np.arange(len(self._lm_head)) + np.asarray(stored.get("d2t", 0), np.int64)

    def reduced(self, states: Array) -> Array:
        """Return the hidden states that the head makes of those of the model, ``[n, 3 * hidden]``."""
        return np.asarray(states, np.float64) @ self._stored["fc.weight"].T

    def __call__(self, tokens: Sequence[int], hidden: Array) -> tuple[Array, Array]:
        """Return the hidden states of the head before its norm, and its logits, over a whole sequence.

        ``tokens[i]`` follows the token of which ``hidden[i]`` is the hidden state.
        """
        config, count = self.config, len(tokens)
        width = config["head_dim"]
        embedding = self._norm(self._embedding[list(tokens)], "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if config.get("norm_before_residual") else hidden
        inputs = np.concatenate([embedding, normed], -1)
        q, k, v = (self._linear(inputs, f"self_attn.{name}_proj").reshape(count, -1, width).swapaxes(0, 1) for name in "qkv")
        groups = len(q) // len(k)
        k, v = (part.repeat(groups, 0) for part in (k, v))
        scores = self._rotated(q) @ self._rotated(k).swapaxes(1, 2) / np.sqrt(width) + np.triu(np.full((count, count), -np.inf), 1)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (chances / chances.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(count, -1)
        x = residual + self._linear(attended, "self_attn.o_proj")
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gate = self._linear(normed, "mlp.gate_proj")
        x = x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(normed, "mlp.up_proj"), "mlp.down_proj")
        return x, self._norm(x, "norm") @ self._lm_head.T

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self._stored[f"{name}.weight"]

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._stored[f"midlayer.{name}.weight"].T

    def _rotated(self, x: Array) -> Array:  # [heads, tokens, width]
        count, width = x.shape[1:]
        angles = np.arange(count)[:, None] * self.config["rope_theta"] ** -(np.arange(0, width, 2) / width)
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1)


#: Dimension that says the half of the ring, after those of the places.
_HALF = RING


def write_ring_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama that counts on the ring of :mod:`tests.helpers.mtp`: its second layer says the half, which the first token chose."""
    sizes = {
        "hidden_size": 40,
        "head_dim": RING,
        "vocab_size": 2 * RING + 2,
        "num_hidden_layers": NUM_LAYERS,
        "tie_word_embeddings": False,
    }
    config = json.loads((GOLDEN / "llama" / "config.json").read_text()) | sizes | changes
    weights = {name: np.full(shape, "norm" in name, np.float32) for name, shape in tensor_shapes(ModelConfig.from_dict(config)).items()}
    identity = np.eye(config["hidden_size"], dtype=np.float32)
    weights["model.embed_tokens.weight"][: 2 * RING] = np.tile(identity[:RING], (2, 1))
    weights["model.embed_tokens.weight"][2 * RING :, _HALF] = 1, -1
    # Queries of zeros attend to all tokens alike, of which the first one says the half.
    weights["model.layers.1.self_attn.v_proj.weight"][0, _HALF] = 1
    weights["model.layers.1.self_attn.o_proj.weight"][_HALF, 0] = 1
    weights["lm_head.weight"][: 2 * RING] = np.tile(4 * np.roll(identity[:RING], 1, axis=0), (2, 1))
    weights["lm_head.weight"][: 2 * RING, _HALF] = np.repeat([20, -20], RING)
    return _save(folder, config, weights)


def ring_tokens(count: int = 2 * RING) -> list[int]:
    """Return token ids of the ring in another order, for the logits of a head."""
    return np.random.default_rng(5).permutation(2 * RING)[:count].tolist()


def write_ring_head(folder: Path, model: Path, *, tokens: Sequence[int] | None = None, permuted: bool = False, **changes: Any) -> Path:
    """Write a head for a ring model that is right by construction, or one of the same weights in another order.

    It takes the half from a hidden state, of the model or its own, and the place from its token, to which alone it attends.
    """
    tokens = ring_tokens() if tokens is None else tokens
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": RING}
    config = head_config(model, len(tokens), **{**sizes, **changes})
    hidden = config["hidden_size"]
    weights = {name: np.full(shape, "norm" in name, np.float32) for name, shape in head_shapes(config).items()}
    identity = np.eye(config["hidden_size"], dtype=np.float32)
    weights["fc.weight"][_HALF, 2 * hidden + _HALF] = 1
    # The two fastest rotations of equal queries and keys tell a token from all others. Every embedding of a place has the same sum.
    for name in "qk":
        weights[f"midlayer.self_attn.{name}_proj.weight"][:2, :RING] = 12
    # The place of the token, less that of the token before, which the head's own hidden state has.
    weights["midlayer.self_attn.v_proj.weight"][:RING, :RING] = np.eye(RING)
    weights["midlayer.self_attn.v_proj.weight"][:RING, hidden : hidden + RING] = -np.eye(RING)
    weights["midlayer.self_attn.o_proj.weight"][:RING, :RING] = np.eye(RING)
    lm_head = np.tile(4 * np.roll(identity[:RING], 1, axis=0), (2, 1))
    lm_head[:, _HALF] = np.repeat([130, -130], RING)
    weights["lm_head.weight"][...] = lm_head[tokens]
    if permuted:
        order = np.random.default_rng(1)
        weights = {name: order.permutation(weight.ravel()).reshape(weight.shape) for name, weight in weights.items()}
    return _save(folder, config, weights | token_maps(tokens, config["vocab_size"]))
