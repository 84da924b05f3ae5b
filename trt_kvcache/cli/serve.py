"""``trt-kvcache serve``: serve a model to many clients, with OpenAI's API."""

from typing import Annotated

import typer

from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import count, note
from trt_kvcache.cli.option_groups import Changed, WrongUsage
from trt_kvcache.cli.server_flags import ServerFlags, ToolCallParser
from trt_kvcache.session.session_options import DEFAULT_PREFILL_CHUNK


def serve(
    folder: session_flags.Folder,
    flags: Annotated[
        session_flags.ScoringFlags,
        Changed("max_batch_size", help=f"Slots of the cache: requests that run at once. Default: {session_flags.MAX_SLOTS}."),
    ],
    server_flags: ServerFlags,
    draft: session_flags.DraftOption = None,
    draft_tree: session_flags.DraftTreeOption = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", metavar="NAME", help="Name of the model for clients. Default: the name of its folder.")
    ] = None,
    prompt_cache: Annotated[
        int,
        typer.Option(min=0, metavar="MIB", help="Memory of the prefix cache, in MiB: the next turn of a chat runs only its new tokens."),
    ] = 256,
    prefill_chunk: session_flags.PrefillChunk = DEFAULT_PREFILL_CHUNK,
    tool_call_parser: Annotated[
        ToolCallParser | None,
        typer.Option("--tool-call-parser", help="Format of the model's tool calls. Default: found in its chat template."),
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Completions, chats and their streams, metrics, and a status page. Each of --adapters is a model for clients. Ctrl-C or SIGTERM waits
    for live answers; a second one ends them. Needs the extra serve.
    """
    from trt_kvcache.server import AsyncEngine
    from trt_kvcache.server.http import make_app
    from trt_kvcache.server.http.metrics import Metrics
    from trt_kvcache.server.http.serving import Server, address_of, bound_socket, serve as serve_at

    if flags.request_adapter is not None:
        raise WrongUsage("expected --adapter or --adapters, got both: clients choose an adapter by the name of the model.")
    allowed = server_flags.server_options(tool_call_parser)
    with bound_socket(server_flags.host, server_flags.port, allowed) as bound:
        source = flags.source(session_flags.located(folder), slots=session_flags.MAX_SLOTS, prompt_cache_bytes=prompt_cache << 20)
        session = session_flags.open_session(source.replace(draft=draft, draft_tree=draft_tree, prefill_chunk=prefill_chunk))
        metrics = Metrics()
        engine = AsyncEngine(
            session,
            model=model_name or folder.resolve().name,
            max_queue=server_flags.queue,
            max_seconds=server_flags.max_seconds,
            observer=metrics,
            guidance=server_flags.guidance_options(),
        )
        server = Server(
            make_app(engine, allowed, metrics=metrics),
            engine,
            options=allowed,
            drain_seconds=server_flags.drain_seconds,
            on_start=lambda: note(
                f"{engine.config.model} at {address_of(bound)}: {count(engine.config.max_num_seqs, 'slot')} of "
                f"{engine.config.context_length} tokens{'' if allowed.api_keys else ', no API key'}"
            ),
            on_drain=lambda: note("draining: live answers may finish; a second signal ends them"),
        )
        serve_at(server, [bound])
