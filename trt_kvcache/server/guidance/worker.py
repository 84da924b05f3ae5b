"""The program of a worker process: it compiles grammars and computes masks with llguidance.

It is a script that imports nothing of this package, so that a worker starts quickly and stays small. It reads frames from its
standard input and answers each on its standard output: a frame is a JSON object followed by bytes. It exits as soon as its input ends,
also in the middle of a job, so that it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, Any, BinaryIO

_SIZES = struct.Struct(">II")

#: Compiled grammars that are cached for further requests.
_KEPT_GRAMMARS = 8

#: JSON in one line: endless white space would be valid too, and small models generate it.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: Errors of llguidance about a grammar, or about a text that cannot continue.
_REASONS = {
    "NoExtensionBias": "a grammar that a text fits, got one that no text fits",
    "NoExtension": "a grammar that a text fits, got one that no text fits",
    "ParserTooComplex": "a simpler grammar, got one whose rules fit a text in too many ways",
    "LexerTooComplex": "a simpler grammar, got one with too large regular expressions",
}


def write_frame(stream: BinaryIO | IO[bytes], header: dict[str, Any], payload: bytes = b"") -> None:
    """Write a frame: a JSON object and bytes."""
    text = json.dumps(header).encode()
    stream.write(_SIZES.pack(len(text), len(payload)) + text + payload)
    stream.flush()


def read_frame(stream: BinaryIO | IO[bytes], *, limit: int = 1 << 32) -> tuple[dict[str, Any], bytes] | None:
    """Read a frame; None at the end of the stream, or if the frame has more than ``limit`` bytes."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    text_size, payload_size = _SIZES.unpack(sizes)
    if text_size + payload_size > limit:
        return None
    text, payload = stream.read(text_size), stream.read(payload_size)
    if len(text) < text_size or len(payload) < payload_size:
        return None
    return json.loads(text), payload


class _RefusedError(Exception):
    """A grammar, or the tokens after it, are refused."""


class _Matchers:
    """Matchers of llguidance by request, each with the number of tokens that it has consumed."""

    def __init__(self, library: Any, tokenizer: Any) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._matchers: dict[int, tuple[Any, int]] = {}

    def drop(self, names: list[int]) -> None:
        """Drop requests."""
        for name in names:
            self._matchers.pop(name, None)

    def compile(self, name: int, kind: str, text: str) -> None:
        """Begin a request with a grammar."""
        key = (kind, text)
        if key not in self._compiled:
            make = self._library.LLMatcher
            grammars = {
                "json": partial(make.grammar_from_json_schema, defaults=_JSON_FORM),
                "regex": make.grammar_from_regex,
                "grammar": make.grammar_from_lark,
            }
            try:
                matcher = make(self._tokenizer, grammars[kind](text), log_level=0)
            except ValueError as error:
                raise _RefusedError(_refusal("that compiles", str(error))) from None
            _check("that compiles", matcher)
            self._compiled[key] = matcher
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        self._matchers[name] = self._compiled[key].deep_copy(), 0

    def mask(self, name: int, kept: int, tokens: list[int]) -> bytes:
        """Roll a request back to its first ``kept`` tokens, consume ``tokens``, and return a bit for each token that may follow."""
        matcher, consumed = self._matchers.pop(name)
        if kept < consumed and not matcher.rollback(consumed - kept):
            raise _RefusedError(_refusal("that can be followed", matcher.get_error()))
        if tokens and not matcher.consume_tokens(tokens):  # only if the mask allowed nothing but the end
            raise _RefusedError("a grammar of texts that the tokenizer can write, got one whose text cannot go on")
        mask: bytes = matcher.compute_bitmask()
        _check("that can be followed", matcher)
        self._matchers[name] = matcher, kept + len(tokens)
        return mask


def _check(expected: str, matcher: Any) -> None:
    if matcher.is_error():
        raise _RefusedError(_refusal(expected, matcher.get_error()))


def _refusal(expected: str, text: str) -> str:
    """Return the expected and the got part of an error, from an error text of llguidance."""
    line = text.splitlines()[0] if text else "unknown"
    return _REASONS.get(line, f"a grammar {expected}, got an error: {line[:300].rstrip('.')}")


def _lower_priority() -> None:
    """Lower the priority, and leave one processor to others. On Windows the process was started with a low priority."""
    with suppress(AttributeError, OSError):
        os.nice(5)
    with suppress(AttributeError, OSError):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[1:] or processors)


def _bound_memory(nbytes: int) -> None:
    """Set a coarse memory limit of the system; the process that started it enforces the exact one."""
    try:
        import resource
    except ImportError:
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


def _read_all(stream: BinaryIO, frames: SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)  # also in the middle of a job


def _open(header: dict[str, Any], tokenizer: bytes) -> _Matchers:
    """Open llguidance with the tokenizer of a model."""
    sys.path[:] = header["path"]
    import llguidance

    _bound_memory(header["memory"])
    opened = llguidance.LLTokenizer(tokenizer.decode(), n_vocab=header["vocab_size"], eos_token=header["eos_token_ids"])
    return _Matchers(llguidance, opened)


def main() -> None:
    """Answer frames until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of libraries is no answer
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal or systemd sends them to all processes; live answers may end
        signal.signal(ending, signal.SIG_IGN)
    frames: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
    threading.Thread(target=_read_all, args=(sys.stdin.buffer, frames), daemon=True).start()
    try:
        matchers = _open(*frames.get())
    except ModuleNotFoundError as error:
        write_frame(answers, {"missing": error.name})
        return
    except Exception as error:  # noqa: BLE001 - any error of a tokenizer, or of another version of the library
        write_frame(answers, {"refused": f"{type(error).__name__}: {str(error)[:300]}"})
        return
    write_frame(answers, {})
    _lower_priority()
    while True:
        job, text = frames.get()
        matchers.drop(job["drop"])
        try:
            if "kind" in job:
                matchers.compile(job["name"], job["kind"], text.decode())
            mask = matchers.mask(job["name"], job["kept"], job["tokens"])
        except _RefusedError as error:
            write_frame(answers, {"refused": str(error)})
        except Exception as error:  # noqa: BLE001 - any error of a grammar
            write_frame(answers, {"refused": f"a grammar that llguidance takes, got {type(error).__name__}: {str(error)[:300]}"})
        else:
            write_frame(answers, {}, mask)


if __name__ == "__main__":
    main()
