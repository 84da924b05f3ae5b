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
    """What a server allows.

    Parameters
    ----------
    api_keys : tuple of str
        A request must bring one of them as ``Authorization: Bearer KEY``. Empty: anyone may ask who calls the server by a name of this
        machine, so that no page of another site can.
    any_host : bool
        Without keys, answer to every name.
    max_body_bytes : int
        Longest body of a request; a longer one is status 413.
    max_prompt_tokens : int, optional
        Longest prompt; what fits into a slot if left out.
    body_seconds : float
        A body that takes longer to arrive is status 408.
    max_header_bytes : int
        Longest request line and headers together, as far as they are one block of lines; longer ones are status 431.
    header_seconds : float
        Request line and headers that take longer to arrive are status 408.
    max_connections : int, optional
        Connections at once; what the process has descriptors for if left out. A further one closes the oldest one that is idle, or else one
        that has not sent its request.
    max_connections_without_headers : int
        Those of one address that have not sent their headers. A further one closes the oldest of them.
    stalled_seconds : float
        A reader that takes nothing for so long is cut off.
    trusted_proxies : tuple of str
        Addresses and networks of proxies. Only of a request that comes from one of them the header of proxies is read: without keys it
        says whose turn the request is.
    proxy_header : {"x-forwarded-for", "forwarded"}
        The header that these proxies write; any other one they may pass on as a client wrote it.

    tool_call_parser : {"hermes", "llama3_json", "mistral"}, optional
        How the model writes calls of tools. If left out, the chat template says.

    Raises
    ------
    ConfigError
        A key is empty, or has characters that a header cannot carry; a proxy is no address; the header or the parser is not known.
    RangeError
        A limit is no positive integer.

    Examples
    --------
    >>> ServerOptions(api_keys=("",))
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.ConfigError: api_keys: expected keys of visible ASCII characters, got one of 0 characters that is not.
    """

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
    """Tell whether a host name or address is this machine, seen from itself.

    Parameters
    ----------
    host : str
        A name or an address, without a port.

    Returns
    -------
    bool
        False for names other than ``localhost``: they may change.

    Examples
    --------
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, True, False, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
