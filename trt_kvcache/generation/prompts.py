"""Prompts: text or token ids, checked and converted to token ids."""

from collections.abc import Mapping, Sequence

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.generation.chat_prompt import ChatPrompt

#: A prompt: token ids, or text for a model with a tokenizer.
Prompt = str | Sequence[int]

#: A prompt, or a conversation for a model with a chat template.
AnyPrompt = Prompt | ChatPrompt

_SEQUENCE = (Sequence, np.ndarray)
_BYTES = (bytes, bytearray, memoryview)


class PromptReader:
    """Converts the prompts of one model to token ids. Without a tokenizer, text is refused."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def rows(self, prompts: Sequence[AnyPrompt], *, add_special_tokens: bool = True, end: int | None = None) -> list[list[int]]:
        """Return the token ids of each prompt. ``add_special_tokens=False`` is for text that continues another.

        ``end``: first token id without a meaning, if ids past the vocabulary have one. Raises ShapeError, RangeError or ConfigError.
        """
        check_sequence(prompts)
        return [self._row(f"prompts[{index}]", prompt, add_special_tokens, end) for index, prompt in enumerate(prompts)]

    def _row(self, what: str, prompt: AnyPrompt, add_special_tokens: bool, end: int | None) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            return self.tokens(what, self._conversation(what, prompt, add_special_tokens))
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigError(f"{what}: expected token ids, got text. The model folder has no tokenizer.json.")
            prompt = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return self.tokens(what, prompt, end)

    def _conversation(self, what: str, prompt: ChatPrompt, begins: bool) -> list[int]:
        if self._tokenizer is None:
            raise ConfigError(f"{what}: expected token ids, got a conversation. The model folder has no tokenizer.json.")
        if not self._tokenizer.has_chat_template:
            raise ConfigError(
                f"{what}: expected a model with a chat template for a conversation, got one without. Pass a text to continue."
            )
        if not begins:
            raise ConfigError(f"{what}: expected text or token ids for a next turn, got a conversation. Pass all of it with reuse=True.")
        text = self._tokenizer.apply_chat_template(
            prompt.messages, prompt.add_generation_prompt, tools=prompt.tools, template_args=prompt.template_args
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def tokens(self, what: str, tokens: Sequence[int], end: int | None = None) -> list[int]:
        """Return checked token ids as a new list. ``what`` names the argument in errors; ``end`` as for :meth:`rows`."""
        if isinstance(tokens, _BYTES):
            raise ShapeError(f"{what}: expected text or token ids, got {type(tokens).__name__}. Make it a text: prompt.decode().")
        if isinstance(tokens, str) or not isinstance(tokens, _SEQUENCE):
            raise ShapeError(f"{what}: expected a sequence of token ids, got {type(tokens).__name__}.")
        limit = self._vocab_size if end is None else end
        if all(type(token) is int and 0 <= token < limit for token in tokens):
            return list(tokens)
        if any(isinstance(token, Mapping) for token in tokens):
            raise ShapeError(f"{what}: expected text or token ids, got messages. Pass them to session.chat, or as a ChatPrompt.")
        return [int_in_range(f"{what}[{index}]", token, 0, limit - 1) for index, token in enumerate(tokens)]


def check_sequence(prompts: Sequence[AnyPrompt]) -> None:
    """Raise :class:`ShapeError` if prompts are not a sequence; the prompts themselves are not checked."""
    if isinstance(prompts, (str, *_BYTES)) or not isinstance(prompts, _SEQUENCE):
        raise ShapeError(f"prompts: expected a sequence of prompts, got {type(prompts).__name__}.")


def as_prompts(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    """Return one prompt as a sequence of one, and a sequence of prompts unchanged."""
    if isinstance(prompts, (str, ChatPrompt, *_BYTES)):
        return [prompts]  # bytes are refused with the others, by their type
    if isinstance(prompts, _SEQUENCE) and len(prompts) and not isinstance(prompts[0], (*_SEQUENCE, ChatPrompt)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
