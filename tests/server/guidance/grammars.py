"""Grammars that hurt, and requests that have one."""

from __future__ import annotations

from typing import Any

#: Overflows a stack of llguidance.
CHAINED = {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(3000)), 'r3000: "b"'])}

#: Takes minutes, and gigabytes, to compile.
ENDLESS = {"json": {"type": "integer", "multipleOf": 99999989}}

#: Every mask takes longer than the one before.
SLOW = {"grammar": 'start: e\ne: e e e | e e | "a" | "b" | /./'}

CHOICE = {"choice": ["cat", "hat"]}


def guided(guided: dict[str, Any], max_tokens: int = 40, **options: Any) -> dict[str, Any]:
    """Return a request whose text follows a grammar."""
    stopping = {name: options.pop(name) for name in ("ignore_eos", "stop") if name in options}
    return {
        "token_ids": [5, 6],
        "sampling_options": {"guided_decoding": guided, **options},
        "stop_conditions": {"max_tokens": max_tokens, **stopping},
    }
