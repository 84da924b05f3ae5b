"""Requests and answers of :class:`~trt_kvcache.server.async_engine.AsyncEngine`: plain dicts, token ids in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Required


class GenerateRequest(TypedDict, total=False):
    """What a request asks for. Options that are left out or None are the model's defaults; others than these are an error.

    Attributes
    ----------
    token_ids : list of int
        The prompt.
    sampling_options : dict
        ``n`` (answers to the prompt), ``temperature``, ``top_p``, ``top_k`` (0 or -1 for all), ``min_p``, ``seed`` (of answer i: ``seed +
        i``), ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``, as
        :class:`~trt_kvcache.SamplingParams` has them; ``guided_decoding``, a dict with one of ``json`` (a JSON schema), ``json_object``
        (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark).
    stop_conditions : dict
        ``max_tokens`` (what has room in a slot if left out; 0 to score the prompt only), ``stop``, ``stop_token_ids``, ``ignore_eos``.
    output_options : dict
        ``logprobs`` and ``prompt_logprobs``: log-probabilities of the generated tokens and of those of the prompt, each with so many of
        the most likely tokens.
    client : str
        Whose request it is: slots go round between clients, and each has its share of the queue. All requests without it are of one client.
    """

    token_ids: Required[list[int]]
    sampling_options: dict[str, Any]
    stop_conditions: dict[str, Any]
    output_options: dict[str, Any]
    client: str


class GenerateChunk(TypedDict, total=False):
    """New tokens of one answer.

    Attributes
    ----------
    index : int
        Which answer, from 0 to ``n - 1``.
    token_ids : list of int
        All tokens since the last chunk; a slow reader gets several. Empty if the answer ended without one more.
    text : str
        The text that has become certain with them: whole characters, nothing that could be part of a stop text.
    log_probs : list of float
        Of the tokens, if asked for.
    top_logprobs : list of list of dict
        The most likely tokens at the place of each, the most likely one first: ``{"token_id": ..., "logprob": ...}``.
    prompt_logprobs : PromptScore
        In the first chunk of answer 0, if asked for: :class:`~trt_kvcache.generation.prompt_score.PromptScore`.
    finish_reason : str
        In the last chunk: ``"stop"``, ``"length"`` or ``"cancelled"``.
    completion_usage : dict
        In the last chunk: ``prompt_tokens``, ``completion_tokens`` and ``total_tokens`` of this answer, and ``prompt_tokens_details`` with
        ``cached_tokens``, those of the prompt that came from the prompt cache or another slot.
    """

    index: Required[int]
    token_ids: Required[list[int]]
    text: str
    log_probs: list[float]
    top_logprobs: list[list[dict[str, Any]]]
    prompt_logprobs: Any
    finish_reason: str
    completion_usage: dict[str, Any]
