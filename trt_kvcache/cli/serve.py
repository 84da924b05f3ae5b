"""``trt-kvcache serve``: a model for many clients, over OpenAI's API."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import count, note
from trt_kvcache.cli.score import ScoringFlags
from trt_kvcache.cli.server_flags import AccessFlags, ConnectionFlags, LimitFlags

_SLOTS = 8

#: As ``trt_kvcache.server.http.tool_formats`` has them, which needs the extra serve.
ToolCallParser = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, kw_only=True)
class ServerSessionFlags(ScoringFlags):
    """The options that say which session a server has."""

    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="SLOTS",
            help=f"Slots of the cache: requests that run at once. Default: {_SLOTS}.",
            rich_help_panel=session_flags.MODEL_PANEL,
        ),
    ] = None


def serve(
    folder: session_flags.Folder,
    flags: ServerSessionFlags,
    access: AccessFlags,
    limits: LimitFlags,
    connections: ConnectionFlags,
    model_name: Annotated[
        str | None, typer.Option("--model-name", metavar="NAME", help="What clients call the model. Default: the name of its folder.")
    ] = None,
    prompt_cache: Annotated[
        int,
        typer.Option(
            min=0, metavar="MIB", help="Memory for copies of prompts, in MiB: of the next turn of a chat, only what is new is run."
        ),
    ] = 256,
    tool_call_parser: Annotated[
        ToolCallParser | None,
        typer.Option("--tool-call-parser", help="How the model writes calls of tools. Default: what its chat template says."),
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    from trt_kvcache.server import AsyncEngine, GuidanceOptions
    from trt_kvcache.server.http import ServerOptions, make_app
    from trt_kvcache.server.http.metrics import Metrics
    from trt_kvcache.server.http.serving import Server, address_of, bound_socket, serve as serve_at

    allowed = ServerOptions(
        api_keys=access.keys(),
        any_host=access.allow_anyone,
        max_body_bytes=limits.max_body_mib << 20,
        max_header_bytes=connections.max_header_kib << 10,
        header_seconds=connections.header_seconds,
        body_seconds=connections.body_seconds,
        stalled_seconds=connections.stalled_seconds,
        max_connections=connections.max_connections,
        max_connections_without_headers=connections.max_connections_without_headers,
        max_prompt_tokens=limits.max_prompt_tokens,
        trusted_proxies=tuple(access.trusted_proxy or ()),
        proxy_header=access.proxy_header,
        tool_call_parser=tool_call_parser,
    )
    with bound_socket(access.host, access.port, allowed) as bound:
        source = flags.source(session_flags.located(folder), slots=_SLOTS, prompt_cache_bytes=prompt_cache << 20)
        session = session_flags.open_session(source)
        metrics = Metrics()
        engine = AsyncEngine(
            session,
            model=model_name or folder.resolve().name,
            max_queue=limits.queue,
            max_seconds=limits.max_seconds,
            observer=metrics,
            guidance=GuidanceOptions(
                compile_seconds=limits.grammar_seconds, mask_seconds=limits.mask_seconds, memory_mib=limits.grammar_mib
            ),
        )
        server = Server(
            make_app(engine, allowed, metrics=metrics),
            engine,
            options=allowed,
            drain_seconds=limits.drain_seconds,
            on_start=lambda: note(
                f"{engine.config.model} at {address_of(bound)}: {count(engine.config.max_num_seqs, 'slot')} of "
                f"{engine.config.context_length} tokens{'' if allowed.api_keys else ', no API key'}"
            ),
            on_drain=lambda: note("ending: answers that have begun may end; a second signal ends at once"),
        )
        serve_at(server, [bound])
