"""``ModelConfig``: description of a decoder-only model, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, one_of, positive_number
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.dtypes import MODEL_DTYPES, numpy_dtype
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION, MAX_LAYERS
from trt_kvcache.model.assistant_input import AssistantInputConfig
from trt_kvcache.model.description import from_plain, to_plain
from trt_kvcache.model.eagle3_input import Eagle3InputConfig
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, Mixer
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.per_layer_config import PerLayerEmbeddingConfig
from trt_kvcache.model.recurrent_config import RecurrentConfig

#: Experts of all layers together: a limit of the tensors that a damaged description names.
MAX_EXPERTS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Description of one decoder-only model. Layers may differ in everything but the width of the hidden state.

    Parameters
    ----------
    family : str
        The ``model_type`` of transformers. It only decides the names of stored weights: the fields below describe the computation.
    vocab_size : int
        Rows of the embedding.
    hidden_size : int
        Width of the residual stream.
    layers : tuple of LayerConfig
        The decoder layers, from the first one on.
    final_norm : NormConfig
        Norm of the head's input.
    max_position_embeddings : int
        Context length that the model was made for, in tokens; the largest int32 for a model that knows no positions.
    tie_word_embeddings : bool
        True if the embedding is also the weight of the head; then there is no ``lm_head.weight``.
    dtype : {"float16", "bfloat16", "float32"}
        Dtype of the stored weights.
    bos_token_id : int or None
        Token that begins a sequence.
    eos_token_ids : tuple of int
        Tokens that end a sequence.
    embedding_multiplier : float
        Factor of the rows of the embedding, before the first layer.
    rounds_embedding_multiplier : bool
        True if that factor is rounded to the compute dtype.
    final_softcap : float or None
        Logits ``x`` become ``final_softcap * tanh(x / final_softcap)``.
    logits_divisor : float
        Divisor of the logits.
    merge_norm : NormConfig or None
        Of an MTP head: norm of the two halves of the first layer's input, the embedding of a token and a hidden state of the model of which
        it is the head; a linear map ``[hidden, 2 * hidden]`` follows. None for a model that reads tokens alone.
    eagle3_input : Eagle3InputConfig or None
        Of an EAGLE-3 head: its input, of hidden states of the model and the embedding of a token. None for other models.
    assistant_input : AssistantInputConfig or None
        Of an assistant: its input, and the layers of the model whose K and V all of its layers read. None for other models.
    per_layer_embedding : PerLayerEmbeddingConfig or None
        A second embedding, with elements for each layer; there is one if and only if layers have a ``per_layer_input``.

    Raises
    ------
    ConfigError
        A field is out of range, or fields contradict each other.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> from trt_kvcache import ModelConfig
    >>> config = ModelConfig.from_dict(json.loads(Path("examples/tiny-llama/config.json").read_text()))
    >>> config.num_layers, config.layers[0].mixer.num_kv_heads, config.layers[0].mixer.head_dim, config.dtype
    (2, 2, 16, 'float16')
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    final_norm: NormConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    final_softcap: float | None = None
    logits_divisor: float = 1.0
    merge_norm: NormConfig | None = None
    eagle3_input: Eagle3InputConfig | None = None
    assistant_input: AssistantInputConfig | None = None
    per_layer_embedding: PerLayerEmbeddingConfig | None = None

    def __post_init__(self) -> None:
        one_of("ModelConfig.dtype", self.dtype, MODEL_DTYPES)
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            int_in_range(f"ModelConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ConfigError(f"ModelConfig.layers: expected from 1 to {MAX_LAYERS}, got {len(self.layers)}.")
        experts = sum(layer.mlp.router.num_experts for layer in self.layers if isinstance(layer.mlp, RoutedMlpConfig))
        if experts > MAX_EXPERTS:
            raise ConfigError(f"ModelConfig.layers: expected at most {MAX_EXPERTS} experts of all layers together, got {experts}.")
        for index, layer in enumerate(self.layers):
            _check_kv_source(self.layers, index, layer.mixer, self.assistant_input)
        self._check_per_layer_embedding()
        for name in ("embedding_multiplier", "logits_divisor"):
            positive_number(f"ModelConfig.{name}", getattr(self, name))
        if self.final_softcap is not None:
            positive_number("ModelConfig.final_softcap", self.final_softcap)

    def _check_per_layer_embedding(self) -> None:
        embedding = self.per_layer_embedding
        size = None if embedding is None else embedding.size
        for index, layer in enumerate(self.layers):
            if layer.per_layer_input is not None and layer.per_layer_input.size != size:
                where = f"ModelConfig.layers[{index}].per_layer_input.size"
                raise ConfigError(f"{where}: expected {size}, the size of per_layer_embedding, got {layer.per_layer_input.size}.")
        if embedding is None:
            return
        if all(layer.per_layer_input is None for layer in self.layers):
            raise ConfigError("ModelConfig.per_layer_embedding: expected none without a layer that has a per_layer_input, got one.")
        if embedding.vocab_size < self.vocab_size:
            raise ConfigError(
                f"ModelConfig.per_layer_embedding.vocab_size: expected at least {self.vocab_size}, a row of each token, "
                f"got {embedding.vocab_size}."
            )
        width = "ModelConfig.per_layer_embedding.size * num_layers"
        int_in_range(width, embedding.size * self.num_layers, 1, MAX_DIMENSION, error=ConfigError)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_logits(self) -> int:
        """Rows of the language model head: one for each token id, or for those that an EAGLE-3 head can propose."""
        return self.vocab_size if self.eagle3_input is None else self.eagle3_input.num_logits

    @property
    def hidden_inputs_width(self) -> int:
        """Elements of hidden states that a draft head reads with each token; 0 for a model that reads tokens alone."""
        if self.assistant_input is not None:
            return self.assistant_input.state_size
        return 0 if self.merge_norm is None and self.eagle3_input is None else self.hidden_size

    @property
    def state_size(self) -> int:
        """Elements of the output of the final norm, or of its projection in an assistant."""
        return self.hidden_size if self.assistant_input is None else self.assistant_input.state_size

    @property
    def attention_layers(self) -> tuple[AttentionConfig, ...]:
        """Attention of each attention layer."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def attention_indices(self) -> tuple[int, ...]:
        """Indices of the attention layers."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, AttentionConfig))

    @property
    def kv_layers(self) -> tuple[AttentionConfig, ...]:
        """Attention of each layer that stores K and V: the layers of the cache. Of an assistant, those of the model that it reads."""
        if self.assistant_input is not None:
            return self.assistant_input.kv_layers
        return tuple(mixer for mixer in self.attention_layers if mixer.stores_kv)

    @property
    def kv_indices(self) -> tuple[int, ...]:
        """Indices of the layers that store K and V."""
        return tuple(index for index in self.attention_indices if self.layers[index].attention.stores_kv)

    @property
    def kv_of_attention(self) -> tuple[int, ...]:
        """For each attention layer the index, among the layers of the cache, of the one whose rows it reads."""
        stored = {layer: place for place, layer in enumerate(self.kv_indices)}
        if self.assistant_input is not None:
            stored = {place: place for place in range(len(self.kv_layers))}
        sources = (self.layers[layer].attention.kv_source_layer for layer in self.attention_indices)
        return tuple(stored[layer if source is None else source] for layer, source in zip(self.attention_indices, sources, strict=True))

    @property
    def recurrent_indices(self) -> tuple[int, ...]:
        """Indices of the layers with recurrent states."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.recurrence is not None)

    @property
    def recurrent_layers(self) -> tuple[RecurrentConfig, ...]:
        """Mixers of the layers with recurrent states."""
        return tuple(layer.recurrence for layer in self.layers if layer.recurrence is not None)

    def embedding_factor(self, dtype: str) -> float:
        """Return the factor of the embedding's rows.

        Parameters
        ----------
        dtype : str
            The compute dtype.

        Returns
        -------
        float
            ``embedding_multiplier``, rounded to ``dtype`` if the model says so.
        """
        if not self.rounds_embedding_multiplier:
            return self.embedding_multiplier
        return float(np.asarray(self.embedding_multiplier).astype(numpy_dtype(dtype)))

    def rope_at_length(self, length: int) -> dict[str, Any] | None:
        """Return the rotation of keys in a cache of a length: equal for caches whose keys can be exchanged.

        Parameters
        ----------
        length : int
            Tokens that a slot can hold, S.

        Returns
        -------
        dict or None
            :meth:`RopeConfig.at_length`. If layers that store keys differ, ``ropes`` has each variant once, and ``layers`` the index of the
            variant of each of these layers. None for a model without RoPE.
        """
        found = [None if mixer.rope is None else mixer.rope.at_length(length) for mixer in self.kv_layers]
        kinds = [rope for index, rope in enumerate(found) if rope not in found[:index]] or [None]
        return kinds[0] if len(kinds) == 1 else {"ropes": kinds, "layers": [kinds.index(rope) for rope in found]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
        """Read a ``config.json`` as transformers 5 or an earlier version writes it.

        Parameters
        ----------
        data : mapping of str to object
            The parsed file. Absent fields have the defaults of transformers.
        default_dtype : {"float16", "bfloat16", "float32"}, optional
            The dtype for a file that does not name one. Without a default such a file is an error.

        Returns
        -------
        ModelConfig
            The model.

        Raises
        ------
        ConfigError
            The model is not supported, or the file is incomplete. The message names the field. A model is never read as if it were a
            different one.

        Warns
        -----
        UserWarning
            A Llama model names a sliding window. Llama has none, so it is ignored, as in transformers.
        """
        from trt_kvcache.model.families.registry import read_config  # families import this module

        return read_config(data, default_dtype=default_dtype)

    def to_description(self) -> dict[str, Any]:
        """Return the model as plain JSON values. Layers that are equal are written once.

        Returns
        -------
        dict
            The fields; ``layers`` are indices into ``layer_kinds``. Fields that have their defaults are left out.
        """
        kinds = list(dict.fromkeys(self.layers))
        plain = to_plain(self)
        plain["layers"] = [kinds.index(layer) for layer in self.layers]
        return {**plain, "layer_kinds": [to_plain(kind) for kind in kinds]}

    @classmethod
    def from_description(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a :meth:`to_description`.

        Parameters
        ----------
        data : mapping of str to object
            Plain JSON values.

        Returns
        -------
        ModelConfig
            An equal model.

        Raises
        ------
        ConfigError
            A field is missing, unknown, of another type or out of range.
        """
        from trt_kvcache.model.families.registry import FAMILIES

        if not isinstance(data, Mapping) or not isinstance(data.get("layer_kinds"), list) or not isinstance(data.get("layers"), list):
            raise ConfigError(f"model: expected an object with layers and layer_kinds, got {short_repr(data)}.")
        kinds = [from_plain(LayerConfig, kind, f"model.layer_kinds[{index}]") for index, kind in enumerate(data["layer_kinds"])]
        layers = []
        for index, kind in enumerate(data["layers"]):
            layers.append(kinds[int_in_range(f"model.layers[{index}]", kind, 0, len(kinds) - 1, error=ConfigError)])
        rest = {name: value for name, value in data.items() if name not in ("layers", "layer_kinds")}
        one_of("model.family", rest.get("family"), FAMILIES)
        return from_plain(cls, rest, "model", layers=tuple(layers))


def _check_kv_source(layers: tuple[LayerConfig, ...], index: int, mixer: Mixer | None, assistant: AssistantInputConfig | None) -> None:
    """Raise ConfigError if a layer reads K and V of a layer that does not store them in its shape before it."""
    source = mixer.kv_source_layer if isinstance(mixer, AttentionConfig) else None
    if assistant is not None and (source is None or source >= len(assistant.kv_layers)):
        expected = f"one of {len(assistant.kv_layers)} layers of the model of the assistant"
        raise ConfigError(f"ModelConfig.layers[{index}].mixer.kv_source_layer: expected {expected}, got {source}.")
    if source is None or not isinstance(mixer, AttentionConfig):
        return
    stored: Mixer | None = layers[source].mixer if source < index else None
    if assistant is not None:
        stored = assistant.kv_layers[source]
    sizes = (mixer.num_kv_heads, mixer.head_dim)
    if not isinstance(stored, AttentionConfig) or not stored.stores_kv or (stored.num_kv_heads, stored.head_dim) != sizes:
        expected = f"an earlier attention layer that stores {sizes[0]} heads of {sizes[1]}"
        raise ConfigError(f"ModelConfig.layers[{index}].mixer.kv_source_layer: expected {expected}, got layer {source}.")
