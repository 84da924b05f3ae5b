"""Train the example model on ``text.txt`` and write it as a Hugging Face folder, beside this script.

    pip install torch transformers
    python examples/tiny-llama/train.py

A Llama of two layers learns the beginning of a chapter by heart, in a few minutes on one CPU core. README.md has the versions
and the numbers of the run that made the files in this folder.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own pages use
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SPECIAL = ["<s>", "</s>", "<unk>"]
WINDOWS = (512, 32)

CONFIG = json.loads((HERE / "config.json").read_text())


def train_tokenizer(text: str) -> Tokenizer:
    """Learn a byte-level BPE vocabulary over printable ASCII: such a text comes back when decoded, other bytes are unknown.

    All 256 bytes would fill a vocabulary as small as this one with tokens that the text never uses.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [chr(byte) for byte in range(33, 127)]  # space and line end are in the text
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    begin = [(SPECIAL[0], CONFIG["bos_token_id"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=begin)
    return tokenizer


class Windows:
    """Random stretches of the text as (input, target) batches.

    Each starts with the begin token at a random place of the text and stops where the text does, after the end token. A
    few input tokens are replaced by random ones: what must be predicted stays the same, so the model learns to use more
    than the last few tokens, and to find its way back into the text from words that are not in it.
    """

    def __init__(self, ids: list[int], noise: float) -> None:
        self.noise, self.starts = noise, len(ids)
        self.ids = torch.tensor([*ids, CONFIG["eos_token_id"], *[-100] * max(WINDOWS)])

    def batch(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both [count, length]; a target of -100 counts for nothing."""
        targets = self.ids[torch.randint(self.starts, (count, 1)) + torch.arange(length)]
        noisy = torch.where(torch.rand(targets.shape) < self.noise, torch.randint(CONFIG["vocab_size"], targets.shape), targets)
        return F.pad(noisy[:, :-1], (1, 0), value=CONFIG["bos_token_id"]).clamp(min=0), targets


def train(model: LlamaForCausalLM, windows: Windows, steps: int, tokens: int, peak: float) -> None:
    """Minimise the cross entropy of the next token, on long windows and on many short ones in turn.

    The long windows teach every position; the short ones teach how to continue a prompt of a few words.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.1)
    warmup, began = steps // 20, time.perf_counter()
    for step in range(steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup)))
        optimizer.param_groups[0]["lr"] = peak * max(rate, 0.01)
        length = WINDOWS[step % len(WINDOWS)]
        inputs, targets = windows.batch(tokens // length, length)
        loss = F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 < len(WINDOWS):
            print(f"step {step:5d} of {steps}   loss {loss.item():.4f} at {length}   {time.perf_counter() - began:4.0f} s", flush=True)


def save(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the weights in float16, the tokenizer, and the configuration files that lie beside this script."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().half() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name in ("config", "generation_config", "tokenizer_config"):
        (folder / f"{name}.json").write_bytes((HERE / f"{name}.json").read_bytes())


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the example model on text.txt.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write (default: beside this script)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--noise", type=float, default=0.03, help="share of the input tokens replaced by random ones")
    parser.add_argument("--seed", type=int, default=1865)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "dtype": "float32"}))
    print(f"{len(text)} characters, {len(ids)} tokens, {sum(w.numel() for w in model.parameters())} weights")
    train(model, Windows(ids, args.noise), args.steps, args.tokens, args.learning_rate)
    save(args.out, model, tokenizer)


if __name__ == "__main__":
    main()
