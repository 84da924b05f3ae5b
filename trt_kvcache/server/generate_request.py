"""Requests to :class:`~trt_kvcache.server.async_engine.AsyncEngine` and chunks of its answers: plain dicts of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Required


class GenerateRequest(TypedDict, total=False):
    """A request. Options that are left out or None are the model's defaults; unknown options are an error.

    Attributes
    ----------
    token_ids : list of int
        The prompt; also ids of ``AsyncEngine.add_embeddings``.
    sampling_options : dict
        ``n`` (answers to the prompt), ``temperature``, ``top_p``, ``top_k`` (0 or -1 for all), ``min_p``, ``seed`` (of answer i: ``seed +
        i``), ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``, as
        in :class:`~trt_kvcache.SamplingParams`; ``guided_decoding``, a dict with one of ``json`` (a JSON schema), ``json_object``
        (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark).
    stop_conditions : dict
        ``max_tokens`` (the rest of the slot if left out; 0 to score the prompt only), ``stop``, ``stop_token_ids``, ``ignore_eos``.
    output_options : dict
        ``logprobs`` and ``prompt_logprobs``: log-probabilities of the generated tokens and of the prompt tokens. The value is the number of
        most likely tokens to return with each.
    client : str
        Name of the client: clients take turns for slots, and each has its share of the queue. Requests without it count as one client.
    adapter : str
        Name of an adapter of the session; the base model if left out.
    """

    token_ids: Required[list[int]]
    sampling_options: dict[str, Any]
    stop_conditions: dict[str, Any]
    output_options: dict[str, Any]
    client: str
    adapter: str


class GenerateChunk(TypedDict, total=False):
    """New tokens of one answer.

    Attributes
    ----------
    index : int
        Index of the answer, from 0 to ``n - 1``.
    token_ids : list of int
        All tokens since the last chunk; a slow reader gets several. Empty if the answer ended without another token.
    text : str
        The text that has become certain with them: whole characters, and no possible beginning of a stop text.
    log_probs : list of float
        Log-probabilities of the tokens, if requested.
    top_logprobs : list of list of dict
        The most likely tokens at each position, the most likely one first: ``{"token_id": ..., "logprob": ...}``.
    prompt_logprobs : PromptScore
        In the first chunk of answer 0, if requested: :class:`~trt_kvcache.generation.prompt_score.PromptScore`.
    finish_reason : str
        In the last chunk: ``"stop"``, ``"length"`` or ``"cancelled"``.
    completion_usage : dict
        In the last chunk: ``prompt_tokens``, ``completion_tokens`` and ``total_tokens`` of this answer, and ``prompt_tokens_details`` with
        ``cached_tokens``, the prompt tokens that were copied from the prefix cache or another slot.
    """

    index: Required[int]
    token_ids: Required[list[int]]
    text: str
    log_probs: list[float]
    top_logprobs: list[list[dict[str, Any]]]
    prompt_logprobs: Any
    finish_reason: str
    completion_usage: dict[str, Any]
