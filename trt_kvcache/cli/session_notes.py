"""Notes of commands about a session, on stderr and in JSON documents."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from trt_kvcache.cli.console import as_json, count, note, size, warn
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.session.session import InferenceSession

Statistics = Annotated[bool, typer.Option("--stats/--no-stats", help="Print times and bytes on stderr at the end.")]


def note_statistics(session: InferenceSession) -> None:
    """Print times, tokens and bytes of a session in one line."""
    stats = session.statistics
    reused = f" ({stats.reused_tokens} more were in the cache)" if stats.reused_tokens else ""
    drafts = f", {stats.accepted_tokens} of {count(stats.draft_tokens, 'draft token')} accepted" if stats.draft_tokens else ""
    note(
        f"{type(session.engine).__name__} on {session.cache.memory.device}: prefill {count(stats.prefill_tokens, 'token')}{reused} in "
        f"{stats.prefill_seconds:.3f} s; decode {count(stats.decode_tokens, 'token')}, {stats.decode_tokens_per_second:.1f} tokens/s"
        f"{drafts}; cache {size(stats.cache_bytes_live)} live of {size(stats.cache_bytes_reserved)}"
    )


def note_seeds(seeds: Iterable[int | None]) -> None:
    """Print the seeds; None is a greedy answer."""
    known = [str(seed) for seed in seeds if seed is not None]
    if known:
        note(f"seed{'s' if len(known) > 1 else ''}: {', '.join(known)}")


def logprobs_document(events: Iterable[GeneratedToken]) -> dict[str, Any]:
    """Return the field ``logprobs`` of an answer in JSON; empty if there are none."""
    known = [{"token": event.token, "logprob": event.logprob, "top": event.top_logprobs} for event in events if event.logprob is not None]
    return {"logprobs": as_json(known)} if known else {}


def session_document(session: InferenceSession) -> dict[str, Any]:
    """Return engine, device and statistics of a session, for ``--json``."""
    stats = session.statistics
    rates = {
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }
    return {
        "engine": type(session.engine).__name__,
        "device": session.cache.memory.device,
        "statistics": {**as_json(stats), **rates},
    }


def warn_of_full_cache(session: InferenceSession) -> None:
    """Warn of active slots without room for their last token."""
    limit = session.max_sequence_length
    active = range(session.cache.active_batch_size)
    full = [str(slot) for slot in active if len(session.tokens(slot)) + len(session.pending_tokens(slot)) > limit]
    if full:
        warn(f"the cache is full: max_sequence_length={limit} ended the text of slot {', '.join(full)}.")
