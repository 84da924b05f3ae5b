"""Write the table of what quantized K and V cost into docs/quantization.md: ``python docs/kv_error_table.py``.

The shipped model computes the logits of every position of a text, with K and V in float32, in 16 bits and in each quantized form. Static
scales are those of the text itself: the largest magnitudes that a calibration could find. ``--check`` writes nothing; exit code 1 says
that a number of the page is off by more than a third: sums in another order round some elements to the next stored value.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trt_kvcache import Checkpoint, HostMemory, InferenceSession, KVCacheManager  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.engine.quantized_kv import QuantizedKV  # noqa: E402
from trt_kvcache.reference import ReferenceEngine  # noqa: E402

PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- errors: docs/kv_error_table.py -->", "<!-- end of errors -->"
MODEL, PROMPT, LENGTH = ROOT / "examples" / "tiny-llama", "Alice was beginning to get very tired", 240
LARGEST = {"fp8": 448.0, "int8": 127.0}
HEAD_DIM = 128  # of the column of bits


def table() -> str:
    """Return the table, one line for each way to store K and V."""
    with InferenceSession.from_model(MODEL, engine="reference", dtype="float32") as session:
        assert session.tokenizer is not None
        text = session.tokenizer.encode(PROMPT)
        text += [event.token for event in session.generate([text], max_new_tokens=LENGTH - len(text), temperature=0.0, ignore_eos=True)]
    exact, largest = logits(text, None, "float32")
    lines = ["| K and V | scales | bits per element | largest error | mean error | same most likely token |", "|---|---|---|---|---|---|"]
    for dtype in ("float16", "bfloat16"):
        lines.append(line(dtype, "none", 16, logits(text, None, dtype, stored_only=True)[0], exact))
    for dtype in LARGEST:
        for scales in ("token", "head", "tensor"):
            bits = 8 + (32 / HEAD_DIM if scales == "token" else 0)
            lines.append(line(dtype, scales, bits, logits(text, form(dtype, scales, largest), "float32")[0], exact))
    return "\n".join(lines)


def line(dtype: str, scales: str, bits: float, found: np.ndarray, exact: np.ndarray) -> str:
    """Return a line: errors relative to the largest and to the mean magnitude of the logits."""
    error = np.abs(found - exact)
    same = (found.argmax(axis=1) == exact.argmax(axis=1)).mean()
    parts = (f"{error.max() / np.abs(exact).max():.1e}", f"{error.mean() / np.abs(exact).mean():.1e}", f"{same:.1%}")
    return f"| {dtype} | {scales} | {bits:g} | {' | '.join(parts)} |"


def form(dtype: str, scales: str, largest: list[np.ndarray]) -> QuantizedKV:
    """Return how K and V are quantized, static scales from the largest magnitudes [2, H] of each layer."""
    if scales == "token":
        return QuantizedKV(dtype)
    by_head = [found / LARGEST[dtype] for found in largest]
    static = [(tuple(k), tuple(v)) if scales == "head" else (float(k.max()), float(v.max())) for k, v in by_head]
    return QuantizedKV(dtype, scales, static)


def logits(text: list[int], quantized: QuantizedKV | None, dtype: str, *, stored_only: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits of every position, and the largest magnitudes of K and V of each layer and head as they are stored.

    With ``stored_only`` only what is in the cache has that dtype: it is what quantized K and V are compared with.
    """
    with Checkpoint.open(MODEL) as checkpoint:
        sizes = {"max_batch_size": 1, "max_sequence_length": LENGTH}
        config = cache_config(checkpoint.config, **sizes, dtype=dtype, attention="plugin", quantized=quantized)
        engine = ReferenceEngine(
            checkpoint, kv=config, dtype=None if stored_only else "float32", max_prefill_length=LENGTH, max_logits_per_slot="all",
            attention="plugin", memory=HostMemory(),
        )  # fmt: skip
    kv = KVCacheManager(config, memory=engine.memory)
    with InferenceSession(engine, kv) as session:
        session.prefill([text[:1]])
        found = session.verify([text[1:]])[0]
        rows = [kv.get_combined_kv_cache(layer).numpy()[0].astype(np.float32) for layer in range(kv.num_layers)]
        return np.asarray(found, np.float64), [np.abs(part).max(axis=(2, 3)) for part in rows]


def numbers(text: str) -> list[float]:
    """Return the numbers of a table."""
    return [float(found) for found in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)]


def main(check: bool) -> int:
    """Write the table, or with ``check`` compare it with the page; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    new = table()
    if check:
        now, then = numbers(new), numbers(old)
        return int(len(now) != len(then) or not np.allclose(now, then, rtol=0.33))
    PAGE.write_text(f"{before}{BEGIN}\n\n{new}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
