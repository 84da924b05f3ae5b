"""The weights of a decoder as torch tensors, in blocks: a mixer or an MLP, with the norms around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.decoder_weights import AssistantWeights, NormWeights, assistant_weights, merge_weights
from trt_kvcache.model import AttentionConfig, Eagle3InputConfig, ModelConfig, NormConfig, RoutedMlpConfig
from trt_kvcache.model.layer_config import Mixer
from trt_kvcache.model.recurrent_config import Mamba2Config, ShortConvConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, final_norm_bias_name, final_norm_name
from trt_kvcache.torch_engine.adapter_updates import LoadUpdates
from trt_kvcache.torch_engine.mlp import Mlp
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.operations import Experts, TorchMatrix, TorchProjection
from trt_kvcache.torch_engine.parts import GatedDeltaNet, Mamba2, Part, SelfAttention, ShortConvolution
from trt_kvcache.torch_engine.per_layer_input import PerLayerEmbedding, PerLayerInput
from trt_kvcache.torch_engine.routed_mlp import RoutedMlp
from trt_kvcache.torch_engine.stored_rows import LoadRows
from trt_kvcache.torch_engine.stored_weights import LoadPacked, LoadTensor, StoredWeights, arranged, stored_weights


@dataclass(frozen=True, kw_only=True)
class Block:
    """A mixer, an MLP or a per-layer input of a layer, in the residual stream: ``scale * (x + factor * output_norm(part(norm(x))))``.

    ``scale``: ``[1]``, or None for 1. ``shares_input``: the part has the input of the block before, and the block has no ``norm``.
    """

    norm: TorchNorm | None
    part: Part
    output_norm: TorchNorm | None
    factor: float
    shares_input: bool = False
    scale: torch.Tensor | None = None
    layer: int


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Input of a draft head, of an embedding and of hidden states of the model. ``eagle3``: of an EAGLE-3 head; None for an MTP head."""

    embedding_norm: TorchNorm
    hidden_norm: TorchNorm
    projection: torch.Tensor  # [hidden, 2 * hidden]; of an EAGLE-3 head [hidden, states_width], which the engine of the model applies
    eagle3: Eagle3InputConfig | None

    @classmethod
    def of(cls, config: ModelConfig, load: LoadTensor) -> Merge | None:
        """Return the input of a draft head; None for a model that reads tokens alone."""
        stored = merge_weights(config, load)
        norm = config.merge_norm if config.eagle3_input is None else config.eagle3_input.norm
        if stored is None or norm is None:
            return None
        norms = [TorchNorm.of(norm, NormWeights(weight, None)) for weight in (stored.embedding_norm, stored.hidden_norm)]
        return cls(embedding_norm=norms[0], hidden_norm=norms[1], projection=arranged(stored.projection), eagle3=config.eagle3_input)

    def __call__(self, embedding: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream ``[A, s, hidden]``, and the input of the first mixer where that is not the norm of the stream."""
        if self.eagle3 is None:
            halves = self.embedding_norm(embedding), self.hidden_norm(states)
            return F.linear(torch.cat(halves, dim=-1), self.projection), None
        normed = self.hidden_norm(states)
        mixer_input = torch.cat((self.embedding_norm(embedding), normed), dim=-1)
        return normed if self.eagle3.adds_normalised else states.clone(), mixer_input  # kernels overwrite the residual stream


@dataclass(frozen=True, kw_only=True)
class TorchWeights:
    """A whole decoder. ``embedding`` and ``head`` are ``[vocab, hidden]``, one tensor if they are tied.

    An assistant has the embedding of its model. ``embedding_factor`` multiplies its rows. ``is_packed``: some matrices are packed.
    """

    embedding: torch.Tensor
    embedding_factor: float
    blocks: tuple[Block, ...]
    final_norm: TorchNorm
    head: TorchMatrix
    is_packed: bool
    per_layer: PerLayerEmbedding | None
    merge: Merge | None = None
    assistant: AssistantWeights[torch.Tensor] | None = None

    @property
    def experts(self) -> Iterator[Experts]:
        """The experts of each layer that has some."""
        return (block.part.experts for block in self.blocks if isinstance(block.part, RoutedMlp))

    @property
    def widest(self) -> int:
        """Outputs of the widest projection of a layer, of which experts count as one."""
        parts = (value for block in self.blocks for value in vars(block.part).values())
        experts = (block.part.outputs for block in self.blocks if isinstance(block.part, RoutedMlp))
        return max((*(part.outputs for part in parts if isinstance(part, TorchProjection)), *experts), default=0)


def torch_weights(
    config: ModelConfig,
    dtype: str,
    load: LoadTensor,
    load_packed: LoadPacked,
    load_updates: LoadUpdates = lambda index: {},
    *,
    load_rows: LoadRows = lambda name: None,
) -> TorchWeights:
    """Return the weights of a model, layer by layer. ``load`` is called once for each tensor that the other functions do not return."""
    embedding = arranged(load(embedding_name(config)))
    blocks = tuple(_blocks(config, load, load_packed, load_updates))
    bias = final_norm_bias_name(config)
    final_norm = TorchNorm.of(config.final_norm, NormWeights(load(final_norm_name(config)), None if bias is None else load(bias)))
    head: TorchMatrix = embedding
    if not config.tie_word_embeddings:
        head = load_packed(HEAD, (slice(None),)) or arranged(load(HEAD))
    matrices = [head, *(value.weight for block in blocks for value in vars(block.part).values() if isinstance(value, TorchProjection))]
    return TorchWeights(
        embedding=embedding,
        embedding_factor=config.embedding_factor(dtype),
        blocks=blocks,
        final_norm=final_norm,
        head=head,
        merge=Merge.of(config, load),
        assistant=assistant_weights(config, lambda name: arranged(load(name))),
        per_layer=PerLayerEmbedding.of(config, dtype, load, load_rows),
        is_packed=not all(isinstance(matrix, torch.Tensor) for matrix in matrices)
        or any(block.part.experts.is_packed for block in blocks if isinstance(block.part, RoutedMlp)),
    )


def _blocks(config: ModelConfig, load: LoadTensor, load_packed: LoadPacked, load_updates: LoadUpdates) -> Iterator[Block]:
    """Yield one block for each mixer, MLP and per-layer input, layer by layer; a second mixer comes before the attention next to it."""
    attention, recurrent = count(), count()
    for index, layer in enumerate(config.layers):
        stored = stored_weights(config, index, load, load_packed, load_updates)
        scale = stored["output_scale"] if layer.output_scale else None
        parts = [part for part in (layer.mixer, layer.mlp, layer.per_layer_input) if part is not None]
        input_norm, shares_input = _norm(layer.input_norm, stored.input_norm), layer.parallel_mixer is not None
        if layer.parallel_mixer is not None:
            part = _mixer(next(recurrent), layer.parallel_mixer, stored)
            yield Block(norm=input_norm, part=part, output_norm=None, factor=layer.parallel_mixer_multiplier, layer=index)
        if layer.mixer is not None:
            yield Block(
                norm=None if shares_input else input_norm,
                part=_mixer(next(attention if isinstance(layer.mixer, AttentionConfig) else recurrent), layer.mixer, stored),
                output_norm=_norm(layer.mixer_output_norm, stored.mixer_output_norm),
                factor=layer.residual_multiplier,
                shares_input=shares_input,
                scale=scale if len(parts) == 1 else None,
                layer=index,
            )
        if layer.mlp is not None:
            norms = (_norm(layer.mlp_norm, stored.mlp_norm), _norm(layer.mlp_output_norm, stored.mlp_output_norm))
            mlp = RoutedMlp.of(layer.mlp, stored) if isinstance(layer.mlp, RoutedMlpConfig) else Mlp.of(layer.mlp, stored)
            yield Block(
                norm=norms[0],
                part=mlp,
                output_norm=norms[1],
                factor=layer.mlp_factor,
                shares_input=layer.parallel,
                scale=scale if layer.per_layer_input is None else None,
                layer=index,
            )
        if layer.per_layer_input is not None:
            output_norm = _norm(layer.per_layer_input.output_norm, stored.norm("per_layer_norm"))
            gated = PerLayerInput.of(index, layer.per_layer_input, stored)
            yield Block(norm=None, part=gated, output_norm=output_norm, factor=1.0, scale=scale, layer=index)


def _mixer(index: int, config: Mixer, stored: StoredWeights) -> Part:
    """Return a mixer. ``index``: its place among the attention layers, or among the recurrent ones."""
    if isinstance(config, AttentionConfig):
        return SelfAttention.of(index, config, stored)
    if isinstance(config, ShortConvConfig):
        return ShortConvolution.of(index, stored)
    return Mamba2.of(index, config, stored) if isinstance(config, Mamba2Config) else GatedDeltaNet.of(index, config, stored)


def _norm(config: NormConfig | None, stored: NormWeights[torch.Tensor] | None) -> TorchNorm | None:
    return None if config is None or stored is None else TorchNorm.of(config, stored)
