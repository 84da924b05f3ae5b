"""The tokenizer of a model folder: text to token ids and back, and chat messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache.checkpoint.chat_template import ChatTemplate, find_chat_template
from trt_kvcache.checkpoint.json_file import read_json_if_present, read_text
from trt_kvcache.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


class Tokenizer:
    """Converts between text and token ids of one model. Create one with :meth:`open`.

    Parameters
    ----------
    path : Path
        The model folder.
    backend : tokenizers.Tokenizer
        The tokenizer of the Hugging Face ``tokenizers`` library.
    special_tokens : mapping of str to str
        Texts of the special tokens by the names that chat templates use: ``"bos_token"``, ``"eos_token"``, ...
    chat_template : ChatTemplate or None
        None if the folder has none.

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
        self, path: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: ChatTemplate | None
    ) -> None:
        self.path = path
        self.special_tokens = special_tokens
        self._backend = backend
        self._chat_template = chat_template

    @classmethod
    def open(cls, folder: str | Path) -> Tokenizer | None:
        """Open the tokenizer of a model folder.

        Parameters
        ----------
        folder : path
            The model folder, with ``tokenizer.json``.

        Returns
        -------
        Tokenizer or None
            None if there is no ``tokenizer.json``.

        Raises
        ------
        CheckpointError
            A file is damaged. The message names it.
        """
        path = Path(folder)
        file = path / TOKENIZER_FILE
        if not file.is_file():
            return None
        config_file = path / TOKENIZER_CONFIG_FILE
        config = read_json_if_present(config_file)
        return cls(path, _parse(read_text(file), file), _special_tokens(config), find_chat_template(path, config, config_file))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of ``eos_token`` in ``tokenizer_config.json``; empty if the file does not name one."""
        text = self.special_tokens.get("eos_token")
        token = None if text is None else self._backend.token_to_id(text)
        return () if token is None else (token,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
            The text.
        add_special_tokens : bool
            Whether to add the tokenizer's own special tokens (begin of text, ...). Pass False for the text of a chat template, which
            already contains them.

        Returns
        -------
        list of int
            The token ids.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Parameters
        ----------
        ids : sequence of int
            The token ids. Ids that no token has are left out.
        skip_special_tokens : bool
            Whether special tokens are left out of the text.

        Returns
        -------
        str
            Bytes that are not valid UTF-8 become U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template."""
        return self._chat_template is not None

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
            Whether the text ends with the opening of the assistant's turn.
        tools : sequence of mapping, optional
            Descriptions of the functions that the model may call, in the form that the model was trained with (usually JSON schema).
        template_args : mapping of str to object, optional
            Further variables of the template, such as ``{"enable_thinking": False}``.

        Returns
        -------
        str
            The text, special tokens included.

        Raises
        ------
        ConfigError
            The folder has no chat template, or the template rejects the messages.
        """
        if self._chat_template is None:
            raise ConfigError(f"{self.path}: expected a chat template in {TOKENIZER_CONFIG_FILE} or chat_template.jinja, got none.")
        variables = {**self.special_tokens, "tools": tools, **(template_args or {})}
        return self._chat_template.render(messages, variables, add_generation_prompt=add_generation_prompt)


def _parse(text: str, file: Path) -> tokenizers.Tokenizer:
    with naming_the_extra():
        import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise CheckpointError(f"{file}: expected a tokenizer, got an error: {error}. The file may be truncated.") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Collect ``bos_token``, ``eos_token`` and others; each is a text, or an object whose text is in ``content``."""
    result: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            result[name] = text
    return result
