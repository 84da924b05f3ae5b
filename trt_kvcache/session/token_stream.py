"""``TokenStream``: what ``generate`` returns: the tokens of its requests, as they are read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

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
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="reference") as session:
    ...     stream = session.generate([5, 6, 7], temperature=1.0, seed=7, max_new_tokens=3, ignore_eos=True)
    ...     _ = next(stream)
    >>> stream
    TokenStream(requests=1, finished=0, tokens=1, seeds=[7])
    """

    def __init__(self, requests: Sequence[Request], tokens: Generator[GeneratedToken, None, None], *, user: SingleUser) -> None:
        self._requests = requests
        self._tokens = tokens
        self._user = user

    @exclusive
    def __next__(self) -> GeneratedToken:
        return next(self._tokens)

    def __repr__(self) -> str:
        count = sum(len(request.tokens) for request in self._requests)
        finished = sum(request.finished for request in self._requests)
        seeds = f", seeds={list(self.seeds)}" if any(request.sampled for request in self._requests) else ""
        return f"TokenStream(requests={len(self._requests)}, finished={finished}, tokens={count}{seeds})"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each request: the given one, or the one that was drawn for it."""
        return tuple(request.sampler[0] for request in self._requests)

    @exclusive
    def close(self) -> None:
        """Read no further. What was handed out stays in the cache or pending."""
        self._tokens.close()
