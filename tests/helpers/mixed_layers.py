"""A model whose layers differ in everything that a layer can differ in, and checkpoints of random weights for such models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.model import (
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QkNormConfig,
    QueryScaling,
    RopeConfig,
)
from trt_kvcache.model.tensor_shapes import tensor_shapes

NORM = NormConfig(epsilon=1e-5)
OFFSET = NormConfig(epsilon=1e-6, weight_offset=1.0, rounds_before_weight=False)
ROPE = RopeConfig(kind="default", theta=100.0)
HALF = RopeConfig(kind="linear", theta=500.0, factor=2.0, partial_rotary_factor=0.5)

#: Parts of the names of norms that have an offset in :func:`mixed_model`.
_WITH_OFFSET = (".0.", ".2.self_attn", ".4.self_attn", "post_per_layer", "model.norm")


def mixed_model(*head_dims: int) -> ModelConfig:
    """Return a model of four layers whose heads are of these four sizes, and a fifth that reads K and V of the third.

    Two layers have per-layer embeddings.
    """
    sizes = ((4, 2), (6, 2), (3, 3), (4, 1))
    plain = [AttentionConfig(num_heads=q, num_kv_heads=kv, head_dim=dim, rope=ROPE) for (q, kv), dim in zip(sizes, head_dims, strict=True)]
    layers = (
        LayerConfig(
            mixer=replace(plain[0], window=5, softcap=2.0, qkv_bias=True, input_multiplier=1.3),
            mlp=MlpConfig(intermediate_size=28, activation="gelu_tanh"),
            input_norm=OFFSET,
            mixer_output_norm=OFFSET,
            mlp_norm=OFFSET,
            mlp_output_norm=OFFSET,
        ),
        LayerConfig(
            mixer=replace(plain[1], rope=None, scale=0.3, o_bias=True, qk_norm=QkNormConfig(norm=NORM, over="full")),
            mlp=MlpConfig(intermediate_size=20, bias=True, gate_multiplier=1.8),
            mixer_output_norm=NORM,
            mlp_output_norm=NORM,
            residual_multiplier=0.7,
            mlp_residual_multiplier=0.4,
        ),
        LayerConfig(
            mixer=replace(
                plain[2],
                rope=HALF,
                window=4,
                query_scaling=QueryScaling(beta=0.5, period=3),
                qk_norm=QkNormConfig(norm=OFFSET),
                v_norm_epsilon=1e-3,
                values_are_keys=True,
            ),
            mlp=MlpConfig(intermediate_size=24),
            input_norm=NORM,
            mlp_norm=NORM,
            output_scale=True,
        ),
        LayerConfig(
            mixer=replace(plain[3], qk_norm=QkNormConfig(norm=NORM, after_rope=True)),
            mlp=MlpConfig(intermediate_size=36),
            input_norm=NORM,
            parallel=True,
        ),
    )
    reader = replace(plain[2], num_heads=6, rope=HALF, window=3, kv_source_layer=2, qk_norm=QkNormConfig(norm=OFFSET))
    gelu, silu = (PerLayerInputConfig(size=6, activation=name, output_norm=OFFSET) for name in ("gelu_tanh", "silu"))
    fifth = LayerConfig(mixer=reader, mlp=MlpConfig(intermediate_size=16), input_norm=NORM, mlp_norm=NORM, per_layer_input=silu)
    layers = (*layers[:2], replace(layers[2], per_layer_input=gelu), layers[3], fifth)
    return ModelConfig(
        family="gemma4_text",  # which has names for all norms, and for the scale of a layer
        vocab_size=43,
        hidden_size=40,
        layers=layers,
        final_norm=OFFSET,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
        embedding_multiplier=3.3,
        rounds_embedding_multiplier=True,
        final_softcap=5.0,
        logits_divisor=1.7,
        per_layer_embedding=PerLayerEmbeddingConfig(vocab_size=47, size=6, norm=NORM),
    )


class RandomCheckpoint:
    """A stand-in for a checkpoint, with random weights, which are equal for equal shapes and an equal quantization scheme."""

    path = Path("random")
    draft_tokens = None
    token_clusters = None

    def __init__(self, config: ModelConfig, scheme: str | None = None) -> None:
        self.config, self._scheme = config, scheme
        self._shapes = tensor_shapes(config)
        self.nbytes = 4 * sum(map(math.prod, self._shapes.values()))

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return 4 * math.prod(self._shapes[name])

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        """Return a quantized matrix of a layer; None for other tensors, and without a scheme."""
        if self._scheme is None or len(self._shapes[name]) != 2 or "layers" not in name:
            return None
        return rounded_to_nearest(self._values(name), self._scheme, "bfloat16")

    def super_blocks(self, name: str) -> None:
        """It is no GGUF file."""

    def offset_blocks(self, name: str) -> None:
        """It is no GGUF file."""

    def unrounded(self, name: str) -> tuple[np.ndarray, str, str] | None:
        """Return the values of a quantized matrix, scheme, and dtype of the scales."""
        return None if self.quantized_weight(name) is None else (self._values(name), str(self._scheme), "bfloat16")

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor: norms near what leaves a value as it is, others so that a product is as large as what goes in."""
        quantized = self.quantized_weight(name)
        return self._values(name) if quantized is None else quantized.dequantized()

    def _values(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        values = np.random.default_rng([*name.encode()]).standard_normal(shape)
        if name.endswith("router.scale"):  # of an input of length 1, so that experts have scores of their own
            return (values * shape[0] ** 0.5).astype(np.float32)
        if "norm" not in name:
            return (values * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)).astype(np.float32)
        has_offset = any(part in name for part in _WITH_OFFSET)
        return (0.3 * values + (0 if has_offset else 1)).astype(np.float32)


def without(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return models that lack one thing each, with the same weights."""

    def changed(layer: int, **changes: object) -> ModelConfig:
        layers = list(model.layers)
        mixer = {name: value for name, value in changes.items() if hasattr(layers[layer].mixer, name)}
        rest = {name: value for name, value in changes.items() if name not in mixer}
        layers[layer] = replace(layers[layer], **{"mixer": replace(layers[layer].mixer, **mixer), **rest})  # type: ignore[arg-type]
        return replace(model, layers=tuple(layers))

    first, third, fifth = model.layers[0], model.layers[2], model.layers[4]
    no_offset = replace(OFFSET, weight_offset=0.0)
    return {
        "window": changed(0, window=None),
        "a token of the window": changed(0, window=6),
        "a token of another window": changed(2, window=3),
        "softcap": changed(0, softcap=None),
        "the size of the softcap": changed(0, softcap=2.5),
        "scale": changed(1, scale=None),
        "query_scaling": changed(2, query_scaling=None),
        "a period of query_scaling": changed(2, query_scaling=QueryScaling(beta=0.5, period=4)),
        "no_rope": changed(1, rope=ROPE),
        "partial_rotary": changed(2, rope=replace(HALF, partial_rotary_factor=1.0)),
        "which part is rotated": changed(2, rope=replace(HALF, partial_rotary_factor=0.25)),
        "several_ropes": changed(3, rope=replace(ROPE, kind="linear", factor=2.0)),
        "parallel": changed(3, parallel=False),
        "norm_after_rope": changed(3, qk_norm=QkNormConfig(norm=NORM)),
        "norm_offset": changed(0, mixer_output_norm=no_offset),
        "the offset of the norm of heads": changed(2, qk_norm=QkNormConfig(norm=no_offset)),
        "the offset of the final norm": replace(model, final_norm=no_offset),
        "an epsilon": changed(3, input_norm=replace(NORM, epsilon=0.1)),
        "activation": changed(0, mlp=replace(first.mlp, activation="silu")),
        "residual_multiplier": changed(1, residual_multiplier=1.0),
        "mlp_residual_multiplier": changed(1, mlp_residual_multiplier=None),
        "a factor of the input of attention": changed(0, input_multiplier=1.0),
        "a factor of the gate": changed(1, mlp=replace(model.layers[1].mlp, gate_multiplier=1.0)),
        "embedding_multiplier": replace(model, embedding_multiplier=1.0),
        "final_softcap": replace(model, final_softcap=None),
        "logits_divisor": replace(model, logits_divisor=1.0),
        "a bias": changed(0, qkv_bias=False),
        "the other bias": changed(1, o_bias=False),
        "a bias of the MLP": changed(1, mlp=replace(model.layers[1].mlp, bias=False)),
        "a norm after the mixer": changed(0, mixer_output_norm=None),
        "a norm after the MLP": changed(1, mlp_output_norm=None),
        "a norm before the MLP": changed(2, mlp_norm=None),
        "a norm before the mixer": changed(2, input_norm=None),
        "norms of heads": changed(2, qk_norm=None),
        "v_norm": changed(2, v_norm_epsilon=None),
        "values_are_keys": changed(2, values_are_keys=False),
        "output_scale": changed(2, output_scale=False),
        "per_layer_embeddings": changed(4, per_layer_input=None),
        "which activation of a per-layer gate": changed(2, per_layer_input=replace(fifth.per_layer_input, activation="silu")),
        "the offset of a norm of per-layer inputs": changed(4, per_layer_input=replace(fifth.per_layer_input, output_norm=no_offset)),
        "the epsilon of the norm of the per-layer projection": replace(
            model, per_layer_embedding=replace(model.per_layer_embedding, norm=replace(NORM, epsilon=0.5))
        ),
        "shared_kv": changed(4, kv_source_layer=None),
        "a token of the window over shared rows": changed(4, window=4),
        "norms of heads over shared rows": changed(4, qk_norm=None),
        "RoPE of queries over shared rows": changed(4, rope=None),
        "full_qk_norm": changed(1, qk_norm=None),
        "which activation": changed(2, mlp=replace(third.mlp, activation="gelu_tanh")),
    }
