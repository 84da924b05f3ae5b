"""``PrefixRouting``: which of several engines should run a prompt, by what each has run before and runs now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from trt_kvcache._util.checks import int_in_range

Engine = TypeVar("Engine", bound=Hashable)


class PrefixRouting(Generic[Engine]):
    """Remembers which engine was given which prompts, so that the next turn of a chat goes where its beginning is in the prompt cache."""

    def __init__(self, *, block_tokens: int = 16, max_blocks: int = 1 << 18) -> None:
        self._block_tokens = int_in_range("block_tokens", block_tokens, 1)
        self._max_blocks = int_in_range("max_blocks", max_blocks, 1)
        self._engines_of: OrderedDict[int, set[Engine]] = OrderedDict()
        self._running: dict[str, tuple[Engine, int]] = {}
        self._given: dict[Engine, int] = {}
        self._count = 0

    def order(self, tokens: Sequence[int], engines: Iterable[Engine]) -> list[Engine]:
        """Return the engines, the best one for a prompt first."""
        load: dict[Engine, int] = {}
        for engine, count in self._running.values():
            load[engine] = load.get(engine, 0) + count
        known: dict[Engine, int] = {}
        for index, block in enumerate(self._blocks(tokens)):
            having = self._engines_of.get(block)
            if having is None:
                break
            known.update(dict.fromkeys(having, (index + 1) * self._block_tokens))
        return sorted(engines, key=lambda one: (len(tokens) - known.get(one, 0) + load.get(one, 0), self._given.get(one, 0)))

    def begin(self, request: str, tokens: Sequence[int], engine: Engine) -> None:
        """Record that an engine runs a prompt."""
        self._count += 1
        self._given[engine] = self._count
        self._running[request] = (engine, len(tokens))
        for block in reversed([*self._blocks(tokens)]):  # of one prompt, the last blocks are forgotten first
            self._engines_of.setdefault(block, set()).add(engine)
            self._engines_of.move_to_end(block)
        while len(self._engines_of) > self._max_blocks:
            self._engines_of.popitem(last=False)

    def end(self, request: str) -> None:
        """Record that a prompt runs no more. Nothing happens if it is not known."""
        self._running.pop(request, None)

    def forget(self, engine: Engine) -> None:
        """Forget an engine that is gone."""
        self._given.pop(engine, None)
        self._running = {name: one for name, one in self._running.items() if one[0] != engine}
        for block in [block for block, having in self._engines_of.items() if engine in having]:
            self._engines_of[block].discard(engine)
            if not self._engines_of[block]:
                del self._engines_of[block]

    def _blocks(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield a hash for each whole block: of its tokens and all before them."""
        before = 0
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            before = hash((before, *tokens[start : start + self._block_tokens]))
            yield before
