"""Trees of draft tokens at the size of Llama-3-8B: time to verify one, and to generate one with an EAGLE-3 head. Needs torch.

    python benchmarks/draft_trees.py [-o FILE] [--batches 1,8] [--sizes 8,16,32,64] [--quick]

Weights are random, as in ``draft_models.py``. ``decode_ms``, ``chain_ms`` and ``tree_ms`` are calls of ``session.verify`` with one token,
and with a chain and a binary tree of as many tokens; each copies the logits of all its tokens to the host. ``propose_ms`` is the time in
which the head generates a tree of this size (``draft_tree=``), which grows on the device. Tokens with trees are first compared with those
without.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from draft_models import EAGLE3_8B, QUICK, answers_of, eagle3_shapes, write
from environment import describe_environment, write_result
from random_model import LLAMA_3_8B

from trt_kvcache import DraftedSequence, Drafter, DraftTree, InferenceSession
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

HERE = Path(__file__).resolve().parent

PROMPT, RUNS = 1024, 20

#: Calls that are not timed, since the first ones capture.
WARM_UP = 3


class Timed:
    """A drafter whose calls are timed."""

    takes_device_states = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seconds: list[float] = []

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[Sequence[int] | DraftTree]:
        """Return the drafts of the drafter."""
        begin = time.perf_counter()
        drafts = self._drafter.propose(sequences)
        self.seconds.append(time.perf_counter() - begin)
        return [*drafts]


def call_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call, the median of runs."""
    seconds = []
    for _ in range(WARM_UP + RUNS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * median(seconds[WARM_UP:]), 3)


def verify_rows(session: InferenceSession, batches: list[int], sizes: list[int]) -> list[dict[str, Any]]:
    """Return the times of verification, by number of sequences and tokens of a tree."""
    rows = []
    for batch in batches:
        session.prefill([[3 + (7 * slot + place) % 100 for place in range(PROMPT)] for slot in range(batch)])
        decode = call_ms(lambda: session.verify([[5]] * batch))  # noqa: B023
        for size in sizes:
            tokens, parents = [[5 + place % 90 for place in range(size)]] * batch, [[(place - 1) // 2 for place in range(size)]] * batch
            chain = call_ms(lambda: session.verify(tokens))  # noqa: B023
            tree = call_ms(lambda: session.verify(tokens, parents=parents))  # noqa: B023
            rows.append({"batch": batch, "tokens": size, "decode_ms": decode, "chain_ms": chain, "tree_ms": tree})
            print(rows[-1], flush=True)
    return rows


def propose_rows(session: InferenceSession, batches: list[int], size: int) -> list[dict[str, Any]]:
    """Return the times of the head for a tree of one size, by number of sequences, after a comparison of the tokens."""
    rows, drafter = [], session._drafter
    assert drafter is not None
    for batch in batches:
        prompts = [[3 + (7 * slot + place) % 100 for place in range(PROMPT)] for slot in range(batch)]
        expected, _ = answers_of(session, prompts, "off")
        answers_of(session, prompts, None)
        timed = Timed(drafter)
        found, _ = answers_of(session, prompts, timed)
        assert found == expected, "trees have changed the tokens"
        rows.append({"batch": batch, "tokens": size, "propose_ms": round(1e3 * median(timed.seconds), 3), "proposals": len(timed.seconds)})
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Write the folders, measure."""
    global PROMPT, RUNS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "draft_trees.json")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--sizes", default="8,16,32,64", help="tokens of a tree, with its root")
    parser.add_argument("--quick", action="store_true", help="small models: to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large, head = LLAMA_3_8B | {"counts": True}, EAGLE3_8B
    if options.quick:
        PROMPT, RUNS = 32, 1
        large, head = large | QUICK | {"num_hidden_layers": 6}, head | QUICK | {"draft_vocab_size": 512}
    batches, sizes = ([int(number) for number in text.split(",")] for text in (options.batches, options.sizes))
    limits = {"engine": "torch", "max_batch_size": max(batches), "max_sequence_length": PROMPT + 256}
    proposed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(folder / "large", large, tensor_shapes(ModelConfig.from_dict(large)), device)
        draft = write(folder / "head", head, eagle3_shapes(head), device)
        with InferenceSession.from_model(model, max_logits_per_slot=max(sizes), **limits) as session:
            verified = verify_rows(session, batches, sizes)
        for size in sizes:
            with InferenceSession.from_model(model, draft=draft, draft_tree=size, **limits) as session:
                proposed += propose_rows(session, batches, size)
    write_result(options.out, {**describe_environment(gpu=device != "cpu"), "prompt": PROMPT, "verify": verified, "propose": proposed})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
