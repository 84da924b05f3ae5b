"""``TokenStream``: the result of ``generate``, the tokens of its requests as they are read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from trt_kvcache.errors import ClosedError, ConfigError, ShapeError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.session.single_user import SingleUser, exclusive


class TokenStream(Iterator[GeneratedToken]):
    """The tokens of one call of ``InferenceSession.generate``, ``chat`` or ``resume``. Work is done as it is read.

    Parameters
    ----------
    requests : sequence of Request (n,)
        One for each prompt.
    tokens : generator of GeneratedToken
        Does the work.
    user : SingleUser
        Of the session: a token is read in one thread at a time.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     stream = session.generate([5, 6, 7], temperature=1.0, seed=7, max_new_tokens=3, ignore_eos=True)
    ...     _ = next(stream)
    >>> stream
    TokenStream(requests=1, finished=0, tokens=1, seeds=[7])

    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
    ...     session.generate("Alice was", max_new_tokens=4).text
    ...     session.generate(["Alice was", "Down the"], max_new_tokens=4).texts
    ' beginn'
    [' beginn', ' Rabbit-Hole']
    """

    def __init__(self, requests: Sequence[Request], tokens: Generator[GeneratedToken, None, None], *, user: SingleUser) -> None:
        self._requests = requests
        self._tokens = tokens
        self._user = user
        self._pieces: list[list[str]] = [[] for _ in requests]
        self._failure = ""

    @exclusive
    def __next__(self) -> GeneratedToken:
        try:
            token = next(self._tokens)
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"  # its traceback would keep the session alive
            raise
        self._pieces[token.index].append(token.text)
        return token

    def __repr__(self) -> str:
        count = sum(request.num_tokens for request in self._requests)
        finished = sum(request.finished for request in self._requests)
        seeds = f", seeds={list(self.seeds)}" if any(request.sampled for request in self._requests) else ""
        return f"TokenStream(requests={len(self._requests)}, finished={finished}, tokens={count}{seeds})"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each request: the given one, or the one that was drawn for it."""
        return tuple(request.sampler[0] for request in self._requests)

    @property
    def text(self) -> str:
        """The whole generated text of a stream of one prompt. Tokens that have not been read are generated first.

        After :meth:`close` it is the text that was read before, and nothing is generated.

        Raises
        ------
        ShapeError
            The stream has several prompts: see :attr:`texts`. Nothing was generated.
        ConfigError
            The model has no tokenizer. Nothing was generated.
        ClosedError
            The stream has ended early with an error, so that a part of the text is missing.
        KVCacheError
            A step fails, as when the stream is iterated over.
        """
        if len(self._requests) != 1:
            raise ShapeError(f"text: expected a stream of one prompt, got one of {len(self._requests)}. texts has the text of each.")
        return self.texts[0]

    @property
    @exclusive
    def texts(self) -> list[str]:
        """The whole text of each prompt, in their order: as :attr:`text`, for any number of prompts."""
        if not all(request.has_text for request in self._requests):
            raise ConfigError("text: expected a model folder with tokenizer.json, got none. The stream has token ids.")
        for _ in self:
            pass
        if self._failure:
            raise ClosedError(
                f"text: this stream: expected all of its tokens, but it ended with {self._failure.removesuffix('.')}. Call generate again."
            )
        return ["".join(pieces) for pieces in self._pieces]

    @exclusive
    def close(self) -> None:
        """End the stream. The tokens that were returned stay in the cache or pending."""
        self._tokens.close()
