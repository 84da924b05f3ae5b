"""What commands print about a session on stderr."""

from typing import Annotated

import typer

from trt_kvcache.cli.console import note, size, warn
from trt_kvcache.session.session import InferenceSession

Statistics = Annotated[bool, typer.Option("--stats/--no-stats", help="Print times and bytes on stderr at the end.")]


def note_statistics(session: InferenceSession) -> None:
    """Print times, tokens and bytes of a session in one line."""
    stats = session.statistics
    reused = f" ({stats.reused_tokens} more were in the cache)" if stats.reused_tokens else ""
    note(
        f"{type(session.engine).__name__} on {session.cache.memory.device}: prefill {stats.prefill_tokens} tokens{reused} in "
        f"{stats.prefill_seconds:.3f} s; decode {stats.decode_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s; "
        f"cache {size(stats.cache_bytes_live)} live of {size(stats.cache_bytes_reserved)}"
    )


def warn_of_full_cache(session: InferenceSession) -> None:
    """Warn of active slots that have no room for the token that was generated last."""
    limit = session.max_sequence_length
    active = range(session.cache.active_batch_size)
    full = [str(slot) for slot in active if len(session.tokens(slot)) + len(session.pending_tokens(slot)) > limit]
    if full:
        warn(f"the cache is full: max_sequence_length={limit} ended the text of slot {', '.join(full)}.")
