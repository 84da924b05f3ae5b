"""Train the example model on the conversations of ``conversations.py`` and write it as a Hugging Face folder, beside this script.

    pip install torch transformers
    python examples/tiny-chat/train.py

README.md has the versions and the numbers of the run that made the files in this folder.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from conversations import conversation
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own pages use
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learn a byte-level BPE vocabulary over all bytes: any text comes back when decoded. Tags of tools are tokens too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - len(TAGS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def targets_of(ids: list[int], opening: list[int]) -> list[int]:
    """Return what each token is to predict: the next one where the assistant speaks, else -100, which counts for nothing."""
    targets, speaking = [-100] * len(ids), False
    for place in range(1, len(ids)):
        if ids[place - len(opening) : place] == opening:
            speaking = True
        if speaking:
            targets[place - 1] = ids[place]
            speaking = ids[place] != CONFIG["eos_token_id"]
    return targets


class Conversations:
    """Batches of conversations of about the same length."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], tokens: int, device: str) -> None:
        opening = tokenizer.encode("<|im_start|>assistant\n").ids
        all_ids = [one.ids[: CONFIG["max_position_embeddings"]] for one in tokenizer.encode_batch(texts)]
        self.device, self.batches = device, list[tuple[Tensor, Tensor]]()
        rows: list[list[int]] = []
        for ids in [*sorted(all_ids, key=len), []]:
            if rows and (not ids or (len(rows) + 1) * len(ids) > tokens):
                filled = [row + [0] * (len(rows[-1]) - len(row)) for row in rows]
                wanted = [one + [-100] * (len(filled[0]) - len(one)) for one in (targets_of(row, opening) for row in rows)]
                self.batches.append((torch.tensor(filled), torch.tensor(wanted)))
                rows = []
            rows.append(ids)
        print(f"{len(texts)} conversations, {sum(map(len, all_ids))} tokens, {len(self.batches)} batches")

    def forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, both [count, length], in another order each time."""
        while True:
            for place in torch.randperm(len(self.batches)).tolist():
                inputs, targets = self.batches[place]
                yield inputs.to(self.device), targets.to(self.device)


def train(model: Qwen3ForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], steps: int, peak: float) -> None:
    """Minimise the cross entropy of what the assistant says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    warmup, began = steps // 20, time.perf_counter()
    for step in range(steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup)))
        optimizer.param_groups[0]["lr"] = peak * max(rate, 0.01)
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs, use_cache=False).logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0 or step == steps - 1:
            print(f"step {step:5d} of {steps}   loss {loss.item():.4f}   {time.perf_counter() - began:4.0f} s", flush=True)


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the weights in float16, the tokenizer, and the files that lie beside this script."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().half().cpu().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((HERE / name).read_bytes())


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the example model on made conversations.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write (default: beside this script)")
    parser.add_argument("--conversations", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens in a batch")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1865)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    chance = random.Random(args.seed)
    made = [conversation(chance) for _ in range(args.conversations)]
    template = (HERE / "chat_template.jinja").read_text()
    writer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    texts = [writer.apply_chat_template(one["messages"], tools=one["tools"], tokenize=False) for one in made]
    tokenizer = train_tokenizer(texts[:10_000])
    model = Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, "dtype": "float32"})).to(device)
    print(f"{sum(weight.numel() for weight in model.parameters())} weights")
    train(model, Conversations(tokenizer, texts, args.tokens, device).forever(), args.steps, args.learning_rate)
    save(args.out, model, tokenizer)


if __name__ == "__main__":
    main()
