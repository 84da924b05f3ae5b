"""Models of real shapes with random weights on a device, as transformers and this package run them; both have the same tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
from packed_weights import quantized
from random_model import GEMMA_4_E4B, LLAMA_3_8B as LLAMA_3_8B_SHAPE, QWEN2_0_5B, QWEN3_4B
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from weight_schemes import scheme_of

from trt_kvcache import InferenceSession, KVCacheManager, Tokenizer
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.engine.decoder_cache import cache_config
from trt_kvcache.model import ModelConfig
from trt_kvcache.torch_engine import TorchEngine
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.stored_weights import LoadPacked, LoadTensor

LLAMA_3_8B = {**LLAMA_3_8B_SHAPE, "max_position_embeddings": 8192 + 1024}  # room for tokens after 8192

MODELS = {"Llama-3-8B": LLAMA_3_8B, "Qwen2-0.5B": QWEN2_0_5B, "Qwen3-4B": QWEN3_4B, "Gemma-4-E4B": GEMMA_4_E4B}

#: Fields of models with which the script is only tried. Matrices have rows of whole super-blocks.
_TINY = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
#: Fields of models whose tokens are compared: small, with a head dim that the attention kernels support.
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
}

#: Further fields of such models of Gemma 4: of both kinds of layers one stores K and V, and one reads them.
_GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 64,
}

#: Standard deviation of logits: top-p then keeps some tokens, and the most likely one is seldom near the next. A small model whose head is
#: its embedding repeats one token, unless the embedding, after its scale, is small beside what the layers add to it.
_LOGITS_DEVIATION, _SMALL_TIED_LOGITS_DEVIATION = 4.0, 1.0


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model of the same family that any machine runs in a moment."""
    return _of_family(config, {**_TINY, "num_key_value_heads": 2})


def small(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a model of the same family whose tokens are compared."""
    return _of_family(config, {**_SMALL, "num_key_value_heads": 2, "torch_dtype": dtype})


def _of_family(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    if config["model_type"] == "gemma4_text":
        fields = {**fields, **_GEMMA_4, "global_head_dim": 2 * fields["head_dim"], "vocab_size_per_layer_input": fields["vocab_size"]}
    return {**config, **fields}


class RandomModel:
    """A model of transformers, and sessions of this package over the same weights.

    ``config`` is a ``config.json``. Matrices are normal with a standard deviation that keeps activations of order 1, norms are near 1.
    With a ``scheme`` of ``weight_schemes.py`` linear layers, and an untied head, are packed in ``memory``; transformers has their values.
    """

    def __init__(
        self, config: dict[str, Any], device: str, folder: Path, *, seed: int = 0, scheme: str | None = None, memory: Any = None
    ) -> None:
        self.config = ModelConfig.from_dict(config)
        self.device = device
        self.tokenizer = random_tokenizer(self.config.vocab_size, folder)
        fields = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype")}
        fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        peer = AutoConfig.for_model(config["model_type"], **fields)
        with torch.device(device):
            self.peer = AutoModelForCausalLM.from_config(peer, dtype=getattr(torch, self.config.dtype)).eval()
        self._fill(seed)
        self._packed = {} if scheme is None else self._rounded(scheme, memory)

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        random = torch.Generator(self.device).manual_seed(seed)
        is_small_and_tied = self.config.tie_word_embeddings and self.config.hidden_size <= _SMALL["hidden_size"]
        small_tied = _SMALL_TIED_LOGITS_DEVIATION / self.config.embedding_factor(self.config.dtype)
        logits_deviation = small_tied if is_small_and_tied else _LOGITS_DEVIATION
        for name, weight in self.peer.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0, 0.02, generator=random)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.02, generator=random)
            elif "embed_tokens_per_layer" in name:  # of order 1 after its scale
                weight.normal_(0.0, (weight.shape[1] / self.config.num_layers) ** -0.5, generator=random)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.normal_(0.0, logits_deviation / math.sqrt(self.config.hidden_size), generator=random)
            else:
                weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[1]), generator=random)

    def session(self, memory: Any, *, slots: int, length: int, width: int, **options: Any) -> InferenceSession:
        """Return a session on the torch engine, with the tokenizer and other options. No weight is read from a file."""
        tensors = self.peer.state_dict()
        return torch_session(
            self.config,
            lambda name: tensors[name].detach(),
            lambda name, rows: self._packed.get(name),
            memory=memory,
            slots=slots,
            length=length,
            width=width,
            tokenizer=self.tokenizer,
            **options,
        )

    @property
    def weights(self) -> WeightsSummary | None:
        """Size of the weights, if some are packed."""
        if not self._packed:
            return None
        dense = [weight for name, weight in self.peer.named_parameters() if name not in self._packed]
        unread = 0 if self.config.tie_word_embeddings else self.peer.get_input_embeddings().weight.nbytes
        nbytes = sum(weight.nbytes for weight in (*dense, *self._packed.values()))
        return WeightsSummary(format="packed", is_quantized=True, nbytes=nbytes, step_nbytes=nbytes - unread)

    @torch.no_grad()
    def _rounded(self, scheme: str, memory: Any) -> dict[str, PackedMatrix]:
        """Round matrices to the values of packed ones, which are returned."""
        found = {}
        for name, weight in self.peer.named_parameters():
            if weight.ndim == 2 and "embed_tokens" not in name:
                found[name] = quantized(weight, scheme_of(scheme, name, self.config.num_layers), memory)
                weight.copy_(found[name].dequantized())
        return found

    def prompts(self, count: int, length: int, *, seed: int) -> list[list[int]]:
        """Return random token ids."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.config.vocab_size, (count, length), generator=random).tolist()


def torch_session(
    config: ModelConfig, load: LoadTensor, *packed: LoadPacked, memory: Any, slots: int, length: int, width: int, **options: Any
) -> InferenceSession:
    """Return a session on the PyTorch engine with these weights."""
    kv = cache_config(config, max_batch_size=slots, max_sequence_length=length, dtype=config.dtype)
    engine = TorchEngine(config, load, *packed, kv=kv, max_prefill_length=width, memory=memory)
    try:
        cache = KVCacheManager(kv, memory=memory)
    except BaseException:
        engine.close()
        raise
    return InferenceSession(engine, cache, **options)


def random_tokenizer(vocab_size: int, folder: Path) -> Tokenizer:
    """Return a byte-level tokenizer of so many tokens: all bytes, then words of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġword{index}" for index in range(vocab_size - len(alphabet)))]
    made = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({}), encoding="utf-8")
    return Tokenizer.open(folder)
