"""A user's script: what type checkers say about it is tested, and it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import trt_kvcache
from trt_kvcache import (
    AsyncSession,
    ChatPrompt,
    GeneratedToken,
    InferenceSession,
    KVCacheError,
    RequestHandle,
    SamplingParams,
    TokenStream,
)

logging.basicConfig(level=logging.WARNING)


def no_repeats(tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Exclude the token that came last."""
    logits[tokens[-1]] = -np.inf
    return logits


def generate(session: InferenceSession) -> str:
    """Continue prompts with options of every kind."""
    stream: TokenStream = session.generate("Alice was", max_new_tokens=3, temperature=0.7, seed=1, stop=["."], logit_bias={5: -1.0})
    text: str = stream.text
    prompts: list[str | list[int]] = ["Alice was", [5, 6]]
    texts: list[str] = session.complete(prompts, max_new_tokens=2)
    assert texts == session.generate(prompts, max_new_tokens=2).texts
    events: list[GeneratedToken] = list(session.generate([[5, 6], [7]], logprobs=2, max_new_tokens=2, logits_processors=[no_repeats]))
    best: float | None = events[0].logprob
    assert best is not None
    assert events[0].top_logprobs is not None
    params = [SamplingParams(stop="x", repetition_penalty=1.1), SamplingParams(stop_token_ids=[3], max_new_tokens=2)]
    for event in session.generate([np.array([5, 6]).tolist(), "Alice"], params):
        if event.finish_reason == "stop":
            break
    return text


def serve(session: InferenceSession) -> list[str]:
    """Submit prompts."""
    handles: list[RequestHandle] = [session.submit(prompt, max_new_tokens=2, presence_penalty=0.5) for prompt in ("Alice", "The")]
    while session.step():
        pass
    return [handle.text for handle in handles]


async def serve_many(session: InferenceSession) -> list[str]:
    """Share a session between tasks."""
    async with AsyncSession(session) as served:
        request = await served.submit("Alice was", max_new_tokens=2)
        parts = [event.text async for event in served.generate([5, 6], SamplingParams(max_new_tokens=2))]
        await request.wait()
        steps: int = await served.run(lambda owned: owned.statistics.decode_steps)
        return [request.text, *parts, str(steps)]


def main() -> None:
    """Run all of it."""
    with trt_kvcache.load("examples/tiny-llama", engine="reference", max_batch_size=2, dtype="float32", attention="native") as session:
        print(generate(session), serve(session))
        try:
            session.chat([{"role": "user", "content": "Hello"}], template_args={"enable_thinking": False}, max_new_tokens=2)
            session.submit(ChatPrompt([{"role": "user", "content": "Hello"}], tools=[{"type": "function"}]))
        except KVCacheError as error:
            print(error)
    print(asyncio.run(serve_many(InferenceSession.from_model("examples/tiny-llama", engine="reference", flavour="auto"))))


if __name__ == "__main__":
    main()
