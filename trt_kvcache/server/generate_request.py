"""Requests and answers of :class:`~trt_kvcache.server.async_engine.AsyncEngine`: plain dicts, token ids in and out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.generation.sampling import SamplingParams, with_options

if TYPE_CHECKING:
    from typing_extensions import Required

#: Most answers to one prompt.
MAX_CHOICES = 128

#: Most characters of the name of a client.
MAX_CLIENT = 256

_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
_STOPPING = {"stop", "stop_token_ids", "ignore_eos"}


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


@dataclass(frozen=True, kw_only=True)
class WantedAnswers:
    """A request that was read and checked as far as that needs no session."""

    token_ids: list[int]
    params: tuple[SamplingParams, ...]
    scores_only: bool
    prompt_logprobs: int | None
    guided: dict[str, Any] | None
    client: str


def read_request(request: Mapping[str, Any], defaults: SamplingParams, *, context_length: int) -> WantedAnswers:
    """Read a :class:`GenerateRequest`."""
    _known("request", request, GenerateRequest.__annotations__)
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
    room = max(1, context_length - len(token_ids) + 1)
    wanted_tokens = int_in_range("max_tokens", stopping.get("max_tokens", room), 0)
    options["max_new_tokens"] = min(max(wanted_tokens, 1), room)
    options["logprobs"] = output.get("logprobs")
    params = with_options(defaults, options)
    prompt_logprobs = output.get("prompt_logprobs")
    if prompt_logprobs is not None:
        int_in_range("prompt_logprobs", prompt_logprobs, 0)
    client = "" if request.get("client") is None else request["client"]
    if not isinstance(client, str) or len(client) > MAX_CLIENT:
        raise ConfigError(f"client: expected a text of at most {MAX_CLIENT} characters, got {client!r:.80}.")
    return WantedAnswers(
        token_ids=list(token_ids),
        params=tuple(_with_seed(params, index) for index in range(count)),
        scores_only=wanted_tokens == 0,
        prompt_logprobs=prompt_logprobs,
        guided=guided,
        client=client,
    )


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None or not index else with_options(params, {"seed": (params.seed + index) % 2**63})


def _group(request: Mapping[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    group = request.get(name)
    if group is None:
        return {}
    _known(name, group, known)
    return {key: value for key, value in group.items() if value is not None}


def _known(what: str, group: Any, known: Collection[str]) -> None:
    if not isinstance(group, Mapping):
        raise ConfigError(f"{what}: expected a mapping, got {type(group).__name__}.")
    unknown = sorted(str(key) for key, value in group.items() if key not in known and value is not None)
    if unknown:
        raise ConfigError(f"{what}: expected {', '.join(sorted(known))}, got {', '.join(unknown)}.")
