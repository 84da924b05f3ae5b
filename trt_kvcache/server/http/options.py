"""``ServerOptions``: what a server allows, and to whom."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http.tool_formats import ToolParserName

#: Headers in which proxies say which client a request comes from.
ProxyHeader = Literal["x-forwarded-for", "forwarded"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server allows."""

    api_keys: tuple[str, ...] = ()
    any_host: bool = False
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    body_seconds: float = 30.0
    max_header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    max_connections: int | None = None
    max_connections_without_headers: int = 64
    stalled_seconds: float = 60.0
    trusted_proxies: tuple[str, ...] = ()
    proxy_header: ProxyHeader = "x-forwarded-for"
    tool_call_parser: ToolParserName | None = None

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
    """Tell whether a host name or address is this machine, seen from itself."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
