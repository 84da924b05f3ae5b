"""Options of ``serve``: access, limits of requests, limits of connections."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trt_kvcache.errors import ConfigError

if TYPE_CHECKING:
    from trt_kvcache.server import GuidanceOptions
    from trt_kvcache.server.http import ServerOptions

#: Names of the parsers in ``trt_kvcache.server.http.tool_formats``, which needs the extra serve.
ToolCallParser = Literal["hermes", "llama3_json", "mistral"]

#: Environment variable with a further API key.
KEY_VARIABLE = "TRT_KVCACHE_API_KEY"

_PANEL = "Limits"
_ACCESS = "Access"
_CONNECTIONS = "Connections"


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Options of a server: address and access, limits of requests, limits of connections."""

    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen at.", rich_help_panel=_ACCESS)] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen at; 0 for any that is free.", rich_help_panel=_ACCESS)
    ] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help=f"An API key; requests need one. Can be given several times. The process list shows it: prefer --api-key-file or the "
            f"environment variable {KEY_VARIABLE}.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with an API key in each line.", rich_help_panel=_ACCESS)
    ] = None
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Serve other machines without keys, under any name.", rich_help_panel=_ACCESS)
    ] = False
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address or network of a proxy whose header names the client of a request. Can be given several times.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    proxy_header: Annotated[
        Literal["x-forwarded-for", "forwarded"],
        typer.Option(help="The header that trusted proxies write.", rich_help_panel=_ACCESS),
    ] = "x-forwarded-for"

    queue: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="REQUESTS",
            help="Most requests that wait for a slot. Each client has a fair share.",
            rich_help_panel=_PANEL,
        ),
    ] = 64
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Longest prompt. Default: the tokens of a slot.", rich_help_panel=_PANEL)
    ] = None
    max_body_mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="Longest body of a request, in MiB.", rich_help_panel=_PANEL)] = 4
    max_seconds: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Longest time of a request.", rich_help_panel=_PANEL)] = (
        600.0
    )
    drain_seconds: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Time for live answers to end after the first signal.", rich_help_panel=_PANEL),
    ] = 30.0
    grammar_seconds: Annotated[
        float,
        typer.Option(
            min=0.001, metavar="SECONDS", help="Longest time to compile the schema or grammar of a response_format.", rich_help_panel=_PANEL
        ),
    ] = 2.0
    mask_seconds: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="Longest time to compute one token mask of a grammar.", rich_help_panel=_PANEL),
    ] = 1.0
    grammar_mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="Most memory of a grammar, in MiB.", rich_help_panel=_PANEL)] = 512

    max_header_kib: Annotated[
        int, typer.Option(min=1, metavar="KIB", help="Longest request line and headers, in KiB.", rich_help_panel=_CONNECTIONS)
    ] = 64
    header_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest time until the headers have arrived.", rich_help_panel=_CONNECTIONS)
    ] = 10.0
    body_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest time until a body has arrived.", rich_help_panel=_CONNECTIONS)
    ] = 30.0
    stalled_seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Longest time without progress in reading a stream.", rich_help_panel=_CONNECTIONS),
    ] = 60.0
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="CONNECTIONS",
            help="Most open connections; a further one closes the oldest idle one. Default: as the limit of open files allows.",
            rich_help_panel=_CONNECTIONS,
        ),
    ] = None
    max_connections_without_headers: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="CONNECTIONS",
            help="Most connections of one address without headers; a further one closes the oldest of them.",
            rich_help_panel=_CONNECTIONS,
        ),
    ] = 64

    def server_options(self, tool_call_parser: ToolCallParser | None) -> "ServerOptions":
        """Return the options of the HTTP server."""
        from trt_kvcache.server.http import ServerOptions  # needs the extra serve

        return ServerOptions(
            api_keys=self.keys(),
            any_host=self.allow_anyone,
            max_body_bytes=self.max_body_mib << 20,
            max_header_bytes=self.max_header_kib << 10,
            header_seconds=self.header_seconds,
            body_seconds=self.body_seconds,
            stalled_seconds=self.stalled_seconds,
            max_connections=self.max_connections,
            max_connections_without_headers=self.max_connections_without_headers,
            max_prompt_tokens=self.max_prompt_tokens,
            trusted_proxies=tuple(self.trusted_proxy or ()),
            proxy_header=self.proxy_header,
            tool_call_parser=tool_call_parser,
        )

    def guidance_options(self) -> "GuidanceOptions":
        """Return the limits of guided decoding."""
        from trt_kvcache.server import GuidanceOptions

        return GuidanceOptions(compile_seconds=self.grammar_seconds, mask_seconds=self.mask_seconds, memory_mib=self.grammar_mib)

    def keys(self) -> tuple[str, ...]:
        """Return the API keys of the options and of the environment; empty if there are none."""
        found = [*(self.api_key or ()), *filter(None, [os.environ.get(KEY_VARIABLE)])]
        if self.api_key_file is not None:
            of_file = _lines(self.api_key_file)
            if not of_file:
                raise ConfigError(f"{self.api_key_file}: expected a key in each line, got none.")
            found += of_file
        return tuple(found)


def _lines(path: Path) -> Sequence[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a text file with a key in each line.") from None
    return [line.strip() for line in text.splitlines() if line.strip()]
