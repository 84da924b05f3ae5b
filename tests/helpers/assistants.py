"""Gemma 4 models with an assistant in a folder of its own: folders, and the assistant in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

FULL, SLIDING = "full_attention", "sliding_attention"

#: Layers of the cache of the models that an assistant reads, by their type: the last ones.
READ = {SLIDING: 1, FULL: 2}


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a small Gemma 4 with random weights, whose last three layers read K and V of earlier ones; return its folder."""
    config = json.loads((GOLDEN / "gemma4-shared" / "config.json").read_text())
    config |= {"dtype": "float32", "vocab_size": 72, "final_logit_softcapping": None, **changes}
    return _save(folder, config, _random(tensor_shapes(ModelConfig.from_dict(config)), seed))


def assistant_config(model: Path, *, clusters: tuple[int, int] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of an assistant, as transformers writes it. ``clusters``: their number, and that of the chosen ones."""
    of_model = json.loads((model / "config.json").read_text())
    text = {name: value for name, value in of_model.items() if name != "architectures"}
    own = {
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 0,
    }
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": of_model["hidden_size"],
        "dtype": "float32",
        "tie_word_embeddings": True,
        "use_ordered_embeddings": clusters is not None,
    }
    if clusters is not None:
        config |= {"num_centroids": clusters[0], "centroid_intermediate_top_k": clusters[1]}
    inner = {name: changes.pop(name) for name in list(changes) if name in text or name in own}
    return {**config, "text_config": {**text, **own, **inner}, **changes}


def assistant_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an assistant, by the names of published files."""
    text = config["text_config"]
    hidden, inner, states = text["hidden_size"], text["intermediate_size"], config["backbone_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "pre_projection.weight": (hidden, 2 * states),
        "post_projection.weight": (states, hidden),
        "model.norm.weight": (hidden,),
    }
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], hidden)
    for index, kind in enumerate(text["layer_types"]):
        width = text["global_head_dim"] if kind == FULL else text["head_dim"]
        queries = text["num_attention_heads"] * width
        bias = {"self_attn.q_proj.bias": (queries,), "self_attn.o_proj.bias": (hidden,)} if text["attention_bias"] else {}
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            **bias,
            "self_attn.q_norm.weight": (width,),
            **{f"mlp.{name}_proj.weight": (hidden, inner) if name == "down" else (inner, hidden) for name in ("gate", "up", "down")},
            **{f"{name}.weight": (hidden,) for name in _NORMS},
            "layer_scalar": (1,),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def write_assistant(folder: Path, model: Path, *, seed: int = 1, clusters: tuple[int, int] | None = None, **changes: Any) -> Path:
    """Write an assistant of random weights for a model; return its folder."""
    config = assistant_config(model, clusters=clusters, **changes)
    weights = _random(assistant_shapes(config), seed)
    if clusters is not None:
        weights["masked_embedding.token_ordering"] = np.random.default_rng(seed).permutation(config["text_config"]["vocab_size"])
    return _save(folder, config, weights)


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape) * 0.3 + ("norm" in name or "scalar" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


class AssistantInFloat64:
    """An assistant, written from ``modeling_gemma4_assistant.py`` and ``modeling_gemma4.py`` of transformers."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self._text = self.config["text_config"]
        stored = load_file(folder / "model.safetensors")
        self._ordering = stored.pop("masked_embedding.token_ordering", None)
        self._stored = {name: np.asarray(weight, np.float64) for name, weight in stored.items()}
        embedding = np.asarray(load_file(model / "model.safetensors")["model.embed_tokens.weight"], np.float64)
        self._embedding = embedding * np.float32(embedding.shape[1] ** 0.5)

    def __call__(self, token: int, state: Array, kv: Mapping[str, tuple[Array, Array]], position: int) -> tuple[Array, Array]:
        """Return logits and state of one token at a position. ``kv``: K and V ``[H, n, D]`` that each type of layers sees."""
        x = self._stored["pre_projection.weight"] @ np.concatenate([self._embedding[token], np.asarray(state, np.float64)])
        for index, kind in enumerate(self._text["layer_types"]):
            x = self._layer(f"model.layers.{index}.", kind, x, *(np.asarray(side, np.float64) for side in kv[kind]), position)
        x = self._norm(x, "model.norm.weight")
        return self._logits(x), self._stored["post_projection.weight"] @ x

    def _logits(self, x: Array) -> Array:
        logits = self._stored["model.embed_tokens.weight"] @ x
        if self._ordering is None:
            return logits
        count = self.config["centroid_intermediate_top_k"]
        nearest = np.argsort(-(self._stored["masked_embedding.centroids.weight"] @ x))[:count]
        kept = self._ordering.reshape(self.config["num_centroids"], -1)[nearest].ravel()
        found = np.full(len(logits), -np.inf)
        found[kept] = logits[kept]
        return found

    def _layer(self, name: str, kind: str, x: Array, k: Array, v: Array, position: int) -> Array:
        width = k.shape[-1]
        q = self._linear(self._norm(x, f"{name}input_layernorm.weight"), f"{name}self_attn.q_proj").reshape(-1, width)
        q = self._rotated(self._norm(q, f"{name}self_attn.q_norm.weight"), kind, position).reshape(len(k), -1, width)
        scores = q @ k.swapaxes(1, 2)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        attended = self._linear((chances / chances.sum(-1, keepdims=True) @ v).ravel(), f"{name}self_attn.o_proj")
        x = x + self._norm(attended, f"{name}post_attention_layernorm.weight")
        normed = self._norm(x, f"{name}pre_feedforward_layernorm.weight")
        gate = self._linear(normed, f"{name}mlp.gate_proj")
        gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        changed = self._linear(gelu * self._linear(normed, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")
        return (x + self._norm(changed, f"{name}post_feedforward_layernorm.weight")) * self._stored[f"{name}layer_scalar"]

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._text["rms_norm_eps"]) * self._stored[name]

    def _linear(self, x: Array, name: str) -> Array:
        return self._stored[f"{name}.weight"] @ x + self._stored.get(f"{name}.bias", 0)

    def _rotated(self, x: Array, kind: str, position: int) -> Array:  # [heads, width]
        rope, width = self._text["rope_parameters"][kind], x.shape[-1]
        angles = position * rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
        if rope["rope_type"] == "proportional":  # the other pairs are not rotated
            angles[int(rope["partial_rotary_factor"] * width // 2) :] = 0
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1)


#: Dimension that says the half of the ring, after those of the places.
_HALF = RING


def write_ring_model(folder: Path, **changes: Any) -> Path:
    """Write a Gemma 4 that counts on the ring of :mod:`tests.helpers.mtp`: its second layer says the half, which the first token chose."""
    sizes = {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "layer_types": [SLIDING, FULL, FULL],
        "num_global_key_value_heads": None,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "tie_word_embeddings": False,
        "vocab_size": 2 * RING + 2,
    }
    config = json.loads((GOLDEN / "gemma4-shared" / "config.json").read_text())
    config |= {"dtype": "float32", "final_logit_softcapping": None, **sizes, **changes}
    weights = _constant(tensor_shapes(ModelConfig.from_dict(config)))
    identity = np.eye(config["hidden_size"], dtype=np.float32)
    weights["model.embed_tokens.weight"][: 2 * RING] = np.tile(identity[:RING], (2, 1))
    weights["model.embed_tokens.weight"][2 * RING :, _HALF] = 1, -1
    # Queries of zeros attend to all tokens alike, of which the first one says the half.
    weights["model.layers.1.self_attn.v_proj.weight"][0, _HALF] = 1
    weights["model.layers.1.self_attn.o_proj.weight"][_HALF, 0] = 1
    weights["lm_head.weight"][: 2 * RING] = _ring_head(identity)
    return _save(folder, config, weights)


def _ring_head(identity: Array, *, shift: int = 1) -> Array:
    head = np.tile(4 * np.roll(identity[:RING], shift, axis=0), (2, 1))
    head[:, _HALF] = np.repeat([20, -20], RING)
    return head


def write_ring_assistant(
    folder: Path, model: Path, *, permuted: bool = False, clusters: tuple[int, int] | None = None, **changes: Any
) -> Path:
    """Write an assistant for a ring model that is right by construction, or one of the same weights in another order.

    It takes the place from its token, and the half from V of the model.
    """
    layers = {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2, "num_kv_shared_layers": 2}
    config = assistant_config(model, clusters=clusters, **layers, **changes)
    weights = _constant(assistant_shapes(config))
    identity = np.eye(config["text_config"]["hidden_size"], dtype=np.float32)
    weights["pre_projection.weight"][:RING, :RING] = np.eye(RING)
    weights["model.layers.1.self_attn.o_proj.weight"][_HALF, 0] = 1
    weights["model.embed_tokens.weight"][: 2 * RING] = _ring_head(identity)
    if permuted:
        order = np.random.default_rng(1)
        weights = {name: order.permutation(weight.ravel()).reshape(weight.shape) for name, weight in weights.items()}
    if clusters is not None:
        weights["masked_embedding.token_ordering"] = np.arange(config["text_config"]["vocab_size"])
    return _save(folder, config, weights)


def _constant(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    return {name: np.full(shape, "norm" in name or "scalar" in name, np.float32) for name, shape in shapes.items()}
