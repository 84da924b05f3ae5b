"""The weights of a decoder as torch tensors, with projections of the same input joined into one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.decoder_weights import LayerWeights, Projection, RoundedTensors, layer_weights
from trt_kvcache.model import LayerConfig, ModelConfig, NormConfig
from trt_kvcache.model.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD
from trt_kvcache.torch_engine.norm import TorchNorm

#: Returns the tensor of a name of Hugging Face transformers: on the engine's device, in its dtype.
LoadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TorchLayer:
    """One decoder layer. ``qkv`` has the heads of q, k and v one after another, ``gate_up`` the rows of gate, then those of up.

    Norms that the layer does not have are None.
    """

    input_norm: TorchNorm | None
    qkv: Projection[torch.Tensor]
    q_norm: TorchNorm | None
    k_norm: TorchNorm | None
    o: Projection[torch.Tensor]
    mixer_output_norm: TorchNorm | None
    mlp_norm: TorchNorm | None
    gate_up: Projection[torch.Tensor]
    down: Projection[torch.Tensor]
    mlp_output_norm: TorchNorm | None


@dataclass(frozen=True, kw_only=True)
class TorchWeights:
    """A whole decoder. ``embedding`` and ``head`` are ``[vocab, hidden]``, one tensor where they are tied.

    Rows of the embedding are multiplied with ``embedding_factor``.
    """

    embedding: torch.Tensor
    embedding_factor: float
    layers: tuple[TorchLayer, ...]
    final_norm: TorchNorm
    head: torch.Tensor


def torch_weights(config: ModelConfig, dtype: str, load: LoadTensor) -> TorchWeights:
    """Collect the weights of a model, layer by layer.

    Parameters
    ----------
    config : ModelConfig
        The model.
    dtype : str
        The precision of the engine.
    load : callable
        Called once with the name of each tensor.

    Returns
    -------
    TorchWeights
        Where ``load`` put its tensors.
    """
    embedding = _arranged(load(EMBEDDING))
    layers = tuple(_joined(part, layer_weights(config, index, load)) for index, part in enumerate(config.layers))
    final_norm = TorchNorm.of(config.final_norm, load(FINAL_NORM))
    head = embedding if config.tie_word_embeddings else _arranged(load(HEAD))
    factor = config.embedding_factor(dtype)
    return TorchWeights(embedding=embedding, embedding_factor=factor, layers=layers, final_norm=final_norm, head=head)


def checkpoint_loader(
    checkpoint: Checkpoint, dtype: str, device: torch.device, progress: Callable[[int, int], object] | None = None
) -> LoadTensor:
    """Return a function that reads tensors of a checkpoint, rounded to ``dtype``, onto a device.

    Parameters
    ----------
    checkpoint : Checkpoint
        An open checkpoint.
    dtype : {"float16", "bfloat16", "float32"}
        The precision of the engine.
    device : torch.device
        Where the tensors are wanted.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` with each tensor.
    """
    rounded = RoundedTensors(checkpoint, dtype, progress)

    def load(name: str) -> torch.Tensor:
        values = rounded(name).astype(rounded.dtype, copy=False)
        on_host = torch.empty(values.shape, dtype=getattr(torch, dtype))
        bits = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}[values.itemsize]
        on_host.view(bits[0]).numpy()[...] = values.view(bits[1])  # NumPy has no bfloat16 that torch knows
        return on_host.to(device)

    return load


def _joined(config: LayerConfig, layer: LayerWeights[torch.Tensor]) -> TorchLayer:
    qk_norm = None if config.attention.qk_norm is None else config.attention.qk_norm.norm
    return TorchLayer(
        input_norm=_norm(config.input_norm, layer.input_norm),
        qkv=_joined_projection(layer.q, layer.k, layer.v),
        q_norm=_norm(qk_norm, layer.q_norm),
        k_norm=_norm(qk_norm, layer.k_norm),
        o=_joined_projection(layer.o),
        mixer_output_norm=_norm(config.mixer_output_norm, layer.mixer_output_norm),
        mlp_norm=_norm(config.mlp_norm, layer.mlp_norm),
        gate_up=_joined_projection(layer.gate, layer.up),
        down=_joined_projection(layer.down),
        mlp_output_norm=_norm(config.mlp_output_norm, layer.mlp_output_norm),
    )


def _norm(config: NormConfig | None, weight: torch.Tensor | None) -> TorchNorm | None:
    return None if config is None or weight is None else TorchNorm.of(config, weight)


def _joined_projection(*parts: Projection[torch.Tensor]) -> Projection[torch.Tensor]:
    biases = [part.bias for part in parts if part.bias is not None]
    weight = parts[0].weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
    return Projection(_arranged(weight), torch.cat(biases) if biases else None)


def _arranged(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix ``[out, in]`` in the order in memory in which the device multiplies it fastest with a single row.

    For float32 on a CPU that is column by column: ``benchmarks/torch_engine.py`` measures both.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight
