"""``Drafter``: proposes the next tokens of sequences for speculative decoding. Every ``draft=`` uses an object of this protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.memory.tensor import DeviceTensor

if TYPE_CHECKING:
    from trt_kvcache.generation.request import Request


class DraftedSequence(NamedTuple):
    """A sequence for which a drafter proposes the next tokens.

    Parameters
    ----------
    request : object
        Its request, the same object in all steps. A drafter may store data of a sequence under it (``weakref.WeakKeyDictionary``).
    row : list of int
        Tokens of the sequence, and possibly others after its first ``length``. To be read only: :attr:`tokens` is a copy.
    length : int
        Number of tokens in the cache.
    pending : tuple of int
        Tokens after them that run in the same step as the draft: usually the last one alone.
    limit : int
        Most tokens to propose, at least 1.
    hidden_states : ndarray (n, hidden_size) float32, optional
        Output of the final norm of the last n tokens in the cache, to be read only; none of earlier tokens, which were copied from a prefix
        cache or a snapshot. In a session with an EAGLE-3 head, the residual stream before three layers, reduced by ``fc`` of the head to
        its ``hidden_size``. None unless the session was opened with ``draft="mtp"``, such a head or an assistant. A drafter whose attribute
        ``takes_device_states`` is True gets a :class:`~trt_kvcache.DeviceTensor` in the dtype of the engine, valid until it returns.
    tree_limit : int
        Most tokens of a :class:`DraftTree`, no path of which may have more than ``limit``; 0 with an engine that takes no trees.
    slot : int
        Slot of the cache that holds its tokens.
    vocab_size : int, optional
        Number of token ids that may be proposed. Ids from it on are rows of ``InferenceSession.add_embeddings``.

    Examples
    --------
    >>> from trt_kvcache import DraftedSequence
    >>> DraftedSequence(None, [5, 6, 7, 0, 0], 3, (8,), limit=4).tokens_from(2)
    [7, 8]
    """

    request: Request
    row: list[int]
    length: int
    pending: tuple[int, ...]
    limit: int
    hidden_states: npt.NDArray[np.float32] | DeviceTensor | None = None
    tree_limit: int = 0
    slot: int = 0
    vocab_size: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, prompt included."""
        return self.length + len(self.pending)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, prompt included."""
        return self.tokens_from(0)

    def tokens_from(self, first: int) -> list[int]:
        """Return the tokens from an index on.

        Parameters
        ----------
        first : int
            Index of the first token to return, from 0.

        Returns
        -------
        list of int
            A new list.
        """
        return [*self.row[first : self.length], *self.pending[max(0, first - self.length) :]]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Wrong ones cost time and change nothing else: the model verifies each.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> class Repeats:
    ...     def propose(self, sequences):
    ...         return [one.tokens[-1:] for one in sequences]
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     plain = session.generate("Alice was", max_new_tokens=8).text
    ...     session.generate("Alice was", max_new_tokens=8, draft=Repeats()).text == plain
    True
    """

    def propose(self, sequences: Sequence[DraftedSequence]) -> Sequence[Sequence[int] | DraftTree]:
        """Propose the tokens that may follow each sequence. Called once before each step that could verify them.

        Parameters
        ----------
        sequences : sequence of DraftedSequence (n,)
            The sequences of this drafter in the next step. One that was there before may have fewer tokens now: a step has failed.

        Returns
        -------
        sequence of sequence of int or DraftTree (n,)
            Token ids, at most ``limit`` of each sequence; none where it has no proposal. Or a tree, if ``tree_limit`` is not 0.
        """


#: Values of ``draft=``: prompt lookup, the MTP head that the session was opened with, none, or a drafter of the caller.
DraftChoice = Literal["ngram", "mtp", "off"] | Drafter
