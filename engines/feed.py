"""Inputs for our runners in ``polygraphy run``: prompts, then the tokens that the reference engine generates after them.

The environment variables TRT_KVCACHE_MODEL and TRT_KVCACHE_PROMPTS (separated by ``|``) choose the model and the prompts.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from trt_kvcache import ReferenceRunner, greedy_feeds
from trt_kvcache.polygraphy.feeds import Feed

_MODEL = os.environ.get("TRT_KVCACHE_MODEL", str(Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"))
_PROMPTS = os.environ.get("TRT_KVCACHE_PROMPTS", "The|He said that").split("|")
_STEPS = 8


def load_data() -> Iterator[Feed]:
    """Yield a prefill of the prompts, then one token per prompt and step."""
    with ReferenceRunner(_MODEL, live_rows=False, max_batch_size=len(_PROMPTS)) as runner:
        for feed in greedy_feeds(runner, _PROMPTS, _STEPS):
            runner.infer(feed)
            yield feed
