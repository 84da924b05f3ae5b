"""Speculative decoding with an EAGLE-3 head and with a draft model at real sizes: tokens per second with drafts and without. Needs torch.

    python benchmarks/draft_models.py [-o FILE] [--drafters eagle3,model] [--batches 1,8] [--lengths 4,0] [--quick]

Model, head and draft model have the shapes of Llama-3-8B, of a head for it and of Llama-3.2-1B, and random weights, but for the language
model head of the model: each token id is followed by the next one. Each drafter generates its drafts as always; none is right, so tokens
that are right at a known rate are verified in their place. ``--lengths``: most tokens of a draft, 0 for those that the session chooses.
First, tokens with drafts are compared with those without. ``propose_ms`` is the time of the drafter in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from environment import describe_environment, write_result
from random_model import LLAMA_3_8B
from safetensors.torch import save_file

from trt_kvcache import DraftedSequence, Drafter, InferenceSession
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

HERE = Path(__file__).resolve().parent

#: Tokens per second over those without drafts, of drafts of 4 tokens that are right at a rate of 0.8.
LIMIT = 2.6

LLAMA_3_2_1B = LLAMA_3_8B | {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True}
}
EAGLE3_8B = {
    **{
        name: LLAMA_3_8B[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    },
    **{name: LLAMA_3_8B[name] for name in ("vocab_size", "rope_theta", "max_position_embeddings", "torch_dtype")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "head_dim": 128,
    "draft_vocab_size": 32000,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
QUICK = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "max_position_embeddings": 1024,
}

#: Of tokens of a draft, the share that is right.
RATES = (0.6, 0.8, 0.9)
PROMPT, TOKENS, RUNS = 1024, 128, 3


class RightAtARate:
    """Lets a drafter generate its drafts, and proposes as many tokens that are right with a known probability."""

    def __init__(self, drafter: Drafter, rate: float, length: int) -> None:
        self._drafter, self._rate, self._length, self._random = drafter, rate, length, Random(1)
        self.seconds: list[float] = []

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        """Return drafts of the lengths that the drafter's have."""
        begin = time.perf_counter()
        if self._length:
            sequences = [one._replace(limit=min(one.limit, self._length)) for one in sequences]
        drafts = self._drafter.propose(sequences)
        self.seconds.append(time.perf_counter() - begin)
        return [self._right(one.pending[-1], len(draft)) for one, draft in zip(sequences, drafts, strict=True)]

    def _right(self, last: int, count: int) -> list[int]:
        return [last + step + (self._random.random() >= self._rate) for step in range(1, count + 1)]


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], device: str) -> Path:
    """Write a checkpoint of random weights, which are made on the device."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    dtype, generator = getattr(torch, config["torch_dtype"]), torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        mean, deviation = (1.0, 0.02) if "norm" in name else (0.0, config["hidden_size"] ** -0.5)
        weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(mean, deviation, generator=generator).cpu()
    if "draft_vocab_size" in config:
        weights["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)  # logits of the first token ids
    if config.get("counts"):
        # The embedding dominates the residual stream, and the head finds the next id.
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name] *= 0.05
        weights["model.embed_tokens.weight"] *= config["hidden_size"] ** 0.5
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(1, 0) * config["hidden_size"] ** -0.5
    save_file(weights, folder / "model.safetensors")
    return folder


def eagle3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a head that reads the embedding of the model."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    attention = {"q": (queries, 2 * hidden), "k": (keys, 2 * hidden), "v": (keys, 2 * hidden), "o": (hidden, queries)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        "fc.weight": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{name}_proj.weight": shape for name, shape in attention.items()},
        **{f"midlayer.mlp.{name}_proj.weight": shape for name, shape in mlp.items()},
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }


def answers_of(session: InferenceSession, prompts: list[list[int]], draft: Any) -> tuple[list[list[int]], float]:
    """Return prompts with their greedy answers, and the seconds from the first token of all to the last."""
    rows: list[list[int]] = [list(prompt) for prompt in prompts]
    begin = 0.0
    for count, event in enumerate(session.generate(prompts, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True, draft=draft)):
        rows[event.index].append(event.token)
        if count == len(prompts) - 1:
            begin = time.perf_counter()
    return rows, time.perf_counter() - begin


def measure(session: InferenceSession, drafter: Drafter, batch: int, length: int, prompt: int) -> list[dict[str, Any]]:
    """Return rows of one number of sequences and one length of drafts, by the rate at which the tokens of drafts are right."""
    random = Random(0)
    prompts = [[random.randrange(3, 200) for _ in range(prompt)] for _ in range(batch)]
    expected, _ = answers_of(session, prompts, "off")
    assert all(after == before + 1 for row in expected for before, after in pairwise(row[prompt - 1 :])), (
        "a token is not followed by the next"
    )
    plain = [answers_of(session, prompts, "off")[1] for _ in range(RUNS)]
    rows = []
    for rate in RATES:
        seconds: list[float] = []
        before = session.statistics
        proposing: list[float] = []
        for run in range(RUNS + 1):  # the first one captures
            chosen = RightAtARate(drafter, rate, length)
            found, taken = answers_of(session, prompts, chosen)
            assert found == expected, "drafts have changed the tokens"
            if run == 0:
                before = session.statistics
                continue
            seconds.append(taken)
            proposing += chosen.seconds
        after = session.statistics
        proposed = after.draft_tokens - before.draft_tokens
        rows.append(
            {
                **{"batch": batch, "length": length, "rate": rate},
                "draft_tokens_a_step": round(proposed / max(1, len(proposing)) / batch, 2),
                "accepted": round((after.accepted_tokens - before.accepted_tokens) / max(1, proposed), 3),
                "propose_ms": round(1e3 * statistics.median(proposing), 3),
                "step_ms": round(1e3 * sum(seconds) / max(1, after.decode_steps - before.decode_steps), 3),
                "token_ms": round(1e3 * statistics.median(plain) / (TOKENS - 1), 3),
                "tokens_per_second": round(batch * (TOKENS - 1) / statistics.median(plain), 1),
                "with_drafts": round(batch * (TOKENS - 1) / statistics.median(seconds), 1),
                "ratio": round(statistics.median(plain) / statistics.median(seconds), 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Write the folders, compare, measure."""
    global PROMPT, TOKENS, RUNS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "draft_models.json")
    parser.add_argument("--drafters", default="eagle3,model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--lengths", default="4,0")
    parser.add_argument("--quick", action="store_true", help="small models: to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes: dict[str, Any] = {}
    if options.quick:
        PROMPT, TOKENS, RUNS, sizes = 64, 24, 1, QUICK
    batches = [int(batch) for batch in options.batches.split(",")]
    content: dict[str, Any] = {**describe_environment(gpu=device != "cpu"), "limit": LIMIT, "prompt": PROMPT, "tokens": TOKENS, "rows": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = LLAMA_3_8B | sizes | {"counts": True}, LLAMA_3_2_1B | sizes
        head = EAGLE3_8B | sizes | ({"draft_vocab_size": 512} if options.quick else {})
        if options.quick:
            large |= {"num_hidden_layers": 6}
        shapes = {name: tensor_shapes(ModelConfig.from_dict(config)) for name, config in (("large", large), ("model", small))}
        model = write(folder / "large", large, shapes["large"], device)
        for drafter in options.drafters.split(","):
            config, of_head = (head, eagle3_shapes(head)) if drafter == "eagle3" else (small, shapes["model"])
            draft = write(folder / drafter, config, of_head, device)
            opened = InferenceSession.from_model(
                model, engine="torch", draft=draft, max_batch_size=max(batches), max_sequence_length=PROMPT + TOKENS + 32
            )
            with opened as session:
                own = session._drafter
                assert own is not None
                content["rows"][drafter] = [
                    row
                    for batch in batches
                    for length in map(int, options.lengths.split(","))
                    for row in measure(session, own, batch, length, PROMPT)
                ]
            write_result(options.out, content)
            torch.cuda.empty_cache() if device == "cuda" else None
    missed = [
        (drafter, row["batch"])
        for drafter, rows in content["rows"].items()
        for row in rows
        if (row["batch"], row["length"], row["rate"]) == (1, 4, 0.8) and row["ratio"] < LIMIT
    ]
    for drafter, batch in missed:
        print(f"{drafter}, batch {batch}: below {LIMIT} times the tokens without drafts")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
