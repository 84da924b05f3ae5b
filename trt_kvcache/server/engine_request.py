"""``EngineRequest``: one request to an :class:`~trt_kvcache.server.async_engine.AsyncEngine`, from reading it to its last chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import SamplingParams, with_options
from trt_kvcache.server.generate_request import GenerateChunk, GenerateRequest
from trt_kvcache.server.guidance import GuidedMask
from trt_kvcache.session.async_request import AsyncRequest

#: Most answers to one prompt.
MAX_CHOICES = 128

#: Most characters of the name of a client.
MAX_CLIENT = 256

_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
_STOPPING = {"stop", "stop_token_ids", "ignore_eos"}


@dataclass(kw_only=True, eq=False)
class EngineRequest:
    """A request, its answers, and the masks of guided decoding. Each answer has a place in the engine until it ends."""

    token_ids: list[int]
    params: tuple[SamplingParams, ...]  # of each answer
    scores_only: bool  # max_tokens is 0: one token is generated, as the session needs it, and not returned
    prompt_logprobs: int | None
    guided: dict[str, Any] | None
    client: str
    adapter: str | None  # the session checks it

    answers: list[AsyncRequest] = field(default_factory=list)  # empty until all have been submitted
    masks: list[GuidedMask] = field(default_factory=list)  # one for each answer with guided decoding
    _aborted: bool = False
    _expired: bool = False
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def read(cls, request: Mapping[str, Any], defaults: SamplingParams, *, context_length: int) -> EngineRequest:
        """Read and check a :class:`GenerateRequest`; the session checks the token ids."""
        _check_keys("request", request, GenerateRequest.__annotations__)
        sampling = _group(request, "sampling_options", {*_SAMPLING, "n", "guided_decoding"})
        stopping = _group(request, "stop_conditions", {*_STOPPING, "max_tokens"})
        output = _group(request, "output_options", {"logprobs", "prompt_logprobs"})
        token_ids = request.get("token_ids")
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes) or not token_ids:
            raise ShapeError(f"token_ids: expected the ids of at least one token, got {token_ids!r:.80}.")
        count = int_in_range("n", sampling.pop("n", 1), 1, MAX_CHOICES)
        guided = sampling.pop("guided_decoding", None)
        options = {**sampling, **{name: stopping[name] for name in _STOPPING if name in stopping}}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        room = max(1, context_length - len(token_ids) + 1)  # the last token needs no row in the cache
        max_tokens = int_in_range("max_tokens", stopping.get("max_tokens", room), 0)
        options["max_new_tokens"] = min(max(max_tokens, 1), room)
        options["logprobs"] = output.get("logprobs")
        params = with_options(defaults, options)
        prompt_logprobs = output.get("prompt_logprobs")
        if prompt_logprobs is not None:
            int_in_range("prompt_logprobs", prompt_logprobs, 0)
        client = "" if request.get("client") is None else request["client"]
        if not isinstance(client, str) or len(client) > MAX_CLIENT:
            raise ConfigError(f"client: expected a text of at most {MAX_CLIENT} characters, got {client!r:.80}.")
        return cls(
            token_ids=list(token_ids),
            params=tuple(_with_seed(params, index) for index in range(count)),
            scores_only=max_tokens == 0,
            prompt_logprobs=prompt_logprobs,
            guided=guided,
            client=client,
            adapter=request.get("adapter"),
        )

    @property
    def num_places(self) -> int:
        """Number of answers that run, wait, or are about to be submitted."""
        return sum(not one.ended for one in self.answers) if self.answers else len(self.params)

    def start_timer(self, seconds: float | None) -> None:
        """Cancel the request when it has lasted for ``seconds``."""
        if seconds is None:
            return

        def expire() -> None:
            self._expired = self.num_places > 0
            self.cancel()

        self._timer = asyncio.get_running_loop().call_later(seconds, expire)

    def raise_if_expired(self, seconds: float | None) -> None:
        """Raise TimeoutError if the timer has cancelled it."""
        if self._expired:
            raise TimeoutError(f"request: expected to end within {seconds:g} seconds; it was cancelled. Ask for fewer tokens.")

    def abort(self) -> None:
        """Cancel the answers, also if they are about to be submitted."""
        self._aborted = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel the answers that have been submitted, and the masks that they wait for."""
        for one in self.answers:
            one.cancel()
        for mask in self.masks:
            mask.cancel()

    def begin(self, answers: Sequence[AsyncRequest]) -> None:
        """Take the submitted answers."""
        self.answers += answers
        if self._aborted:
            self.cancel()

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for one in self.answers:
            if not one.ended:
                one.cancel()
        for mask in self.masks:
            mask.close()

    async def chunks(self) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks of all answers, as they come."""
        counts = [0] * len(self.answers)  # tokens of each answer that were yielded
        if len(self.answers) == 1:
            last: GenerateChunk | None = None
            while last is None or "finish_reason" not in last:
                last = self._chunk(0, await self.answers[0].read(counts[0]), counts)
                yield last
            return
        reads = {asyncio.create_task(answer.read(0)): index for index, answer in enumerate(self.answers)}
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=reads.__getitem__):
                    index = reads[task]
                    chunk = self._chunk(index, task.result(), counts)
                    del reads[task]
                    yield chunk
                    if "finish_reason" not in chunk:
                        reads[asyncio.create_task(self.answers[index].read(counts[index]))] = index
        finally:
            for task in reads:
                task.cancel()
            await asyncio.gather(*reads, return_exceptions=True)  # several may have failed: asyncio would complain of all but the first

    def _chunk(self, index: int, new: Sequence[GeneratedToken], counts: list[int]) -> GenerateChunk:
        """Return the chunk of new tokens of an answer; without any, it was cancelled."""
        handle, shown = self.answers[index].handle, [] if self.scores_only else new
        chunk = GenerateChunk(index=index, token_ids=[event.token for event in shown], text="".join([event.text for event in shown]))
        if shown and self.params[index].logprobs is not None:
            chunk["log_probs"] = [event.logprob or 0.0 for event in shown]
            chunk["top_logprobs"] = [
                [{"token_id": token, "logprob": value} for token, value in event.top_logprobs or ()] for event in shown
            ]
        if index == 0 and not counts[0] and self.prompt_logprobs is not None and new:
            chunk["prompt_logprobs"] = handle.prompt_score
        counts[index] += len(new)
        reason = new[-1].finish_reason if new else "cancelled"
        if reason is not None:
            completion, prompt = 0 if self.scores_only else counts[index], len(handle.prompt)
            chunk["finish_reason"] = "length" if self.scores_only and new else reason
            chunk["completion_usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": handle.reused_tokens},
            }
        return chunk


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None or not index else with_options(params, {"seed": (params.seed + index) % 2**63})


def _group(request: Mapping[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    group = request.get(name)
    if group is None:
        return {}
    _check_keys(name, group, known)
    return {key: value for key, value in group.items() if value is not None}


def _check_keys(name: str, group: Any, known: Collection[str]) -> None:
    if not isinstance(group, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {type(group).__name__}.")
    unknown = sorted(str(key) for key, value in group.items() if key not in known and value is not None)
    if unknown:
        raise ConfigError(f"{name}: expected {', '.join(sorted(known))}, got {', '.join(unknown)}.")
