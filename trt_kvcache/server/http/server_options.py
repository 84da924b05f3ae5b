"""``ServerOptions``: limits of a server, and access to it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http.tool_formats import ToolParserName

#: Headers in which proxies record the client of a request.
ProxyHeader = Literal["x-forwarded-for", "forwarded"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits of a server, and access to it."""

    #: A request needs one of them as ``Authorization: Bearer KEY``. If empty, the Host header must name this machine, so that no page of
    #: another site can send requests (DNS rebinding), unless ``any_host``.
    api_keys: tuple[str, ...] = ()
    any_host: bool = False
    max_body_bytes: int = 4 << 20  # else status 413
    max_prompt_tokens: int | None = None  # None: the tokens of a slot
    body_seconds: float = 30.0  # until a body is complete, else status 408
    max_header_bytes: int = 64 << 10  # of request line and headers, else status 431
    header_seconds: float = 10.0  # until request line and headers are complete, else status 408
    #: None: as the limit of file descriptors allows. A further one closes the oldest idle one, or the oldest without a complete request.
    max_connections: int | None = None
    max_connections_without_headers: int = 64  # of one address; a further one closes the oldest of them
    stalled_seconds: float = 60.0  # a client that reads nothing for so long is disconnected
    #: Addresses and networks of proxies. Only they may name the client of a request, in ``proxy_header``; they must overwrite or extend it.
    trusted_proxies: tuple[str, ...] = ()
    proxy_header: ProxyHeader = "x-forwarded-for"
    tool_call_parser: ToolParserName | None = None  # None: found in the chat template

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"api_keys: expected keys of visible ASCII characters, got one of {len(key)} characters that is not.")
        for name in ("max_body_bytes", "max_header_bytes", "max_connections_without_headers", "max_prompt_tokens", "max_connections"):
            if getattr(self, name) is not None:
                int_in_range(name, getattr(self, name), 1)
        for proxy in self.trusted_proxies:
            _check_proxy(proxy)
        one_of("proxy_header", self.proxy_header, get_args(ProxyHeader))
        if self.tool_call_parser is not None:
            one_of("tool_call_parser", self.tool_call_parser, get_args(ToolParserName))


def _check_proxy(text: str) -> None:
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(f"trusted_proxies: expected addresses or networks, such as 10.0.0.0/8, got {text!r:.80}.") from None
    if not network.prefixlen:
        raise ConfigError(f"trusted_proxies: expected the addresses of proxies, got all addresses, {text}: then any client has any name.")


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is a loopback one. Of names only ``localhost`` is: others may change."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
