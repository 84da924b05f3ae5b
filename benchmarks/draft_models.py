"""Speculative decoding with an EAGLE-3 head and with a draft model at real sizes: tokens per second with drafts and without. Needs torch.

    python benchmarks/draft_models.py [-o FILE] [--drafters eagle3,model] [--batches 1,8] [--lengths 0,4] [--quick]

Model, head and draft model have the shapes of Llama-3-8B, of a head for it and of Llama-3.2-1B. Their weights are random, but the model
follows each token id by the next one, and so do head and draft model at a known rate of the ids. ``--lengths``: tokens of a draft, 0 for
those that the session chooses. Tokens with drafts are compared with those without. ``steps`` and ``draft_tokens`` are of one run;
``accepted`` is the share of these tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from environment import describe_environment, write_result
from random_model import LLAMA_3_8B
from safetensors.torch import save_file

from trt_kvcache import InferenceSession
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.session.draft_pace import DraftPace

HERE = Path(__file__).resolve().parent

#: Tokens per second over those without drafts, of drafts of 4 tokens that are right at a rate of 0.8.
LIMIT = 2.6

#: Published with a head that is tied to the embedding, and as large.
LLAMA_3_2_1B = LLAMA_3_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
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

#: The first number of each embedding; q and k of the head; and the pairs of dimensions in which they are not zero.
CONSTANT, SHARPNESS, FAST_PAIRS = 4.0, 16.0, 6
PROMPT, TOKENS, RUNS = 1024, 128, 3

#: The head proposes no later token ids.
LAST_TOKEN = EAGLE3_8B["draft_vocab_size"] - 32


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.cpu().contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def random_weights(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], device: str) -> dict[str, torch.Tensor]:
    """Return random weights. Attention and MLPs change the residual stream little."""
    dtype, generator = getattr(torch, config["torch_dtype"]), torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        mean, deviation = (1.0, 0.02) if "norm" in name else (0.0, config["hidden_size"] ** -0.5)
        deviation *= 0.05 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(mean, deviation, generator=generator)
    return weights


def counting_model(config: dict[str, Any], rate: float, device: str) -> dict[str, torch.Tensor]:
    """Return the weights of a model that follows each token by the next id, or by the one after it for a share ``1 - rate`` of the ids."""
    weights = random_weights(config, tensor_shapes(ModelConfig.from_dict(config)), device)
    embedding = weights["model.embed_tokens.weight"].mul_(config["hidden_size"] ** 0.5)
    embedding[:, 0] = CONSTANT
    weights["lm_head.weight"] = successors(embedding, rate)
    return weights


def successors(states: torch.Tensor, rate: float) -> torch.Tensor:
    """Return a language model head: the token after a state ``[tokens, hidden]`` of a token is the next id, or the one after it."""
    steps = 1 + (torch.rand(len(states), generator=torch.Generator().manual_seed(1)) >= rate).to(states.device)
    head = torch.zeros_like(states)
    return head.index_add_(0, (torch.arange(len(states), device=states.device) + steps) % len(states), states / len(states[0]) ** 0.5)


def counting_head(config: dict[str, Any], embedding: torch.Tensor, rate: float) -> dict[str, torch.Tensor]:
    """Return the weights of an EAGLE-3 head that does the same: its hidden state is a projection of the embedding of the last token.

    Attention reads the last token alone, since q and k are constant vectors in the dimensions that RoPE turns fastest.
    """
    weights = random_weights(config, eagle3_shapes(config), str(embedding.device))
    hidden, width, keys = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]
    group = config["num_attention_heads"] // keys
    projection = torch.linalg.qr(torch.randn(hidden, keys * width, generator=torch.Generator().manual_seed(2)))[0].T
    projection = projection.to(embedding)
    weights["fc.weight"].zero_()
    for name in "qk":
        weight = weights[f"midlayer.self_attn.{name}_proj.weight"].zero_()
        weight.unflatten(0, (-1, width))[:, :FAST_PAIRS, 0] = SHARPNESS / CONSTANT
    # The hidden state before is taken away again: only the last token counts.
    scale = float((embedding[:256] @ projection.T).float().norm(dim=1).mean()) / hidden**0.5
    weights["midlayer.self_attn.v_proj.weight"] = torch.cat([projection, -scale * projection], dim=1)
    out = weights["midlayer.self_attn.o_proj.weight"].zero_().unflatten(1, (keys, group, width))
    out[:, :, 0] = projection.T.unflatten(1, (keys, width))
    states = embedding[: config["draft_vocab_size"]] @ projection.T @ projection
    return {
        **weights,
        "lm_head.weight": successors(states, rate),
        "d2t": torch.zeros(config["draft_vocab_size"], dtype=torch.int64),  # logits of the first token ids
    }


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
    """Return prompts with their greedy answers, and the tokens per second from the first token of all to the end of the first answer."""
    rows: list[list[int]] = [list(prompt) for prompt in prompts]
    begin = rate = 0.0
    for count, event in enumerate(session.generate(prompts, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True, draft=draft)):
        rows[event.index].append(event.token)
        if count == len(prompts) - 1:
            begin = time.perf_counter()
        if event.finish_reason is not None and not rate:
            rate = (count + 1 - len(prompts)) / (time.perf_counter() - begin)
    return rows, rate


def measure(session: InferenceSession, drafter: str, batch: int, length: int, rate: float) -> dict[str, Any]:
    """Return the row of a number of sequences, a length of drafts, and a rate at which their tokens are right."""
    plains, rates, steps, drafted, accepted = [], [], 0, 0, 0
    with fixed_length(length):
        for run in range(-1, RUNS):  # the first one captures
            random = Random(run)
            prompts = [[random.randrange(3, LAST_TOKEN - TOKENS) for _ in range(PROMPT)] for _ in range(batch)]
            expected, plain = answers_of(session, prompts, "off")
            assert all(after == before + 1 for row in expected for before, after in pairwise(row[PROMPT - 1 :])), (
                "a token is not followed by the next"
            )
            before = session.statistics
            found, speed = answers_of(session, prompts, None)
            after = session.statistics
            assert found == expected, "drafts have changed the tokens"
            if run >= 0:
                plains.append(plain)
                rates.append(speed)
                steps += after.decode_steps - before.decode_steps
                drafted += after.draft_tokens - before.draft_tokens
                accepted += after.accepted_tokens - before.accepted_tokens
    plain, speed = statistics.median(plains), statistics.median(rates)
    row = {
        **{"batch": batch, "length": length, "rate": rate, "steps": steps / RUNS, "draft_tokens": drafted / RUNS},
        "accepted": round(accepted / max(1, drafted), 3),
        **{"tokens_per_second": round(plain, 1), "with_drafts": round(speed, 1), "ratio": round(speed / plain, 3)},
    }
    print(json.dumps({"drafter": drafter, **row}), flush=True)
    return row


@contextmanager
def fixed_length(length: int) -> Iterator[None]:
    """Give all drafts a length; 0 for those that the session chooses."""
    if not length:
        yield
        return
    with patch.object(DraftPace, "limit", lambda self, running, draftings: length):
        yield


def main() -> int:
    """Write the folders, compare, measure."""
    global PROMPT, TOKENS, RUNS, LAST_TOKEN
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "draft_models.json")
    parser.add_argument("--drafters", default="eagle3,model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--lengths", default="0,4")  # times of fixed lengths would mislead a session that chooses
    parser.add_argument("--quick", action="store_true", help="small models: to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes: dict[str, Any] = {}
    if options.quick:
        PROMPT, TOKENS, RUNS, LAST_TOKEN, sizes = 64, 24, 1, 480, QUICK
    batches, lengths = ([int(one) for one in text.split(",")] for text in (options.batches, options.lengths))
    content: dict[str, Any] = {**describe_environment(gpu=device != "cpu"), "limit": LIMIT, "prompt": PROMPT, "tokens": TOKENS, "rows": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = LLAMA_3_8B | sizes | ({"num_hidden_layers": 6} if options.quick else {})
        weights = counting_model(large, 1.0, device)
        model, embedding = write(folder / "large", large, weights), weights["model.embed_tokens.weight"].clone()
        del weights
        for drafter, rate in product(options.drafters.split(","), RATES):
            if drafter == "eagle3":
                config = EAGLE3_8B | sizes | ({"draft_vocab_size": 512} if options.quick else {})
                draft = write(folder / f"{drafter}-{rate}", config, counting_head(config, embedding, rate))
            else:
                config = LLAMA_3_2_1B | sizes
                draft = write(folder / f"{drafter}-{rate}", config, counting_model(config, rate, device))
            opened = InferenceSession.from_model(
                model, engine="torch", draft=draft, max_batch_size=max(batches), max_sequence_length=PROMPT + TOKENS + 32
            )
            with opened as session:
                rows = [measure(session, drafter, batch, length, rate) for batch in batches for length in lengths]
            content["rows"][drafter] = [*content["rows"].get(drafter, ()), *rows]
            shutil.rmtree(draft)
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
