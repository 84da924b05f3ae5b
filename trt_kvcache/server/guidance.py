"""``Guidance``: text that follows a JSON schema or a grammar, by masks of llguidance over the logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache.checkpoint.model_files import TOKENIZER_FILE
from trt_kvcache.checkpoint.tokenizer import Tokenizer
from trt_kvcache.errors import ConfigError, ProcessorError
from trt_kvcache.generation.sampling import LogitsProcessor

if TYPE_CHECKING:
    import llguidance

#: JSON in one line: whitespace without end would be valid too, and small models write it.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class Guidance:
    """Makes logits processors that allow only what continues a text of a grammar. Of one model; from any thread.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of the model.
    vocab_size : int
        Width of the logits.
    eos_token_ids : sequence of int
        Tokens that end a text: at least one, because a text that is complete must be able to end.

    Raises
    ------
    ConfigError
        There is no such token, or llguidance does not read the tokenizer.
    ModuleNotFoundError
        llguidance is not installed.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> from trt_kvcache.server.guidance import Guidance
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="reference") as session:
    ...     guidance = Guidance(session.tokenizer, session.vocab_size, [0])
    ...     only = guidance.processor({"choice": ["cat", "hat"]})
    ...     text = "".join(token.text for token in session.generate("A", logits_processors=[only], stop_token_ids=[0]))
    >>> text in ("cat", "hat")
    True
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        with naming_the_extra():
            import llguidance
        if not eos_token_ids:
            raise ConfigError("guided decoding: expected a model with an end token, got one without: a complete text could not end.")
        self._vocab_size = vocab_size
        self._library = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            file = tokenizer.path / TOKENIZER_FILE
            raise ConfigError(f"guided decoding: {file}: llguidance does not read it: {error!s:.300}.") from error

    def processor(self, guided: Mapping[str, Any]) -> LogitsProcessor:
        """Return a logits processor for one request.

        Parameters
        ----------
        guided : mapping
            One of ``json`` (a JSON schema), ``json_object`` (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark).

        Returns
        -------
        callable
            For ``SamplingParams.logits_processors``, of one request alone.

        Raises
        ------
        ConfigError
            Not one of these, or one that llguidance does not compile.
        """
        matcher = self._library.LLMatcher(self._tokenizer, self._grammar(guided), log_level=0)
        if matcher.is_error():
            raise ConfigError(f"guided decoding: expected a grammar that compiles, got an error: {_first_line(matcher.get_error())}")
        return _Mask(matcher, self._vocab_size)

    def _grammar(self, guided: Mapping[str, Any]) -> str:
        given = [(name, value) for name, value in guided.items() if value is not None]
        if len(given) != 1 or given[0][0] not in _KINDS:
            raise ConfigError(f"guided decoding: expected one of {', '.join(_KINDS)}, got {', '.join(guided) or 'nothing'}.")
        [(kind, value)] = given
        matcher = self._library.LLMatcher
        if kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else value
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return _compiled(partial(matcher.grammar_from_json_schema, defaults=_JSON_FORM), text)
        if kind == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) and text for text in value):
                raise ConfigError(f"guided decoding: choice: expected texts, got {value!r:.80}.")
            return _compiled(matcher.grammar_from_lark, "start: " + " | ".join(json.dumps(text) for text in value))
        if not isinstance(value, str):
            raise ConfigError(f"guided decoding: {kind}: expected a text, got {value!r:.80}.")
        return _compiled(matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark, value)


def _compiled(compile_grammar: Callable[[str], str], text: str) -> str:
    try:
        return compile_grammar(text)
    except ValueError as error:
        raise ConfigError(f"guided decoding: expected a grammar that compiles, got an error: {_first_line(str(error))}") from error


def _first_line(text: str) -> str:
    return f"{text.splitlines()[0] if text else 'unknown'!s:.300}"


class _Mask:
    """A logits processor: excludes what cannot continue the text so far. A step that is repeated finds the matcher where it was."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._start: int | None = None
        self._consumed: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self._start is None:
            self._start = len(tokens)
        count = len(tokens) - self._start
        if count < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - count)
            del self._consumed[count:]
        new = list(tokens[self._start + len(self._consumed) :])
        if new and not self._matcher.consume_tokens(new):  # only where the mask had nothing to allow but the end
            raise ProcessorError(
                f"guided decoding: expected a grammar of texts that the tokenizer can write, got: {_first_line(self._matcher.get_error())}"
            )
        self._consumed += new
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), count=self._vocab_size, bitorder="little")
        if self._matcher.is_error():
            raise ProcessorError(f"guided decoding: {_first_line(self._matcher.get_error())}")
        logits[allowed == 0] = -np.inf
        return logits
