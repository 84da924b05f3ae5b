"""The tokenizer of a model folder: text to token ids and back, and chat messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.chat_template import ChatTemplate, find_chat_template
from trt_kvcache.checkpoint.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, ModelFiles
from trt_kvcache.checkpoint.token_bytes import TokenBytes
from trt_kvcache.errors import CheckpointError, ConfigError, KVCacheError, RangeError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """Converts between text and token ids of one model. Create one with :meth:`open`.

    Parameters
    ----------
    path : Path
        The model folder.
    backend : tokenizers.Tokenizer
        The tokenizer of the Hugging Face ``tokenizers`` library. Its truncation and padding, which training leaves in a file, are switched
        off, as transformers does unless a call asks for them.
    special_tokens : mapping of str to str
        Texts of the special tokens by the names that chat templates use: ``"bos_token"``, ``"eos_token"``, ...
    chat_template : ChatTemplate or None
        None if the folder has none.
    add_bos_token : bool, optional
        True if a text begins with the token ``"bos_token"``. If left out, ``tokenizer.json`` decides.

    Attributes
    ----------
    path : Path
        The model folder.
    special_tokens : mapping of str to str
        Texts of the special tokens by the names that chat templates use.

    Examples
    --------
    >>> from trt_kvcache import Tokenizer
    >>> tokenizer = Tokenizer.open("examples/tiny-llama")
    >>> ids = tokenizer.encode("The rabbit")
    >>> tokenizer.decode(ids)
    'The rabbit'
    >>> tokenizer.has_chat_template
    False
    """

    def __init__(
        self,
        path: Path,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
        *,
        add_bos_token: bool | None = None,
    ) -> None:
        self.path = path
        self.special_tokens = special_tokens
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._chat_template = chat_template
        self._add_bos_token = add_bos_token
        self._bos_token_id = self._token_id("bos_token")

    @classmethod
    def open(cls, folder: str | Path) -> Tokenizer | None:
        """Open the tokenizer of a model folder.

        Parameters
        ----------
        folder : path
            The model folder, with ``tokenizer.json``; or a GGUF file.

        Returns
        -------
        Tokenizer or None
            None if there is no ``tokenizer.json``, and no tokenizer in the metadata of a GGUF file.

        Raises
        ------
        CheckpointError
            A file is damaged. The message names it.
        """
        path = Path(folder)
        files = ModelFiles(path)
        if not files.has(TOKENIZER_FILE):
            return None
        file, config_file = files.source(TOKENIZER_FILE), files.source(TOKENIZER_CONFIG_FILE)
        config = files.json_if_present(TOKENIZER_CONFIG_FILE)
        add_bos_token = config.get("add_bos_token")
        if not isinstance(add_bos_token, bool | None):
            raise CheckpointError(f"{config_file}: add_bos_token: expected true or false, got {short_repr(add_bos_token)}.")
        return cls(
            path,
            _parse(files.text(TOKENIZER_FILE), file),
            _special_tokens(config),
            find_chat_template(path, config, config_file),
            add_bos_token=add_bos_token,
        )

    def to_json(self) -> str:
        """Return the text of ``tokenizer.json``, without truncation and padding."""
        return str(self._backend.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of ``eos_token`` in ``tokenizer_config.json``; empty if the file does not name one."""
        token = self._token_id("eos_token")
        return () if token is None else (token,)

    def special_token_id(self, text: str) -> int | None:
        """Return the id of a special token by its text; :meth:`decode` leaves such tokens out, so no generated text has it.

        Parameters
        ----------
        text : str
            All of the token, such as ``"<|im_end|>"``.

        Returns
        -------
        int or None
            None if no special token is written so.
        """
        return self._special_ids.get(text)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {token.content: index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def _token_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None or not _is_utf8(text) else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
            The text.
        add_special_tokens : bool
            True to add the tokenizer's own special tokens (begin of text, ...). Pass False for the text of a chat template, which
            already contains them. If ``tokenizer_config.json`` has ``add_bos_token``, it decides whether the text begins with
            ``bos_token``, as for the Llama tokenizers of transformers 4.

        Returns
        -------
        list of int
            The token ids.

        Raises
        ------
        ConfigError
            The text cannot be encoded in UTF-8 (it has lone surrogates).
        CheckpointError
            The tokenizer fails on the text, because ``tokenizer.json`` is damaged.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            failure = self._encoding_failure([text], error)
            if failure is None:
                raise
            raise failure from error
        return self._with_bos(text, ids, add_special_tokens)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts as :meth:`encode` does, on several cores, while other Python threads run.

        Parameters
        ----------
        texts : sequence of str
            The texts.
        add_special_tokens : bool
            As for :meth:`encode`.

        Returns
        -------
        list of list of int
            The token ids of each.

        Raises
        ------
        ConfigError, CheckpointError
            As :meth:`encode`.
        """
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            failure = self._encoding_failure(texts, error)
            if failure is None:
                raise
            raise failure from error
        return [self._with_bos(text, one.ids, add_special_tokens) for text, one in zip(texts, found, strict=True)]

    def _with_bos(self, text: str, ids: list[int], add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._add_bos_token is not None and self._bos_token_id is not None:
            begins = ids[:1] == [self._bos_token_id] and not text.startswith(self.special_tokens["bos_token"])
            if self._add_bos_token and ids[:1] != [self._bos_token_id]:
                return [self._bos_token_id, *ids]
            if not self._add_bos_token and begins:
                return ids[1:]
        return ids

    def _encoding_failure(self, texts: Sequence[str], error: BaseException) -> KVCacheError | None:
        """Return this package's error for one of the library; None for any other error."""
        if any(isinstance(text, str) and not _is_utf8(text) for text in texts):
            return ConfigError("text: expected characters that UTF-8 can encode, got lone surrogates.")
        return self._failure(error) if _is_of_library(error) else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token in the vocabulary: a limit of its text, except for characters that a normalizer drops."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Parameters
        ----------
        ids : sequence of int
            The token ids. Ids that no token has are left out.
        skip_special_tokens : bool
            True to leave special tokens out of the text.

        Returns
        -------
        str
            Bytes that are not valid UTF-8 become U+FFFD.

        Raises
        ------
        RangeError
            An id is negative, or larger than 32 bits.
        CheckpointError
            The tokenizer fails on the ids, because ``tokenizer.json`` is damaged.
        """
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RangeError("ids: expected token ids from 0 to 2**32 - 1.") from error
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise self._failure(error) from error

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token adds to a text, also of a token that is a part of a character.

        Parameters
        ----------
        token : int
            Its id.

        Returns
        -------
        bytes or None
            For a special token, its name. None if no token has this id, or ``tokenizer.json`` does not say which bytes it stands for.
        """
        return self._token_bytes.of(token)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    def _failure(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"{self.path / TOKENIZER_FILE}: the tokenizer fails: {type(error).__name__}: {error!s:.300}.")

    @property
    def has_chat_template(self) -> bool:
        """True if the folder has a chat template."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None if the folder has none."""
        return None if self._chat_template is None else self._chat_template.text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation. Encode it with ``add_special_tokens=False``.

        Parameters
        ----------
        messages : sequence of mapping
            ``{"role": ..., "content": ...}``, oldest first.
        add_generation_prompt : bool
            True if the text ends with the opening of the assistant's turn.
        tools : sequence of mapping, optional
            Descriptions of the functions that the model may call, in the format that the model was trained with (usually JSON schema).
        template_args : mapping of str to object, optional
            Further variables of the template, such as ``{"enable_thinking": False}``.

        Returns
        -------
        str
            The text, special tokens included.

        Raises
        ------
        ConfigError
            The folder has no chat template, the template rejects the messages, or it was stopped because it takes too long.
        CheckpointError
            The template is not valid.
        ClosedError
            After :meth:`close_chat_template`.
        """
        if self._chat_template is None:
            raise ConfigError(f"{self.path.name}: expected a chat template in {TOKENIZER_CONFIG_FILE} or chat_template.jinja, got none.")
        variables = {**self.special_tokens, "tools": tools, **(template_args or {})}
        return self._chat_template.render(messages, variables, add_generation_prompt=add_generation_prompt)

    def close_chat_template(self) -> None:
        """End the processes of the chat template and their rendering. Later calls raise ClosedError. Thread-safe, idempotent."""
        if self._chat_template is not None:
            self._chat_template.close()


def _parse(text: str, file: Path) -> tokenizers.Tokenizer:
    with naming_the_extra():
        import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise CheckpointError(f"{file}: expected a tokenizer, got an error: {error!s:.300}. The file may be truncated.") from error


def _is_of_library(error: BaseException) -> bool:
    """Return True for an error of the tokenizers library about its file. Its panics are no ``Exception``."""
    return (isinstance(error, Exception) and not isinstance(error, MemoryError | TypeError)) or type(error).__name__ == "PanicException"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Collect ``bos_token``, ``eos_token`` and others; each is a text, or an object whose text is in ``content``."""
    result: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            result[name] = text
    return result
