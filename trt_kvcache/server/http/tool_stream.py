"""``ToolStream``: splits the text of an answer into content and tool calls, as it is generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from trt_kvcache.server.http.text_places import TextPlaces
from trt_kvcache.server.http.tool_formats import MalformedCallError, ParameterTypes, Reader, ToolCall, ToolFormat

#: A part of an answer: content, or a tool call.
Part = str | ToolCall


#: Most parsing failures of one answer. Text after a failed call is parsed again from its tag on, which may reach the end each time.
_MOST_FAILURES = 64


class ToolStream:
    """Splits an answer. White space around calls is dropped. Text that only begins like a call is content."""

    # only_one: calls after the first are dropped. hidden: tags that are special tokens, which are never content.

    def __init__(
        self, form: ToolFormat, types: ParameterTypes | None = None, *, only_one: bool = False, hidden: Sequence[str] = ()
    ) -> None:
        self._form, self._types, self._only_one, self._hidden = form, types or {}, only_one, hidden
        self._text = ""
        self._space = ""
        self._opening = ""
        self._reader: Reader | None = None
        self._calls = self._failures = 0
        self._may_be_bare = form.bare

    def push(self, text: str) -> list[Part]:
        """Add the next part of the text, and return the parts that have become certain."""
        self._text += text
        return self._parts(ended=False)

    def end(self) -> list[Part]:
        """Return the remaining parts."""
        parts = self._parts(ended=True)
        if self._space and not self._calls:
            parts.append(self._space)
        self._space = ""
        return parts

    def _parts(self, *, ended: bool) -> list[Part]:
        parts: list[Part] = []
        while self._step(parts, ended=ended):
            pass
        return parts

    def _step(self, parts: list[Part], *, ended: bool) -> bool:
        """Parse the next part of the text; False if it is incomplete."""
        if self._reader is not None:
            return self._read_calls(parts, self._reader, ended=ended)
        if not self._text:
            return False
        if self._may_be_bare:
            rest = self._text.lstrip()
            if self._calls and rest.startswith(";"):
                rest = rest[1:].lstrip()
            if not rest and not ended:
                return False
            if rest.startswith("{"):
                spaces = len(self._text) - len(rest)
                self._begin(parts, "", self._text[:spaces])
                self._text = rest
                return True
            self._may_be_bare = False
        place = self._text.find(self._form.opening)
        if place >= 0 and self._failures < _MOST_FAILURES:
            before, self._text = self._text[:place], self._text[place + len(self._form.opening) :]
            self._add(parts, before)
            self._begin(parts, self._form.opening, "")
            return True
        held = 0 if ended else _held(self._text, (self._form.opening, *self._hidden))
        self._add(parts, self._text[: len(self._text) - held])
        self._text = self._text[len(self._text) - held :]
        return False

    def _begin(self, parts: list[Part], opening: str, before: str) -> None:
        if before.strip():  # between two calls
            before = ""
        self._add(parts, before)
        self._opening, self._reader = opening, self._form.reader(self._types)

    def _read_calls(self, parts: list[Part], reader: Reader, *, ended: bool) -> bool:
        try:
            found = reader.read(self._text, ended=ended)
        except MalformedCallError:
            found = None
        else:
            if found is None and not ended:
                return False
        self._reader = None
        if found is None:
            self._failures += 1
            # The tag alone is content: the text after it may contain a call.
            self._may_be_bare = False
            whole, self._text = self._opening or self._text[:1], self._text if self._opening else self._text[1:]
            self._add(parts, whole)
            return True
        taken, calls = found
        self._text, self._space = self._text[taken:], ""
        wanted = calls[: max(0, 1 - self._calls)] if self._only_one else calls
        self._calls += len(wanted)
        self._may_be_bare = self._form.bare
        parts += wanted
        return True

    def _add(self, parts: list[Part], text: str) -> None:
        """Add content. White space at its end waits for the next part."""
        for tag in self._hidden:
            text = text.replace(tag, "")
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        if parts and isinstance(parts[-1], str):
            parts[-1] += shown
        else:
            parts.append(shown)


def _held(text: str, tags: Sequence[str]) -> int:
    """Return the number of characters at the end that may be the beginning of a tag."""
    return next(
        (size for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1) if any(tag.startswith(text[-size:]) for tag in tags)), 0
    )


class TagTexts:
    """Inserts tags that are special tokens into the text of one answer, which does not have them."""

    def __init__(self, places: TextPlaces, tags: Mapping[int, str]) -> None:
        self._places, self._tags = places, tags
        self._length = 0
        self._waiting: deque[tuple[int, str]] = deque()

    def add(self, text: str, token_ids: Sequence[int]) -> str:
        """Return the text of a chunk with its tags. A tag waits until the text in front of it is certain."""
        for token in token_ids:
            place = self._places.of(token)
            if token in self._tags:
                self._waiting.append((place, self._tags[token]))
        parts, done, end = [], 0, self._length + len(text)
        while self._waiting and self._waiting[0][0] <= end:  # a later tag may be cut off by a stop text
            place, tag = self._waiting.popleft()
            split = max(done, place - self._length)
            parts += [text[done:split], tag]
            done = split
        self._length = end
        return "".join([*parts, text[done:]])
