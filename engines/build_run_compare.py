"""Build an engine folder, run it, and compare it with full recomputation and with the NumPy engine, by Polygraphy.

    python engines/build_run_compare.py [MODEL] [-o FOLDER] [--prompt TEXT ...] [--steps 8] [--attention plugin]

MODEL is a Hugging Face folder; by default the shipped one. Without a GPU the build is the same, and the PyTorch or NumPy engine runs the
folder in place of TensorRT, with a warning. Exit code 1 if the paths differ.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from polygraphy.comparator import Comparator

from trt_kvcache import InferenceSession, RecomputeRunner, ReferenceRunner, SessionRunner, build_engine, greedy_feeds
from trt_kvcache.polygraphy import SessionCompareFunc

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"


def feeds(model, prompts, steps):
    """Return a prefill of the prompts, then one greedy token for each prompt and step, as the NumPy engine chooses them."""
    found = []
    with ReferenceRunner(model, live_rows=False, max_batch_size=len(prompts)) as runner:
        for feed in greedy_feeds(runner, prompts, steps):
            runner.infer(feed)
            found.append(feed)
    return found


def main():
    """Build, run, compare."""
    parser = argparse.ArgumentParser(description="Build an engine folder, run it, and compare its paths")
    parser.add_argument("model", nargs="?", default=MODEL, type=Path, help="Hugging Face folder; the shipped model by default")
    parser.add_argument("-o", "--out", default=Path("out/recipe"), type=Path, help="engine folder to build")
    parser.add_argument("--prompt", action="append", help="prompt; may be given several times, one for each slot")
    parser.add_argument("--steps", default=8, type=int, help="decode steps to compare")
    parser.add_argument("--attention", default="auto", help="attention variant of the build: auto, native, mask or plugin")
    arguments = parser.parse_args()
    prompts = arguments.prompt or ["The", "He said that"]

    # Build. The folder has the plan, its configuration and the tokenizer.
    report = build_engine(
        arguments.model, arguments.out, max_batch_size=len(prompts), max_sequence_length=256, attention=arguments.attention
    )
    print(f"built {report.path} with {report.tensorrt}: {report.plan_nbytes} bytes in {report.seconds:.1f} s")

    # Run.
    with InferenceSession.open(arguments.out) as session:
        for prompt, text in zip(prompts, session.complete(prompts, max_new_tokens=arguments.steps), strict=True):
            print(f"{prompt}|{text}")

    # Compare. Each runner has its own cache; K and V of all layers and the logits are compared after each step.
    opens = partial(InferenceSession.open, arguments.out)
    runners = [SessionRunner(opens, name="session"), RecomputeRunner(opens, name="recompute")]
    runners.append(ReferenceRunner(arguments.model, name="numpy", max_batch_size=len(prompts), max_sequence_length=256))
    results = Comparator.run(runners, data_loader=feeds(arguments.model, prompts, arguments.steps))
    found = Comparator.compare_accuracy(results, compare_func=SessionCompareFunc(dtype=session.cache_config.dtype))
    print("all paths agree" if found else "the paths differ: trt-kvcache compare names step, layer, slot and head")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
