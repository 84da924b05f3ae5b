"""Train the example model on ``text.txt`` and write it as a Hugging Face folder, beside this script.

    pip install torch tokenizers safetensors numpy
    python examples/tiny-llama/train.py

A Llama of two layers learns a chapter by heart, in a few minutes on one CPU core. Its modules carry the names that
transformers uses, so the state dictionary is the checkpoint. README.md has the versions and the numbers of the run that
made the files in this folder.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import fmean

import safetensors
import safetensors.torch
import tokenizers
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own pages use

HERE = Path(__file__).parent
BOS, EOS = "<s>", "</s>"
WINDOWS = (512, 32)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "float16",
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 56,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 640,
}
GENERATION_CONFIG = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 1}
TOKENIZER_CONFIG = {
    "bos_token": BOS,
    "clean_up_tokenization_spaces": False,
    "eos_token": EOS,
    "model_max_length": CONFIG["max_position_embeddings"],
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def train_tokenizer(text: str) -> Tokenizer:
    """Learn a byte-level BPE vocabulary: every text encodes, and decoding gives the same text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, CONFIG["bos_token_id"])]
    )
    return tokenizer


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis, times a learned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CONFIG["hidden_size"]))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [batch, length, hidden]."""
        return F.rms_norm(x, self.weight.shape, self.weight, CONFIG["rms_norm_eps"])


def rope_table(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] for rotating pair (i, i + head_dim / 2) at each position."""
    head_dim, theta = CONFIG["head_dim"], CONFIG["rope_parameters"]["rope_theta"]
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding to x [batch, heads, length, head_dim]."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which groups of query heads share one key and value head."""

    def __init__(self) -> None:
        super().__init__()
        hidden, self.head_dim = CONFIG["hidden_size"], CONFIG["head_dim"]
        queries, keys = CONFIG["num_attention_heads"] * self.head_dim, CONFIG["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Let each position of x [batch, length, hidden] read the positions up to itself."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(rotate(q, rope), rotate(k, rope), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length, hidden] position by position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each on the normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(), MLP()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the next hidden states [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model; the output head is the embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.model.layers = nn.ModuleList(DecoderLayer() for _ in range(CONFIG["num_hidden_layers"]))
        self.model.norm = RMSNorm()
        self.rope = rope_table(CONFIG["max_position_embeddings"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth = math.sqrt(2 * CONFIG["num_hidden_layers"]) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(weight, std=CONFIG["initializer_range"] / depth)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab] for ids [batch, length]."""
        rope = tuple(table[: ids.shape[1]] for table in self.rope)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rope)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


class Windows:
    """Random stretches of the text as (input, target) batches.

    Each starts with the begin token at a random place of the text and stops where the text does, after the end token. A
    few input tokens are replaced by random ones: what must be predicted stays the same, so the model learns to use more
    than the last few tokens, and to find its way back into the text from words that are not in it.
    """

    def __init__(self, ids: list[int], noise: float, seed: int) -> None:
        self.noise, self.starts = noise, len(ids)
        padding = torch.full((CONFIG["max_position_embeddings"],), -100)
        self.ids = torch.cat((torch.tensor([*ids, CONFIG["eos_token_id"]]), padding))
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both [count, length]; a target of -100 counts for nothing."""
        starts = torch.randint(self.starts, (count, 1), generator=self.generator)
        targets = self.ids[starts + torch.arange(length)]
        inputs = torch.cat((torch.full((count, 1), CONFIG["bos_token_id"]), targets[:, :-1]), dim=1).clamp(min=0)
        wrong = torch.rand(inputs.shape, generator=self.generator) < self.noise
        wrong[:, 0] = False
        other = torch.randint(2, CONFIG["vocab_size"], inputs.shape, generator=self.generator)
        return torch.where(wrong, other, inputs), targets


def train(model: Llama, windows: Windows, steps: int, tokens: int, peak: float) -> None:
    """Minimise the cross entropy of the next token, on long windows and on many short ones in turn.

    The long windows teach every position; the short ones teach how to go on from a prompt of a few words.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.1)
    warmup, losses, began = max(1, steps // 20), [], time.perf_counter()
    for step in range(steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = peak * max(rate, 0.01)
        length = WINDOWS[step % len(WINDOWS)]
        inputs, targets = windows.batch(tokens // length, length)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            means = "   ".join(f"{fmean(losses[i - 100 :: len(WINDOWS)]):.4f} at {n}" for i, n in enumerate(WINDOWS))
            print(f"step {step + 1:5d} of {steps}   loss by window {means}   {time.perf_counter() - began:4.0f} s", flush=True)


def save(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write the weights in float16, the tokenizer and the configuration files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().half().contiguous() for name, weight in model.named_parameters()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in (("config", CONFIG), ("generation_config", GENERATION_CONFIG), ("tokenizer_config", TOKENIZER_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


@torch.inference_mode()
def continue_text(model: Llama, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """Append the most likely token, again and again."""
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        best = int(model(torch.tensor([ids]))[0, -1].argmax())
        if best == CONFIG["eos_token_id"]:
            break
        ids.append(best)
    return tokenizer.decode(ids)


def main() -> None:
    """Train, save, and show what the saved weights say."""
    parser = argparse.ArgumentParser(description="Train the example model on text.txt.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write (default: beside this script)")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--noise", type=float, default=0.03, help="share of the input tokens replaced by random ones")
    parser.add_argument("--seed", type=int, default=1865)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    print(f"torch {torch.__version__}, tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = Llama()
    print(f"{len(text)} characters, {len(ids)} tokens, {sum(w.numel() for w in model.parameters())} weights")
    began = time.perf_counter()
    train(model, Windows(ids, args.noise, args.seed), args.steps, args.tokens, args.learning_rate)
    save(args.out, model, tokenizer)
    print(f"trained in {time.perf_counter() - began:.0f} s, written to {args.out}")

    model.load_state_dict({name: weight.half().float() for name, weight in model.state_dict().items()})
    print(continue_text(model, tokenizer, "The rabbit-hole went straight on", 120))


if __name__ == "__main__":
    main()
