"""``PrefixRouting``: the choice of an engine for a prompt, by the prefixes that each has cached and by its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from trt_kvcache._util.checks import int_in_range

_Engine = TypeVar("_Engine", bound=Hashable)


class PrefixRouting(Generic[_Engine]):
    """Sends the next turn of a chat to the engine that has its prefix cached, unless the load of that engine exceeds the saved prefill."""

    # Cost of a prompt on an engine: prompt tokens that it has not cached, plus tokens of the prompts that it runs at the moment.
    # Of equal costs, the engine that has waited longest for a prompt comes first.

    def __init__(self, *, block_tokens: int = 16, max_blocks: int = 1 << 18) -> None:
        self._block_tokens = int_in_range("block_tokens", block_tokens, 1)
        self._max_blocks = int_in_range("max_blocks", max_blocks, 1)
        self._engines_of: OrderedDict[int, set[_Engine]] = OrderedDict()
        self._running: dict[str, tuple[_Engine, int]] = {}
        self._given: dict[_Engine, int] = {}
        self._count = 0

    def order(self, tokens: Sequence[int], engines: Iterable[_Engine]) -> list[_Engine]:
        """Return the engines by the cost of a prompt, the cheapest first."""
        load: dict[_Engine, int] = {}
        for engine, count in self._running.values():
            load[engine] = load.get(engine, 0) + count
        known: dict[_Engine, int] = {}
        for index, block in enumerate(self._blocks(tokens)):
            having = self._engines_of.get(block)
            if having is None:
                break
            known.update(dict.fromkeys(having, (index + 1) * self._block_tokens))
        return sorted(engines, key=lambda one: (len(tokens) - known.get(one, 0) + load.get(one, 0), self._given.get(one, 0)))

    def begin(self, request: str, tokens: Sequence[int], engine: _Engine) -> None:
        """Record that an engine runs the prompt of a request."""
        self._count += 1
        self._given[engine] = self._count
        self._running[request] = (engine, len(tokens))
        for block in reversed([*self._blocks(tokens)]):  # of one prompt, the last blocks are dropped first
            self._engines_of.setdefault(block, set()).add(engine)
            self._engines_of.move_to_end(block)
        while len(self._engines_of) > self._max_blocks:
            self._engines_of.popitem(last=False)

    def end(self, request: str) -> None:
        """Record that a request has ended. An unknown one is ignored."""
        self._running.pop(request, None)

    def forget(self, engine: _Engine) -> None:
        """Drop an engine that has ended."""
        self._given.pop(engine, None)
        self._running = {name: one for name, one in self._running.items() if one[0] != engine}
        for block in [block for block, having in self._engines_of.items() if engine in having]:
            self._engines_of[block].discard(engine)
            if not self._engines_of[block]:
                del self._engines_of[block]

    def _blocks(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield a hash for each whole block: of its tokens and all earlier ones."""
        before = 0
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            before = hash((before, *tokens[start : start + self._block_tokens]))
            yield before
